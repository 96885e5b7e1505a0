//! Page tables: the content of each page of a RAM block.
//!
//! ```text
//! root blob      [ segment 0 | segment 1 | ... ]      each all-zero, or the id of a segment blob
//! segment blob   [ page 0 | page 1 | ... page 511 ]   each zero, or the id of a page blob
//! ```
//!
//! Both levels are blobs like any other, so a segment whose pages did not change is shared with
//! the checkpoint before, and so is a whole table. Equal memory gives equal roots.

use std::collections::BTreeMap;

use stillframe_page::hash::ContentId;

use crate::blobs::Blobs;
use crate::error::RepoError;
use crate::format::layout::{Cursor, FormatError};
use crate::format::manifest::PAGES_MAX;
use crate::writer::Writer;

/// Number of pages that a segment covers; the last one of a table covers the rest.
pub const SEGMENT_PAGES: u64 = 512;

/// Number of segments read or written per batch: bounds memory, and lets neighbours be read together.
pub(crate) const BATCH: usize = 256;

const ENTRY_ZERO: u8 = 0;
const ENTRY_STORED: u8 = 1;

pub(crate) const ROOT_MAGIC: &[u8; 4] = b"SFRT";
pub(crate) const SEGMENT_MAGIC: &[u8; 4] = b"SFSG";

/// The content of one page (or, in a root, of one segment).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageRef {
    /// All zero; nothing is stored.
    Zero,
    /// The blob of this id.
    Stored(ContentId),
}

/// Decodes a root blob: the segments of a table of `pages` pages.
pub fn decode_root(bytes: &[u8], pages: u64) -> Result<Vec<PageRef>, FormatError> {
    let mut cursor = Cursor::new(bytes);
    if cursor.array()? != *ROOT_MAGIC {
        return Err(FormatError::invalid(
            "the blob is not the root of a page table",
        ));
    }
    let found = cursor.u64()?;
    if found != pages {
        return Err(FormatError::invalid(format!(
            "the page table covers {found} pages instead of {pages}"
        )));
    }
    decode_entries(cursor, pages.div_ceil(SEGMENT_PAGES))
}

/// Decodes a root blob of a table of any size: the number of pages, and the segments.
pub(crate) fn decode_root_of_any_size(bytes: &[u8]) -> Result<(u64, Vec<PageRef>), FormatError> {
    let mut cursor = Cursor::new(bytes);
    cursor.take(ROOT_MAGIC.len())?;
    let pages = cursor.u64()?;
    Ok((pages, decode_root(bytes, pages)?))
}

/// Decodes a segment blob of any number of pages.
pub(crate) fn decode_segment_of_any_size(bytes: &[u8]) -> Result<Vec<PageRef>, FormatError> {
    // Only the last segment of a table is not full.
    decode_segment(bytes, SEGMENT_PAGES).or_else(|error| {
        (1..SEGMENT_PAGES)
            .find_map(|pages| decode_segment(bytes, pages).ok())
            .ok_or(error)
    })
}

/// Decodes a segment blob of `pages` pages.
pub fn decode_segment(bytes: &[u8], pages: u64) -> Result<Vec<PageRef>, FormatError> {
    let mut cursor = Cursor::new(bytes);
    if cursor.array()? != *SEGMENT_MAGIC {
        return Err(FormatError::invalid(
            "the blob is not a segment of a page table",
        ));
    }
    decode_entries(cursor, pages)
}

/// One byte for each entry, then the ids of those that are stored.
fn decode_entries(mut cursor: Cursor<'_>, count: u64) -> Result<Vec<PageRef>, FormatError> {
    let too_many = |_| FormatError::invalid("the page table is too large");
    let kinds = cursor.take(usize::try_from(count).map_err(too_many)?)?;
    let mut entries = Vec::with_capacity(kinds.len());
    for &kind in kinds {
        entries.push(match kind {
            ENTRY_ZERO => PageRef::Zero,
            ENTRY_STORED => PageRef::Stored(ContentId(cursor.array()?)),
            _ => {
                return Err(FormatError::invalid(format!(
                    "the page table has an entry of kind {kind}"
                )));
            }
        });
    }
    cursor.finish()?;
    Ok(entries)
}

fn encode_entries(out: &mut Vec<u8>, entries: &[PageRef]) {
    out.extend(entries.iter().map(|entry| match entry {
        PageRef::Zero => ENTRY_ZERO,
        PageRef::Stored(_) => ENTRY_STORED,
    }));
    for entry in entries {
        if let PageRef::Stored(id) = entry {
            out.extend_from_slice(&id.0);
        }
    }
}

pub(crate) fn encode_root(pages: u64, segments: &[PageRef]) -> Vec<u8> {
    let mut out = ROOT_MAGIC.to_vec();
    out.extend_from_slice(&pages.to_le_bytes());
    encode_entries(&mut out, segments);
    out
}

pub(crate) fn encode_segment(entries: &[PageRef]) -> Vec<u8> {
    let mut out = SEGMENT_MAGIC.to_vec();
    encode_entries(&mut out, entries);
    out
}

/// Number of pages that segment `number` of a table of `pages` pages covers.
pub(crate) fn segment_pages(pages: u64, number: u64) -> u64 {
    SEGMENT_PAGES.min(pages.saturating_sub(number * SEGMENT_PAGES))
}

