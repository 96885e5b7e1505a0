//! Whether pages have kept their write protection.

use std::ops::Range;

use stillframe_sys::pagemap::{Pagemap, PagemapError};

use super::error::TrackerError;
use crate::memory::block::Block;

/// Whether pages that were protected in the pause, and read since, still had their content of the pause. Two things
/// take protection away without a fault: KSM, which replaces a page by a shared one (`replace_page` in the
/// kernel's mm/ksm.c), and a discard (balloon, free page reporting).
pub(super) fn still_protected(
    pagemap: &Pagemap,
    block: &Block,
    pages: &[Range<u64>],
) -> Result<bool, TrackerError> {
    let mut written = Vec::new();
    for range in pages {
        let scanned = pagemap.written(block.addresses(range), &mut written);
        scanned.map_err(|source| scan_error(block, source))?;
    }
    Ok(written.is_empty() && block.has_data(pages)?)
}

pub(super) fn scan_error(block: &Block, source: PagemapError) -> TrackerError {
    TrackerError::Scan {
        block: block.name().to_owned(),
        source,
    }
}
