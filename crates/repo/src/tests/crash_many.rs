//! Crashes of the machine while two writers and a pruner are at work on one repository: whatever was
//! reported as committed, and is not being forgotten, is there and whole.
//!
//! The three are threads, each with a store of its own as processes have; at each step on the disk one of
//! them may be held for a moment, so that their steps mix in another way for every seed. All steps are
//! recorded as one sequence, cut at random points, and what a crash could leave there is laid out and
//! checked. `STILLFRAME_CRASH_SEEDS=300` tries so many seeds (2 without it).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::crash::{Disk, files_below, lay_out_anew};
use super::faults::{Event, Faults};
use super::support::{Dice, Vm, init, open, password, test_dir};
use crate::store::local::LocalStore;
use crate::{CheckpointId, Forget, Repository};

/// Checkpoints of each writer.
const CHECKPOINTS: usize = 14;
/// Rounds of the pruner.
const PRUNES: usize = 4;
/// Cuts of each recording.
const CUTS: u64 = 8;

/// A checkpoint that is there from this event on.
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
    Repository::open_at(LocalStore::with_faults(dir, faults), &password()).unwrap()
}

/// Takes checkpoints; they share pages with those of the other writer.
fn write(repo: &mut Repository, faults: &Faults, journal: &Journal, seed: u64, label: &str) {
    // The same memory to begin with, for both.
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

/// Forgets some of what there is, and prunes.
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
        let forget = Forget {
            ids,
            ..Forget::default()
        };
        repo.forget(&forget).unwrap();
        repo.prune(false, &mut |_| {}).unwrap();
    }
}

/// Lets all three work; the steps in their order, and what was committed.
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

/// What must be there after so many events.
fn due(committed: &[Committed], events: usize) -> Vec<&Committed> {
    let there = committed.iter().filter(|one| one.since <= events);
    there
        .filter(|one| one.forgotten.is_none_or(|from| from >= events))
        .collect()
}

/// Looks at one state of the disk.
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
    // And the next prune takes nothing away that is needed.
    repo.prune(false, &mut |_| {}).unwrap();
    let report = repo.check(true, &mut |_| {}).unwrap();
    assert_eq!(report.problems, [], "{context}, pruned");
    for one in due {
        assert!(one.vm.compare(&mut repo, &one.id).unwrap(), "{context}");
    }
}

/// How many states were looked at.
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
fn no_crash_loses_what_several_have_committed() {
    let seeds = std::env::var("STILLFRAME_CRASH_SEEDS");
    let seeds = seeds.map_or(2, |text| text.parse().unwrap());
    let tried: u64 = (0..seeds).map(try_seed).sum();
    eprintln!("{seeds} seeds, {tried} states of the disk");
    assert!(tried >= seeds * CUTS * 3, "{tried}");
}

/// The model itself: a file in a folder whose own name is not on disk is not there.
#[test]
fn a_folder_without_a_name_holds_nothing() {
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
