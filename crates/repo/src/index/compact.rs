//! Keeps the number of index files small.
//!
//! Each checkpoint writes one index file; a checkpoint every two seconds would leave 43,200 a day
//! to be listed by every `begin` and read by every `open`. So when a commit finds more than
//! [`FILES_MAX`] small ones of about one length it merges them into one that supersedes them. A merged
//! file is merged again with its like until it is no longer small, so each entry is rewritten a handful
//! of times, most merges are of small files only, and the number of files grows with the size of the
//! repository, not with the number of checkpoints.

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::index::file::{IndexBuilder, IndexFile, visit_index_file};
use crate::index::in_memory::{Index, SeenFile};
use crate::pack::IndexedPack;
use crate::store::local::{Area, LocalStore};
use crate::store::lock::Lock;

/// Small index files of about one length that are let be.
const FILES_MAX: usize = 32;

/// Lengths up to which files are merged with each other: those of single checkpoints, and what becomes
/// of these. Beyond the last, the entries of about 100,000 blobs, a file is no longer small.
const LENGTHS: [u64; 2] = [64 << 10, 4 << 20];

/// Merges small index files if there are many. A failure changes nothing and is not reported: the
/// files are right as they are, and the next commit tries again.
pub(crate) fn merge_small_index_files(
    store: &LocalStore,
    keys: &Keys,
    index: &mut Index,
    lock: &Lock,
) {
    let mut least = 0;
    for below in LENGTHS {
        let alike = |file: &&SeenFile| (least..below).contains(&file.bytes);
        let mut names: Vec<FileHash> = Vec::new();
        for (name, file) in index.live_files() {
            if alike(&file) {
                names.push(*name);
            }
        }
        if names.len() > FILES_MAX {
            names.sort_unstable();
            let _ = merge(store, keys, index, lock, &names);
        }
        least = below;
    }
}

/// Two writers may merge the same files at once: both results tell the truth, twice.
fn merge(
    store: &LocalStore,
    keys: &Keys,
    index: &mut Index,
    lock: &Lock,
    names: &[FileHash],
) -> Result<(), RepoError> {
    let mut supersedes = names.to_vec();
    // Also those a killed merge or prune left behind.
    supersedes.extend(index.superseded_files());
    let mut merged = IndexBuilder::new(keys, supersedes)?;
    for &name in names {
        visit_index_file(store, keys, name, |entry| {
            merged.add(&entry);
        })?;
    }
    let file = merged.finish();
    let name = FileHash::of(&file);
    lock.assert_held()?;
    store.create(Area::Index, &name.to_string(), &file)?;
    index.add_merged(name, names, file.len() as u64);
    remove_superseded(store, index)
}

/// Removes superseded index files. Need not be made durable: one that
/// comes back after a crash is still superseded, and the next index file written makes sure of
/// the removal before the superseding one can be removed itself.
fn remove_superseded(store: &LocalStore, index: &mut Index) -> Result<(), RepoError> {
    let names: Vec<FileHash> = index.superseded_files().collect();
    for name in names {
        store.remove(Area::Index, &name.to_string())?;
        index.forget_file(&name);
    }
    Ok(())
}

/// An index is cut into files of about this many bytes: all that is ever in memory of one.
pub(crate) const INDEX_FILE_BYTES: usize = 16 << 20;

/// Writes a whole new index in place of the old one. The last file supersedes all old ones; those
/// before it only say again what is true anyway.
pub(crate) struct NewIndex<'a> {
    store: &'a LocalStore,
    keys: &'a Keys,
    file: IndexFile,
    bytes: usize,
}

impl<'a> NewIndex<'a> {
    pub(crate) fn new(store: &'a LocalStore, keys: &'a Keys) -> NewIndex<'a> {
        NewIndex {
            store,
            keys,
            file: IndexFile::default(),
            bytes: 0,
        }
    }

    pub(crate) fn add(&mut self, entry: IndexedPack) -> Result<(), RepoError> {
        self.bytes += entry.directory.encoded_bytes();
        self.file.packs.push(entry);
        if self.bytes >= INDEX_FILE_BYTES {
            self.write()?;
        }
        Ok(())
    }

    fn write(&mut self) -> Result<(), RepoError> {
        let file = self.file.seal(self.keys)?;
        self.store
            .create(Area::Index, &FileHash::of(&file).to_string(), &file)?;
        self.file.packs.clear();
        self.bytes = 0;
        Ok(())
    }

    /// Puts the new index into force and removes the files that it supersedes.
    pub(crate) fn finish(mut self, lock: &Lock, old: Vec<FileHash>) -> Result<(), RepoError> {
        lock.assert_held()?;
        self.file.supersedes = old;
        self.write()?;
        for name in &self.file.supersedes {
            self.store.remove(Area::Index, &name.to_string())?;
        }
        Ok(())
    }
}
