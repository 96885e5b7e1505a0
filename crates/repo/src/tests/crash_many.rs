//! Crashes of the machine while two writers and a pruner use one repository: every checkpoint that was committed
//! and is not being forgotten exists and is complete.
//!
//! The three are threads, each with a store of its own as processes have. At each step on the disk one of them
//! may be delayed, so that their steps interleave differently for every seed. All steps are recorded as one
//! sequence, which is cut at random points; a state that a crash could leave there is written and checked.
//! `STILLFRAME_CRASH_SEEDS=300` tries that many seeds (2 without it).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::crash::{Disk, files_below, lay_out_anew};
use super::faults::{Event, Faults};
use super::support::{Dice, SMALL_PACKS, Vm, forget_ids, init, open, password, test_dir};
use crate::store::local::LocalStore;
use crate::{CheckpointId, Repository};

/// Number of checkpoints of each writer.
const CHECKPOINTS: usize = 14;
/// Number of rounds of the pruner.
const PRUNES: usize = 4;
/// Number of cuts of each recording.
const CUTS: u64 = 8;

/// A checkpoint that exists from event `since` on.
#[derive(Clone)]
struct Committed {
    id: CheckpointId,
    vm: Arc<Vm>,
    since: usize,
    /// It may be gone from this event on.
    forgotten: Option<usize>,
}

type Journal = Arc<Mutex<Vec<Committed>>>;

fn store(dir: &Path, faults: &Faults, seed: u64) -> Repository {
    let faults = faults.of_another();
    let mut dice = Dice(seed);
    faults.before_each(move |_| match dice.below(8) {
        0 => std::thread::sleep(Duration::from_micros(dice.below(1500))),
        1..4 => std::thread::yield_now(),
        _ => {}
    });
    let store = LocalStore::with_faults(dir, faults);
    let mut repo = Repository::open_at(store, &password()).unwrap();
    // One of the writers.
    if seed % 2 == 1 {
        repo.pack_limits = SMALL_PACKS;
    }
    repo
}

/// Takes checkpoints; they share pages with those of the other writer.
fn write(repo: &mut Repository, faults: &Faults, journal: &Journal, seed: u64, label: &str) {
    // Both writers begin with the same memory.
    let mut vm = Vm::new(label, 160);
    vm.run(&mut Dice(5), 120);
    let mut dice = Dice(seed);
    for round in 0..CHECKPOINTS {
        if round % 5 == 4 {
            vm.forget_parent();
        }
        vm.run(&mut dice, 12);
        let id = vm.checkpoint(repo).unwrap();
        journal.lock().unwrap().push(Committed {
            id,
            vm: Arc::new(vm.clone()),
            since: faults.event_count(),
            forgotten: None,
        });
    }
}

/// Forgets some of the checkpoints, and prunes.
fn prune(repo: &mut Repository, faults: &Faults, journal: &Journal, seed: u64) {
    let mut dice = Dice(seed);
    for _ in 0..PRUNES {
        std::thread::sleep(Duration::from_millis(dice.below(20)));
        let mut ids = Vec::new();
        for committed in journal.lock().unwrap().iter_mut() {
            if committed.forgotten.is_none() && dice.below(3) == 0 {
                committed.forgotten = Some(faults.event_count());
                ids.push(committed.id);
            }
        }
        let forget = forget_ids(ids);
        repo.forget(&forget).unwrap();
        repo.prune(false, &mut |_| {}).unwrap();
    }
}

/// Runs all three. Returns the steps in their order, and what was committed.
fn record(dir: &Path, seed: u64) -> (Vec<Event>, Vec<Committed>) {
    let faults = Faults::default();
    faults.record();
    let journal = Journal::default();
    std::thread::scope(|scope| {
        for (number, label) in [(1, "one"), (2, "two")] {
            let (faults, journal) = (&faults, &journal);
            let seed = seed * 8 + number;
            let mut repo = store(dir, faults, seed);
            scope.spawn(move || write(&mut repo, faults, journal, seed, label));
        }
        let mut repo = store(dir, &faults, seed * 8 + 3);
        let (faults, journal) = (&faults, &journal);
        scope.spawn(move || prune(&mut repo, faults, journal, seed * 8 + 4));
    });
    let committed = journal.lock().unwrap().clone();
    (faults.events(), committed)
}

