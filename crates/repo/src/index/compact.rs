//! Keeps the number of index files small.
//!
//! Each checkpoint writes one index file, or several if it is large. A checkpoint every two seconds would leave
//! 43,200 files a day for every `begin` to list and every `open` to read. So a commit that finds more than [`FILES_MAX`] small files of about
//! one length merges them into one that supersedes them. A merged file is merged again with files of its length
//! until it is no longer small. So each entry is rewritten a few times, most merges are of small files only, and
//! the number of files grows with the size of the repository, not with the number of checkpoints.

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::index::file::{IndexBuilder, IndexFile, visit_index_file};
use crate::index::writer_index::WriterIndex;
use crate::pack::IndexedPack;
use crate::store::local::{Area, LocalStore};
use crate::store::lock::Lock;

/// Number of small index files of about one length that are not merged.
const FILES_MAX: usize = 32;

/// Upper bounds in bytes of the two lengths of small files: those of single checkpoints, and those merged from
/// them. The last is the length of the entries of about 100,000 blobs.
const LENGTHS: [u64; 2] = [64 << 10, 4 << 20];

/// Merges small index files if there are many. A failure changes nothing and is not reported: the files are valid
/// as they are, and the next commit tries again.
pub(crate) fn merge_small_index_files(
    store: &LocalStore,
    keys: &Keys,
    index: &mut WriterIndex,
    lock: &Lock,
) {
    // It has not read the files that this commit has written.
    if index.refresh_files().is_err() {
        return;
    }
    let mut least = 0;
    for below in LENGTHS {
        let alike = |&(_, bytes): &(FileHash, u64)| (least..below).contains(&bytes);
        let files = index.live_files().filter(alike);
        let mut names: Vec<FileHash> = files.map(|(name, _)| name).collect();
        if names.len() > FILES_MAX {
            names.sort_unstable();
            let _ = merge(store, keys, index, lock, &names);
        }
        least = below;
    }
}

/// Two writers may merge the same files at once: both results are correct.
fn merge(
    store: &LocalStore,
    keys: &Keys,
    index: &mut WriterIndex,
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
    index.refresh_files()?;
    remove_superseded(store, index)
}

/// Removes superseded index files, without an fsync: one that reappears after a crash is still superseded. The
/// next index file written makes the removal durable before the superseding one can be removed itself.
fn remove_superseded(store: &LocalStore, index: &mut WriterIndex) -> Result<(), RepoError> {
    let names: Vec<FileHash> = index.superseded_files().collect();
    for name in names {
        store.remove(Area::Index, &name.to_string())?;
        index.forget_file(&name);
    }
    Ok(())
}

/// An index is split into files of about this many bytes: no more of it is in memory at once.
pub(crate) const INDEX_FILE_BYTES: usize = 16 << 20;

/// Writes a whole new index in place of the old one. The last file supersedes all old ones; the files before it
/// only repeat entries that are valid anyway.
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

    /// Activates the new index and removes the files that it supersedes.
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
