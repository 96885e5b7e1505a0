//! Where the pages of a VM come from: the one seam before populate.
//!
//! ```text
//!   PageSource: a repository | a connection ──pages──> eager or lazy populate ──> guest memory
//! ```
//!
//! There is one source for each RAM block. A source is shared by threads; each thread that reads single pages has
//! a [`PageFetcher`] of its own.

pub mod based;
pub mod connection;
pub mod repository;

use stillframe_page::PageRequest;
use thiserror::Error;

/// The most pages of a working set.
pub const WORKING_SET_PAGES_MAX: usize = repository::WORKING_SET_PAGES_MAX;

/// Why pages cannot be had from their source.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The repository failed.
    #[error(transparent)]
    Repository(#[from] repository::Error),
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] connection::Error),
}

/// Where fetched pages go: the number of the first, and the bytes of all.
pub type TakePages<'t, E> = &'t mut dyn FnMut(u64, &[u8]) -> Result<(), E>;

/// Where pages go that several threads fetch.
pub type TakeMany<'t, E> = &'t (dyn Fn(u64, &[u8]) -> Result<(), E> + Sync);

/// Whether a page that is to be fetched is wanted still: a fault may have been faster.
pub type StillWanted<'w> = &'w (dyn Fn(u64) -> bool + Sync);

/// The pages of one RAM block.
pub trait PageSource: Send + Sync + Sized {
    /// Reads single pages; one a thread.
    type Fetcher: PageFetcher<Self> + Send;

    /// The number of pages.
    fn pages(&self) -> u64;

    /// Whether a page is all zero. May take a read.
    ///
    /// # Errors
    /// The source cannot find out now.
    fn is_zero(&self, page: u64) -> Result<bool, SourceError>;

    /// Answers as [`PageSource::is_zero`], where that takes no read; else `false`.
    fn is_known_zero(&self, page: u64) -> bool;

    /// Pages that are likely to be used first, in this order.
    fn likely_first(&self) -> &[u32];

    /// Announces that all pages will be fetched: data that takes fewer reads at once is read now.
    ///
    /// # Errors
    /// Nothing is lost; single pages may still be had.
    fn prepare(&self) -> Result<(), SourceError>;

    /// Fetches pages in whatever order is quickest, on up to `threads` threads. Those that are not wanted any more may
    /// be left out.
    ///
    /// # Errors
    /// The first error, of the source or of `take`, ends it; some pages were handed over by then.
    fn fetch_many<E: From<SourceError> + Send>(
        &self,
        pages: Vec<u64>,
        threads: usize,
        wanted: StillWanted<'_>,
        take: TakeMany<'_, E>,
    ) -> Result<(), E>;

    /// A fetcher for one thread, for all blocks of the same VM.
    ///
    /// # Errors
    /// It cannot be had now.
    fn fetcher(&self) -> Result<Self::Fetcher, SourceError>;
}

/// Fetches single pages, with what comes along at little cost.
pub trait PageFetcher<S> {
    /// Fetches the requested page, and those of its neighbours that are quickly had now.
    ///
    /// # Errors
    /// The first error, of the source or of `take`.
    fn fetch<E: From<SourceError>>(
        &mut self,
        source: &S,
        request: PageRequest<'_>,
        take: TakePages<'_, E>,
    ) -> Result<(), E>;
}
