//! Forgets checkpoints: removes their manifests; the next prune frees the space.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use crate::error::RepoError;
use crate::format::annotation::Tag;
use crate::format::lease_record::LeaseRecord;
use crate::format::lock_record::LockKind;
use crate::format::manifest::CheckpointId;
use crate::format::manifest::Summary;
use crate::lease;
use crate::maintenance::retention::{KeepPolicy, KeepReason, select};
use crate::repository::Repository;
use crate::store::local::Area;
use crate::store::lock::EXCLUSIVE_WAIT;
use crate::store::lock::Lock;

/// What to forget.
#[derive(Debug, Clone, Default)]
pub struct Forget {
    /// These checkpoints, whatever the policy keeps.
    pub ids: Vec<CheckpointId>,
    /// And the checkpoints that the policy does not keep. An empty policy forgets nothing.
    pub policy: KeepPolicy,
    /// The label of the only VM that the policy applies to; `None`: it applies to each VM separately.
    pub vm: Option<String>,
    /// The policy applies only to checkpoints that have all of these tags.
    pub tags: Vec<Tag>,
    /// Also forget checkpoints that lazily restored VMs still need, and remove their leases.
    pub break_leases: bool,
    /// Only report; remove nothing.
    pub dry_run: bool,
}

/// What was forgotten and what was kept.
#[derive(Debug, Clone, Default)]
pub struct ForgetReport {
    /// The checkpoints that were forgotten, or would be, oldest first.
    pub forgotten: Vec<Summary>,
    /// The checkpoints that were kept, with the reasons, oldest first. There is no reason where no policy
    /// applied.
    pub kept: Vec<(Summary, Vec<KeepReason>)>,
    /// The checkpoints kept only for a VM that does not have all its memory yet, oldest first.
    pub leased: Vec<(Summary, LeaseRecord)>,
    /// The leases that were broken, or would be.
    pub broken: Vec<LeaseRecord>,
}

impl Repository {
    /// Forgets checkpoints durably, except those that VMs being restored still need. Takes the exclusive lock,
    /// except for a dry run.
    ///
    /// # Errors
    /// Before anything is removed: a VM still needs one of `what.ids`, or it does not exist; or the policy would
    /// keep nothing of a VM that it applies to.
    pub fn forget(&mut self, what: &Forget) -> Result<ForgetReport, RepoError> {
        let lock = match what.dry_run {
            true => None,
            false => Some(Lock::take(
                &self.store,
                LockKind::Exclusive,
                EXCLUSIVE_WAIT,
            )?),
        };
        let leases = lease::in_force(&self.store, lock.as_ref())?;
        let mut report = plan(self.summaries()?, what, Timestamp::now())?;
        let broken = report.leave_out(leases, what)?;
        let Some(lock) = lock else { return Ok(report) };
        for name in broken {
            self.store.remove(Area::Leases, &name)?;
        }
        for gone in &report.forgotten {
            lock.assert_held()?;
            // The working set first, because it is found by its manifest.
            self.store.remove(Area::WorkingSets, &gone.id.to_hex())?;
            self.store.remove(Area::Manifests, &gone.id.to_hex())?;
        }
        // Prune relies on it: a manifest that reappeared after a crash would lack its pages.
        self.store.sync_area(Area::Manifests)?;
        Ok(report)
    }
}

impl ForgetReport {
    /// Moves leased checkpoints from `forgotten` to `leased`. Returns the leases to break instead, by the names
    /// of their files.
    fn leave_out(
        &mut self,
        leases: Vec<(String, LeaseRecord)>,
        what: &Forget,
    ) -> Result<Vec<String>, RepoError> {
        let mut names = Vec::new();
        for (name, lease) in leases {
            let at = self
                .forgotten
                .iter()
                .position(|gone| gone.id == lease.checkpoint);
            match at {
                Some(_) if what.break_leases => {
                    names.push(name);
                    self.broken.push(lease);
                }
                Some(_) if what.ids.contains(&lease.checkpoint) => {
                    return Err(RepoError::Leased {
                        checkpoint: lease.checkpoint,
                        by: Box::new(lease),
                    });
                }
                Some(at) => self.leased.push((self.forgotten.remove(at), lease)),
                None => {}
            }
        }
        self.leased
            .sort_by_key(|(summary, _)| (summary.time, summary.id));
        Ok(names)
    }
}

fn plan(all: Vec<Summary>, what: &Forget, now: Timestamp) -> Result<ForgetReport, RepoError> {
    let known: BTreeSet<CheckpointId> = all.iter().map(|summary| summary.id).collect();
    if let Some(missing) = what.ids.iter().find(|id| !known.contains(id)) {
        return Err(RepoError::NotFound {
            name: missing.to_hex(),
            vm: None,
        });
    }
    let governed = |summary: &Summary| {
        !what.policy.is_empty()
            && what.vm.as_ref().is_none_or(|only| *only == summary.vm)
            && summary.tags.has_all(&what.tags)
    };
    let mut by_vm: BTreeMap<&str, Vec<&Summary>> = BTreeMap::new();
    for summary in all.iter().filter(|summary| governed(summary)) {
        by_vm.entry(&summary.vm).or_default().push(summary);
    }
    let mut reasons = BTreeMap::new();
    for (vm, checkpoints) in by_vm {
        let kept = select(&what.policy, &checkpoints, now);
        // Only a tag rule can keep nothing: a misspelt tag must not forget all checkpoints.
        if kept.is_empty() {
            return Err(RepoError::NothingKept { vm: vm.into() });
        }
        reasons.extend(kept);
    }
    let mut report = ForgetReport::default();
    for summary in all {
        let why = reasons.remove(&summary.id);
        let unwanted = why.is_none() && governed(&summary);
        match unwanted || what.ids.contains(&summary.id) {
            true => report.forgotten.push(summary),
            false => report.kept.push((summary, why.unwrap_or_default())),
        }
    }
    Ok(report)
}
