//! Death at every point. Three ways, from exact to real: every step on the disk made to fail in
//! turn; every crash of the machine that the fsyncs allow, worked out from a recording; and a child
//! process killed at random moments (`kill.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::faults::Event;
use super::support::{Dice, Vm, copy_tree, init, open, test_dir};
use crate::{CheckpointId, Forget, KeepPolicy, RepoError, Repository};

/// Everything that can be read must be whole, and the checkpoints given must be there.
fn assert_intact(dir: &Path, expected: &[(CheckpointId, Vm)], context: &str) -> Repository {
    let mut repo = open(dir);
    let report = repo.check(true, &mut |_| {}).unwrap();
    assert_eq!(report.problems, [], "{context}");
    for (id, vm) in expected {
        assert!(vm.compare(&mut repo, id).unwrap(), "{context}: {id}");
    }
    repo
}

/// What a process that died leaves: its locks, which name a process that is gone.
fn drop_locks(dir: &Path) {
    std::fs::remove_dir_all(dir.join("locks")).unwrap();
}

type Operation = fn(&mut Repository, &mut Vm, &[CheckpointId]) -> Result<(), RepoError>;

const OPERATIONS: [(&str, Operation); 4] = [
    ("checkpoint", |repo, vm, _| {
        vm.run(&mut Dice(77), 60);
        vm.checkpoint(repo).map(|_| ())
    }),
    ("forget", |repo, _, ids| {
        repo.forget(&Forget {
            ids: ids[..3].to_vec(),
            ..Forget::default()
        })
        .map(|_| ())
    }),
    ("forget and prune", |repo, _, ids| {
        repo.forget(&Forget {
            ids: ids[..4].to_vec(),
            ..Forget::default()
        })?;
        repo.prune(false, &mut |_| {}).map(|_| ())
    }),
    ("rebuild", |repo, _, _| {
        repo.rebuild_index(&mut |_| {}).map(|_| ())
    }),
];

#[test]
fn every_step_may_be_the_last() {
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
    // So many that the next commit merges index files.
    for _ in 6..32 {
        vm.run(&mut dice, 2);
        vm.checkpoint(&mut repo).unwrap();
    }
    drop(repo);
    for (name, operation) in OPERATIONS {
        for recovers in [false, true] {
            let failed =
                |steps: &u64| fail_at(base.path(), &taken, name, operation, *steps, recovers);
            let last = (0..5000).find(|steps| !failed(steps));
            assert!(
                last.is_some_and(|steps| steps >= 7),
                "{name} took {last:?} steps"
            );
        }
    }
}

/// Lets one step of an operation fail, on a copy of a repository with these checkpoints, and looks
/// at what is left. Without `recovers` all later steps fail too, as if the process had died; with
/// it the process lives on and tidies up. Whether the operation got that far.
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
        // The same handle goes on, with what it has in memory.
        let id = vm.checkpoint(&mut repo).unwrap();
        assert!(vm.compare(&mut repo, &id).unwrap(), "{context}");
        drop_locks(dir.path());
    }
    drop(repo);
    // The last two are never forgotten; the others may be gone, but if there, whole.
    let mut repo = assert_intact(dir.path(), &taken[4..], &context);
    let mut survivors = taken.to_vec();
    survivors.retain(|(id, _)| repo.has_manifest(id).unwrap());
    repo.prune(false, &mut |_| {}).unwrap();
    assert_intact(dir.path(), &survivors, &context);
    fired
}

/// What a name stands for from now on: a file of these bytes, or none.
type Change = (PathBuf, Option<Arc<Vec<u8>>>);

/// Files by their paths.
pub(super) type Files = BTreeMap<PathBuf, Arc<Vec<u8>>>;

/// The disk after a crash: what was forced to it, and of the rest what chance kept.
#[derive(Default)]
pub(super) struct Disk {
    /// Files whose names are durable.
    files: Files,
    synced: Vec<PathBuf>,
    /// Name changes not yet forced to disk, by folder.
    pending: BTreeMap<PathBuf, Vec<Change>>,
    /// Folders that were made, and those of them whose own names are not forced to disk.
    folders: BTreeSet<PathBuf>,
    nameless: Vec<PathBuf>,
}

impl Disk {
    /// One that has these files to begin with.
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
                    // A name for contents that never reached the disk.
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

    /// What a crash now could leave: any of the changes not forced to disk, in any combination.
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

/// What must be there once so many events have happened, unless it is being forgotten.
struct Milestone {
    events: usize,
    committed: Vec<(CheckpointId, Vm)>,
}

/// A life of a repository: checkpoints of two VMs, forgetting, pruning, recorded.
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
            repo.forget(&Forget {
                ids,
                ..Forget::default()
            })
            .unwrap();
            if round % 24 == 23 {
                repo.prune(false, &mut |_| {}).unwrap();
            }
        }
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

/// Lays out a disk as files.
pub(super) fn lay_out_anew(files: &Files, live: &Path) -> tempfile::TempDir {
    let empty = test_dir();
    lay_out(files, live, empty.path())
}

/// Lays out a disk as files, on top of an empty repository.
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

/// Whether an event is about a lock; those are not part of what must survive.
fn is_about_locks(event: &Event) -> bool {
    match event {
        Event::Rename(_, path, _) | Event::Remove(path) => {
            path.parent().unwrap().ends_with("locks")
        }
        _ => false,
    }
}

#[test]
fn any_crash_of_the_machine_leaves_what_was_committed() {
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
        // Some of the points, and around removals more of them.
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
            // Comparing all would take long; the oldest has been through the most.
            let ends = committed.iter().take(1).chain(committed.last());
            let mut repo = assert_intact(dir.path(), &ends.cloned().collect::<Vec<_>>(), &context);
            for (id, _) in committed {
                assert!(repo.has_manifest(id).unwrap(), "{context}");
            }
            if kept == "some" {
                let policy = KeepPolicy {
                    last: 2,
                    ..KeepPolicy::default()
                };
                repo.forget(&Forget {
                    policy,
                    ..Forget::default()
                })
                .unwrap();
                repo.prune(false, &mut |_| {}).unwrap();
                assert_intact(dir.path(), &[], &context);
            }
            tried += 1;
        }
    }
    assert!(tried > 100, "{tried}");
}
