//! A connection's thread at the source: it reads, encodes and sends pages, and leaves those for later that the guest is
//! writing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use stillframe_link::Stream;
use stillframe_page::PAGE_BYTES;
use stillframe_page::encoding::Compression;
use stillframe_sys::affinity::{AffinityGuard, Processors};

use super::error::MigrateError;
use super::limiter::Limiter;
use super::pages::SentPages;
use super::{MigratedPages, Wire};
use crate::connection::ConnectionError;
use crate::connection::compression::CompressionChoice;
use crate::connection::message::{Control, Message};
use crate::memory::Page;
use crate::memory::block::{Block, Guest};
use crate::memory::page_buffer::PageBuffer;
use crate::memory::ranges::{length, split, subtract};
use crate::sink::connection::ConnectionPages;
use crate::tracking::rewritten::Rewritten;

/// Pages of a batch, at most. What is read, encoded and sent at a time fits into a processor's cache, and the first bytes
/// leave soon.
pub(super) const BATCH_PAGES: u64 = 256;
/// Adjacent pages that go over one connection.
pub(super) const CHUNK_PAGES: u64 = 256;

/// Bytes of a change that is much smaller than a page, whatever was sent before.
pub(super) const LITTLE: u64 = PAGE_BYTES / 16;
/// A chunk is sent at the end of the round if more than one page in this number was written again.
const HOT: u64 = 64;
/// A chunk of which no page was written for this time will hardly need deltas.
const CALM: Duration = Duration::from_millis(200);

/// Where the content of a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// In the guest's memory.
    Memory(Guest),
    /// The same, and the pages are sent even if the guest has written them again.
    Sample,
    /// Nowhere: they are zero.
    Zero,
}

/// Pages of one block.
#[derive(Debug, Clone)]
pub(super) struct Batch {
    pub block: usize,
    pub pages: Vec<Range<u64>>,
    pub content: Content,
    /// What is sent is remembered, to find changes.
    pub remembered: bool,
}

/// Work for a connection.
pub(super) enum Task {
    /// To send these pages.
    Batch(Batch),
    /// To say what was sent.
    End(End),
}

/// After a number of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The destination is to have all pages so far.
    Round,
    /// There are no more.
    All,
}

/// What a connection has sent so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sent {
    pub pages: MigratedPages,
    pub bytes: u64,
    /// How pages are compressed now.
    pub compression: Option<Compression>,
}

/// What a connection says at the end of a round.
pub(super) struct Done {
    pub sent: Sent,
    /// Pages of this round that it has not sent, because the round was cut short, each with the number of its block.
    pub unsent: Vec<(usize, Range<u64>)>,
}

/// What all threads need.
#[derive(Clone)]
pub(super) struct Common {
    pub blocks: Vec<Arc<Block>>,
    pub rewritten: Rewritten,
    pub limiter: Arc<Limiter>,
    /// Where they run while the guest does.
    pub processors: Processors,
    /// How pages are compressed.
    pub compression: CompressionChoice,
    pub round: Arc<Ongoing>,
}

/// What the threads and their orderer know of a round that goes on.
#[derive(Debug, Default)]
pub(super) struct Ongoing {
    /// Pages of a running guest that are not sent yet are not to be sent.
    pub cut_short: AtomicBool,
    /// Pages that have left.
    pub sent: AtomicU64,
    /// And their bytes.
    pub bytes: AtomicU64,
}

/// The chunks of a batch.
struct Sorted {
    /// The guest leaves them alone.
    calm: Option<Batch>,
    /// Between the others.
    other: Option<Batch>,
    /// The guest is writing them. At the end of the round most of their pages will have been written again, and are left
    /// out.
    hot: Option<Batch>,
}

impl Sorted {
    fn other(batch: Batch) -> Sorted {
        Sorted {
            calm: None,
            other: Some(batch),
            hot: None,
        }
    }
}

/// The state of a thread.
pub(super) struct PageSender {
    sink: ConnectionPages<Stream>,
    pages: SentPages,
    common: Common,
    buffer: PageBuffer,
    /// When the first round began, while it lasts.
    first_round: Option<Instant>,
    unsent: Vec<(usize, Range<u64>)>,
}

impl PageSender {
    /// A sender over this connection.
    ///
    /// # Errors
    /// There is no memory for the compressor, or it has no such level.
    pub fn new(
        wire: Wire,
        pages: SentPages,
        common: Common,
    ) -> Result<PageSender, ConnectionError> {
        Ok(PageSender {
            sink: ConnectionPages::new(wire, common.compression)?,
            pages,
            common,
            buffer: PageBuffer::new(BATCH_PAGES as usize),
            first_round: Some(Instant::now()),
            unsent: Vec::new(),
        })
    }

