//! Prefetch: pages are read while QEMU starts, before there is memory to put them into.
//!
//! Pages that are likely to be accessed first are read into preload buffers, and put into the VM's memory as soon
//! as that is there. They are the beginning of the working set, or, where none was recorded, the pages written last
//! before the checkpoint.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::populate::lazy::fault_around::pages_around;
use crate::source::{PageFetcher as _, PageSource, SourceError};
use stillframe_page::{GuestPage, PAGE_BYTES, PageRequest, ReadOrder};

/// Upper bound on the bytes of preload buffers.
const BYTES_MAX: u64 = 64 << 20;

/// Preload buffers: pages that were read, and are in no guest memory yet.
#[derive(Debug, Default)]
pub struct Prefetched {
    pub(super) buffers: Vec<PreloadBuffer>,
    /// How many pages of the working set, from its beginning, are among them.
    pub(super) of_working_set: usize,
    pages: u64,
}

/// Pages that lie one behind the other.
#[derive(Debug)]
pub(super) struct PreloadBuffer {
    /// The number of the block in the manifest.
    pub(super) block: usize,
    pub(super) pages: Range<u64>,
    /// Their contents; none where all are zero.
    pub(super) bytes: Vec<u8>,
}

impl Prefetched {
    /// How many pages that are.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    fn add(&mut self, block: usize, pages: Range<u64>, bytes: &[u8]) {
        self.pages += pages.end - pages.start;
        self.buffers.push(PreloadBuffer {
            block,
            pages,
            bytes: bytes.to_vec(),
        });
    }
}

/// Reads for as long as `wait` takes. Blocks are numbered as in the manifest.
pub fn while_waiting<T, S: PageSource>(
    wait: impl FnOnce() -> T,
    sources: &[S],
    working_set: &[GuestPage],
) -> (T, Prefetched) {
    let enough = AtomicBool::new(false);
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("prefetch".into());
        let read = || read(sources, working_set, &enough);
        // Without it nothing is missing but time.
        let reading = builder.spawn_scoped(scope, read).ok();
        let waited = wait();
        enough.store(true, Ordering::Relaxed);
        let read = reading.map(|reading| reading.join());
        let prefetched = match read {
            Some(Ok(prefetched)) => prefetched,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Prefetched::default(),
        };
        (waited, prefetched)
    })
}

/// Prefetches until `enough` is set, or nothing is left to prefetch, or a page cannot be read. In the last case the
/// fill tries that page again, and reports the error.
fn read<S: PageSource>(
    sources: &[S],
    working_set: &[GuestPage],
    enough: &AtomicBool,
) -> Prefetched {
    let mut prefetched = Prefetched::default();
    let Some(Ok(mut fetcher)) = sources.first().map(PageSource::fetcher) else {
        return prefetched;
    };
    let mut seen = HashSet::new();
    let mut fetch_more = |page: GuestPage, prefetched: &mut Prefetched| {
        !enough.load(Ordering::Relaxed)
            && prefetched.pages * PAGE_BYTES < BYTES_MAX
            && fetch(&mut fetcher, sources, page, &mut seen, prefetched).is_ok()
    };
    if working_set.is_empty() {
        let newest = (0..).zip(sources).flat_map(|(block, source)| {
            let changes = source.likely_first().iter();
            changes.map(move |&page| GuestPage::new(block, page.into()))
        });
        for page in newest {
            if !fetch_more(page, &mut prefetched) {
                break;
            }
        }
    }
    for &page in working_set {
        if !fetch_more(page, &mut prefetched) {
            break;
        }
        prefetched.of_working_set += 1;
    }
    prefetched
}

/// Reads a page and what comes along with it, unless it was read before.
fn fetch<S: PageSource>(
    fetcher: &mut S::Fetcher,
    sources: &[S],
    wanted: GuestPage,
    seen: &mut HashSet<GuestPage>,
    prefetched: &mut Prefetched,
) -> Result<(), SourceError> {
    let GuestPage { block, page } = wanted;
    // A working set of a form that this checkpoint cannot have is of no use, and does no harm.
    let Some(source) = sources.get(block).filter(|source| page < source.pages()) else {
        return Ok(());
    };
    if seen.contains(&wanted) {
        return Ok(());
    }
    if source.is_zero(page)? {
        seen.insert(wanted);
        prefetched.add(block, page..page + 1, &[]);
        return Ok(());
    }
    let mut around = pages_around(page, source.pages());
    around.retain(|&other| !seen.contains(&GuestPage::new(block, other)));
    let request = PageRequest {
        page,
        neighbours: &around,
        order: ReadOrder::Ascending,
    };
    fetcher.fetch(source, request, &mut |first, bytes| {
        let pages = first..first + bytes.len() as u64 / PAGE_BYTES;
        seen.extend(pages.clone().map(|page| GuestPage::new(block, page)));
        prefetched.add(block, pages, bytes);
        Ok::<(), SourceError>(())
    })
}
