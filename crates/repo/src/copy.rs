//! Copies checkpoints into another repository, at another place and with another key.
//!
//! Everything is read and verified in the source, and stored in the target like a new checkpoint. Pages are
//! deduplicated against the target, and have other ids there, since ids are keyed. Tables, layers and deltas of
//! the original become a table of whole pages, so that a copy needs no other checkpoint. What the original has in
//! images is stored, unless the target knows images that have it.
//!
//! A copy names its original in its VM record. By that name an earlier copy is found, also as the copy of a copy,
//! and not made again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stillframe_page::is_zero;

use crate::error::RepoError;
use crate::format::manifest::{BlockTable, CheckpointId, DiskTable, Manifest, PageCounts, Stream};
use crate::page_table::builder::PageTableBuilder;
use crate::page_table::map::PageMap;
use crate::page_table::table::PageRef;
use crate::progress::{Phase, Progress};
use crate::repository::{Reader, Repository};
use crate::sync::lock;
use crate::writer::{PIECE_BYTES, Put, Writer};

/// The field of a VM record that names the original.
const ORIGINAL: &str = "copied_from";

/// Number of pages read per batch, which bounds the memory for their ids.
const PAGES_AT_ONCE: u64 = 1 << 14;

/// Number of pieces of a stream in memory at once.
const PIECES_AT_ONCE: usize = 256;

/// A checkpoint of some repository.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Original {
    /// The repository's id.
    pub repository: String,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
}

/// The result for one checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copied {
    /// The checkpoint that the copy is of; where a copy was copied, its original.
    pub original: Original,
    /// Its id in the target.
    pub id: CheckpointId,
    /// Whether the target had it already, and nothing was copied.
    pub known: bool,
    /// Counts of the stored pages.
    pub pages: PageCounts,
    /// Bytes of packs and index that were written for it.
    pub bytes_stored: u64,
}

/// The original of a checkpoint: the one that it is a copy of, or else itself.
fn original(repository: &Repository, id: &CheckpointId, manifest: &Manifest) -> Original {
    let field = manifest.vm_record.get(ORIGINAL);
    let named = field.and_then(|field| Original::deserialize(field).ok());
    named.unwrap_or_else(|| Original {
        repository: repository.id().to_string(),
        checkpoint: *id,
    })
}

