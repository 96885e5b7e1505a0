//! The source's lanes: each has a thread that answers requests for pages of the stopped VM.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use stillframe_link::Closer;
use stillframe_page::PAGE;
use thiserror::Error;

use super::{Reconnect, Unreachable, Wire};
use crate::connection::ConnectionError;
use crate::connection::batch::{BatchWriter, PAGES_MAX};
use crate::connection::compression::CompressionChoice;
use crate::connection::framing::Kind;
use crate::connection::message::{Control, Message};
use crate::connection::word::{Session, Word};
use crate::memory::block::{Block, BlockError, Guest};
use crate::memory::page_buffer::PageBuffer;
use crate::memory::ranges;

/// Why pages are not served.
#[derive(Debug, Error)]
pub enum ServingError {
    /// There is one connection, and not the others.
    #[error("cannot open a connection for pages: {why}")]
    NotOpened {
        /// Why not.
        why: String,
    },
    /// A connection failed.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// No descriptor for a socket.
    #[error("cannot prepare a connection for pages")]
    Socket(#[source] std::io::Error),
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// Reading memory failed.
    #[error("cannot read the VM's memory")]
    Block(#[from] BlockError),
}

/// What the threads share.
#[derive(Default)]
struct Shared {
    /// What may be read from here on.
    begun: OnceLock<Guest>,
    pages: AtomicU64,
    bytes: AtomicU64,
    /// Why memory cannot be read any more.
    failure: Mutex<Option<String>>,
}

/// The lanes of one migration. They end when this is dropped.
pub(super) struct Serving {
    session: Session,
    blocks: Vec<Arc<Block>>,
    lanes: usize,
    compression: CompressionChoice,
    shared: Arc<Shared>,
    closers: Vec<Closer>,
}

impl Serving {
    /// The lanes of these blocks, none of which is open yet. Pages are compressed in this way.
    pub fn new(
        session: &Session,
        blocks: Vec<Arc<Block>>,
        lanes: usize,
        compression: CompressionChoice,
    ) -> Serving {
        Serving {
            session: session.clone(),
            blocks,
            lanes,
            compression,
            shared: Arc::default(),
            closers: Vec::new(),
        }
    }

    /// How many there are.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// Opens them, in place of those that were open. The numbers of the connections begin with `first`.
    ///
    /// # Errors
    /// The destination cannot be reached.
    pub fn open(&mut self, first: usize, reconnect: Reconnect<'_>) -> Result<(), ServingError> {
        self.close();
        for number in first..first + self.lanes {
            let mut wire =
                reconnect().map_err(|Unreachable { why, .. }| ServingError::NotOpened { why })?;
            let session = self.session.clone();
            wire.send_control(&Control::Join { session, number })?;
            let closer = wire.closer().map_err(ServingError::Socket)?;
            self.closers.push(closer);
            let lane = Lane {
                writer: BatchWriter::new(self.compression)?,
                wire,
                blocks: self.blocks.clone(),
                shared: Arc::clone(&self.shared),
                buffer: PageBuffer::default(),
                answered: Instant::now(),
            };
            let thread = std::thread::Builder::new().name("lane".to_owned());
            let thread = thread.spawn(move || lane.run());
            thread.map_err(ServingError::Thread)?;
        }
        Ok(())
    }

    /// Requests are answered from here on. Only the pages of a VM that is stopped are final.
    pub fn begin(&self, guest: Guest) {
        self.shared.begun.get_or_init(|| guest);
    }

    /// Pages that were fetched.
    pub fn pages(&self) -> u64 {
        self.shared.pages.load(Ordering::Relaxed)
    }

    /// Bytes that were sent for them.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Why memory cannot be read any more.
    pub fn failure(&self) -> Option<String> {
        let failure = self.shared.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn close(&mut self) {
        self.closers.drain(..).for_each(|closer| closer.close());
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.close();
    }
}

/// The state of a thread.
struct Lane {
    wire: Wire,
    writer: BatchWriter,
    blocks: Vec<Arc<Block>>,
    shared: Arc<Shared>,
    buffer: PageBuffer,
    /// When the last answer was sent.
    answered: Instant,
}

impl Lane {
    /// Answers until the connection ends, or memory cannot be read.
    fn run(mut self) {
        self.wire.limit_silence(super::NO_PAGES_MAX);
        loop {
            let before = self.wire.bytes_sent();
            let request = match self.wire.receive_message() {
                Ok(request) => request,
                Err(_) => return,
            };
            if let Err(error) = self.answer(request) {
                let why = Some(crate::in_words(&error));
                let word = Word::Never;
                let _ = self.wire.send_control(&Control::Word { word, why });
                return;
            }
            let sent = self.wire.bytes_sent() - before;
            self.shared.bytes.fetch_add(sent, Ordering::Relaxed);
        }
    }

    fn answer(&mut self, request: Message) -> Result<(), ServingError> {
        // The destination requests more when it has what is under way: a slow network shows here, too.
        let waited = self.answered.elapsed();
        let (begun, before) = (Instant::now(), self.wire.bytes_sent());
        let Message::Control(Control::Fetch { block, pages }) = request else {
            return Err(request.unexpected().into());
        };
        let known = self.blocks.get(block).filter(|memory| {
            let inside = |&page: &u32| u64::from(page) < memory.pages();
            pages.len() <= PAGES_MAX && pages.is_sorted_by(|a, b| a < b) && pages.iter().all(inside)
        });
        let Some((memory, &guest)) = known.zip(self.shared.begun.get()) else {
            let what = "a request for pages that cannot be had".to_owned();
            return Err(ConnectionError::Malformed { what }.into());
        };
        self.buffer.expect(pages.len());
        let bytes = &mut self.buffer[..pages.len() * PAGE];
        let numbers: Vec<u64> = pages.iter().map(|&page| page.into()).collect();
        let runs = ranges::runs(&numbers);
        let mut into = ranges::split(bytes, &runs);
        memory.read(guest, &mut into, &runs).inspect_err(|error| {
            let failure = self.shared.failure.lock();
            *failure.unwrap_or_else(PoisonError::into_inner) = Some(crate::in_words(error));
        })?;
        self.writer.begin(block);
        for (page, bytes) in numbers.into_iter().zip(bytes.as_chunks().0) {
            self.writer.page(page, bytes)?;
        }
        let payload = self.writer.finish()?;
        let sending = Instant::now();
        self.wire.send_parts(Kind::Pages, &payload)?;
        let sending = waited + sending.elapsed();
        let (sent, whole) = (self.wire.bytes_sent() - before, waited + begun.elapsed());
        let accounted = self.writer.compressor().sent(sent, sending, whole);
        accounted.map_err(ConnectionError::from)?;
        self.answered = Instant::now();
        self.shared
            .pages
            .fetch_add(pages.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}
