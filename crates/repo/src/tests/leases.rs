//! Leases: a checkpoint that a VM being restored still needs is not removed.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::support::{Dice, Vm, WAIT, forget_ids, init, keep_last, test_dir};
use crate::{CheckpointId, ErrorClass, Forget, RepoError, Repository};

/// A process that lives until it is dropped, and when it started.
struct Process(Child, u64);

impl Process {
    fn start() -> Process {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let fields = stat.rsplit(')').next().unwrap().split_whitespace();
        let started = { fields }.nth(19).unwrap().parse().unwrap();
        Process(child, started)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A repository with three checkpoints, and the VM as it was at each.
fn three(dir: &Path) -> (Repository, Vec<(CheckpointId, Vm)>) {
    let mut repo = init(dir);
    let mut vm = Vm::new("vm", 200);
    let mut dice = Dice(3);
    let mut taken = Vec::new();
    for _ in 0..3 {
        vm.run(&mut dice, 150);
        vm.forget_parent();
        taken.push((vm.checkpoint(&mut repo).unwrap(), vm.clone()));
    }
    (repo, taken)
}

/// Leaves a lease, as a killed process would.
fn leave(repo: &mut Repository, id: &CheckpointId, of: &Process) {
    let reader = repo.reader(WAIT).unwrap();
    drop(reader.lease(id, of.0.id(), of.1).unwrap());
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir.join("leases")).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_leased_checkpoint_stays_until_the_vm_has_its_memory() {
    let dir = test_dir();
    let (mut repo, taken) = three(dir.path());
    let (leased, vm) = &taken[0];
    let process = Process::start();
    leave(&mut repo, leased, &process);
    assert_eq!(files(dir.path()).len(), 1);
    let error = repo.forget(&forget_ids(vec![*leased])).unwrap_err();
    assert!(
        matches!(&error, RepoError::Leased { checkpoint, by } if checkpoint == leased && by.holder.pid == process.0.id()),
        "{error}"
    );
    assert_eq!(error.class(), ErrorClass::Locked);
    // A policy leaves it out and reports it.
    let report = repo.forget(&keep_last(1)).unwrap();
    assert_eq!(
        report
            .forgotten
            .iter()
            .map(|gone| gone.id)
            .collect::<Vec<_>>(),
        [taken[1].0]
    );
    assert_eq!(report.leased[0].0.id, *leased);
    repo.prune(false, &mut |_| {}).unwrap();
    assert!(vm.compare(&mut repo, leased).unwrap());
    // A process that continues the restore has the same lease, and ends it.
    let reader = repo.reader(WAIT).unwrap();
    let again = reader.lease(leased, process.0.id(), process.1).unwrap();
    assert_eq!(files(dir.path()).len(), 1);
    again.end().unwrap();
    drop(reader);
    assert_eq!(
        repo.forget(&forget_ids(vec![*leased]))
            .unwrap()
            .forgotten
            .len(),
        1
    );
}

#[test]
fn the_lease_of_an_ended_vm_is_removed() {
    let dir = test_dir();
    let (mut repo, taken) = three(dir.path());
    let process = Process::start();
    leave(&mut repo, &taken[0].0, &process);
    drop(process);
    let report = repo.forget(&keep_last(1)).unwrap();
    assert_eq!((report.forgotten.len(), report.leased.len()), (2, 0));
    assert!(files(dir.path()).is_empty());
    // If the VM has ended before its lease is dropped, no lease is left.
    let process = Process::start();
    let reader = repo.reader(WAIT).unwrap();
    let lease = reader
        .lease(&taken[2].0, process.0.id(), process.1)
        .unwrap();
    drop(process);
    drop(lease);
    assert!(files(dir.path()).is_empty());
    // A forgotten checkpoint cannot be leased.
    let process = Process::start();
    let error = reader.lease(&taken[0].0, process.0.id(), process.1).err();
    assert_eq!(error.unwrap().class(), ErrorClass::NotFound);
    assert!(files(dir.path()).is_empty());
}

#[test]
fn a_vm_of_another_machine_counts_as_alive_until_its_lease_is_broken() {
    let dir = test_dir();
    let (mut repo, taken) = three(dir.path());
    let process = Process::start();
    leave(&mut repo, &taken[0].0, &process);
    drop(process);
    let path = files(dir.path()).remove(0);
    let mut record: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    record["host"] = json!("elsewhere");
    record["boot"] = json!("another boot");
    std::fs::write(&path, record.to_string()).unwrap();
    age(&path, 100_000);
    assert_eq!(repo.forget(&keep_last(1)).unwrap().leased.len(), 1);
    repo.prune(false, &mut |_| {}).unwrap();
    assert!(taken[0].1.compare(&mut repo, &taken[0].0).unwrap());
    let broken = Forget {
        break_leases: true,
        ..keep_last(1)
    };
    let dry = repo
        .forget(&Forget {
            dry_run: true,
            ..broken.clone()
        })
        .unwrap();
    assert_eq!((dry.forgotten.len(), dry.broken.len()), (1, 1));
    assert!(path.exists());
    let report = repo.forget(&broken).unwrap();
    assert_eq!(report.broken[0].holder.host, "elsewhere");
    assert_eq!((report.forgotten.len(), path.exists()), (1, false));
}

fn age(path: &Path, minutes: u64) {
    let old = SystemTime::now() - Duration::from_secs(minutes * 60);
    let file = std::fs::File::options().append(true).open(path);
    file.unwrap().set_modified(old).unwrap();
}

#[test]
fn half_a_lease_blocks_until_it_is_old() {
    let dir = test_dir();
    let (mut repo, _) = three(dir.path());
    let path = dir.path().join("leases/0123.lease");
    std::fs::write(&path, "{\"vers").unwrap();
    let error = repo.forget(&keep_last(1)).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Damaged);
    age(&path, 31);
    assert_eq!(repo.forget(&keep_last(1)).unwrap().forgotten.len(), 2);
    assert!(!path.exists());
    // A later version may have more fields.
    std::fs::write(&path, "{\"version\": 1000000}").unwrap();
    let error = repo.prune(false, &mut |_| {}).unwrap_err();
    assert_eq!(error.class(), ErrorClass::FutureVersion);
    assert!(error.to_string().contains("leases/0123.lease"), "{error}");
}
