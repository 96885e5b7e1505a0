//! A checkpoint in a repository as a source.

pub use stillframe_repo::RepoError as Error;
pub use stillframe_repo::working_set::PAGES_MAX as WORKING_SET_PAGES_MAX;

use stillframe_page::{PAGE_BYTES, PageRequest};
use stillframe_repo::{BlockTable, PageMap, PageReader};

use super::{PageFetcher, PageSource, SourceError, StillWanted, TakeMany, TakePages};
use crate::memory::BlockShape;

/// The names and lengths of the blocks of a checkpoint.
pub fn shapes(tables: &[BlockTable]) -> Vec<BlockShape> {
    let shape = |table: &BlockTable| BlockShape {
        name: table.name.clone(),
        pages: table.pages * u64::from(table.page_bytes) / PAGE_BYTES,
    };
    tables.iter().map(shape).collect()
}

/// An error of the receiver of pages, in a form that errors of the repository become, too.
struct Received<E>(E);

impl<E: From<SourceError>> From<Error> for Received<E> {
    fn from(error: Error) -> Received<E> {
        Received(SourceError::from(error).into())
    }
}

impl<'a> PageSource for PageMap<'a> {
    type Fetcher = PageReader<'a>;

    fn pages(&self) -> u64 {
        self.pages()
    }

    fn is_zero(&self, page: u64) -> Result<bool, SourceError> {
        Ok(self.is_zero(page)?)
    }

    fn is_known_zero(&self, page: u64) -> bool {
        self.is_known_zero(page)
    }

    fn likely_first(&self) -> &[u32] {
        self.newest_changes()
    }

    fn prepare(&self) -> Result<(), SourceError> {
        Ok(self.read_rest()?)
    }

    fn fetch_many<E: From<SourceError> + Send>(
        &self,
        pages: Vec<u64>,
        threads: usize,
        _wanted: StillWanted<'_>,
        take: TakeMany<'_, E>,
    ) -> Result<(), E> {
        let take = |page: u64, bytes: &[u8]| take(page, bytes).map_err(Received);
        let read = self.read_pages(pages, threads, &take);
        read.map_err(|Received(error)| error)
    }

    fn fetcher(&self) -> Result<PageReader<'a>, SourceError> {
        Ok(self.page_reader()?)
    }
}

impl<'a> PageFetcher<PageMap<'a>> for PageReader<'a> {
    fn fetch<E: From<SourceError>>(
        &mut self,
        source: &PageMap<'a>,
        request: PageRequest<'_>,
        take: TakePages<'_, E>,
    ) -> Result<(), E> {
        let mut take = |page: u64, bytes: &[u8]| take(page, bytes).map_err(Received);
        let read = self.read(source, request, &mut take);
        read.map_err(|Received(error)| error)
    }
}
