//! Layers: the changes of a RAM block from one checkpoint to the next, stored beside its page table.
//!
//! A table costs 17 KB for each 2 MiB of memory with a changed page; a layer costs only the changes. It lists
//! pages whose whole content is new, and *parts*: deltas of several pages against their versions below
//! (`stillframe_page::delta`). A page may be in both; its delta then applies to the new content.
//!
//! ```text
//! layer   | "SFLY" | pages of the block 8 | zero pages: runs | stored pages: runs, then their ids 32 each |
//!         | varint parts | for each: id 32, runs |
//! runs    | varint runs | for each: varint pages skipped, varint pages |
//! ```

use std::ops::Range;

use stillframe_page::delta;
use stillframe_page::hash::ContentId;
use stillframe_page::varint;

use crate::error::RepoError;
use crate::format::layout::{Cursor, FormatError};
use crate::format::manifest::PAGES_MAX;
use crate::page_table::table::PageRef;
use crate::writer::Writer;

pub(crate) const LAYER_MAGIC: &[u8; 4] = b"SFLY";

/// The changes of a RAM block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layer {
    /// Pages with new whole content, ascending.
    pub whole: Vec<(u32, PageRef)>,
    /// Deltas. The pages of each come before those of the next.
    pub parts: Vec<Part>,
}

/// A blob that holds the deltas of some pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The blob.
    pub id: ContentId,
    /// The pages, ascending.
    pub pages: Vec<u32>,
}

impl Layer {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.parts.is_empty()
    }

    /// The pages that it lists, ascending.
    pub(crate) fn pages(&self) -> Vec<u32> {
        let whole = self.whole.iter().map(|&(page, _)| page);
        let changed = self
            .parts
            .iter()
            .flat_map(|part| part.pages.iter().copied());
        let mut pages: Vec<u32> = whole.chain(changed).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    }

    /// Encodes the layer of a block of `pages` pages.
    pub fn encode(&self, pages: u64) -> Vec<u8> {
        let mut out = LAYER_MAGIC.to_vec();
        out.extend_from_slice(&pages.to_le_bytes());
        let zero = self.whole.iter().filter(|(_, is)| *is == PageRef::Zero);
        put_runs(&mut out, zero.map(|&(page, _)| page));
        let stored = self.whole.iter().filter_map(|&(page, is)| match is {
            PageRef::Zero => None,
            PageRef::Stored(id) => Some((page, id)),
        });
        put_runs(&mut out, stored.clone().map(|(page, _)| page));
        for (_, id) in stored {
            out.extend_from_slice(&id.0);
        }
        // Each part has at least one page of its own, and pages fit 32 bits.
        varint::put(&mut out, self.parts.len() as u32);
        for part in &self.parts {
            out.extend_from_slice(&part.id.0);
            put_runs(&mut out, part.pages.iter().copied());
        }
        out
    }

    /// Decodes the layer of a block of `pages` pages.
    pub fn decode(bytes: &[u8], pages: u64) -> Result<Layer, FormatError> {
        let mut cursor = Cursor::new(bytes);
        let found = decode_start(&mut cursor)?;
        if found != pages || pages > PAGES_MAX {
            return Err(FormatError::invalid(format!(
                "the layer belongs to a block of {found} pages instead of {pages}"
            )));
        }
        let zero = take_runs(&mut cursor, pages, u64::MAX)?;
        let left = cursor.left() as u64;
        let stored = take_runs(&mut cursor, pages, left / 32)?;
        let mut whole: Vec<(u32, PageRef)> = Vec::new();
        for page in stored.into_iter().flatten() {
            whole.push((page, PageRef::Stored(ContentId(cursor.array()?))));
        }
        let parts = take_parts(&mut cursor, pages)?;
        cursor.finish()?;
        // Last, because only here a few bytes expand to many pages.
        whole.extend(zero.into_iter().flatten().map(|page| (page, PageRef::Zero)));
        whole.sort_unstable_by_key(|&(page, _)| page);
        if whole.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            return Err(FormatError::invalid(
                "a page of the layer is zero and stored",
            ));
        }
        Ok(Layer { whole, parts })
    }

    /// Decodes a layer of a block of any size. Returns the number of pages of the block, and the layer.
    pub(crate) fn decode_of_any_size(bytes: &[u8]) -> Result<(u64, Layer), FormatError> {
        let pages = decode_start(&mut Cursor::new(bytes))?;
        Ok((pages, Layer::decode(bytes, pages)?))
    }

    /// Stores the layer. Returns its id.
    pub(crate) fn put(&self, writer: &mut Writer<'_>, pages: u64) -> Result<ContentId, RepoError> {
        writer.put_unnamed(&self.encode(pages))
    }
}

fn decode_start(cursor: &mut Cursor<'_>) -> Result<u64, FormatError> {
    match cursor.array()? == *LAYER_MAGIC {
        true => cursor.u64(),
        false => Err(FormatError::invalid("the blob is not a layer")),
    }
}

