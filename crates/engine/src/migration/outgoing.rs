//! The source's connections for pages. Each has a thread that reads, encodes and sends the pages of its share of memory.
//!
//! ```text
//!   round ──> batches ──> connection 1: leave out, read, encode ══> ┐
//!                    └──> connection 2: leave out, read, encode ══> ┴ destination
//! ```
//!
//! Every version of a page goes over the same connection, so that the last one arrives last. A connection takes a
//! batch when it has sent the one before: pages are read late, and left out when they have changed again.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded};
use stillframe_link::Closer;
use stillframe_page::encoding::Compression;

use super::error::MigrateError;
use super::page_sender::{
    BATCH_PAGES, Batch, CHUNK_PAGES, Common, Content, Done, End, LITTLE, Ongoing, PageSender, Sent,
    Task, chunks,
};
use super::pages::SentPages;
use super::{BEAT, MigratedPages, Reconnect, Unreachable, Wire};
use crate::connection::message::Control;
use crate::connection::word::Session;
use crate::memory::block::Guest;
use crate::memory::ranges::{PageRanges, count};
use crate::tracking::tracker::Collected;
use crate::{Progress, ProgressSink};

/// Places of a block that are sent from at the same time. Memory has long stretches that compress well, which the
/// processor limits, and long ones that do not, which the network limits.
const PLACES: usize = 8;
/// Batches that wait for a connection, so that none is idle while another has pages that take long. They are page numbers
/// only.
const WAITING_MAX: usize = 32;

/// One of the connections, and its thread.
struct Sending {
    /// Closed when it is dropped.
    tasks: Option<Sender<Task>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<Result<(), MigrateError>>>,
    closer: Closer,
}

/// The connections.
pub(super) struct Outgoing {
    connections: Vec<Sending>,
    sent: Sent,
    common: Common,
    /// Pages that no connection was given.
    postponed: u64,
    /// Pages that were not sent because a round was cut short, each with the number of its block.
    unsent: Vec<(usize, Range<u64>)>,
    /// When the destination last heard that this side lives, or soon before.
    beat: Instant,
}

impl Outgoing {
    /// Opens one connection for each of these states.
    ///
    /// # Errors
    /// The destination cannot be reached.
    pub fn open(
        reconnect: Reconnect<'_>,
        session: &Session,
        states: Vec<SentPages>,
        common: Common,
    ) -> Result<Outgoing, MigrateError> {
        let mut connections = Vec::with_capacity(states.len());
        for (number, pages) in (0..).zip(states) {
            let unreachable = |Unreachable { why, .. }| MigrateError::NoMoreConnections { why };
            let mut wire = reconnect().map_err(unreachable)?;
            let session = session.clone();
            wire.send_control(&Control::Join { session, number })?;
            let closer = wire.closer().map_err(MigrateError::Socket)?;
            let (tasks, todo) = bounded(WAITING_MAX);
            let (done, ended) = bounded(1);
            let sender = PageSender::new(wire, pages, common.clone())?;
            let thread = std::thread::Builder::new().name("pages".to_owned());
            let thread = thread.spawn(move || sender.run(&todo, &done));
            connections.push(Sending {
                tasks: Some(tasks),
                done: ended,
                thread: Some(thread.map_err(MigrateError::Thread)?),
                closer,
            });
        }
        Ok(Outgoing {
            connections,
            sent: Sent::default(),
            common,
            postponed: 0,
            unsent: Vec::new(),
            beat: Instant::now(),
        })
    }

    /// All pages found until now are protected again.
    pub fn begin_round(&self) {
        self.common.round.cut_short.store(false, Ordering::Relaxed);
        self.common.round.sent.store(0, Ordering::Relaxed);
        self.common.round.bytes.store(0, Ordering::Relaxed);
        self.common.rewritten.begin_round();
    }

    /// The round that goes on.
    pub fn round(&self) -> Arc<Ongoing> {
        Arc::clone(&self.common.round)
    }