/// The checkpoints that must exist after this many events.
fn due(committed: &[Committed], events: usize) -> Vec<&Committed> {
    let there = committed.iter().filter(|one| one.since <= events);
    there
        .filter(|one| one.forgotten.is_none_or(|from| from >= events))
        .collect()
}

/// Checks one state of the disk.
fn examine(dir: &Path, due: &[&Committed], context: &str, dice: &mut Dice) {
    // Their processes are gone.
    let _ = std::fs::remove_dir_all(dir.join("locks"));
    let mut repo = open(dir);
    let report = repo.check(true, &mut |_| {}).unwrap();
    assert_eq!(report.problems, [], "{context}");
    for one in due {
        assert!(repo.has_manifest(&one.id).unwrap(), "{context}: {}", one.id);
    }
    if !due.is_empty() {
        let one = due[dice.below(due.len() as u64) as usize];
        assert!(one.vm.compare(&mut repo, &one.id).unwrap(), "{context}");
    }
    // The next prune removes nothing that is needed.
    repo.prune(false, &mut |_| {}).unwrap();
    let report = repo.check(true, &mut |_| {}).unwrap();
    assert_eq!(report.problems, [], "{context}, pruned");
    for one in due {
        assert!(one.vm.compare(&mut repo, &one.id).unwrap(), "{context}");
    }
}

/// Returns the number of states that were checked.
fn try_seed(seed: u64) -> u64 {
    let live = test_dir();
    drop(init(live.path()));
    let before = files_below(live.path());
    let (events, committed) = record(live.path(), seed);
    assert_eq!(committed.len(), 2 * CHECKPOINTS, "seed {seed}");
    let mut dice = Dice(seed);
    let mut cuts: Vec<usize> = (0..CUTS)
        .map(|_| dice.below(events.len() as u64) as usize)
        .collect();
    cuts.push(events.len() - 1);
    let mut disk = Disk::with(before);
    let mut tried = 0;
    for (at, event) in events.iter().enumerate() {
        disk.apply(event);
        for _ in cuts.iter().filter(|cut| **cut == at) {
            for kept in ["nothing", "all", "some"] {
                let files = disk.crash(&mut || match kept {
                    "nothing" => false,
                    "all" => true,
                    _ => dice.below(2) == 0,
                });
                let dir = lay_out_anew(&files, live.path());
                let total = events.len();
                let context =
                    format!("seed {seed}, event {at} of {total} ({event:?}), {kept} kept");
                examine(dir.path(), &due(&committed, at + 1), &context, &mut dice);
                tried += 1;
            }
        }
    }
    tried
}

#[test]
fn checkpoints_of_several_processes_survive_any_crash() {
    let seeds = std::env::var("STILLFRAME_CRASH_SEEDS");
    let seeds = seeds.map_or(2, |text| text.parse().unwrap());
    let tried: u64 = (0..seeds).map(try_seed).sum();
    eprintln!("{seeds} seeds, {tried} states of the disk");
    assert!(tried >= seeds * CUTS * 3, "{tried}");
}

/// The model itself: a file in a folder whose own name is not synced does not exist.
#[test]
fn a_folder_without_a_durable_name_is_empty() {
    let file = PathBuf::from("/r/packs/ab/x");
    let events = [
        Event::CreateFolder("/r/packs/ab".into()),
        Event::SyncFile("/r/tmp/x".into()),
        Event::Rename("/r/tmp/x".into(), file.clone(), Arc::default()),
        Event::SyncFolder("/r/packs/ab".into()),
    ];
    let mut disk = Disk::default();
    events.iter().for_each(|event| disk.apply(event));
    assert!(disk.crash(&mut || false).is_empty());
    assert!(disk.crash(&mut || true).contains_key(&file));
    disk.apply(&Event::SyncFolder("/r/packs".into()));
    assert!(disk.crash(&mut || false).contains_key(&file));
}
