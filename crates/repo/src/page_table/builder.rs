//! The page-table builder: it stores the content of a RAM block, all of it or the changes since another
//! checkpoint.
//!
//! A first checkpoint makes a page table. Each that follows adds a layer, and layers are merged as
//! they become many, so that a checkpoint has few of them however long a watch runs:
//!
//! ```text
//! table   level 2   level 1 ... (up to 15)   level 0 ... (up to 16)
//!   ^        ^         |    ^                   |
//!   |        +---------+    +-------------------+    16 of a level make one of the next
//!   +--------+ whole pages go into the table, deltas stay (they need no page read)
//! ```
//!
//! Deltas of one page become one delta against the same base, so a page's chain is no longer than
//! there are layers, and what is merged is never larger than the pages themselves.

use stillframe_page::PAGE;
use stillframe_page::delta::{DeltaEncoder, EncodedDelta};
use stillframe_page::hash::ContentId;

use crate::error::RepoError;
use crate::format::manifest::{BlockTable, LayerRef};
use crate::page_table::layer::{Layer, Part};
use crate::page_table::overlay::{Deltas, GROUP_PAGES, Overlay};
use crate::page_table::table::{PageRef, TableEditor};
use crate::writer::Writer;

/// Number of layers of a level that are merged into one of the next.
const FAN: usize = 16;

/// The level of the layer that remains when all were merged.
const LEVEL_TOP: u8 = 2;

/// Zstandard level of merged deltas, the same as for other data.
const COMPRESSION: i32 = 1;

/// The stored content of a RAM block, as [`PageTableBuilder::finish`] returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The root of the page table.
    pub root: ContentId,
    /// The layers over it, oldest first.
    pub layers: Vec<LayerRef>,
}

/// Stores the content of one RAM block. Keeps the changed pages in memory, about 40 bytes for each.
pub struct PageTableBuilder {
    pages: u64,
    below: Below,
    parts: Vec<Part>,
}

enum Below {
    /// Nothing: all pages are zero.
    Nothing(TableEditor),
    /// Another checkpoint.
    Checkpoint {
        written: Written,
        whole: Vec<(u32, PageRef)>,
    },
}

impl PageTableBuilder {
    /// A block whose pages are all zero.
    pub fn new(pages: u64) -> PageTableBuilder {
        PageTableBuilder {
            pages,
            below: Below::Nothing(TableEditor::new(pages)),
            parts: Vec::new(),
        }
    }

    /// A block as it was at another checkpoint.
    pub fn after(table: &BlockTable) -> PageTableBuilder {
        PageTableBuilder {
            pages: table.pages,
            below: Below::Checkpoint {
                written: Written {
                    root: table.root,
                    layers: table.layers.clone(),
                },
                whole: Vec::new(),
            },
            parts: Vec::new(),
        }
    }

    /// Sets the content of a page. The last call counts; a page outside the block makes `finish` fail.
    pub fn set(&mut self, page: u64, content: PageRef) {
        match &mut self.below {
            Below::Nothing(table) => table.set(page, content),
            // A number beyond 32 bits stays outside every block.
            Below::Checkpoint { whole, .. } => {
                whole.push((u32::try_from(page).unwrap_or(u32::MAX), content));
            }
        }
    }

    /// Adds the changes of some pages since the checkpoint before. A page may be in one delta only, and must not
    /// be [`PageTableBuilder::set`] as well.
    pub fn add_delta(
        &mut self,
        writer: &mut Writer<'_>,
        delta: EncodedDelta,
    ) -> Result<(), RepoError> {
        if !delta.pages.is_empty() {
            self.parts.push(put_part(writer, delta)?);
        }
        Ok(())
    }

    /// Stores the changes.
    pub fn finish(self, writer: &mut Writer<'_>) -> Result<Written, RepoError> {
        match self.below {
            Below::Nothing(table) if self.parts.is_empty() => Ok(Written {
                root: table.finish(writer)?,
                layers: Vec::new(),
            }),
            Below::Nothing(_) => Err(RepoError::Table {
                what: "a delta needs a checkpoint to follow".into(),
            }),
            Below::Checkpoint { written, whole } => {
                let layer = new_layer(whole, self.parts, self.pages)?;
                let mut written = merge_layers(writer, self.pages, written)?;
                if !layer.is_empty() {
                    written.layers.push(LayerRef {
                        id: layer.put(writer, self.pages)?,
                        level: 0,
                    });
                }
                Ok(written)
            }
        }
    }
}

