//! Checkpoints copied into another repository: the same memory under another key, and complete without the
//! original.

use stillframe_page::GuestPage;

use super::support::{Dice, Vm, WAIT, forget_ids, init, test_dir};
use crate::{CheckpointId, Copied, Copies, RepoError, Repository, WorkingSet};

fn copy(
    from: &mut Repository,
    id: &CheckpointId,
    to: &mut Repository,
) -> Result<Copied, RepoError> {
    let mut copies = Copies::of(to).unwrap();
    from.copy_to(id, to, &mut copies, WAIT, &mut |_| {})
}

/// A repository with checkpoints of a VM, each with layers and deltas over the one before.
fn taken(repo: &mut Repository, count: usize) -> Vec<(CheckpointId, Vm)> {
    let mut vm = Vm::new("vm", 1500);
    let mut dice = Dice(21);
    vm.run(&mut dice, 1000);
    let mut taken = Vec::new();
    for _ in 0..count {
        vm.run(&mut dice, 60);
        vm.tags = vec!["nightly".parse().unwrap()].try_into().unwrap();
        vm.note = Some("before the upgrade".parse().unwrap());
        taken.push((vm.checkpoint(repo).unwrap(), vm.clone()));
    }
    taken
}

#[test]
fn a_copy_has_the_content_of_the_original() {
    let dirs = [test_dir(), test_dir()];
    let [mut from, mut to] = [&dirs[0], &dirs[1]].map(|dir| init(dir.path()));
    let taken = taken(&mut from, 20);
    let (id, vm) = &taken[19];
    let set = WorkingSet {
        pages: vec![GuestPage::new(0, 7), GuestPage::new(0, 3)],
    };
    assert!(
        from.reader(WAIT)
            .unwrap()
            .record_working_set(id, &set)
            .unwrap()
    );
    let copied = copy(&mut from, id, &mut to).unwrap();
    assert!(!copied.known && copied.id != *id);
    assert!(vm.compare(&mut to, &copied.id).unwrap());
    assert_eq!(to.working_set(&copied.id).unwrap(), Some(set));
    assert_eq!(to.check(true, &mut |_| {}).unwrap().problems, []);
    let [here, there] = [from.manifest(id).unwrap(), to.manifest(&copied.id).unwrap()];
    assert_eq!(
        (&here.vm, here.time, &here.downtime_us),
        (&there.vm, there.time, &there.downtime_us)
    );
    assert_eq!((&here.tags, &here.note), (&there.tags, &there.note));
    assert!(!there.tags.is_empty() && there.note.is_some());
    assert_eq!(there.vm_record["label"], here.vm_record["label"]);
    // Its parent is not in the target, so it names none. The repositories share no ids.
    assert!(here.parent.is_some() && there.parent.is_none());
    assert_ne!(here.ram[0].root, there.ram[0].root);
    assert_eq!(
        there.pages.total,
        there.pages.new + there.pages.duplicate + there.pages.zero
    );
    // It is complete without the original.
    drop(from);
    let [source, _target] = dirs;
    drop(source);
    assert!(vm.compare(&mut to, &copied.id).unwrap());
}

#[test]
fn the_next_copy_shares_what_it_can() {
    let dirs = [test_dir(), test_dir()];
    let [mut from, mut to] = [&dirs[0], &dirs[1]].map(|dir| init(dir.path()));
    let taken = taken(&mut from, 3);
    let first = copy(&mut from, &taken[0].0, &mut to).unwrap();
    let next = copy(&mut from, &taken[1].0, &mut to).unwrap();
    assert!(next.pages.new < first.pages.new / 5, "{next:?}");
    assert_eq!(to.manifest(&next.id).unwrap().parent, Some(first.id));
    // Neither copy needs the other.
    let forget = forget_ids(vec![first.id]);
    to.forget(&forget).unwrap();
    to.prune(false, &mut |_| {}).unwrap();
    assert!(taken[1].1.compare(&mut to, &next.id).unwrap());
}

#[test]
fn a_checkpoint_is_copied_once() {
    let dirs = [test_dir(), test_dir(), test_dir()];
    let [mut one, mut two, mut three] = [&dirs[0], &dirs[1], &dirs[2]].map(|dir| init(dir.path()));
    let taken = taken(&mut one, 2);
    let id = taken[1].0;
    let copied = copy(&mut one, &id, &mut two).unwrap();
    let again = copy(&mut one, &id, &mut two).unwrap();
    assert_eq!((again.known, again.id), (true, copied.id));
    assert_eq!(two.manifests().unwrap().len(), 1);
    // A copy of a copy counts as a copy of the original, whatever its source.
    let far = copy(&mut two, &copied.id, &mut three).unwrap();
    assert_eq!((far.known, far.original.checkpoint), (false, id));
    assert!(taken[1].1.compare(&mut three, &far.id).unwrap());
    assert!(copy(&mut one, &id, &mut three).unwrap().known);
    let back = copy(&mut three, &far.id, &mut one).unwrap();
    assert_eq!((back.known, back.id), (true, id));
}

/// Damaged data is not copied.
#[test]
fn an_unreadable_checkpoint_is_not_copied() {
    let dirs = [test_dir(), test_dir()];
    let [mut from, mut to] = [&dirs[0], &dirs[1]].map(|dir| init(dir.path()));
    let taken = taken(&mut from, 1);
    for name in from.store.names(crate::store::local::Area::Packs).unwrap() {
        let path = from.store.path(crate::store::local::Area::Packs, &name);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[100] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    let error = copy(&mut from, &taken[0].0, &mut to).unwrap_err();
    assert!(matches!(error, RepoError::Damaged { .. }), "{error}");
    assert!(to.manifests().unwrap().is_empty());
    assert!(
        to.store
            .names(crate::store::local::Area::Packs)
            .unwrap()
            .is_empty()
    );
}
