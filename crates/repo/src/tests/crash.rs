//! Crashes at every point, in three ways: every step on the disk fails in turn; every state that the fsyncs allow
//! after a crash of the machine is computed from a recording; and a child process is killed at random moments
//! (`kill.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::faults::Event;
use super::support::{
    Dice, SMALL_PACKS, Vm, copy_tree, forget_ids, init, keep_last, open, test_dir,
};
use crate::pack::PackLimits;
use crate::{CheckpointId, RepoError, Repository};

/// Every checkpoint must be complete, and the given ones must exist.
fn assert_intact(dir: &Path, expected: &[(CheckpointId, Vm)], context: &str) -> Repository {
    let mut repo = open(dir);
    let report = repo.check(true, &mut |_| {}).unwrap();
    assert_eq!(report.problems, [], "{context}");
    for (id, vm) in expected {
        assert!(vm.compare(&mut repo, id).unwrap(), "{context}: {id}");
    }
    repo
}

/// Removes the locks that a dead process leaves, which name a process that is gone.
fn drop_locks(dir: &Path) {
    std::fs::remove_dir_all(dir.join("locks")).unwrap();
}

type Operation = fn(&mut Repository, &mut Vm, &[CheckpointId]) -> Result<(), RepoError>;

#[test]
fn every_step_of_a_checkpoint_may_fail() {
    every_step_may_fail("checkpoint", |repo, vm, _| {
        vm.run(&mut Dice(77), 60);
        vm.checkpoint(repo).map(|_| ())
    });
}

#[test]
fn every_step_of_a_checkpoint_of_many_packs_may_fail() {
    every_step_may_fail("checkpoint of many packs", |repo, vm, _| {
        repo.pack_limits = SMALL_PACKS;
        vm.run(&mut Dice(78), 150);
        vm.checkpoint(repo).map(|_| ())
    });
}

#[test]
fn every_step_of_forgetting_may_fail() {
    every_step_may_fail("forget", |repo, _, ids| {
        repo.forget(&forget_ids(ids[..3].to_vec())).map(|_| ())
    });
}

#[test]
fn every_step_of_pruning_may_fail() {
    every_step_may_fail("forget and prune", |repo, _, ids| {
        repo.forget(&forget_ids(ids[..4].to_vec()))?;
        repo.prune(false, &mut |_| {}).map(|_| ())
    });
}

#[test]
fn every_step_of_a_rebuild_may_fail() {
    every_step_may_fail("rebuild", |repo, _, _| {
        repo.rebuild_index(&mut |_| {}).map(|_| ())
    });
}

/// Lets each step of an operation fail in turn.
fn every_step_may_fail(name: &str, operation: Operation) {
    let base = test_dir();
    let mut repo = init(base.path());
    let mut dice = Dice(4);
    let mut vm = Vm::new("vm", 600);
    let taken: Vec<(CheckpointId, Vm)> = (0..6)
        .map(|_| {
            vm.run(&mut dice, 150);
            (vm.checkpoint(&mut repo).unwrap(), vm.clone())
        })
        .collect();
    // Enough for the next commit to merge index files.
    for _ in 6..32 {
        vm.run(&mut dice, 2);
        vm.checkpoint(&mut repo).unwrap();
    }
    drop(repo);
    for recovers in [false, true] {
        let failed = |steps: &u64| fail_at(base.path(), &taken, name, operation, *steps, recovers);
        let last = (0..5000).find(|steps| !failed(steps));
        assert!(
            last.is_some_and(|steps| steps >= 7),
            "{name} took {last:?} steps"
        );
    }
}

