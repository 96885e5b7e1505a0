//! The source's pages: sent while the guest runs, or served while it is stopped.

use std::io::{Read, Write};

use stillframe_page::{GuestPage, PAGE};
use stillframe_qemu::monitor::Monitor;

use super::MigratedPages;
use super::error::MigrateError;
use super::sent_ids::{PageHash, SentIds};
use crate::connection::batch::{BatchWriter, PAGES_MAX};
use crate::connection::framing::Kind;
use crate::connection::message::{Control, Message, RANGES_MAX};
use crate::connection::{Connection, ConnectionError};
use crate::encoding::delta_cache::DeltaCache;
use crate::encoding::page_encoder::PageEncoder;
use crate::memory::block::Guest;
use crate::memory::{BlockShape, Page};
use crate::sink::connection::ConnectionPages;
use crate::sink::page_stream::PageStream;
use crate::tracking::tracker::Tracker;

/// Pages on their way over one connection, with the means to encode them.
pub(super) struct SentPages {
    stream: PageStream,
    encoder: PageEncoder,
    /// The content of each page as last sent.
    cache: DeltaCache,
    ids: SentIds,
    /// Pages that have the id with which they were sent last are not sent.
    skip_known: bool,
    known: u64,
    fake: u64,
    /// Left out because the guest had written them again.
    pub postponed: u64,
}

impl SentPages {
    /// None yet. `cache_bytes` is the budget of the delta cache, `seed` the secret of the ids. Without a hash, pages that
    /// are known by their ids are counted, and sent.
    pub fn new(
        blocks: &[BlockShape],
        cache_bytes: u64,
        seed: u64,
        hash: Option<PageHash>,
    ) -> SentPages {
        let mut stream = PageStream::new(blocks);
        stream.pages_may_come_twice(blocks);
        let mut cache = DeltaCache::default();
        cache.set_budget(cache_bytes);
        SentPages {
            stream,
            encoder: PageEncoder::in_one_thread(),
            cache,
            ids: SentIds::new(blocks, hash.unwrap_or(PageHash::Xxh3), seed),
            skip_known: hash.is_some(),
            known: 0,
            fake: 0,
            postponed: 0,
        }
    }

    /// Sends ascending pages of one block.
    pub fn put<S: Write>(
        &mut self,
        sink: &mut ConnectionPages<S>,
        block: usize,
        mut pages: Vec<Page<'_>>,
    ) -> Result<(), ConnectionError> {
        pages.retain(|page| {
            let number = GuestPage::new(block, page.number);
            let known = self.ids.is_known(number, page.bytes);
            // The delta cache finds it by itself.
            let fake = known && self.cache.get(number).is_none();
            match self.skip_known {
                true => self.known += u64::from(fake),
                false => self.fake += u64::from(fake),
            }
            !fake || !self.skip_known
        });
        self.stream
            .put(sink, &mut self.encoder, &self.cache, block, &pages)?;
        for &Page { number, bytes } in &pages {
            self.cache.put(GuestPage::new(block, number), bytes);
        }
        Ok(())
    }

    /// What was sent so far.
    pub fn counts(&self) -> MigratedPages {
        let counts = &self.stream.counts;
        let sent = counts.new + counts.duplicate + counts.zero + counts.delta;
        MigratedPages {
            sent,
            zero: counts.zero,
            delta: counts.delta,
            known: counts.unchanged + self.known,
            postponed: self.postponed,
            fake: self.fake,
            doomed: sent - counts.captured,
        }
    }
}

/// Answers requests for pages of the stopped VM until the destination has all. Returns how many pages were sent.
pub(super) fn serve<S: Read + Write>(
    connection: &mut Connection<S>,
    tracker: &Tracker,
    monitor: &mut Monitor,
) -> Result<u64, MigrateError> {
    let content = tracker.populated()?.drained(monitor)?;
    for (block, ranges) in content.written.iter().enumerate() {
        for ranges in ranges.chunks(RANGES_MAX) {
            let ranges = ranges.iter().map(|range| (range.start, range.end));
            let ranges = ranges.collect();
            connection.send_control(&Control::Content { block, ranges })?;
        }
    }
    // No block has this number: the list has ended.
    let end = Control::Content {
        block: content.written.len(),
        ranges: Vec::new(),
    };
    connection.send_control(&end)?;
    let mut writer = BatchWriter::new()?;
    let mut buffer = vec![0; PAGES_MAX * PAGE];
    let mut sent = 0;
    loop {
        let (block, pages) = match connection.receive_message()? {
            Message::Control(Control::Fetch { block, pages }) => (block, pages),
            Message::Control(Control::Fetched) => return Ok(sent),
            other => return Err(other.unexpected().into()),
        };
        let tracked = tracker.blocks().get(block).map(|tracked| &tracked.block);
        let known = tracked.filter(|block| {
            let inside = |&page: &u32| u64::from(page) < block.pages();
            pages.len() <= PAGES_MAX && pages.is_sorted_by(|a, b| a < b) && pages.iter().all(inside)
        });
        let Some(memory) = known else {
            let what = "a request for pages that the VM does not have".to_owned();
            return Err(ConnectionError::Malformed { what }.into());
        };
        let bytes = &mut buffer[..pages.len() * PAGE];
        let ranges: Vec<_> = pages
            .iter()
            .map(|&page| page.into()..u64::from(page) + 1)
            .collect();
        let mut into: Vec<&mut [u8]> = bytes.chunks_mut(PAGE).collect();
        memory.read(Guest::Stopped, &mut into, &ranges)?;
        writer.begin(block);
        for (&page, bytes) in pages.iter().zip(bytes.as_chunks().0) {
            writer.page(page.into(), bytes)?;
        }
        connection.send(Kind::Pages, writer.finish())?;
        sent += pages.len() as u64;
    }
}