impl Repository {
    /// Copies a checkpoint into the repository `target`, unless `copies` has it: the checkpoints of the target by
    /// their originals, to which the copy is added. Waits up to `wait` for the lock of each repository.
    pub fn copy_to(
        &mut self,
        id: &CheckpointId,
        target: &mut Repository,
        copies: &mut Copies,
        wait: Duration,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Copied, RepoError> {
        let working_set = self.working_set(id).unwrap_or_default();
        let reader = self.reader(wait)?;
        // Under the lock: a manifest that exists now stays.
        let manifest = reader.manifest(id)?;
        let source = reader.repository();
        let original = original(source, id, &manifest);
        if let Some(&known) = copies.0.get(&original) {
            return Ok(Copied {
                original,
                id: known,
                known: true,
                pages: PageCounts::default(),
                bytes_stored: 0,
            });
        }
        let parent = manifest.parent.and_then(|parent| {
            let found = source.read_manifest(&parent).ok()??;
            copies
                .0
                .get(&self::original(source, &parent, &found))
                .copied()
        });
        let mut writer = target.begin(wait)?;
        let mut pages = PageCounts::default();
        let (ram, disks) = copy_pages(&reader, &manifest, &mut writer, &mut pages, progress)?;
        let streams = copy_streams(&reader, &manifest, &mut writer)?;
        let mut vm_record = manifest.vm_record;
        if let Some(fields) = vm_record.as_object_mut() {
            // An id and a name: serialization cannot fail.
            let named = serde_json::to_value(&original).unwrap_or_default();
            fields.insert(ORIGINAL.to_owned(), named);
        }
        let committed = writer.commit(Manifest {
            vm: manifest.vm,
            time: manifest.time,
            parent,
            tags: manifest.tags,
            note: manifest.note,
            ram,
            disks,
            images: BTreeSet::new(),
            streams,
            pages,
            bytes_stored: 0,
            vm_record,
            downtime_us: manifest.downtime_us,
        })?;
        copies.0.insert(original.clone(), committed.id);
        if let Some(set) = working_set {
            // A hint: the copy is complete without it.
            let _ = target
                .reader(wait)
                .and_then(|reader| reader.record_working_set(&committed.id, &set));
        }
        Ok(Copied {
            original,
            id: committed.id,
            known: false,
            pages,
            bytes_stored: committed.bytes_stored,
        })
    }
}

/// The checkpoints of a repository by their originals, to find earlier copies.
#[derive(Debug, Default)]
pub struct Copies(HashMap<Original, CheckpointId>);

impl Copies {
    /// Reads all manifests of a repository.
    pub fn of(repository: &Repository) -> Result<Copies, RepoError> {
        let mut found = HashMap::new();
        for id in repository.checkpoint_ids()? {
            // One that was forgotten since the folder was listed is left out.
            if let Some(manifest) = repository.read_manifest(&id)? {
                found.insert(original(repository, &id, &manifest), id);
            }
        }
        Ok(Copies(found))
    }
}

/// Copies all RAM blocks and disks, and counts their pages.
fn copy_pages(
    reader: &Reader<'_>,
    manifest: &Manifest,
    writer: &mut Writer<'_>,
    counts: &mut PageCounts,
    progress: &mut dyn FnMut(Progress),
) -> Result<(Vec<BlockTable>, Vec<DiskTable>), RepoError> {
    let total = manifest.tables().map(|(_, table)| table.pages).sum();
    counts.total = total;
    counts.captured = total;
    let mut done = 0;
    let mut copied = Vec::new();
    for (_, table) in manifest.tables() {
        let mut at = |page| {
            progress(Progress {
                phase: Phase::Copy,
                done: done + page,
                total,
            });
        };
        copied.push(copy_table(reader, table, writer, counts, &mut at)?);
        done += table.pages;
    }
    let disks = copied.split_off(manifest.ram.len());
    let disks = manifest
        .disks
        .iter()
        .zip(disks)
        .map(|(disk, table)| DiskTable {
            bytes: disk.bytes,
            bitmap: disk.bitmap.clone(),
            table,
        });
    Ok((copied, disks.collect()))
}

/// Copies the pages of one table. `at` gets the number of each page that a batch begins with.
fn copy_table(
    reader: &Reader<'_>,
    table: &BlockTable,
    writer: &mut Writer<'_>,
    counts: &mut PageCounts,
    at: &mut dyn FnMut(u64),
) -> Result<BlockTable, RepoError> {
    let map = PageMap::open(reader, table)?;
    let sink = Mutex::new(Sink {
        writer,
        memory: PageTableBuilder::new(table.pages),
        counts,
    });
    for first in (0..table.pages).step_by(PAGES_AT_ONCE as usize) {
        at(first);
        let mut pages = Vec::new();
        for page in first..table.pages.min(first + PAGES_AT_ONCE) {
            match map.is_zero(page)? {
                true => lock(&sink).counts.zero += 1,
                false => pages.push(page),
            }
        }
        map.read_pages(pages, 1, &|page, bytes| {
            lock(&sink).put(page, bytes, table.page_bytes as usize)
        })?;
    }
    let Sink { writer, memory, .. } = sink
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let written = memory.finish(writer)?;
    Ok(BlockTable {
        name: table.name.clone(),
        page_bytes: table.page_bytes,
        pages: table.pages,
        root: written.root,
        layers: written.layers,
    })
}

/// Stores the pages of one table.
struct Sink<'s, 'w> {
    writer: &'s mut Writer<'w>,
    memory: PageTableBuilder,
    counts: &'s mut PageCounts,
}

impl Sink<'_, '_> {
    /// Stores adjacent pages.
    fn put(&mut self, first: u64, bytes: &[u8], page_bytes: usize) -> Result<(), RepoError> {
        if !bytes.len().is_multiple_of(page_bytes) {
            let what = format!(
                "{} bytes are not a whole number of pages of {page_bytes} bytes",
                bytes.len()
            );
            return Err(RepoError::Table { what });
        }
        for (page, bytes) in (first..).zip(bytes.chunks(page_bytes)) {
            self.put_page(page, bytes)?;
        }
        Ok(())
    }

    fn put_page(&mut self, page: u64, bytes: &[u8]) -> Result<(), RepoError> {
        // Deltas may make zeros.
        if is_zero(bytes) {
            self.counts.zero += 1;
            return Ok(());
        }
        let id = self.writer.hasher().id(bytes);
        match self.writer.put(id, bytes)? {
            Put::New => self.counts.new += 1,
            Put::Duplicate => self.counts.duplicate += 1,
        }
        self.memory.set(page, PageRef::Stored(id));
        Ok(())
    }
}

/// Copies all streams, piece by piece.
fn copy_streams(
    reader: &Reader<'_>,
    manifest: &Manifest,
    writer: &mut Writer<'_>,
) -> Result<BTreeMap<String, Stream>, RepoError> {
    let mut streams = BTreeMap::new();
    for (name, stream) in &manifest.streams {
        let mut copy = Stream {
            bytes: 0,
            pieces: Vec::with_capacity(stream.pieces.len()),
        };
        for some in stream.pieces.chunks(PIECES_AT_ONCE) {
            for piece in reader.blobs().read_many(some)? {
                if piece.len() > PIECE_BYTES {
                    return Err(wrong_stream(name));
                }
                copy.bytes += piece.len() as u64;
                copy.pieces.push(writer.put_unnamed(&piece)?);
            }
        }
        if copy.bytes != stream.bytes {
            return Err(wrong_stream(name));
        }
        streams.insert(name.clone(), copy);
    }
    Ok(streams)
}

fn wrong_stream(name: &str) -> RepoError {
    RepoError::Damaged {
        file: format!("the stream '{name}'"),
        what: "its pieces have other lengths than the checkpoint says".into(),
    }
}