    /// Works until there are no more tasks.
    ///
    /// # Errors
    /// The connection or a read failed.
    pub fn run(mut self, tasks: &Receiver<Task>, done: &Sender<Done>) -> Result<(), MigrateError> {
        // While the guest is stopped, all processors are free.
        let mut placement = Some(AffinityGuard::to(&self.common.processors));
        let mut last = Vec::new();
        for task in tasks {
            match task {
                Task::Batch(batch) if self.leaves_out(&batch) => self.leave_out(batch),
                Task::Batch(batch) => {
                    let Sorted { calm, other, hot } = self.sorted(batch)?;
                    last.extend(hot);
                    for batch in [calm, other].into_iter().flatten() {
                        self.send(batch, &mut placement)?;
                    }
                }
                Task::End(end) => {
                    for batch in last.drain(..) {
                        match self.leaves_out(&batch) {
                            true => self.leave_out(batch),
                            false => self.send(batch, &mut placement)?,
                        }
                    }
                    self.end(end, done)?;
                    self.first_round = None;
                }
            }
        }
        Ok(())
    }

    /// Whether the round is cut short for this batch.
    fn leaves_out(&self, batch: &Batch) -> bool {
        let running = batch.content == Content::Memory(Guest::Running);
        running && self.common.round.cut_short.load(Ordering::Relaxed)
    }

    fn leave_out(&mut self, batch: Batch) {
        let pages = batch.pages.into_iter();
        self.unsent.extend(pages.map(|range| (batch.block, range)));
    }

    /// Sorts the chunks of a batch by what the guest writes.
    fn sorted(&self, batch: Batch) -> Result<Sorted, MigrateError> {
        if batch.content != Content::Memory(Guest::Running) {
            return Ok(Sorted::other(batch));
        }
        let rewritten = self.common.rewritten.among(batch.block, &batch.pages)?;
        let hot = chunks_with(&batch.pages, &rewritten, HOT);
        let part = |pages: Vec<Range<u64>>, remembered| {
            (!pages.is_empty()).then_some(Batch {
                pages,
                remembered,
                ..batch
            })
        };
        let rest = subtract(&batch.pages, &hot);
        let calm = match self.seems_calm() {
            true => subtract(&rest, &chunks_with(&rest, &rewritten, u64::MAX)),
            false => Vec::new(),
        };
        Ok(Sorted {
            other: part(subtract(&rest, &calm), true),
            calm: part(calm, false),
            hot: part(hot, true),
        })
    }

    /// Whether a page that was not written since the first round began will hardly be written at all.
    fn seems_calm(&self) -> bool {
        let looks = !matches!(self.common.rewritten, Rewritten::Unknown);
        let long = self
            .first_round
            .is_some_and(|begun| begun.elapsed() >= CALM);
        looks && self.pages.finds_known() && long
    }

    /// All pages so far are sent, or all there are.
    fn end(&mut self, end: End, done: &Sender<Done>) -> Result<(), MigrateError> {
        match end {
            End::Round => self.sync()?,
            End::All => {
                if self.pages.awaits_answer() {
                    self.sync()?;
                }
                self.sink.connection().send_control(&Control::Last)?;
            }
        }
        let sent = Sent {
            pages: self.pages.counts(),
            bytes: self.sink.bytes_sent(),
            compression: Some(self.sink.compression()),
        };
        let unsent = std::mem::take(&mut self.unsent);
        // It is awaited, unless the migration has failed.
        let _ = done.send(Done { sent, unsent });
        Ok(())
    }

    /// Waits until the destination has all pages so far. Those that it did not find in an image are sent.
    fn sync(&mut self) -> Result<(), MigrateError> {
        let differing = self.await_synced()?;
        let awaited = self.pages.take_awaited();
        if differing.is_empty() {
            return Ok(());
        }
        if !awaited {
            let what = "that no image has pages that were sent".to_owned();
            return Err(ConnectionError::Malformed { what }.into());
        }
        for (block, pages) in differing {
            self.send_again(block, pages)?;
        }
        self.sync()
    }

    fn await_synced(&mut self) -> Result<Vec<(usize, Range<u64>)>, MigrateError> {
        let blocks = &self.common.blocks;
        let wire = self.sink.connection();
        wire.send_control(&Control::Sync)?;
        let mut differing = Vec::new();
        loop {
            match wire.receive_message()? {
                Message::Control(Control::Synced) => break,
                Message::Control(Control::Differs { block, ranges }) if block < blocks.len() => {
                    let ends = blocks[block].pages();
                    let ranges = ranges.into_iter().map(|(first, end)| first..end.min(ends));
                    differing.extend(ranges.map(|range| (block, range)));
                }
                other => return Err(other.unexpected().into()),
            }
        }
        Ok(differing)
    }

