//! Connections as a source: pages are fetched from the VM at their other end, which is stopped.
//!
//! ```text
//!   fault handlers ──> lanes for demand ══╗
//!                                         ╠══ the source's engine, which reads its QEMU
//!   background fill ─> lanes for bulk ════╝
//! ```
//!
//! A lane has one connection. A page that a thread waits for is not behind pages that none waits for, and few of these
//! are under way at a time. A lane that fails is dropped; others may be added. Pages that cannot have content are known
//! from the beginning, and never fetched.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use stillframe_page::PAGE;
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::encoding::Decoder;
use stillframe_page::hash::ContentId;
use stillframe_page::{PageRequest, ReadOrder};

use super::{PageFetcher, PageSource, SourceError, StillWanted, TakeMany, TakePages};
use crate::connection::Connection;
pub use crate::connection::ConnectionError as Error;
use crate::connection::batch::{Batch, PAGES_MAX};
use crate::connection::message::{Control, Message};
use crate::encoding::page_encoder::hash_all;
use crate::memory::{BlockShape, Page};
use crate::sink::connection::transfer_hasher;

/// Pages of one request of the background fill. Few, because a page that a thread waits for shares the link with those
/// under way: 8 ms of it at 1 Gbit/s, with two lanes.
const BULK_PAGES: usize = 32;
/// Requests of a bulk lane that are not answered yet.
const BULK_DEPTH: usize = 4;

/// What a lane is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Pages that a thread waits for.
    Demand,
    /// All others.
    Bulk,
}

/// Connections whose other ends serve the pages of a stopped VM.
pub struct FetchSession<S> {
    demand: Lanes<S>,
    bulk: Lanes<S>,
    blocks: Vec<BlockShape>,
    in_flight: InFlight,
    /// The content ids that pages must have, if they are known.
    expected: OnceLock<Vec<Vec<Option<ContentId>>>>,
}

/// Pages that were requested and have not come, a bit each by block. They are no neighbours of others: a thread that runs
/// through memory would have each of them sent several times. It is a hint: a bit that stays set costs a fault.
struct InFlight(Vec<Vec<AtomicU64>>);

impl InFlight {
    fn of(blocks: &[BlockShape]) -> InFlight {
        let words = |block: &BlockShape| (0..block.pages.div_ceil(64)).map(|_| AtomicU64::new(0));
        InFlight(blocks.iter().map(|block| words(block).collect()).collect())
    }

    fn word(&self, block: usize, page: u64) -> Option<&AtomicU64> {
        self.0.get(block)?.get((page / 64) as usize)
    }

    fn has(&self, block: usize, page: u64) -> bool {
        let word = self.word(block, page);
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (page % 64) & 1 == 1)
    }

    fn set(&self, block: usize, pages: &[u64], to: bool) {
        for &page in pages {
            let bit = 1 << (page % 64);
            match (self.word(block, page), to) {
                (Some(word), true) => _ = word.fetch_or(bit, Ordering::Relaxed),
                (Some(word), false) => _ = word.fetch_and(!bit, Ordering::Relaxed),
                (None, _) => {}
            }
        }
    }
}

struct Lanes<S> {
    state: Mutex<State<S>>,
    given_back: Condvar,
}

struct State<S> {
    idle: Vec<Fetching<S>>,
    /// Those that are in use, too.
    all: usize,
    /// Why the last one failed.
    why: Option<String>,
}

/// A connection, and what it takes to read its answers.
struct Fetching<S> {
    connection: Connection<S>,
    decoder: Decoder,
    /// Pages that were compressed.
    buffer: Vec<u8>,
}

/// A lane in use. Unless it is given back it has failed.
struct InUse<'l, S> {
    lanes: &'l Lanes<S>,
    fetching: Option<Fetching<S>>,
}

