//! The populate half: a checkpoint's pages into the memory of a new QEMU, before it runs or while it does.

pub mod base;
pub mod eager;
pub mod lazy;

use std::io;
use std::sync::{Mutex, PoisonError};

use stillframe_repo::{PageMap, RepoError};

/// Hands pages to `take`, in no order, as [`PageMap::read_pages`] does; the first error of either ends it.
pub(crate) fn read_pages<E>(
    map: &PageMap<'_>,
    pages: impl IntoIterator<Item = u64>,
    threads: usize,
    take: impl Fn(u64, &[u8]) -> Result<(), E> + Sync,
) -> Result<(), E>
where
    E: std::error::Error + From<RepoError> + Send,
{
    // The repository's sink speaks io::Error; the other's own error is kept for the report.
    let failed: Mutex<Option<E>> = Mutex::new(None);
    let read = map.read_pages(pages, threads, &|page, bytes| {
        take(page, bytes).map_err(|error| {
            let text = error.to_string();
            *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            io::Error::other(text)
        })
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(read?),
    }
}
