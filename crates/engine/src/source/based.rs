//! A VM that comes from another host, and of which a checkpoint is here, as a source: what was written since the
//! checkpoint is fetched, the rest is read from it.

use std::io::{Read, Write};

use stillframe_page::PageRequest;

use super::connection::{FetchedBlock, Fetcher};
use super::{PageFetcher, PageSource, SourceError, StillWanted, TakeMany, TakePages};

/// One block of such a VM; without a checkpoint, what is not fetched is zero.
pub struct BasedBlock<B, S> {
    fetched: FetchedBlock<S>,
    base: Option<B>,
}

/// Fetches single pages of it.
pub struct BasedFetcher<F> {
    fetched: Fetcher,
    stored: Option<F>,
}

impl<B: PageSource, S: Read + Write + Send> BasedBlock<B, S> {
    /// All pages that `fetched` does not have are those of `base`.
    pub fn new(fetched: FetchedBlock<S>, base: Option<B>) -> BasedBlock<B, S> {
        BasedBlock { fetched, base }
    }

    /// Where a page is, if it is not fetched.
    fn stored(&self, page: u64) -> Option<&B> {
        let base = self.base.as_ref();
        base.filter(|_| self.fetched.is_known_zero(page))
    }
}

impl<B: PageSource, S: Read + Write + Send> PageSource for BasedBlock<B, S> {
    type Fetcher = BasedFetcher<B::Fetcher>;

    fn pages(&self) -> u64 {
        self.fetched.pages()
    }

    fn is_zero(&self, page: u64) -> Result<bool, SourceError> {
        let Some(base) = self.stored(page) else {
            return self.fetched.is_zero(page);
        };
        let zero = base.is_zero(page)?;
        if zero {
            self.fetched.compare_zero(page)?;
        }
        Ok(zero)
    }

    fn is_known_zero(&self, page: u64) -> bool {
        match self.stored(page) {
            // If it differs, that is found where it can be said.
            Some(base) => base.is_known_zero(page) && self.fetched.compare_zero(page).is_ok(),
            None => self.fetched.is_known_zero(page),
        }
    }

    fn likely_first(&self) -> &[u32] {
        match (self.fetched.likely_first(), &self.base) {
            ([], Some(base)) => base.likely_first(),
            (first, _) => first,
        }
    }

    fn prepare(&self) -> Result<(), SourceError> {
        self.base.as_ref().map_or(Ok(()), PageSource::prepare)
    }

    fn fetch_many<E: From<SourceError> + Send>(
        &self,
        pages: Vec<u64>,
        threads: usize,
        wanted: StillWanted<'_>,
        take: TakeMany<'_, E>,
    ) -> Result<(), E> {
        let is_stored = |page: &u64| self.stored(*page).is_some();
        let (stored, fetched) = pages.into_iter().partition(is_stored);
        self.fetched.fetch_many(fetched, threads, wanted, take)?;
        let Some(base) = &self.base else {
            return Ok(());
        };
        let compared = |first: u64, bytes: &[u8]| {
            self.fetched.compare(first, bytes)?;
            take(first, bytes)
        };
        base.fetch_many(stored, threads, wanted, &compared)
    }

    fn fetcher(&self) -> Result<Self::Fetcher, SourceError> {
        let stored = self.base.as_ref().map(PageSource::fetcher).transpose()?;
        Ok(BasedFetcher {
            fetched: self.fetched.fetcher()?,
            stored,
        })
    }
}

impl<B, S> PageFetcher<BasedBlock<B, S>> for BasedFetcher<B::Fetcher>
where
    B: PageSource,
    S: Read + Write + Send,
{
    fn fetch<E: From<SourceError>>(
        &mut self,
        source: &BasedBlock<B, S>,
        request: PageRequest<'_>,
        take: TakePages<'_, E>,
    ) -> Result<(), E> {
        let stored = source.stored(request.page);
        let mut neighbours = request.neighbours.to_vec();
        neighbours.retain(|&page| source.stored(page).is_some() == stored.is_some());
        let request = PageRequest {
            neighbours: &neighbours,
            ..request
        };
        match (stored, &mut self.stored) {
            (Some(base), Some(reader)) => {
                let compared = &mut |first: u64, bytes: &[u8]| {
                    source.fetched.compare(first, bytes)?;
                    take(first, bytes)
                };
                reader.fetch(base, request, compared)
            }
            _ => self.fetched.fetch(&source.fetched, request, take),
        }
    }
}