impl<S> Lanes<S> {
    fn none() -> Lanes<S> {
        Lanes {
            state: Mutex::new(State {
                idle: Vec::new(),
                all: 0,
                why: None,
            }),
            given_back: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State<S>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self) -> usize {
        self.state().all
    }

    /// Waits for one that is not in use.
    fn take(&self) -> Result<InUse<'_, S>, Error> {
        let mut state = self.state();
        loop {
            if let Some(fetching) = state.idle.pop() {
                let fetching = Some(fetching);
                return Ok(InUse {
                    lanes: self,
                    fetching,
                });
            }
            if state.all == 0 {
                let why = state.why.clone();
                let why = why.unwrap_or_else(|| "there is none yet".to_owned());
                return Err(Error::NoLane { why });
            }
            let waited = self.given_back.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<S> Drop for InUse<'_, S> {
    fn drop(&mut self) {
        let mut state = self.lanes.state();
        match self.fetching.take() {
            Some(fetching) => state.idle.push(fetching),
            None => state.all -= 1,
        }
        self.lanes.given_back.notify_all();
    }
}

impl<S: Read + Write> InUse<'_, S> {
    /// Does something with it, after whose failure it is of no more use.
    fn with<T>(
        &mut self,
        what: impl FnOnce(&mut Fetching<S>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let Some(fetching) = &mut self.fetching else {
            return Err(self.has_failed());
        };
        what(fetching).inspect_err(|error| {
            self.fetching = None;
            self.lanes.state().why = Some(crate::in_words(error));
        })
    }

    fn has_failed(&self) -> Error {
        let why = self.lanes.state().why.clone();
        Error::NoLane {
            why: why.unwrap_or_default(),
        }
    }

    /// Requests at most [`PAGES_MAX`] ascending pages.
    fn ask(&mut self, session: &FetchSession<S>, block: usize, pages: &[u64]) -> Result<(), Error> {
        session.in_flight.set(block, pages, true);
        self.with(|Fetching { connection, .. }| {
            connection.send_control(&Control::Fetch {
                block,
                // A block has less than 2^30 pages.
                pages: pages.iter().map(|&page| page as u32).collect(),
            })
        })
    }

    /// Receives what was requested; adjacent pages are handed over together.
    fn receive<E: From<SourceError>>(
        &mut self,
        session: &FetchSession<S>,
        (block, pages): (usize, &[u64]),
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut refused = None;
        let received = self.with(|fetching| {
            let Fetching {
                connection,
                decoder,
                buffer,
            } = fetching;
            let answer = connection.receive_message()?;
            let Message::Pages(payload) = answer else {
                return Err(answer.unexpected());
            };
            let batch = Batch::decode(&payload, &session.blocks)?;
            if batch.block != block || !batch.numbers().eq(pages.iter().copied()) {
                let what = "other pages than were requested".to_owned();
                return Err(Error::Malformed { what });
            }
            for (first, bytes) in batch.runs(decoder, buffer)? {
                session.compare(block, first, bytes)?;
                // An error of the receiver is none of the connection.
                if refused.is_none() {
                    refused = take(first, bytes).err();
                }
            }
            connection.give_back(payload);
            Ok(())
        });
        session.in_flight.set(block, pages, false);
        match (received, refused) {
            (_, Some(refused)) => Err(refused),
            (Err(error), None) => Err(SourceError::from(error).into()),
            (Ok(()), None) => Ok(()),
        }
    }
}

impl<S: Read + Write> FetchSession<S> {
    /// Without a lane yet.
    pub fn new(blocks: &[BlockShape]) -> FetchSession<S> {
        FetchSession {
            demand: Lanes::none(),
            bulk: Lanes::none(),
            blocks: blocks.to_vec(),
            in_flight: InFlight::of(blocks),
            expected: OnceLock::new(),
        }
    }

    /// From here on each page is compared with the id that it has at the source, by block; said once.
    pub fn expect(&self, ids: Vec<Vec<Option<ContentId>>>) {
        let _ = self.expected.set(ids);
    }

    fn compare(&self, block: usize, first: u64, bytes: &[u8]) -> Result<(), Error> {
        let Some(ids) = self.expected.get().and_then(|ids| ids.get(block)) else {
            return Ok(());
        };
        let pages: Vec<Page<'_>> = Page::consecutive(first, bytes).collect();
        let found = hash_all(&transfer_hasher(), &pages);
        let expected = ids.get(first as usize..first as usize + found.len());
        match expected == Some(&found) {
            true => Ok(()),
            false => Err(Error::Malformed {
                what: format!("pages from {first} on that are not those of the pause"),
            }),
        }
    }

    /// Adds a lane.
    ///
    /// # Errors
    /// There is no memory for the decompressor.
    pub fn add(&self, lane: Lane, connection: Connection<S>) -> Result<(), Error> {
        let decoder = Decoder::new()?;
        let lanes = self.lanes(lane);
        let mut state = lanes.state();
        state.all += 1;
        state.idle.push(Fetching {
            connection,
            decoder,
            buffer: Vec::new(),
        });
        lanes.given_back.notify_all();
        Ok(())
    }

    /// How many lanes work.
    pub fn count(&self) -> usize {
        self.demand.count() + self.bulk.count()
    }

    /// Drops the lanes that no thread uses now: new ones are coming.
    pub fn drop_idle(&self) {
        for lanes in [&self.demand, &self.bulk] {
            let mut state = lanes.state();
            state.all -= state.idle.len();
            state.idle.clear();
        }
    }

    fn lanes(&self, lane: Lane) -> &Lanes<S> {
        match lane {
            Lane::Demand => &self.demand,
            Lane::Bulk => &self.bulk,
        }
    }

    /// The source of block number `block`, of whose pages only those of `content` may be other than zero. `first` are
    /// likely to be used first.
    pub fn source(
        self: &Arc<Self>,
        block: usize,
        content: DirtyBitmap,
        first: Vec<u32>,
    ) -> FetchedBlock<S> {
        FetchedBlock {
            session: Arc::clone(self),
            block,
            content,
            first,
        }
    }

    /// Fetches over one lane what is left of these batches.
    fn fetch_batches<E: From<SourceError>>(
        &self,
        block: usize,
        (batches, wanted): (&Mutex<std::slice::Chunks<'_, u64>>, StillWanted<'_>),
        take: TakeMany<'_, E>,
    ) -> Result<(), E> {
        let failed = |error: Error| E::from(SourceError::from(error));
        let next = || {
            batches
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .next()
        };
        let mut lane = self.bulk.take().map_err(failed)?;
        let mut asked = VecDeque::new();
        loop {
            while asked.len() < BULK_DEPTH
                && let Some(pages) = next()
            {
                let pages: Vec<u64> = pages.iter().copied().filter(|&page| wanted(page)).collect();
                if !pages.is_empty() {
                    lane.ask(self, block, &pages).map_err(failed)?;
                    asked.push_back(pages);
                }
            }
            let Some(pages) = asked.pop_front() else {
                return Ok(());
            };
            if let Err(error) = lane.receive(self, (block, &pages), take) {
                // Its further answers would be taken for others.
                lane.fetching = None;
                return Err(error);
            }
        }
    }
}

/// One block of the VM at the other end.
pub struct FetchedBlock<S> {
    session: Arc<FetchSession<S>>,
    block: usize,
    content: DirtyBitmap,
    first: Vec<u32>,
}

/// Fetches single pages. It has no state: the session has.
pub struct Fetcher;

impl<S: Read + Write> FetchedBlock<S> {
    /// Compares adjacent pages that came from elsewhere with the ids that they have at the source, if these are known.
    ///
    /// # Errors
    /// They differ.
    pub fn compare(&self, first: u64, bytes: &[u8]) -> Result<(), SourceError> {
        Ok(self.session.compare(self.block, first, bytes)?)
    }

    /// The same for a page that is zero.
    ///
    /// # Errors
    /// It is not zero at the source.
    pub fn compare_zero(&self, page: u64) -> Result<(), SourceError> {
        self.compare(page, &[0; PAGE])
    }
}

impl<S: Read + Write + Send> PageSource for FetchedBlock<S> {
    type Fetcher = Fetcher;

    fn pages(&self) -> u64 {
        self.content.pages()
    }

    /// A page that may have content counts as one that has, and comes as zeros then.
    fn is_zero(&self, page: u64) -> Result<bool, SourceError> {
        Ok(self.is_known_zero(page))
    }

    fn is_known_zero(&self, page: u64) -> bool {
        !self.content.get(page)
    }

    fn likely_first(&self) -> &[u32] {
        &self.first
    }

    fn prepare(&self) -> Result<(), SourceError> {
        Ok(())
    }

    /// A thread a lane, however many processors there are: it mostly waits.
    fn fetch_many<E: From<SourceError> + Send>(
        &self,
        mut pages: Vec<u64>,
        _threads: usize,
        wanted: StillWanted<'_>,
        take: TakeMany<'_, E>,
    ) -> Result<(), E> {
        pages.sort_unstable();
        pages.dedup();
        if pages.is_empty() {
            return Ok(());
        }
        let batches = Mutex::new(pages.chunks(BULK_PAGES));
        let lanes = self.session.bulk.count().max(1);
        let work = || {
            self.session
                .fetch_batches(self.block, (&batches, wanted), take)
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..lanes).map(|_| scope.spawn(work)).collect();
            let own = work();
            let theirs = others.into_iter().map(|thread| match thread.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            theirs.fold(own, Result::and)
        })
    }

    fn fetcher(&self) -> Result<Fetcher, SourceError> {
        Ok(Fetcher)
    }
}

impl<S: Read + Write + Send> PageFetcher<FetchedBlock<S>> for Fetcher {
    fn fetch<E: From<SourceError>>(
        &mut self,
        source: &FetchedBlock<S>,
        request: PageRequest<'_>,
        take: TakePages<'_, E>,
    ) -> Result<(), E> {
        let PageRequest {
            page, neighbours, ..
        } = request;
        let session = &source.session;
        let mut rest: Vec<u64> = neighbours.to_vec();
        rest.retain(|&other| !session.in_flight.has(source.block, other));
        let mut batches: Vec<&[u64]> = Vec::new();
        let requested = [page];
        match request.order {
            // By itself: the others take their time to cross.
            ReadOrder::RequestedFirst => {
                rest.retain(|&other| other != page);
                batches.push(&requested);
            }
            ReadOrder::Ascending => {
                rest.push(page);
                rest.sort_unstable();
                rest.dedup();
            }
        }
        batches.extend(rest.chunks(PAGES_MAX));
        let failed = |error: Error| E::from(SourceError::from(error));
        let mut lane = session.demand.take().map_err(failed)?;
        for pages in &batches {
            lane.ask(session, source.block, pages).map_err(failed)?;
        }
        for pages in batches {
            let received = lane.receive(session, (source.block, pages), &mut *take);
            if let Err(error) = received {
                lane.fetching = None;
                return Err(error);
            }
        }
        Ok(())
    }
}
