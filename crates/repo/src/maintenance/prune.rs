//! Prune: removes the blobs that no checkpoint refers to.
//!
//! ```text
//! 1 exclusive lock
//! 2 mark everything in use
//! 3 plan: each pack is kept, removed, or repacked (its used blobs copied)
//! 4 make earlier removals of manifests durable; write the new packs
//! 5 write the new index; its last file supersedes every older one    <- takes effect here
//! 6 remove old index files, then old packs, then packs that no index file describes, then tmp/
//! ```
//!
//! Killed before 5, the new packs are unreferenced and the next prune removes them. Killed after 5,
//! the old index files no longer count though some are still there, and the next prune removes
//! the rest. At no point does an index file that counts name a pack that is gone.

use std::collections::HashSet;
use std::sync::Mutex;

use stillframe_page::hash::ContentId;

use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::image_record::ImageId;
use crate::format::lock_record::LockKind;
use crate::index::compact::NewIndex;
use crate::index::file::read_index_file;
use crate::index::in_memory::Index;
use crate::index::locations::PackInfo;
use crate::index::mark_bitmaps::Mark;
use crate::lease;
use crate::maintenance::mark::mark_used;
use crate::maintenance::problem::Problem;
use crate::maintenance::scrub::open_directory;
use crate::pack::IndexedPack;
use crate::pack::PACK_BYTES_TARGET;
use crate::pack::packer::Packer;
use crate::progress::{Phase, Progress};
use crate::repository::Repository;
use crate::store::local::{Area, UNFINISHED_LOCK};
use crate::store::lock::EXCLUSIVE_WAIT;
use crate::store::lock::{Lock, STALE_AFTER, age};
use crate::sync::lock;

/// A pack is repacked when at least 1/5 of it is waste: copying the rest then costs at most four bytes for each
/// byte freed.
const WASTE_SHARE: u64 = 5;

/// A pack shorter than this is small. Small packs are merged when they can fill a pack, or when there are more
/// than [`SMALL_PACKS_MAX`]. Each checkpoint of a long watch leaves one.
const SMALL_PACK_BYTES: u64 = PACK_BYTES_TARGET / 8;
const SMALL_PACKS_MAX: usize = 64;

/// What a prune did, or would do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PruneReport {
    /// Number of checkpoints; everything that they refer to is kept.
    pub checkpoints: u64,
    /// Blobs in use.
    pub blobs_used: u64,
    /// Blobs no longer in use; blocks of images are not counted.
    pub blobs_unused: u64,
    /// Packs left as they are.
    pub packs_kept: u64,
    /// Packs removed because nothing in them is in use.
    pub packs_removed: u64,
    /// Packs whose used blobs were copied to new ones.
    pub packs_repacked: u64,
    /// Packs of unfinished checkpoints that were removed.
    pub packs_unindexed: u64,
    /// Bytes of all packs before.
    pub bytes_before: u64,
    /// Bytes of all packs after; estimated in a dry run.
    pub bytes_after: u64,
}

/// What to do with the packs, by their number in the index.
#[derive(Default)]
struct Plan {
    keep: Vec<u32>,
    remove: Vec<u32>,
    repack: Vec<u32>,
    /// Packs that no index file describes.
    unindexed: Vec<String>,
}

