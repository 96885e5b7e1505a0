//! What the destination has of a VM before it comes: a checkpoint in a repository that it can read.
//!
//! ```text
//!   destination: checkpoint ──> memory of the new QEMU ──> ids of its pages ──> source: sends what has another id
//! ```
//!
//! The idea is VeCycle's (Knauth and Fetzer, Middleware 2015). The ids are those of `verify`: 256 bits of BLAKE3, so that a
//! page that is taken for known is known. A page that is zero at the source, and not in the checkpoint, is sent as such.
//!
//! A source that has tracked all writes since a checkpoint, and names it (its base), needs no ids: it sends what was
//! written. Then no page of the checkpoint is read before the VM runs or the new QEMU needs it.

use std::ops::Range;
use std::time::{Duration, Instant};

use stillframe_page::GuestPage;
use stillframe_page::PAGE;
use stillframe_page::hash::{ContentHasher, ContentId};
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{Manifest, PageMap, Reader, RepoError, Repository};
use stillframe_sys::process::Process;

use super::error::{MigrateError, ReceiveError};
use super::{BEAT, Wire};
use crate::ProgressSink;
use crate::connection::message::{Base, Control, Message};
use crate::memory::BlockShape;
use crate::memory::block::Block;
use crate::memory::ranges::{PageRanges, runs};
use crate::populate::eager::{self, PopulateError};
use crate::sink::connection::transfer_hasher;
use crate::source::repository::shapes;
use crate::source::{PageSource, TakeMany};
use crate::verify::Image;

/// Where a destination looks for what it has of a VM.
pub struct SeedFrom<'r> {
    /// The repository.
    pub repository: &'r mut Repository,
    /// The name of the checkpoint, among those of the VM.
    pub name: String,
    /// How long another process may keep the repository locked.
    pub lock_wait: Duration,
}

/// A checkpoint of a VM that comes.
pub(super) struct Seed<'r> {
    manifest: Manifest,
    reader: Reader<'r>,
    /// The source sends what was written since.
    pub base: Option<Base>,
}

impl<'r> Seed<'r> {
    /// The checkpoint that is the source's base, or one of this VM by its name, with the same memory, if there is one.
    ///
    /// # Errors
    /// The repository cannot be read.
    pub fn find(
        from: &'r mut SeedFrom<'_>,
        vm: &VmRecord,
        blocks: &[BlockShape],
        base: Option<&Base>,
    ) -> Result<Option<Seed<'r>>, RepoError> {
        let mut found = match base {
            Some(base) => base_of(from.repository, base, (&vm.label, blocks))?,
            None => None,
        };
        let base = base.filter(|_| found.is_some()).cloned();
        if base.is_none() {
            let named = found_or_none(from.repository.resolve(&from.name, Some(&vm.label)))?;
            found = named.map(|(_, manifest)| manifest);
        }
        let Some(manifest) = found.filter(|manifest| is_of(manifest, blocks)) else {
            return Ok(None);
        };
        let reader = from.repository.reader(from.lock_wait)?;
        Ok(Some(Seed {
            manifest,
            reader,
            base,
        }))
    }

    /// The base of a VM that lacks pages.
    ///
    /// # Errors
    /// The repository cannot be read, is another one, or has the checkpoint no more.
    pub fn again(
        from: &'r mut SeedFrom<'_>,
        base: &Base,
        vm: (&str, &[BlockShape]),
    ) -> Result<Seed<'r>, ReceiveError> {
        let found = base_of(from.repository, base, vm)?;
        let manifest = found.ok_or_else(|| ReceiveError::no_base(base))?;
        let reader = from.repository.reader(from.lock_wait)?;
        Ok(Seed {
            manifest,
            reader,
            base: Some(base.clone()),
        })
    }

    /// Writes its pages into the memory of a new QEMU, and sends their ids, unless it is the base.
    ///
    /// # Errors
    /// They cannot be read, written or sent.
    pub fn plant(
        &self,
        process: &Process,
        blocks: &[Block],
        wire: &mut Wire,
        progress: ProgressSink<'_>,
    ) -> Result<(), ReceiveError> {
        let all: Vec<&Block> = blocks.iter().collect();
        let mut beat = Instant::now();
        let alive = &mut |done| {
            progress(done);
            if beat.elapsed() >= BEAT {
                beat = Instant::now();
                // A connection that is lost shows at the ids.
                let _ = wire.send_control(&Control::Alive);
            }
        };
        let mut read = || -> Result<_, PopulateError> {
            eager::populate(process, &all, self.maps(blocks)?, alive)?;
            let maps = self.maps(blocks)?;
            maps.iter().map(content).collect::<Result<Vec<_>, _>>()
        };
        let content = read().map_err(ReceiveError::Seed)?;
        if self.base.is_some() {
            return Ok(());
        }
        say_ids(wire, blocks, content)
    }

    /// The page maps of these blocks.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn maps(&self, blocks: &[Block]) -> Result<Vec<PageMap<'_>>, PopulateError> {
        let table = |block: &Block| {
            let mut tables = self.manifest.ram.iter();
            // There is one of each.
            tables.find(|table| table.name == block.name())
        };
        let tables = blocks.iter().filter_map(table);
        let maps = tables.map(|table| PageMap::open(&self.reader, table));
        let maps: Result<Vec<_>, RepoError> = maps.collect();
        Ok(maps.map_err(crate::source::SourceError::from)?)
    }
}

