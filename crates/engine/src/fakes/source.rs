//! A source of pages that may fail.

use stillframe_page::PageRequest;
use stillframe_repo::RepoError;

use super::pages;
use crate::source::{PageFetcher, PageSource, SourceError, StillWanted, TakeMany, TakePages};

/// One page for each of the bytes, full of it.
#[derive(Debug, Clone)]
pub(crate) struct FakeSource {
    pub(crate) fillings: Vec<u8>,
    /// A page that cannot be had.
    pub(crate) failing: Option<u64>,
}

impl FakeSource {
    fn page(&self, page: u64) -> Result<Vec<u8>, SourceError> {
        if self.failing == Some(page) {
            let path = "/repository".into();
            return Err(RepoError::NoSpace { path }.into());
        }
        Ok(pages(&[self.fillings[page as usize]]))
    }
}

impl PageSource for FakeSource {
    type Fetcher = FakeFetcher;

    fn pages(&self) -> u64 {
        self.fillings.len() as u64
    }

    fn is_zero(&self, page: u64) -> Result<bool, SourceError> {
        Ok(self.fillings[page as usize] == 0)
    }

    fn is_known_zero(&self, page: u64) -> bool {
        self.fillings[page as usize] == 0
    }

    fn likely_first(&self) -> &[u32] {
        &[]
    }

    fn prepare(&self) -> Result<(), SourceError> {
        Ok(())
    }

    fn fetch_many<E: From<SourceError> + Send>(
        &self,
        pages: Vec<u64>,
        _threads: usize,
        _wanted: StillWanted<'_>,
        take: TakeMany<'_, E>,
    ) -> Result<(), E> {
        // From the last: the order is the source's.
        pages
            .iter()
            .rev()
            .try_for_each(|&page| take(page, &self.page(page)?))
    }

    fn fetcher(&self) -> Result<FakeFetcher, SourceError> {
        Ok(FakeFetcher)
    }
}

/// Fetches from a [`FakeSource`].
pub(crate) struct FakeFetcher;

impl PageFetcher<FakeSource> for FakeFetcher {
    fn fetch<E: From<SourceError>>(
        &mut self,
        source: &FakeSource,
        request: PageRequest<'_>,
        take: TakePages<'_, E>,
    ) -> Result<(), E> {
        take(request.page, &source.page(request.page)?)
    }
}
