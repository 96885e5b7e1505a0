//! The repository as a sink: contents become blobs, and each block a page table or a layer over one.
//!
//! The repository compresses and encrypts in threads of its own, which make this one wait when they cannot
//! follow: memory stays bounded.

use stillframe_page::PAGE_BYTES;
use stillframe_page::hash::ContentHasher;
use stillframe_repo::page_table::table::PageRef;
use stillframe_repo::{BlockTable, PageCounts, PageTableBuilder, Put, RepoError, Writer};

use super::{EncodedBatch, PageSink};
use crate::encoding::page_encoder::PageEncoding;
use crate::memory::BlockShape;
use crate::memory::Page;
use crate::memory::outcome::Content;
use crate::sink::page_stream::StreamCounts;

/// The pages of one checkpoint on their way into a repository.
pub struct RepositoryPages<'r> {
    /// Writes the checkpoint.
    pub writer: Writer<'r>,
    tables: Vec<PageTableBuilder>,
    /// Do not store pages that the repository has.
    dedup: bool,
}

impl<'r> RepositoryPages<'r> {
    /// A sink for memory that follows no checkpoint.
    pub fn first(writer: Writer<'r>, blocks: &[BlockShape], dedup: bool) -> RepositoryPages<'r> {
        let mut pages = RepositoryPages {
            writer,
            tables: Vec::new(),
            dedup,
        };
        pages.begin(blocks);
        pages
    }

    /// A sink for memory that was as in these tables.
    pub fn after(writer: Writer<'r>, tables: &[BlockTable], dedup: bool) -> RepositoryPages<'r> {
        let mut pages = RepositoryPages {
            writer,
            tables: Vec::new(),
            dedup,
        };
        pages.follow(tables);
        pages
    }

    /// Begins blocks that were as in these tables: those before are finished.
    pub fn follow(&mut self, tables: &[BlockTable]) {
        self.tables = tables.iter().map(PageTableBuilder::after).collect();
    }

    /// Begins blocks that follow no checkpoint: those before are finished.
    pub fn begin(&mut self, blocks: &[BlockShape]) {
        let tables = blocks.iter();
        self.tables = tables
            .map(|block| PageTableBuilder::new(block.pages))
            .collect();
    }

    /// Writes the tables of all blocks.
    ///
    /// # Errors
    /// That of the repository.
    pub fn finish(&mut self, blocks: &[BlockShape]) -> Result<Vec<BlockTable>, RepoError> {
        let tables = std::mem::take(&mut self.tables).into_iter();
        let finished = blocks.iter().zip(tables).map(|(block, table)| {
            let written = table.finish(&mut self.writer)?;
            Ok(BlockTable {
                name: block.name.clone(),
                page_bytes: PAGE_BYTES as u32,
                pages: block.pages,
                root: written.root,
                layers: written.layers,
            })
        });
        finished.collect()
    }
}

impl PageSink for RepositoryPages<'_> {
    type Error = RepoError;

    fn hasher(&self) -> Option<&ContentHasher> {
        Some(self.writer.hasher())
    }

    fn put(&mut self, batch: EncodedBatch<'_>) -> Result<Vec<Content>, RepoError> {
        let table = &mut self.tables[batch.block];
        let mut contents = Vec::with_capacity(batch.pages.len());
        let mut ids = batch.ids.iter().copied();
        for (&Page { number, bytes }, &encoding) in batch.pages.iter().zip(batch.encodings) {
            contents.push(match encoding {
                PageEncoding::Zero => {
                    table.set(number, PageRef::Zero);
                    Content::Zero
                }
                PageEncoding::Same => Content::Known,
                PageEncoding::Delta => Content::New,
                PageEncoding::Unknown | PageEncoding::TooMuch => {
                    let id = ids.next();
                    let id = id.unwrap_or_else(|| self.writer.hasher().id(bytes));
                    let put = match self.dedup {
                        true => self.writer.put(id, bytes)?,
                        false => self.writer.put_again(id, bytes)?,
                    };
                    table.set(number, PageRef::Stored(id));
                    match put {
                        Put::New => Content::New,
                        Put::Duplicate => Content::Known,
                    }
                }
            });
        }
        for delta in batch.deltas {
            table.add_delta(&mut self.writer, delta)?;
        }
        Ok(contents)
    }
}

impl From<StreamCounts> for PageCounts {
    fn from(counts: StreamCounts) -> PageCounts {
        PageCounts {
            total: counts.total,
            captured: counts.captured,
            new: counts.new,
            duplicate: counts.duplicate,
            zero: counts.zero,
            delta: counts.delta,
            unchanged: counts.unchanged,
            free: 0,
        }
    }
}