    /// The pages that a round has left out that was cut short, once its end was awaited.
    pub fn take_unsent(&mut self) -> PageRanges {
        let mut unsent = vec![Vec::new(); self.common.blocks.len()];
        for (block, range) in self.unsent.drain(..) {
            unsent[block].push(range);
        }
        let ascending = |ranges: &mut Vec<Range<u64>>| ranges.sort_unstable_by_key(|one| one.start);
        unsent.iter_mut().for_each(ascending);
        unsent
    }

    /// Counts pages that are left out of this round.
    pub fn postponed(&mut self, pages: u64) {
        self.postponed += pages;
    }

    /// Takes the pages of a round. Meanwhile, and while it waits, the destination hears over the first connection that
    /// this side lives.
    ///
    /// # Errors
    /// A connection or a read failed.
    pub fn put(
        &mut self,
        wire: &mut Wire,
        wanted: &Collected,
        guest: Guest,
        progress: ProgressSink<'_>,
    ) -> Result<(), MigrateError> {
        let (mut done, total) = (0, wanted.pages());
        let taken = &mut |more| {
            done += more;
            progress(Progress::FullPass { done, total });
        };
        for (block, pages) in wanted.written.iter().enumerate() {
            self.put_block(wire, block, pages, Content::Memory(guest), taken)?;
        }
        for (block, pages) in wanted.discarded.iter().enumerate() {
            self.put_block(wire, block, pages, Content::Zero, taken)?;
        }
        Ok(())
    }

    fn put_block(
        &mut self,
        wire: &mut Wire,
        block: usize,
        pages: &[Range<u64>],
        content: Content,
        taken: &mut dyn FnMut(u64),
    ) -> Result<(), MigrateError> {
        let mut batches = vec![(0, Vec::new()); self.connections.len()];
        let parts: Vec<Range<u64>> = pages.iter().cloned().flat_map(chunks).collect();
        for part in mixed(parts.len()).map(|at| parts[at].clone()) {
            let number = (part.start / CHUNK_PAGES) as usize + block;
            let number = number % batches.len();
            let (count, batch) = &mut batches[number];
            let more = part.end - part.start;
            if *count + more > BATCH_PAGES {
                let pages = std::mem::take(batch);
                self.batch(wire, number, (block, pages, content))?;
                taken(std::mem::take(count));
            }
            batch.push(part);
            *count += more;
        }
        for (number, (count, pages)) in batches.into_iter().enumerate() {
            if count > 0 {
                self.batch(wire, number, (block, pages, content))?;
                taken(count);
            }
        }
        Ok(())
    }

    /// Hands a batch to a connection.
    fn batch(
        &mut self,
        wire: &mut Wire,
        number: usize,
        (block, mut pages, content): (usize, Vec<Range<u64>>, Content),
    ) -> Result<(), MigrateError> {
        pages.sort_unstable_by_key(|range| range.start);
        let batch = Batch {
            block,
            pages,
            content,
            remembered: true,
        };
        self.order(wire, number, Task::Batch(batch))
    }

    /// Sends some pages that were sent before, and will be sent again. Whether they take less than half of the bytes of
    /// a page so far, or little.
    ///
    /// # Errors
    /// A connection or a read failed.
    pub fn are_smaller(&mut self, wire: &mut Wire, few: PageRanges) -> Result<bool, MigrateError> {
        let before = self.sent;
        let pages = count(&few);
        for (block, pages) in few.iter().enumerate() {
            self.put_block(wire, block, pages, Content::Sample, &mut |_| ())?;
        }
        self.sync(wire)?;
        let each = before.bytes / (before.pages.sent - before.pages.zero).max(1);
        let again = (self.sent.bytes - before.bytes) / pages.max(1);
        Ok(again < (each / 2).max(LITTLE))
    }