/// Lets one step of an operation fail, on a copy of a repository with these checkpoints, and checks the result.
/// Without `recovers` all later steps fail too, as if the process had ended; with it the process continues and
/// cleans up. Returns whether the operation reached that step.
fn fail_at(
    base: &Path,
    taken: &[(CheckpointId, Vm)],
    name: &str,
    operation: Operation,
    steps: u64,
    recovers: bool,
) -> bool {
    let dir = test_dir();
    copy_tree(base, dir.path());
    let ids: Vec<CheckpointId> = taken.iter().map(|(id, _)| *id).collect();
    let mut vm = taken[taken.len() - 1].1.clone();
    let mut repo = open(dir.path());
    repo.store.faults.fail_after(steps, recovers);
    let faults = repo.store.faults.clone();
    let result = operation(&mut repo, &mut vm, &ids);
    let fired = faults.have_fired();
    assert!(fired || result.is_ok(), "{name}, {steps}: {result:?}");
    drop_locks(dir.path());
    let context = format!("{name}, failure after step {steps}, disk recovers: {recovers}");
    if recovers {
        faults.heal();
        // The same handle continues, with its state in memory.
        let id = vm.checkpoint(&mut repo).unwrap();
        assert!(vm.compare(&mut repo, &id).unwrap(), "{context}");
        drop_locks(dir.path());
    }
    drop(repo);
    // The last two are never forgotten; the others may be gone, but must be complete if they exist.
    let mut repo = assert_intact(dir.path(), &taken[4..], &context);
    let mut survivors = taken.to_vec();
    survivors.retain(|(id, _)| repo.has_manifest(id).unwrap());
    repo.prune(false, &mut |_| {}).unwrap();
    assert_intact(dir.path(), &survivors, &context);
    fired
}

/// The new content of a name: a file of these bytes, or none.
type Change = (PathBuf, Option<Arc<Vec<u8>>>);

/// Files by their paths.
pub(super) type Files = BTreeMap<PathBuf, Arc<Vec<u8>>>;

/// A model of the disk after a crash: what was synced, and random parts of the rest.
#[derive(Default)]
pub(super) struct Disk {
    /// Files whose names are durable.
    files: Files,
    synced: Vec<PathBuf>,
    /// Name changes not yet synced, by folder.
    pending: BTreeMap<PathBuf, Vec<Change>>,
    /// Folders that were created, and those of them whose own names are not synced.
    folders: BTreeSet<PathBuf>,
    nameless: Vec<PathBuf>,
}

impl Disk {
    /// A disk with these files.
    pub(super) fn with(files: Files) -> Disk {
        Disk {
            files,
            ..Disk::default()
        }
    }

    pub(super) fn apply(&mut self, event: &Event) {
        match event {
            Event::SyncFile(path) => self.synced.push(path.clone()),
            Event::Rename(from, to, bytes) => {
                let bytes = match self.synced.contains(from) {
                    true => bytes.clone(),
                    // A name for contents that were never synced.
                    false => Arc::new(vec![0; bytes.len() / 2]),
                };
                self.note(to, Some(bytes));
            }
            Event::Remove(path) => self.note(path, None),
            Event::CreateFolder(path) => {
                if self.folders.insert(path.clone()) {
                    self.nameless.push(path.clone());
                }
            }
            Event::SyncFolder(folder) => {
                self.nameless.retain(|made| made.parent() != Some(folder));
                for (path, bytes) in self.pending.remove(folder).unwrap_or_default() {
                    apply_change(&mut self.files, path, bytes);
                }
            }
        }
    }

    fn note(&mut self, path: &Path, bytes: Option<Arc<Vec<u8>>>) {
        let folder = path.parent().unwrap().to_owned();
        self.pending
            .entry(folder)
            .or_default()
            .push((path.to_owned(), bytes));
    }

    /// The files after a crash now: with any of the changes that are not synced, in any combination.
    pub(super) fn crash(&self, keep: &mut dyn FnMut() -> bool) -> Files {
        let mut files = self.files.clone();
        for (path, bytes) in self.pending.values().flatten() {
            if keep() {
                apply_change(&mut files, path.clone(), bytes.clone());
            }
        }
        for folder in &self.nameless {
            if !keep() {
                files.retain(|path, _| path.parent() != Some(folder));
            }
        }
        files
    }
}

fn apply_change(files: &mut Files, path: PathBuf, bytes: Option<Arc<Vec<u8>>>) {
    match bytes {
        Some(bytes) => files.insert(path, bytes),
        None => files.remove(&path),
    };
}

/// The checkpoints that must exist after this many events, unless they are being forgotten.
struct Milestone {
    events: usize,
    committed: Vec<(CheckpointId, Vm)>,
}

