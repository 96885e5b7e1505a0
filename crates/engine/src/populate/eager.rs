//! Eager restore: every page is populated before the guest's first instruction.
//!
//! A fresh QEMU's memory is zero, except for the data that QEMU itself put there (firmware, tables) and the old
//! content of a RAM file. So zero pages are written only where memory is not zero.

use std::io;
use std::ops::Range;
use std::thread;

use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_qemu::monitor::RamBlock;
use stillframe_sys::pagemap::{Pagemap, PagemapError};
use stillframe_sys::process::{Process, ProcessError};
use stillframe_sys::uffd::UffdError;
use thiserror::Error;

use super::lazy::FillError;
use crate::memory::BlockShape;
use crate::memory::block::{Block, BlockError};
use crate::source::{PageSource, SourceError};
use crate::{Progress, ProgressSink};

/// Pages gathered before they are read, in their order in the repository. This bounds memory at about 70 MiB,
/// whatever the guest's size.
const WINDOW_PAGES: u64 = 1 << 19;

/// Why memory could not be populated. The VM has not run.
#[derive(Debug, Error)]
pub enum PopulateError {
    /// The new VM has other RAM blocks than the checkpoint.
    #[error(
        "the new VM's RAM blocks differ from the checkpoint's: {difference}. It must be started by the same QEMU with the same machine, devices and firmware"
    )]
    Blocks {
        /// The difference.
        difference: String,
    },
    /// The pages cannot be had.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// Its memory cannot be written.
    #[error("cannot write the new VM's memory")]
    Block(#[from] BlockError),
    /// Its memory cannot be inspected.
    #[error("cannot see the new VM's memory")]
    Process(#[from] ProcessError),
    /// Missing pages cannot be handled.
    #[error("cannot serve the missing pages of the new VM")]
    Uffd(#[from] UffdError),
    /// A page could not be populated.
    #[error("cannot fill the VM's memory")]
    Fill(#[from] FillError),
    /// The threads that populate memory could not be started.
    #[error("cannot start the threads that fill the VM's memory")]
    Threads(#[source] io::Error),
    /// Its page map cannot be read.
    #[error("cannot see which pages of the new VM are in use")]
    Pagemap(#[from] PagemapError),
}

/// Opens the RAM blocks of a fresh QEMU that are to become these, in their order.
pub fn open_blocks(
    process: &Process,
    ram: &[RamBlock],
    shapes: &[BlockShape],
) -> Result<Vec<Block>, PopulateError> {
    if let Some(extra) = ram
        .iter()
        .find(|block| !shapes.iter().any(|shape| shape.name == block.name))
    {
        let difference = format!("{} is not in the checkpoint", extra.name);
        return Err(PopulateError::Blocks { difference });
    }
    let mappings = process.mappings()?;
    shapes
        .iter()
        .map(|shape| {
            let recorded_bytes = shape.pages * PAGE_BYTES;
            let difference = match ram.iter().find(|block| block.name == shape.name) {
                Some(found) if found.used_bytes == recorded_bytes => {
                    return Ok(Block::open(process, &mappings, found, true)?);
                }
                Some(found) => format!(
                    "{} has {} bytes, the checkpoint {recorded_bytes}",
                    shape.name, found.used_bytes
                ),
                None => format!("{} is missing", shape.name),
            };
            Err(PopulateError::Blocks { difference })
        })
        .collect()
}

/// Writes all pages of the checkpoint. Returns how many had content.
pub fn populate<S: PageSource>(
    process: &Process,
    blocks: &[&Block],
    sources: Vec<S>,
    progress: ProgressSink<'_>,
) -> Result<u64, PopulateError> {
    let pagemap = Pagemap::open(process)?;
    let total = sources.iter().map(PageSource::pages).sum();
    let mut done = 0;
    let mut written = 0;
    // One after the other, because a table that was read takes 33 bytes a page.
    for (block, source) in blocks.iter().zip(sources) {
        let in_use = in_use(&pagemap, block)?;
        source.prepare()?;
        let mut used = in_use.into_iter().flatten().peekable();
        for start in (0..source.pages()).step_by(WINDOW_PAGES as usize) {
            let end = source.pages().min(start + WINDOW_PAGES);
            // Zeros where something is, content everywhere.
            let is_used = |page: u64| {
                while used.next_if(|&used| used < page).is_some() {}
                used.peek() == Some(&page)
            };
            written += write_pages(block, &source, start..end, is_used)?;
            progress(Progress::Populating {
                done: done + end,
                total,
            });
        }
        done += source.pages();
    }
    Ok(written)
}

/// Pages of a fresh QEMU that may be other than zero.
pub(crate) fn in_use(pagemap: &Pagemap, block: &Block) -> Result<Vec<Range<u64>>, PopulateError> {
    if let Some(data) = block.data_pages()? {
        return Ok(data);
    }
    if !block.absent_is_zero() {
        return Ok(block.whole());
    }
    let mut found = Vec::new();
    pagemap.populated(block.range(), &mut found)?;
    let base = block.range().start;
    Ok(found
        .iter()
        .map(|range| (range.start - base) / PAGE_BYTES..(range.end - base) / PAGE_BYTES)
        .collect())
}

/// Writes the pages that have content, and zeros where `is_used` reports old content.
/// Returns how many had content. Only memory is touched that `is_used`, or that gets content.
pub(super) fn write_pages<S: PageSource>(
    block: &Block,
    source: &S,
    pages: impl IntoIterator<Item = u64>,
    mut is_used: impl FnMut(u64) -> bool,
) -> Result<u64, PopulateError> {
    let mut with_content = Vec::new();
    for page in pages.into_iter().filter(|&page| page < source.pages()) {
        match source.is_zero(page)? {
            false => with_content.push(page),
            true if is_used(page) => block.write(page, &[0; PAGE])?,
            true => {}
        }
    }
    let written = with_content.len() as u64;
    let threads = thread::available_parallelism()
        .map_or(1, std::num::NonZero::get)
        .min(8);
    source.fetch_many(with_content, threads, &|_| true, &|page, bytes| {
        block.write(page, bytes).map_err(PopulateError::from)
    })?;
    Ok(written)
}
