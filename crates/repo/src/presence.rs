//! Which packs of the index are not there whole.
//!
//! Nothing may be deduplicated against a pack that was removed or cut short, or a checkpoint that
//! nobody can restore would be taken for a good one. Looking at every pack before every checkpoint
//! would cost more than the checkpoint, so a pack is looked at when the index first tells of it,
//! and again when the folder it lies in has changed.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, SystemTime};

use crate::error::RepoError;
use crate::index::PackInfo;
use crate::local::LocalStore;
use crate::pack::FileHash;

/// Times of files are as coarse as the kernel's tick: of a folder changed this recently, a later
/// change may not show.
const COARSE: Duration = Duration::from_secs(1);

/// What is known of the packs on disk.
#[derive(Default)]
pub(crate) struct Presence {
    /// When each folder of packs had last been changed, when its packs were looked at.
    folders: HashMap<u8, SystemTime>,
    /// How many packs of the index, from the first on, have been looked at.
    looked_at: usize,
    missing: BTreeSet<FileHash>,
}

impl Presence {
    /// The packs that are not there, or not of their length.
    pub(crate) fn missing(&self) -> &BTreeSet<FileHash> {
        &self.missing
    }

    #[cfg(test)]
    pub(crate) fn lose(&mut self, name: FileHash) {
        self.missing.insert(name);
    }

    /// The index is made anew, and numbers its packs anew.
    pub(crate) fn start_over(&mut self) {
        self.folders.clear();
        self.looked_at = 0;
    }

    /// Looks at the packs that are new, and at those whose folder has changed; whether more or
    /// fewer are missing than before.
    pub(crate) fn look(
        &mut self,
        store: &LocalStore,
        packs: &[PackInfo],
    ) -> Result<bool, RepoError> {
        let changed = self.changed_folders(store, packs)?;
        let mut different = false;
        for (number, pack) in packs.iter().enumerate() {
            if number < self.looked_at && !changed[usize::from(pack.name.0[0])] {
                continue;
            }
            let whole = store.pack_bytes(&pack.name.to_string())? == Some(pack.file_bytes);
            different |= match whole {
                true => self.missing.remove(&pack.name),
                false => self.missing.insert(pack.name),
            };
        }
        self.looked_at = packs.len();
        // Those that the index tells of no more.
        self.missing
            .retain(|name| packs.iter().any(|pack| pack.name == *name));
        Ok(different)
    }

    /// By the first byte of the packs' names.
    fn changed_folders(
        &mut self,
        store: &LocalStore,
        packs: &[PackInfo],
    ) -> Result<[bool; 256], RepoError> {
        let mut used = [false; 256];
        for pack in packs {
            used[usize::from(pack.name.0[0])] = true;
        }
        let mut changed = [false; 256];
        for folder in (0..=u8::MAX).filter(|&folder| used[usize::from(folder)]) {
            let at = store.pack_folder_changed(folder)?;
            changed[usize::from(folder)] = at.is_none() || at != self.folders.get(&folder).copied();
            match at.filter(|at| at.elapsed().is_ok_and(|age| age > COARSE)) {
                Some(at) => self.folders.insert(folder, at),
                None => self.folders.remove(&folder),
            };
        }
        Ok(changed)
    }
}