/// The layer of the pages that were added, in any order.
fn new_layer(
    mut whole: Vec<(u32, PageRef)>,
    mut parts: Vec<Part>,
    pages: u64,
) -> Result<Layer, RepoError> {
    // A stable sort, so that the last content of a page comes last.
    whole.sort_by_key(|&(page, _)| page);
    whole.dedup_by(|later, kept| {
        let same = later.0 == kept.0;
        if same {
            kept.1 = later.1;
        }
        same
    });
    parts.sort_by(|a, b| a.pages.cmp(&b.pages));
    let layer = Layer { whole, parts };
    let changed = layer.parts.iter().flat_map(|part| &part.pages);
    let problem = if !changed.clone().is_sorted_by(|a, b| a < b) {
        Some("two deltas change the same page".to_owned())
    } else {
        let last = layer.whole.last().map(|&(page, _)| page);
        let last = last.max(changed.last().copied());
        last.filter(|&page| u64::from(page) >= pages)
            .map(|page| format!("page {page} is outside a block of {pages} pages"))
    };
    match problem {
        Some(what) => Err(RepoError::Table { what }),
        None => Ok(layer),
    }
}

/// Merges layers if there are too many of a level.
fn merge_layers(
    writer: &mut Writer<'_>,
    pages: u64,
    mut written: Written,
) -> Result<Written, RepoError> {
    let layers = &mut written.layers;
    let of_level =
        |layers: &[LayerRef], level| layers.iter().filter(|at| at.level == level).count();
    if of_level(layers, 0) < FAN {
        return Ok(written);
    }
    if of_level(layers, 1) + 1 >= FAN {
        return merge_all(writer, pages, &written);
    }
    let first = layers.partition_point(|layer| layer.level > 0);
    let merged = Overlay::read(writer.blobs(), &layers[first..], pages)?;
    layers.truncate(first);
    let layer = Layer {
        whole: merged.whole,
        parts: compose(writer, &merged.deltas)?,
    };
    layers.push(LayerRef {
        id: layer.put(writer, pages)?,
        level: 1,
    });
    Ok(written)
}

/// Merges all layers: whole pages go into the table, deltas into one layer.
fn merge_all(writer: &mut Writer<'_>, pages: u64, written: &Written) -> Result<Written, RepoError> {
    let merged = Overlay::read(writer.blobs(), &written.layers, pages)?;
    let mut table = TableEditor::from_root(&*writer, written.root, pages)?;
    for (page, content) in merged.whole {
        table.set(page.into(), content);
    }
    let root = table.finish(writer)?;
    let layer = Layer {
        whole: Vec::new(),
        parts: compose(writer, &merged.deltas)?,
    };
    let layers = match layer.is_empty() {
        true => Vec::new(),
        false => vec![LayerRef {
            id: layer.put(writer, pages)?,
            level: LEVEL_TOP,
        }],
    };
    Ok(Written { root, layers })
}

/// Merges the deltas of each page into one. A delta is old XOR new: applied to zeros, several yield the delta
/// between the oldest version and the newest.
fn compose(writer: &mut Writer<'_>, deltas: &Deltas) -> Result<Vec<Part>, RepoError> {
    let mut encoder = DeltaEncoder::new(COMPRESSION)?;
    let mut parts = Vec::new();
    let mut memory = Vec::new();
    for group in deltas.pages().chunks(GROUP_PAGES) {
        memory.clear();
        memory.resize(group.len() * PAGE, 0);
        deltas.apply(writer.blobs(), group, &mut memory)?;
        for (&page, change) in group.iter().zip(memory.as_chunks().0) {
            encoder.add(page, [&[0; PAGE], change], PAGE);
            if encoder.is_full() {
                parts.push(put_part(writer, encoder.finish()?)?);
            }
        }
    }
    if !encoder.is_empty() {
        parts.push(put_part(writer, encoder.finish()?)?);
    }
    Ok(parts)
}

fn put_part(writer: &mut Writer<'_>, delta: EncodedDelta) -> Result<Part, RepoError> {
    Ok(Part {
        id: writer.put_unnamed(&delta.bytes)?,
        pages: delta.pages,
    })
}
