//! The missing-pack detector: which packs of the index are not there in their full length.
//!
//! No blob may be deduplicated against a pack that was removed or cut short, or a checkpoint that
//! cannot be restored would be taken for a good one. Inspecting every pack before every checkpoint
//! would cost more than the checkpoint. So a pack is inspected when the index first names it,
//! and again when its folder has changed. Checkpoints change folders themselves, and the
//! small ones of a long watch change all of them, again and again. So known packs are inspected for a fiftieth
//! of the time at most, one folder after the other.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant, SystemTime};

use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::index::locations::PackInfo;
use crate::store::local::{Area, LocalStore};

/// Times of files are as coarse as the kernel's tick: of a folder changed this recently, a later
/// change may not show.
const COARSE: Duration = Duration::from_secs(1);

/// Inspecting a pack or a folder takes about two microseconds; a fiftieth of the time is for that.
const US_A_LOOK: u128 = 2 * 50;
/// Known packs that may be inspected however little time has passed.
const LOOKS_MIN: usize = 100;

/// Packs lie in a folder by the first byte of their name.
const FOLDERS: usize = 256;

/// What is known of the packs on disk.
pub(crate) struct Presence {
    /// The time of change of each folder of packs, as of the inspection of its packs.
    folders: HashMap<u8, SystemTime>,
    /// How many packs of the index, from the first on, have been inspected.
    looked_at: usize,
    /// The numbers of these, by folder.
    known: Vec<Vec<u32>>,
    /// When known packs were last inspected.
    last: Option<Instant>,
    /// The folder to go on with.
    next: u8,
    /// [`LOOKS_MIN`], but for tests.
    looks_min: usize,
    missing: BTreeSet<FileHash>,
}

impl Default for Presence {
    fn default() -> Presence {
        Presence {
            folders: HashMap::new(),
            looked_at: 0,
            known: vec![Vec::new(); FOLDERS],
            last: None,
            next: 0,
            looks_min: LOOKS_MIN,
            missing: BTreeSet::new(),
        }
    }
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
        self.known.iter_mut().for_each(Vec::clear);
        self.last = None;
    }

    /// Looks at the packs that are new, and at those whose folder has changed; whether more or
    /// fewer are missing than before.
    pub(crate) fn look(
        &mut self,
        store: &LocalStore,
        packs: &[PackInfo],
    ) -> Result<bool, RepoError> {
        let mut different = false;
        for folder in self.changed_folders(store)? {
            for &number in &self.known[usize::from(folder)] {
                different |= look_at(store, &packs[number as usize], &mut self.missing)?;
            }
        }
        for (number, pack) in packs.iter().enumerate().skip(self.looked_at) {
            different |= look_at(store, pack, &mut self.missing)?;
            // An index has less than 2^32 packs.
            self.known[usize::from(pack.name.0[0])].push(number as u32);
        }
        self.looked_at = packs.len();
        // Packs that the index no longer names.
        self.missing
            .retain(|name| packs.iter().any(|pack| pack.name == *name));
        Ok(different)
    }

    /// The folders that have changed; as many as there is time for.
    fn changed_folders(&mut self, store: &LocalStore) -> Result<Vec<u8>, RepoError> {
        let mut allowance = self.allowance();
        let mut changed = Vec::new();
        for folder in (0..=u8::MAX).map(|step| self.next.wrapping_add(step)) {
            let count = self.known[usize::from(folder)].len();
            if count == 0 {
                continue;
            }
            if allowance == 0 {
                self.next = folder;
                break;
            }
            let at = store.pack_folder_changed(folder)?;
            allowance -= 1;
            if at.is_none() || at != self.folders.get(&folder).copied() {
                changed.push(folder);
                allowance = allowance.saturating_sub(count);
            }
            match at.filter(|at| at.elapsed().is_ok_and(|age| age > COARSE)) {
                Some(at) => self.folders.insert(folder, at),
                None => self.folders.remove(&folder),
            };
        }
        Ok(changed)
    }

    /// How many known packs may be looked at now.
    fn allowance(&mut self) -> usize {
        let last = self.last.replace(Instant::now());
        last.map_or(usize::MAX, |last| {
            let looks = last.elapsed().as_micros() / US_A_LOOK;
            usize::try_from(looks)
                .unwrap_or(usize::MAX)
                .max(self.looks_min)
        })
    }
}

/// Whether a pack is missing now and was not, or the other way round.
fn look_at(
    store: &LocalStore,
    pack: &PackInfo,
    missing: &mut BTreeSet<FileHash>,
) -> Result<bool, RepoError> {
    let whole = store.length(Area::Packs, &pack.name.to_string())? == Some(pack.file_bytes);
    Ok(match whole {
        true => missing.remove(&pack.name),
        false => missing.insert(pack.name),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::store::local::Area;

    /// However little may be looked at a time, a pack that vanished is missed after a while.
    #[test]
    fn little_looks_come_round() {
        let folder = tempfile::tempdir().unwrap();
        let store = LocalStore::new(folder.path());
        let packs: Vec<PackInfo> = (0..60u8)
            .map(|number| {
                let name = FileHash::of(&[number]);
                let path = store.path(Area::Packs, &name.to_string());
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, [number; 9]).unwrap();
                PackInfo::of_bytes(name, 9)
            })
            .collect();
        let mut presence = Presence {
            looks_min: 3,
            ..Presence::default()
        };
        assert!(!presence.look(&store, &packs).unwrap());
        // All of these folders have changed just now.
        presence.last = Some(Instant::now());
        let changed = presence.changed_folders(&store).unwrap();
        let is_changed = |pack: &&PackInfo| changed.contains(&pack.name.0[0]);
        let looked_at = packs.iter().filter(is_changed).count();
        // The last folder is looked at to its end.
        assert!((1..10).contains(&looked_at), "{looked_at}");
        fs::remove_file(store.path(Area::Packs, &packs[50].name.to_string())).unwrap();
        let looks = (1..).find(|_| presence.look(&store, &packs).unwrap());
        assert!(looks.is_some_and(|looks| looks <= 60), "{looks:?}");
        assert!(presence.missing().contains(&packs[50].name));
        // New ones are looked at at once.
        let mut more = packs;
        more.push(PackInfo::of_bytes(FileHash::of(b"new"), 1));
        assert!(presence.look(&store, &more).unwrap());
    }
}