    /// Waits until the destination has all pages so far.
    ///
    /// # Errors
    /// A connection or a read failed.
    pub fn sync(&mut self, wire: &mut Wire) -> Result<(), MigrateError> {
        self.all(wire, End::Round)
    }

    /// Waits until all pages are sent; there are no more.
    ///
    /// # Errors
    /// The same.
    pub fn last(&mut self, wire: &mut Wire) -> Result<(), MigrateError> {
        self.all(wire, End::All)
    }

    /// What was sent until the last of these waits.
    pub fn pages(&self) -> MigratedPages {
        let mut pages = self.sent.pages;
        pages.postponed += self.postponed;
        pages
    }

    /// How pages were compressed then, over one of the connections.
    pub fn compression(&self) -> Option<Compression> {
        self.sent.compression
    }

    /// Bytes sent until then.
    pub fn bytes(&self) -> u64 {
        self.sent.bytes
    }

    fn all(&mut self, wire: &mut Wire, end: End) -> Result<(), MigrateError> {
        for number in 0..self.connections.len() {
            self.order(wire, number, Task::End(end))?;
        }
        let mut all = Sent::default();
        for number in 0..self.connections.len() {
            let Done { sent, unsent } = loop {
                match self.connections[number].done.recv_timeout(BEAT) {
                    Ok(done) => break done,
                    Err(RecvTimeoutError::Timeout) => self.say_alive(wire)?,
                    Err(RecvTimeoutError::Disconnected) => return Err(self.failed(number)),
                }
            };
            self.unsent.extend(unsent);
            all.pages += sent.pages;
            all.bytes += sent.bytes;
            all.compression = sent.compression;
        }
        self.sent = all;
        Ok(())
    }

    /// The destination hears now and then that this side lives.
    fn say_alive(&mut self, wire: &mut Wire) -> Result<(), MigrateError> {
        if self.beat.elapsed() >= BEAT {
            self.beat = Instant::now();
            wire.send_control(&Control::Alive)?;
        }
        Ok(())
    }

    fn order(
        &mut self,
        wire: &mut Wire,
        number: usize,
        mut task: Task,
    ) -> Result<(), MigrateError> {
        self.say_alive(wire)?;
        loop {
            let tasks = self.connections[number].tasks.as_ref();
            match tasks.map(|tasks| tasks.send_timeout(task, BEAT)) {
                Some(Ok(())) => return Ok(()),
                Some(Err(SendTimeoutError::Timeout(again))) => {
                    task = again;
                    wire.send_control(&Control::Alive)?;
                }
                _ => return Err(self.failed(number)),
            }
        }
    }

    /// Why the thread has ended.
    fn failed(&mut self, number: usize) -> MigrateError {
        let thread = self.connections[number].thread.take();
        match thread.map(JoinHandle::join) {
            Some(Ok(Err(error))) => error,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            Some(Ok(Ok(()))) | None => MigrateError::NoMoreConnections {
                why: "it was closed".to_owned(),
            },
        }
    }
}

impl Drop for Outgoing {
    /// A thread that waits for its connection does so no longer.
    fn drop(&mut self) {
        for connection in &mut self.connections {
            connection.tasks = None;
            connection.closer.close();
        }
    }
}

/// The numbers below `count`, from several places at the same time.
fn mixed(count: usize) -> impl Iterator<Item = usize> {
    let step = count.div_ceil(PLACES);
    let each = (0..step).flat_map(move |first| (0..PLACES).map(move |place| first + place * step));
    each.filter(move |&number| number < count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_come_once_and_neighbours_not_together() {
        for count in [0, 1, 7, 8, 9, 100, 1001] {
            let mut all: Vec<usize> = mixed(count).collect();
            if count > 2 * PLACES {
                assert!(all.windows(2).all(|pair| pair[0].abs_diff(pair[1]) > 1));
            }
            all.sort_unstable();
            assert!(all.into_iter().eq(0..count));
        }
    }
}