/// Reads these pages, zeros included.
///
/// # Errors
/// They cannot be read, or `take` fails.
pub(super) fn read(
    map: &PageMap<'_>,
    pages: Vec<u64>,
    take: TakeMany<'_, PopulateError>,
) -> Result<(), PopulateError> {
    let mut stored = Vec::with_capacity(pages.len());
    for page in pages {
        match PageSource::is_zero(map, page)? {
            true => take(page, &[0; PAGE])?,
            false => stored.push(page),
        }
    }
    // There is a thread for each connection.
    map.fetch_many(stored, 1, &|_| true, take)
}

/// Sends the ids of these pages of each block; the others are zero.
///
/// # Errors
/// Memory cannot be read, or the connection failed.
pub(super) fn say_ids(
    wire: &mut Wire,
    blocks: &[Block],
    content: Vec<Vec<Range<u64>>>,
) -> Result<(), ReceiveError> {
    for part in blocks.iter().zip(content) {
        let image = Image::of(std::iter::once(part), &transfer_hasher())?;
        image.ids().try_for_each(|ids| wire.send_ids(ids))?;
    }
    Ok(())
}

/// The checkpoint of this name, if it is in this repository and is one of the VM with this label and memory.
fn base_of(
    repository: &Repository,
    base: &Base,
    (label, blocks): (&str, &[BlockShape]),
) -> Result<Option<Manifest>, RepoError> {
    if repository.id().to_string() != base.repository {
        return Ok(None);
    }
    let manifest = found_or_none(repository.manifest(&base.checkpoint))?;
    Ok(manifest.filter(|manifest| manifest.vm == label && is_of(manifest, blocks)))
}

fn found_or_none<T>(found: Result<T, RepoError>) -> Result<Option<T>, RepoError> {
    match found {
        Err(RepoError::NotFound { .. }) => Ok(None),
        found => found.map(Some),
    }
}

/// Whether a checkpoint has these blocks, and no others.
fn is_of(manifest: &Manifest, blocks: &[BlockShape]) -> bool {
    let there = shapes(&manifest.ram);
    there.len() == blocks.len() && blocks.iter().all(|block| there.contains(block))
}

/// Pages that are not zero.
fn content(map: &PageMap<'_>) -> Result<Vec<Range<u64>>, PopulateError> {
    map.prepare()?;
    let mut pages = Vec::new();
    for page in 0..PageSource::pages(map) {
        if !PageSource::is_zero(map, page)? {
            pages.push(page);
        }
    }
    Ok(runs(&pages))
}

/// The ids of what the destination has.
#[derive(Debug)]
pub(super) struct Seeds {
    /// By block and page; `None` is a zero page.
    ids: Vec<Vec<Option<ContentId>>>,
    hasher: ContentHasher,
}

impl Seeds {
    /// Receives them.
    ///
    /// # Errors
    /// The connection failed, or the ids are not those of these blocks.
    pub fn receive(wire: &mut Wire, blocks: &[BlockShape]) -> Result<Seeds, MigrateError> {
        let pages: u64 = blocks.iter().map(|block| block.pages).sum();
        let mut all = Vec::new();
        while (all.len() as u64) < pages {
            match wire.receive_message()? {
                Message::Ids(more) if (all.len() + more.len()) as u64 <= pages => all.extend(more),
                Message::Control(Control::Alive) => {}
                other => return Err(other.unexpected().into()),
            }
        }
        let mut all = all.into_iter();
        let of_block = |block: &BlockShape| all.by_ref().take(block.pages as usize).collect();
        Ok(Seeds {
            ids: blocks.iter().map(of_block).collect(),
            hasher: transfer_hasher(),
        })
    }

    /// Whether the destination has this content of a page.
    pub fn has(&self, page: GuestPage, bytes: &[u8; PAGE]) -> bool {
        let id = self.ids[page.block][page.page as usize];
        id.is_some_and(|id| id == self.hasher.id(bytes))
    }

    /// Pages of which the destination has some content.
    pub fn pages(&self) -> PageRanges {
        let of_block = |ids: &Vec<Option<ContentId>>| {
            let numbered = (0..).zip(ids).filter(|(_, id)| id.is_some());
            runs(&numbered.map(|(page, _)| page).collect::<Vec<u64>>())
        };
        self.ids.iter().map(of_block).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_destination_has_a_page_if_its_id_is_that_of_the_content() {
        let hasher = transfer_hasher();
        let (page, other) = ([1; PAGE], [2; PAGE]);
        let seeds = Seeds {
            ids: vec![vec![None; 2], vec![None, Some(hasher.id(&page)), None]],
            hasher,
        };
        let at = |block, number| GuestPage::new(block, number);
        assert!(seeds.has(at(1, 1), &page) && !seeds.has(at(1, 1), &other));
        // What is zero there has no id, whatever it is here.
        assert!(!seeds.has(at(1, 0), &page) && !seeds.has(at(0, 1), &[0; PAGE]));
        assert_eq!(seeds.pages(), [vec![], vec![1..2; 1]]);
    }
}
