//! The missing-pack detector: it finds packs of the index that are not there in their full length.
//!
//! No blob may be deduplicated against a pack that was removed or cut short: the new checkpoint could not be
//! restored. Inspecting every pack before every checkpoint would cost more than the checkpoint. So a pack is
//! inspected when the index first names it, and again when its folder has changed. Checkpoints change folders
//! themselves, and the small ones of a long watch change all of them again and again. So known packs are
//! inspected for 2 % of the time at most, one folder after the other.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant, SystemTime};

use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::store::local::{Area, LocalStore};

/// Times of files are as coarse as the kernel's tick: after a change this recent, a later change of the folder
/// may not show.
const COARSE: Duration = Duration::from_secs(1);

/// Microseconds between two inspections: one of a pack or a folder takes about 2 µs, so they take 2 % of the
/// time.
const INSPECTION_INTERVAL_US: u128 = 2 * 50;
/// Number of known packs that may be inspected even if no time has passed.
const INSPECTIONS_MIN: usize = 100;

/// Packs lie in a folder by the first byte of their name.
const FOLDERS: usize = 256;

/// A pack of an index.
pub(crate) trait InspectedPack {
    fn name(&self) -> &FileHash;

    /// The length in bytes that it has if it is whole.
    fn file_bytes(&self) -> u64;
}

/// The state of the detector.
pub(crate) struct MissingPackDetector {
    /// The time of change of each folder of packs, as of the inspection of its packs.
    folders: HashMap<u8, SystemTime>,
    /// Number of packs of the index, from the first on, that have been inspected.
    inspected: usize,
    /// The numbers of these, by folder.
    known: Vec<Vec<u32>>,
    /// When known packs were last inspected.
    last: Option<Instant>,
    /// The folder to continue with.
    next: u8,
    /// [`INSPECTIONS_MIN`], except in tests.
    inspections_min: usize,
    missing: BTreeSet<FileHash>,
}

impl Default for MissingPackDetector {
    fn default() -> MissingPackDetector {
        MissingPackDetector {
            folders: HashMap::new(),
            inspected: 0,
            known: vec![Vec::new(); FOLDERS],
            last: None,
            next: 0,
            inspections_min: INSPECTIONS_MIN,
            missing: BTreeSet::new(),
        }
    }
}

impl MissingPackDetector {
    /// The packs that are missing or cut short.
    pub(crate) fn missing(&self) -> &BTreeSet<FileHash> {
        &self.missing
    }

    #[cfg(test)]
    pub(crate) fn lose(&mut self, name: FileHash) {
        self.missing.insert(name);
    }

    /// Starts over: the index numbers its packs anew.
    pub(crate) fn start_over(&mut self) {
        self.folders.clear();
        self.inspected = 0;
        self.known.iter_mut().for_each(Vec::clear);
        self.last = None;
    }

    /// Inspects new packs, and those whose folder has changed. Returns whether the set of missing packs has
    /// changed.
    pub(crate) fn inspect(
        &mut self,
        store: &LocalStore,
        packs: &[impl InspectedPack],
    ) -> Result<bool, RepoError> {
        let mut different = false;
        for folder in self.changed_folders(store)? {
            for &number in &self.known[usize::from(folder)] {
                different |= inspect_pack(store, &packs[number as usize], &mut self.missing)?;
            }
        }
        for (number, pack) in packs.iter().enumerate().skip(self.inspected) {
            different |= inspect_pack(store, pack, &mut self.missing)?;
            // An index has less than 2^32 packs.
            self.known[usize::from(pack.name().0[0])].push(number as u32);
        }
        self.inspected = packs.len();
        // Packs that the index no longer names.
        self.missing
            .retain(|name| packs.iter().any(|pack| pack.name() == name));
        Ok(different)
    }

    /// The folders that have changed, as far as the allowance permits.
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

    /// Number of known packs that may be inspected now.
    fn allowance(&mut self) -> usize {
        let last = self.last.replace(Instant::now());
        last.map_or(usize::MAX, |last| {
            let inspections = last.elapsed().as_micros() / INSPECTION_INTERVAL_US;
            usize::try_from(inspections)
                .unwrap_or(usize::MAX)
                .max(self.inspections_min)
        })
    }
}

/// Inspects a pack. Returns whether it has gone missing or come back.
fn inspect_pack(
    store: &LocalStore,
    pack: &impl InspectedPack,
    missing: &mut BTreeSet<FileHash>,
) -> Result<bool, RepoError> {
    let whole = store.length(Area::Packs, &pack.name().to_string())? == Some(pack.file_bytes());
    Ok(match whole {
        true => missing.remove(pack.name()),
        false => missing.insert(*pack.name()),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::index::locations::PackInfo;
    use crate::store::local::Area;

    /// A missing pack is found after a while even with the smallest allowance.
    #[test]
    fn a_small_allowance_reaches_every_folder() {
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
        let mut detector = MissingPackDetector {
            inspections_min: 3,
            ..MissingPackDetector::default()
        };
        assert!(!detector.inspect(&store, &packs).unwrap());
        // All of these folders have changed just now.
        detector.last = Some(Instant::now());
        let changed = detector.changed_folders(&store).unwrap();
        let is_changed = |pack: &&PackInfo| changed.contains(&pack.name.0[0]);
        let inspected = packs.iter().filter(is_changed).count();
        // The last folder is inspected to its end.
        assert!((1..10).contains(&inspected), "{inspected}");
        fs::remove_file(store.path(Area::Packs, &packs[50].name.to_string())).unwrap();
        let inspections = (1..).find(|_| detector.inspect(&store, &packs).unwrap());
        assert!(
            inspections.is_some_and(|inspections| inspections <= 60),
            "{inspections:?}"
        );
        assert!(detector.missing().contains(&packs[50].name));
        // New packs are inspected at once.
        let mut more = packs;
        more.push(PackInfo::of_bytes(FileHash::of(b"new"), 1));
        assert!(detector.inspect(&store, &more).unwrap());
    }
}
