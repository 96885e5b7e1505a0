//! Rebuilds the index from the packs, after index files were lost or damaged.

use std::collections::HashSet;

use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::lock_record::LockKind;
use crate::index::compact::NewIndex;
use crate::index::file::read_index_file;
use crate::index::in_memory::Index;
use crate::maintenance::problem::Problem;
use crate::maintenance::scrub::{PackFile, open_directory};
use crate::pack::IndexedPack;
use crate::progress::Progress;
use crate::repository::Repository;
use crate::store::local::Area;
use crate::store::lock::EXCLUSIVE_WAIT;
use crate::store::lock::Lock;

/// What a rebuild did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RebuildReport {
    /// Packs that the new index describes.
    pub packs: u64,
    /// Packs whose directory cannot be read; the new index keeps the old entries of them.
    pub problems: Vec<Problem>,
    /// Index files that were replaced.
    pub index_files_replaced: u64,
}

impl Repository {
    /// Reads the directories of all packs and writes a new index in place of the old one. Takes the exclusive lock;
    /// can be killed at any point.
    pub fn rebuild_index(
        &mut self,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<RebuildReport, RepoError> {
        let lock = Lock::take(&self.store, LockKind::Exclusive, EXCLUSIVE_WAIT)?;
        let mut report = RebuildReport::default();
        let old = self.store.names(Area::Index)?;
        let old: Vec<FileHash> = old
            .iter()
            .filter_map(|name| FileHash::from_name(name))
            .collect();
        let mut new_index = NewIndex::new(&self.store, &self.keys);
        let mut unreadable = HashSet::new();
        self.visit_pack_files(progress, |file, pack| {
            let Some(PackFile { name: pack, bytes }) = pack else {
                return Ok(());
            };
            match open_directory(&self.store, &self.keys, pack, bytes) {
                Ok(opened) => {
                    new_index.add(IndexedPack {
                        pack,
                        directory: opened.directory,
                    })?;
                    report.packs += 1;
                }
                Err(error) => {
                    let label = self.store.label(Area::Packs, file);
                    report.problems.push(Problem::from_error(label, &error));
                    unreadable.insert(pack);
                }
            }
            Ok(())
        })?;
        // Old entries of packs whose directory cannot be read must not be lost.
        for &name in &old {
            let Ok((file, _)) = read_index_file(&self.store, &self.keys, name) else {
                continue;
            };
            for entry in file.packs {
                if unreadable.remove(&entry.pack) {
                    new_index.add(entry)?;
                    report.packs += 1;
                }
            }
        }
        report.index_files_replaced = old.len() as u64;
        new_index.finish(&lock, old)?;
        self.index = Index::default();
        Ok(report)
    }
}