fn take_parts(cursor: &mut Cursor<'_>, pages: u64) -> Result<Vec<Part>, FormatError> {
    let mut parts: Vec<Part> = Vec::new();
    for _ in 0..cursor.varint()? {
        let id = ContentId(cursor.array()?);
        let runs = take_runs(cursor, pages, delta::PAGES_MAX as u64)?;
        let part = Part {
            id,
            pages: runs.into_iter().flatten().collect(),
        };
        let last = parts.last().and_then(|part| part.pages.last());
        match part.pages.first() {
            None => return Err(FormatError::invalid("a part of the layer has no pages")),
            first if first <= last => {
                return Err(FormatError::invalid("the parts of the layer overlap"));
            }
            Some(_) => parts.push(part),
        }
    }
    Ok(parts)
}

/// Encodes ascending page numbers as runs.
fn put_runs(out: &mut Vec<u8>, pages: impl Iterator<Item = u32>) {
    let mut runs: Vec<Range<u32>> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => runs.push(page..page + 1),
        }
    }
    varint::put(out, runs.len() as u32);
    let mut next = 0;
    for run in runs {
        varint::put(out, run.start - next);
        varint::put(out, run.end - run.start);
        next = run.end;
    }
}

/// Decodes runs that together have at most `count_max` pages of a block of `pages`.
fn take_runs(
    cursor: &mut Cursor<'_>,
    pages: u64,
    count_max: u64,
) -> Result<Vec<Range<u32>>, FormatError> {
    let mut runs: Vec<Range<u32>> = Vec::new();
    let (mut next, mut count) = (0u64, 0);
    for number in 0..cursor.varint()? {
        let (skipped, length) = (cursor.varint()?, cursor.varint()?);
        let start = next + u64::from(skipped);
        next = start + u64::from(length);
        count += u64::from(length);
        if length == 0 || (skipped == 0 && number > 0) {
            return Err(FormatError::invalid("a run of the layer's pages is empty"));
        }
        if next > pages || count > count_max {
            return Err(FormatError::invalid(
                "the layer has pages outside its block, or too many",
            ));
        }
        // Below PAGES_MAX.
        runs.push(start as u32..next as u32);
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 3000;

    fn layer() -> impl Strategy<Value = Layer> {
        let entry = prop_oneof![
            Just(PageRef::Zero),
            any::<[u8; 32]>().prop_map(|id| PageRef::Stored(ContentId(id)))
        ];
        let whole = prop::collection::btree_map(0..PAGES as u32, entry, 0..60);
        let deltas = prop::collection::btree_set(0..PAGES as u32, 0..60);
        (whole, deltas, 1..20usize).prop_map(
            |(whole, deltas, together): (BTreeMap<_, _>, BTreeSet<_>, _)| {
                let deltas: Vec<u32> = deltas.into_iter().collect();
                let parts = deltas.chunks(together).map(|pages| Part {
                    id: ContentId([pages.len() as u8; 32]),
                    pages: pages.to_vec(),
                });
                Layer {
                    whole: whole.into_iter().collect(),
                    parts: parts.collect(),
                }
            },
        )
    }

    proptest! {
        #[test]
        fn a_layer_is_decoded_as_it_was_encoded(layer in layer()) {
            let bytes = layer.encode(PAGES);
            prop_assert_eq!(&Layer::decode(&bytes, PAGES).unwrap(), &layer);
            prop_assert_eq!(Layer::decode_of_any_size(&bytes).unwrap(), (PAGES, layer));
            prop_assert!(Layer::decode(&bytes, PAGES + 1).is_err());
            prop_assert!(Layer::decode(&bytes[..bytes.len() - 1], PAGES).is_err());
        }

        #[test]
        fn damage_is_refused_or_decodes_consistently(layer in layer(), at: prop::sample::Index, bit in 0..8u32) {
            let mut bytes = layer.encode(PAGES);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            if let Ok(read) = Layer::decode(&bytes, PAGES) {
                prop_assert!(read.whole.iter().all(|&(page, _)| u64::from(page) < PAGES));
                prop_assert!(read.parts.iter().flat_map(|part| &part.pages).is_sorted());
            }
        }
    }

    #[test]
    fn an_inconsistent_layer_is_refused() {
        let start = [&LAYER_MAGIC[..], &10u64.to_le_bytes()].concat();
        let id = [7; 32];
        let bad: [(&str, &[&[u8]]); 7] = [
            ("an empty run", &[&[1, 3, 0], &[0], &[0]]),
            ("runs that touch", &[&[2, 3, 1, 0, 1], &[0], &[0]]),
            ("a page beyond the block", &[&[1, 9, 2], &[0], &[0]]),
            ("stored pages without ids", &[&[0], &[1, 0, 9], &[0]]),
            (
                "a page zero and stored",
                &[&[1, 3, 1], &[1, 3, 1], &id, &[0]],
            ),
            ("a part without pages", &[&[0], &[0], &[1], &id, &[0]]),
            (
                "parts that overlap",
                &[&[0], &[0], &[2], &id, &[1, 3, 2], &id, &[1, 4, 1]],
            ),
        ];
        for (what, bytes) in bad {
            let bytes = [start.clone(), bytes.concat()].concat();
            assert!(Layer::decode(&bytes, 10).is_err(), "{what}");
        }
    }
}