    /// Sends pages that the destination has not found. What the guest has written meanwhile comes once more.
    fn send_again(&mut self, block: usize, pages: Range<u64>) -> Result<(), MigrateError> {
        for pages in chunks(pages) {
            let bytes = &mut self.buffer[..((pages.end - pages.start) * PAGE_BYTES) as usize];
            let memory = &self.common.blocks[block];
            let range = std::slice::from_ref(&pages);
            memory.read(Guest::Running, &mut [&mut *bytes], range)?;
            let contents = pages.zip(bytes.as_chunks().0);
            let contents: Vec<Page<'_>> = contents
                .map(|(number, bytes)| Page { number, bytes })
                .collect();
            self.pages.put_again(&mut self.sink, (block, &contents))?;
        }
        Ok(())
    }

    fn send(
        &mut self,
        batch: Batch,
        placement: &mut Option<AffinityGuard>,
    ) -> Result<(), MigrateError> {
        let Batch {
            block,
            mut pages,
            content,
            remembered,
        } = batch;
        let memory = &self.common.blocks[block];
        match content {
            Content::Memory(Guest::Running) => {
                let rewritten = self.common.rewritten.among(block, &pages)?;
                let rest = subtract(&pages, &rewritten);
                self.pages.postponed += length(&pages) - length(&rest);
                pages = rest;
            }
            Content::Memory(Guest::Stopped) => {
                *placement = None;
                self.pages.send_no_places();
            }
            Content::Sample | Content::Zero => {}
        }
        let begun = Instant::now();
        let bytes = &mut self.buffer[..(length(&pages) * PAGE_BYTES) as usize];
        match content {
            Content::Memory(guest) => memory.read(guest, &mut split(bytes, &pages), &pages)?,
            Content::Sample => memory.read(Guest::Running, &mut split(bytes, &pages), &pages)?,
            Content::Zero => bytes.fill(0),
        }
        let contents = pages.iter().cloned().flatten().zip(bytes.as_chunks().0);
        let pages: Vec<Page<'_>> = contents
            .map(|(number, bytes)| Page { number, bytes })
            .collect();
        let before = self.sink.bytes_sent();
        let count = pages.len() as u64;
        self.pages.put(&mut self.sink, (block, pages), remembered)?;
        let bytes = self.sink.bytes_sent() - before;
        self.common.round.sent.fetch_add(count, Ordering::Relaxed);
        self.common.round.bytes.fetch_add(bytes, Ordering::Relaxed);
        let worked = begun.elapsed();
        if content != Content::Memory(Guest::Stopped) {
            self.common.limiter.wait(bytes);
        }
        self.sink.account(worked, begun.elapsed() - worked)?;
        Ok(())
    }
}

/// Those of these ranges, each within a chunk, of which more than one page in this number is among the rewritten ones. Both
/// ascend.
fn chunks_with(pages: &[Range<u64>], rewritten: &[Range<u64>], in_number: u64) -> Vec<Range<u64>> {
    let parts = pages.iter().cloned().flat_map(chunks);
    let of_chunk = |range: &Range<u64>| range.start / CHUNK_PAGES;
    let mut counts: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for range in pages.iter().cloned().flat_map(chunks) {
        counts.entry(of_chunk(&range)).or_default().0 += range.end - range.start;
    }
    for range in rewritten.iter().cloned().flat_map(chunks) {
        counts.entry(of_chunk(&range)).or_default().1 += range.end - range.start;
    }
    let has_more = |range: &Range<u64>| {
        let (all, written) = counts[&of_chunk(range)];
        written > all / in_number
    };
    parts.filter(has_more).collect()
}

/// Cuts pages where another connection begins.
pub(super) fn chunks(pages: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut next = pages.start;
    std::iter::from_fn(move || {
        let end = pages.end.min((next / CHUNK_PAGES + 1) * CHUNK_PAGES);
        let part = next..end;
        next = end;
        (part.start < part.end).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_hot_where_many_of_its_pages_were_written_again() {
        let pages = [0..256, 300..310, 500..612, 1024..1280];
        let of = |rewritten: &[Range<u64>]| chunks_with(&pages, rewritten, HOT);
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[0..4, 1024..1028]), []);
        assert_eq!(of(&[0..5, 1024..1028]), vec![0..256; 1]);
        // What is left of the chunk of 256..512 are 22 pages.
        assert_eq!(of(&vec![305..306; 1]), [300..310, 500..512]);
        assert_eq!(of(&vec![550..560; 1]), vec![512..612; 1]);
        // One page is enough for it not to be calm.
        let of = |rewritten: &[Range<u64>]| chunks_with(&pages, rewritten, u64::MAX);
        assert_eq!(of(&vec![1027..1028; 1]), vec![1024..1280; 1]);
    }

    #[test]
    fn chunks_end_where_another_connection_begins() {
        let cut: Vec<Range<u64>> = chunks(254..513).collect();
        assert_eq!(cut, [254..256, 256..512, 512..513]);
        assert_eq!(chunks(3..3).count(), 0);
    }
}
