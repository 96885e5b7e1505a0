//! A connection as a source: pages are fetched from the VM at its other end, which is stopped.
//!
//! There is one stream, so that fetchers of several threads wait for each other. Pages that cannot have content are
//! known from the beginning, and never fetched.

use std::io::{Read, Write};
use std::sync::{Mutex, PoisonError};

use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::encoding::Decoder;
use stillframe_page::{PageRequest, ReadOrder};

use super::{PageFetcher, PageSource, SourceError, TakeMany, TakePages};
use crate::connection::Connection;
pub use crate::connection::ConnectionError as Error;
use crate::connection::batch::{Batch, PAGES_MAX};
use crate::connection::message::{Control, Message};
use crate::memory::BlockShape;

/// A connection whose other end serves the pages of a stopped VM.
pub struct FetchSession<'c, S> {
    shared: Mutex<Shared<'c, S>>,
    blocks: Vec<BlockShape>,
}

struct Shared<'c, S> {
    connection: &'c mut Connection<S>,
    decoder: Decoder,
}

impl<'c, S: Read + Write> FetchSession<'c, S> {
    /// A fetcher over this connection, after the sender's greeting.
    ///
    /// # Errors
    /// There is no memory for the decompressor.
    pub fn new(
        connection: &'c mut Connection<S>,
        blocks: &[BlockShape],
    ) -> Result<FetchSession<'c, S>, Error> {
        let decoder = Decoder::new()?;
        Ok(FetchSession {
            shared: Mutex::new(Shared {
                connection,
                decoder,
            }),
            blocks: blocks.to_vec(),
        })
    }

    /// The source of each block, of whose pages only those of `content` may be other than zero.
    pub fn sources(&self, content: Vec<DirtyBitmap>) -> Vec<FetchedBlock<'_, 'c, S>> {
        let numbered = content.into_iter().enumerate();
        let source = |(block, content)| FetchedBlock {
            session: self,
            block,
            content,
        };
        numbered.map(source).collect()
    }

    /// Fetches at most [`PAGES_MAX`] ascending pages with one message; adjacent ones are handed over together.
    fn fetch<E: From<SourceError>>(
        &self,
        block: usize,
        pages: &[u64],
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let failed = |error: Error| E::from(SourceError::from(error));
        // A session whose thread panicked is in the middle of a frame; the next frame's check fails then.
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let Shared {
            connection,
            decoder,
        } = &mut *shared;
        let fetch = Control::Fetch {
            block,
            // A block has less than 2^30 pages.
            pages: pages.iter().map(|&page| page as u32).collect(),
        };
        connection.send_control(&fetch).map_err(failed)?;
        let answer = connection.receive_message().map_err(failed)?;
        let Message::Pages(payload) = answer else {
            return Err(failed(answer.unexpected()));
        };
        let batch = Batch::decode(&payload, &self.blocks).map_err(failed)?;
        if batch.block != block || !batch.numbers().eq(pages.iter().copied()) {
            let what = "other pages than were requested".to_owned();
            return Err(failed(Error::Malformed { what }));
        }
        let taken = batch.runs(decoder, |first, bytes| {
            take(first, bytes).map_err(Received::Receiver)
        });
        taken.map_err(|error| match error {
            Received::Receiver(error) => error,
            Received::Connection(error) => failed(error),
        })
    }
}

/// An error of the receiver of pages, or of the connection.
enum Received<E> {
    Receiver(E),
    Connection(Error),
}

impl<E> From<Error> for Received<E> {
    fn from(error: Error) -> Received<E> {
        Received::Connection(error)
    }
}

/// One block of the VM at the other end.
pub struct FetchedBlock<'s, 'c, S> {
    session: &'s FetchSession<'c, S>,
    block: usize,
    content: DirtyBitmap,
}

/// Fetches single pages. It has no state: the session has.
pub struct Fetcher;

impl<S: Read + Write + Send> PageSource for FetchedBlock<'_, '_, S> {
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
        &[]
    }

    fn prepare(&self) -> Result<(), SourceError> {
        Ok(())
    }

    fn fetch_many<E: From<SourceError> + Send>(
        &self,
        mut pages: Vec<u64>,
        _threads: usize,
        take: TakeMany<'_, E>,
    ) -> Result<(), E> {
        pages.sort_unstable();
        pages.dedup();
        let mut batches = pages.chunks(PAGES_MAX);
        batches.try_for_each(|batch| self.session.fetch(self.block, batch, take))
    }

    fn fetcher(&self) -> Result<Fetcher, SourceError> {
        Ok(Fetcher)
    }
}

impl<S: Read + Write + Send> PageFetcher<FetchedBlock<'_, '_, S>> for Fetcher {
    fn fetch<E: From<SourceError>>(
        &mut self,
        source: &FetchedBlock<'_, '_, S>,
        request: PageRequest<'_>,
        take: TakePages<'_, E>,
    ) -> Result<(), E> {
        let PageRequest {
            page, neighbours, ..
        } = request;
        let mut rest: Vec<u64> = neighbours.to_vec();
        match request.order {
            // By itself: the others take their time to cross.
            ReadOrder::RequestedFirst => {
                source.session.fetch(source.block, &[page], &mut *take)?;
                rest.retain(|&other| other != page);
            }
            ReadOrder::Ascending => {
                rest.push(page);
                rest.sort_unstable();
                rest.dedup();
            }
        }
        let mut batches = rest.chunks(PAGES_MAX);
        batches.try_for_each(|batch| source.session.fetch(source.block, batch, &mut *take))
    }
}