/// Records the events of a repository: checkpoints of two VMs, forgetting, pruning.
fn record_life(dir: &Path, seed: u64) -> (Vec<Event>, Vec<Milestone>) {
    let mut repo = open(dir);
    let faults = repo.store.faults.clone();
    faults.record();
    let mut dice = Dice(seed);
    let mut vms = [Vm::new("one", 300), Vm::new("two", 530)];
    let mut committed: Vec<(CheckpointId, Vm)> = Vec::new();
    let mut milestones = Vec::new();
    for round in 0..60 {
        if round % 12 == 11 {
            let keep = 3 + dice.below(4) as usize;
            let cut = committed.len().saturating_sub(keep);
            let ids = committed.drain(..cut).map(|(id, _)| id).collect();
            milestones.push(Milestone {
                events: faults.event_count(),
                committed: committed.clone(),
            });
            repo.forget(&forget_ids(ids)).unwrap();
            if round % 24 == 23 {
                repo.prune(false, &mut |_| {}).unwrap();
            }
        }
        // Some checkpoints have index files before they end.
        repo.pack_limits = [PackLimits::STANDARD, SMALL_PACKS][round % 2];
        let vm = &mut vms[dice.below(2) as usize];
        vm.run(&mut dice, 30);
        let id = vm.checkpoint(&mut repo).unwrap();
        committed.push((id, vm.clone()));
        milestones.push(Milestone {
            events: faults.event_count(),
            committed: committed.clone(),
        });
    }
    (faults.events(), milestones)
}

/// All files in a folder.
pub(super) fn files_below(folder: &Path) -> Files {
    let mut files = Files::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.append(&mut files_below(&path)),
            false => drop(files.insert(path.clone(), Arc::new(std::fs::read(path).unwrap()))),
        }
    }
    files
}

/// Writes a disk as files.
pub(super) fn lay_out_anew(files: &Files, live: &Path) -> tempfile::TempDir {
    let empty = test_dir();
    lay_out(files, live, empty.path())
}

/// Writes a disk as files, on top of an empty repository.
fn lay_out(files: &Files, live: &Path, fresh: &Path) -> tempfile::TempDir {
    let dir = test_dir();
    copy_tree(fresh, dir.path());
    for (path, bytes) in files {
        let path = dir.path().join(path.strip_prefix(live).unwrap());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, &**bytes).unwrap();
    }
    dir
}

/// Whether an event is about a lock; locks need not survive.
fn is_about_locks(event: &Event) -> bool {
    match event {
        Event::Rename(_, path, _) | Event::Remove(path) => {
            path.parent().unwrap().ends_with("locks")
        }
        _ => false,
    }
}

#[test]
fn committed_checkpoints_survive_any_crash_of_the_machine() {
    let live = test_dir();
    drop(init(live.path()));
    let fresh = test_dir();
    copy_tree(live.path(), fresh.path());
    let (events, milestones) = record_life(live.path(), 11);
    let mut dice = Dice(12);
    let mut tried = 0;
    let mut disk = Disk::default();
    for (at, event) in events
        .iter()
        .enumerate()
        .filter(|(_, event)| !is_about_locks(event))
    {
        disk.apply(event);
        // Some of the points, and more of them around removals.
        let one_in = if matches!(event, Event::Remove(_)) {
            3
        } else {
            6
        };
        if dice.below(one_in) != 0 {
            continue;
        }
        let passed = milestones
            .iter()
            .rfind(|milestone| milestone.events <= at + 1);
        let committed = passed.map_or(&[][..], |milestone| &milestone.committed);
        for kept in ["nothing", "all", "some"] {
            let files = disk.crash(&mut || match kept {
                "nothing" => false,
                "all" => true,
                _ => dice.below(2) == 0,
            });
            let dir = lay_out(&files, live.path(), fresh.path());
            let context = format!("crash after event {at}, {kept} kept of what was not on disk");
            // Comparing all would take long; most events happened since the oldest.
            let ends = committed.iter().take(1).chain(committed.last());
            let mut repo = assert_intact(dir.path(), &ends.cloned().collect::<Vec<_>>(), &context);
            for (id, _) in committed {
                assert!(repo.has_manifest(id).unwrap(), "{context}");
            }
            if kept == "some" {
                repo.forget(&keep_last(2)).unwrap();
                repo.prune(false, &mut |_| {}).unwrap();
                assert_intact(dir.path(), &[], &context);
            }
            tried += 1;
        }
    }
    assert!(tried > 100, "{tried}");
}