impl Repository {
    /// Removes blobs that no checkpoint refers to. Can be killed at any point. Refuses to begin if a manifest or
    /// page table cannot be read, since blobs that it refers to would be lost. Takes the exclusive lock, except
    /// for a dry run.
    pub fn prune(
        &mut self,
        dry_run: bool,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<PruneReport, RepoError> {
        let lock = match dry_run {
            true => self.reading_lock(EXCLUSIVE_WAIT)?,
            false => Some(Lock::take(
                &self.store,
                LockKind::Exclusive,
                EXCLUSIVE_WAIT,
            )?),
        };
        self.refresh_index()?;
        self.index.clear_marks();
        let mut report = PruneReport {
            checkpoints: mark_used(self, &mut refuse, progress)?,
            ..PruneReport::default()
        };
        let plan = self.plan(&mut report)?;
        match lock {
            Some(lock) if !dry_run => self.carry_out(&plan, &lock, &mut report, progress)?,
            _ => {}
        }
        self.index = Index::default();
        Ok(report)
    }

    fn plan(&self, report: &mut PruneReport) -> Result<Plan, RepoError> {
        let used = self.used_bytes(report);
        let mut plan = Plan::default();
        let mut small = Vec::new();
        for (number, pack) in (0_u32..).zip(self.index.packs()) {
            let frames = self.index.frames_of(number);
            let plain: u64 = frames.map(|frame| u64::from(frame.plain_bytes)).sum();
            let used = used[number as usize];
            report.bytes_before += pack.file_bytes;
            if let Some(image) = pack.image
                && (used > 0 || self.has_image(image)?)
            {
                self.require(pack)?;
                // An error if a checkpoint needs an image that was removed by hand.
                self.images.record(image)?;
                report.bytes_after += pack.file_bytes;
                plan.keep.push(number);
                continue;
            }
            if used == 0 {
                plan.remove.push(number);
                continue;
            }
            self.require(pack)?;
            if (plain - used) * WASTE_SHARE >= plain {
                plan.repack.push(number);
                // Assumes that the rest compresses as well as the whole.
                report.bytes_after +=
                    (u128::from(pack.file_bytes) * u128::from(used) / u128::from(plain)) as u64;
            } else if pack.file_bytes < SMALL_PACK_BYTES {
                small.push((number, pack.file_bytes));
                report.bytes_after += pack.file_bytes;
            } else {
                plan.keep.push(number);
                report.bytes_after += pack.file_bytes;
            }
        }
        let small_bytes: u64 = small.iter().map(|(_, bytes)| bytes).sum();
        let merge = small.len() > SMALL_PACKS_MAX || small_bytes > PACK_BYTES_TARGET;
        let target = if merge {
            &mut plan.repack
        } else {
            &mut plan.keep
        };
        target.extend(small.iter().map(|(number, _)| number));
        for name in self.store.names(Area::Packs)? {
            let unindexed = FileHash::from_name(&name)
                .is_some_and(|hash| self.index.pack_number(&hash).is_none());
            if unindexed && let Some(bytes) = self.store.length(Area::Packs, &name)? {
                report.bytes_before += bytes;
                plan.unindexed.push(name);
            }
        }
        report.packs_kept = plan.keep.len() as u64;
        report.packs_removed = plan.remove.len() as u64;
        report.packs_repacked = plan.repack.len() as u64;
        report.packs_unindexed = plan.unindexed.len() as u64;
        Ok(plan)
    }

    /// Whether the repository knows an image. One whose indexing was killed, or that was removed, it does not.
    fn has_image(&self, id: ImageId) -> Result<bool, RepoError> {
        let length = self.store.length(Area::Images, &id.to_string())?;
        Ok(length.is_some())
    }

    /// An error if a pack that is needed is missing or cut short.
    fn require(&self, pack: &PackInfo) -> Result<(), RepoError> {
        let name = pack.name.to_string();
        match self.store.length(Area::Packs, &name)? {
            Some(bytes) if bytes == pack.file_bytes => Ok(()),
            _ => Err(RepoError::Damaged {
                file: self.store.label(Area::Packs, &name),
                what: "it is missing or cut short".into(),
            }),
        }
    }

    /// Bytes in use of each pack. A second copy of a blob is not in use: the index finds one.
    fn used_bytes(&self, report: &mut PruneReport) -> Vec<u64> {
        let mut used = vec![0; self.index.packs().len()];
        for location in self.index.locations() {
            if self.index.has(location, Mark::Used) {
                used[self.index.pack_of(location) as usize] += u64::from(location.bytes);
                report.blobs_used += 1;
            } else if self.index.frame(location).0.image.is_none() {
                report.blobs_unused += 1;
            }
        }
        used
    }

    fn carry_out(
        &self,
        plan: &Plan,
        lock: &Lock,
        report: &mut PruneReport,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RepoError> {
        // A killed `forget` may have left removals that are not durable. A manifest that reappeared after a crash
        // would lack its pages.
        self.store.sync_area(Area::Manifests)?;
        let new_packs = self.repack(&plan.repack, progress)?;
        let new_bytes: u64 = new_packs
            .iter()
            .map(|entry| entry.directory.file_bytes())
            .sum();
        match plan.remove.is_empty() && plan.repack.is_empty() {
            false => self.write_index(plan, new_packs, lock)?,
            // Nothing changes; but a killed prune may have left index files behind.
            true => self
                .index
                .superseded_files()
                .try_for_each(|name| self.store.remove(Area::Index, &name.to_string()))?,
        }
        lock.assert_held()?;
        self.remove_packs(plan, progress)?;
        self.remove_leftovers(lock)?;
        self.remove_orphaned_working_sets()?;
        let kept = plan
            .keep
            .iter()
            .map(|&number| self.index.packs()[number as usize].file_bytes);
        report.bytes_after = new_bytes + kept.sum::<u64>();
        Ok(())
    }

    /// Copies the used blobs of packs into new packs, in the order of their locations, one pack in memory at a
    /// time.
    fn repack(
        &self,
        packs: &[u32],
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Vec<IndexedPack>, RepoError> {
        if packs.is_empty() {
            return Ok(Vec::new());
        }
        let packer = Mutex::new(self.packer()?);
        let copied = (0..).zip(packs).try_for_each(|(done, &number)| {
            let total = packs.len() as u64;
            progress(Progress {
                phase: Phase::Repack,
                done,
                total,
            });
            self.copy_pack(number, &packer)
        });
        let packer = packer
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        match copied {
            Ok(()) => packer.finish(),
            Err(error) => {
                packer.abandon();
                Err(error)
            }
        }
    }

    fn copy_pack(&self, number: u32, packer: &Mutex<Packer>) -> Result<(), RepoError> {
        let pack = &self.index.packs()[number as usize];
        let opened = open_directory(&self.store, &self.keys, pack.name, pack.file_bytes)?;
        let ids = opened
            .directory
            .frames
            .iter()
            .flat_map(|frame| &frame.blobs)
            .map(|(id, _)| *id);
        let wanted: Vec<(ContentId, ContentId)> = ids
            .filter(|id| {
                let at = self.index.get(id);
                at.is_some_and(|at| {
                    self.index.pack_of(at) == number && self.index.has(at, Mark::Used)
                })
            })
            .map(|id| (id, id))
            .collect();
        let add = |id: ContentId, bytes: &[u8]| lock(packer).add(id, bytes);
        self.blobs().read_sorted(wanted, 1, &add)
    }

    /// Writes an index that describes the kept and the new packs, in place of the old one.
    fn write_index(
        &self,
        plan: &Plan,
        new_packs: Vec<IndexedPack>,
        lock: &Lock,
    ) -> Result<(), RepoError> {
        let packs = self.index.packs();
        let mut keep: HashSet<FileHash> = plan
            .keep
            .iter()
            .map(|&number| packs[number as usize].name)
            .collect();
        let mut new_index = NewIndex::new(&self.store, &self.keys);
        for (&name, _) in self.index.live_files() {
            for entry in read_index_file(&self.store, &self.keys, name)?.0.packs {
                if keep.remove(&entry.pack) {
                    new_index.add(entry)?;
                }
            }
        }
        for entry in new_packs {
            new_index.add(entry)?;
        }
        new_index.finish(lock, self.index.files().keys().copied().collect())
    }

    fn remove_packs(
        &self,
        plan: &Plan,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RepoError> {
        let old = plan.remove.iter().chain(&plan.repack);
        let old = old.map(|&number| self.index.packs()[number as usize].name.to_string());
        let names: Vec<String> = old.chain(plan.unindexed.iter().cloned()).collect();
        for (done, name) in (0..).zip(&names) {
            let total = names.len() as u64;
            progress(Progress {
                phase: Phase::Remove,
                done,
                total,
            });
            self.store.remove(Area::Packs, name)?;
        }
        Ok(())
    }

    /// Removes unfinished files. Under the exclusive lock they come from dead processes, except for locks of
    /// processes that wait for this one.
    fn remove_leftovers(&self, lock: &Lock) -> Result<(), RepoError> {
        for name in self.store.names(Area::Temporary)? {
            self.store.remove(Area::Temporary, &name)?;
        }
        // Leased checkpoints have their manifests; leases of ended VMs are removed.
        lease::in_force(&self.store, Some(lock))?;
        for name in self.store.names(Area::Locks)? {
            let age = age(&self.store, Area::Locks, &name, lock.now())?;
            if age > STALE_AFTER && name.ends_with(UNFINISHED_LOCK) {
                self.store.remove(Area::Locks, &name)?;
            }
        }
        Ok(())
    }
}

/// Blobs of a reference that cannot be followed are not distinguishable from waste.
fn refuse(problem: Problem) -> Result<(), RepoError> {
    Err(RepoError::Damaged {
        file: problem.file,
        what: problem.what,
    })
}