/// Builds a page table, new or from an existing one. Keeps only the changed pages in memory, about 40 bytes for
/// each, until [`TableEditor::finish`] writes their segments.
pub(crate) struct TableEditor {
    pages: u64,
    segments: Vec<PageRef>,
    edits: BTreeMap<u32, Vec<(u16, PageRef)>>,
    outside: Option<u64>,
}

impl TableEditor {
    /// A table whose pages are all zero.
    pub(crate) fn new(pages: u64) -> TableEditor {
        let segments = pages.min(PAGES_MAX).div_ceil(SEGMENT_PAGES);
        TableEditor {
            pages,
            segments: vec![PageRef::Zero; segments as usize],
            edits: BTreeMap::new(),
            outside: (pages > PAGES_MAX).then_some(pages),
        }
    }

    /// The table with this root, which must cover `pages` pages.
    pub(crate) fn from_root<'a>(
        from: impl Into<Blobs<'a>>,
        root: ContentId,
        pages: u64,
    ) -> Result<TableEditor, RepoError> {
        Ok(TableEditor {
            pages,
            segments: read_root(from.into(), &root, pages)?,
            edits: BTreeMap::new(),
            outside: None,
        })
    }

    /// Sets the content of a page. A page outside the table makes `finish` fail.
    pub(crate) fn set(&mut self, page: u64, content: PageRef) {
        if page >= self.pages {
            self.outside = Some(page);
            return;
        }
        // Bounded by PAGES_MAX.
        let segment = (page / SEGMENT_PAGES) as u32;
        let edits = match self.edits.entry(segment) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => {
                let untouched = self.segments.get(segment as usize);
                if content == PageRef::Zero && untouched == Some(&PageRef::Zero) {
                    return;
                }
                entry.insert(Vec::new())
            }
        };
        edits.push(((page % SEGMENT_PAGES) as u16, content));
    }

    /// Writes the changed segments and returns the root.
    pub(crate) fn finish(mut self, writer: &mut Writer<'_>) -> Result<ContentId, RepoError> {
        if let Some(page) = self.outside {
            return Err(RepoError::Table {
                what: format!(
                    "page {page} is outside a table of {} pages",
                    self.pages.min(PAGES_MAX)
                ),
            });
        }
        let edits: Vec<_> = std::mem::take(&mut self.edits).into_iter().collect();
        for batch in edits.chunks(BATCH) {
            let olds = self.read_old(writer.blobs(), batch)?;
            for ((number, edits), mut entries) in batch.iter().zip(olds) {
                for &(slot, content) in edits {
                    if let Some(entry) = entries.get_mut(usize::from(slot)) {
                        *entry = content;
                    }
                }
                self.segments[*number as usize] = put_segment(writer, &entries)?;
            }
        }
        writer.put_unnamed(&encode_root(self.pages, &self.segments))
    }

    /// The segments of a batch before the changes.
    fn read_old(
        &self,
        blobs: Blobs<'_>,
        batch: &[(u32, Vec<(u16, PageRef)>)],
    ) -> Result<Vec<Vec<PageRef>>, RepoError> {
        let numbers: Vec<u64> = batch.iter().map(|&(number, _)| number.into()).collect();
        read_segments(blobs, self.pages, &self.segments, &numbers)
    }
}

fn put_segment(writer: &mut Writer<'_>, entries: &[PageRef]) -> Result<PageRef, RepoError> {
    // "All zero" has one encoding, so that equal memory has equal roots.
    if entries.iter().all(|entry| *entry == PageRef::Zero) {
        return Ok(PageRef::Zero);
    }
    writer
        .put_unnamed(&encode_segment(entries))
        .map(PageRef::Stored)
}

pub(crate) fn read_root(
    blobs: Blobs<'_>,
    root: &ContentId,
    pages: u64,
) -> Result<Vec<PageRef>, RepoError> {
    decode_root(&blobs.read(root)?, pages).map_err(|error| bad_blob(root, &error))
}

/// Reads the segments of these numbers, all-zero ones too.
pub(crate) fn read_segments(
    blobs: Blobs<'_>,
    pages: u64,
    segments: &[PageRef],
    numbers: &[u64],
) -> Result<Vec<Vec<PageRef>>, RepoError> {
    let ids: Vec<ContentId> = numbers
        .iter()
        .filter_map(|&number| match segments.get(number as usize) {
            Some(PageRef::Stored(id)) => Some(*id),
            _ => None,
        })
        .collect();
    let mut read = blobs.read_many(&ids)?.into_iter().zip(&ids);
    numbers
        .iter()
        .map(|&number| {
            let count = segment_pages(pages, number);
            match segments.get(number as usize) {
                Some(PageRef::Stored(_)) => match read.next() {
                    Some((bytes, id)) => {
                        decode_segment(&bytes, count).map_err(|error| bad_blob(id, &error))
                    }
                    None => Ok(Vec::new()),
                },
                _ => Ok(vec![PageRef::Zero; count as usize]),
            }
        })
        .collect()
}

pub(crate) fn bad_blob(id: &ContentId, error: &FormatError) -> RepoError {
    RepoError::Damaged {
        file: format!("blob {id}"),
        what: error.to_string(),
    }
}
