//! Describes new packs by index files.

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::index::compact::INDEX_FILE_BYTES;
use crate::index::file::IndexFile;
use crate::index::writer_index::WriterIndex;
use crate::pack::IndexedPack;
use crate::pack::packer::discard;
use crate::store::local::{Area, LocalStore};
use crate::store::lock::Lock;

/// Removes packs that must not be recorded: the lock was lost, or the index cannot number their blobs.
pub(crate) fn ensure_recordable(
    store: &LocalStore,
    index: &WriterIndex,
    lock: &Lock,
    packs: &[IndexedPack],
) -> Result<(), RepoError> {
    let held = lock.assert_held();
    let recordable = held.and_then(|()| index.ensure_room(packs));
    if recordable.is_err() {
        discard(store, packs);
    }
    recordable
}

/// Writes the index files that describe new packs: one, or several for many GiB. Returns the bytes of packs and
/// index files.
pub(crate) fn record_packs(
    store: &LocalStore,
    keys: &Keys,
    packs: Vec<IndexedPack>,
) -> Result<u64, RepoError> {
    let mut contents = IndexFile::default();
    let mut stored = 0;
    let mut bytes = 0;
    let mut packs = packs.into_iter().peekable();
    while let Some(entry) = packs.next() {
        stored += entry.directory.file_bytes();
        bytes += entry.directory.encoded_bytes();
        contents.packs.push(entry);
        if bytes < INDEX_FILE_BYTES && packs.peek().is_some() {
            continue;
        }
        let file = contents.seal(keys)?;
        let name = FileHash::of(&file);
        store.create(Area::Index, &name.to_string(), &file)?;
        stored += file.len() as u64;
        contents.packs.clear();
        bytes = 0;
    }
    Ok(stored)
}
