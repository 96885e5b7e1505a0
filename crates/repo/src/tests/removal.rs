//! Forget and prune: kept checkpoints can be read, and the space of the others is freed.

use jiff::{SignedDuration, Timestamp};

use super::support::{Dice, Vm, WAIT, forget_ids, init, keep_last, open, test_dir};
use crate::{CheckpointId, ErrorClass, Forget, KeepPolicy, RepoError, Repository, Tags};

fn tree_bytes(dir: &std::path::Path) -> u64 {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| match path.is_dir() {
            true => tree_bytes(&path),
            false => path.metadata().unwrap().len(),
        })
        .sum()
}

fn assert_clean(repo: &mut Repository) {
    let report = repo.check(true, &mut |_| {}).unwrap();
    assert_eq!(report.problems, []);
}

/// Checkpoints of one VM, an hour apart, and the VM at each.
fn history(repo: &mut Repository, label: &str, count: i64) -> Vec<(CheckpointId, Vm)> {
    let mut dice = Dice(label.len() as u64);
    let mut vm = Vm::new(label, 700);
    let start: Timestamp = "2026-05-01T00:30:00Z".parse().unwrap();
    (0..count)
        .map(|hour| {
            vm.run(&mut dice, 200);
            let time = start + SignedDuration::from_hours(hour);
            (vm.checkpoint_at(repo, time).unwrap(), vm.clone())
        })
        .collect()
}

#[test]
fn prune_frees_forgotten_checkpoints_and_keeps_the_rest() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let kept = history(&mut repo, "kept", 3);
    let alone = tree_bytes(dir.path());
    let gone = history(&mut repo, "gone!", 12);
    let ids: Vec<CheckpointId> = gone.iter().map(|(id, _)| *id).collect();
    let forget = forget_ids(ids.clone());
    let report = repo.forget(&forget).unwrap();
    assert_eq!(report.forgotten.len(), 12);
    assert_eq!(report.kept.len(), 3);

    let dry_run = repo.prune(true, &mut |_| {}).unwrap();
    let before = tree_bytes(dir.path());
    let report = repo.prune(false, &mut |_| {}).unwrap();
    assert_eq!(dry_run, report);
    assert_eq!(report.packs_removed, 12);
    assert!(report.bytes_after < report.bytes_before);
    let after = tree_bytes(dir.path());
    // Except the names of the replaced index files.
    assert!(
        after < before && after <= alone + 1024,
        "{alone} {before} {after}"
    );
    assert_clean(&mut repo);
    for mut repo in [repo, open(dir.path())] {
        for (id, vm) in &kept {
            assert!(vm.compare(&mut repo, id).unwrap());
        }
        assert!(!repo.has_manifest(&ids[0]).unwrap());
    }
}

#[test]
fn packs_with_much_waste_are_repacked() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    // Each checkpoint overwrites a third of the one before: old packs become mostly waste.
    let all = history(&mut repo, "vm", 30);
    let before = tree_bytes(&dir.path().join("packs"));
    repo.forget(&keep_last(2)).unwrap();
    let report = repo.prune(false, &mut |_| {}).unwrap();
    assert!(report.packs_repacked > 0, "{report:?}");
    let after = tree_bytes(&dir.path().join("packs"));
    assert_eq!(after, report.bytes_after);
    assert!(after * 4 < before * 3, "{before} {after}");
    assert_clean(&mut repo);
    for (id, vm) in &all[28..] {
        assert!(vm.compare(&mut repo, id).unwrap());
    }
    // Nothing is left to do.
    let again = repo.prune(false, &mut |_| {}).unwrap();
    assert_eq!((again.packs_removed, again.packs_repacked), (0, 0));
    assert_eq!(again.bytes_before, again.bytes_after);
}

#[test]
fn many_small_packs_are_merged() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut dice = Dice(3);
    let mut vm = Vm::new("vm", 600);
    let taken: Vec<_> = (0..80)
        .map(|_| {
            vm.run(&mut dice, 3);
            (vm.checkpoint(&mut repo).unwrap(), vm.clone())
        })
        .collect();
    let report = repo.prune(false, &mut |_| {}).unwrap();
    assert!(report.packs_repacked >= 60, "{report:?}");
    assert!(repo.check(true, &mut |_| {}).unwrap().packs < 10);
    for (id, vm) in &taken {
        assert!(vm.compare(&mut repo, id).unwrap());
    }
}

#[test]
fn a_policy_applies_to_each_vm_on_its_own() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    history(&mut repo, "one", 5);
    history(&mut repo, "three", 4);
    let policy = KeepPolicy {
        last: 1,
        daily: 1,
        ..KeepPolicy::default()
    };
    let only_one = Forget {
        policy: policy.clone(),
        vm: Some("one".into()),
        dry_run: true,
        ..Forget::default()
    };
    let report = repo.forget(&only_one).unwrap();
    assert_eq!(report.forgotten.len(), 4);
    assert!(report.forgotten.iter().all(|summary| summary.vm == "one"));
    assert_eq!(
        repo.manifests().unwrap().len(),
        9,
        "a dry run removes nothing"
    );
    let report = repo
        .forget(&Forget {
            policy,
            ..Forget::default()
        })
        .unwrap();
    assert_eq!(report.forgotten.len(), 7);
    let labels: Vec<_> = repo
        .manifests()
        .unwrap()
        .into_iter()
        .map(|(_, m)| m.vm)
        .collect();
    assert_eq!(labels.len(), 2);
    assert!(labels.contains(&"one".into()) && labels.contains(&"three".into()));
}

/// Checkpoints of one VM, every second one with the tag `even`.
fn tagged(repo: &mut Repository, label: &str, count: usize) -> Vec<CheckpointId> {
    let mut vm = Vm::new(label, 10);
    let even = Tags::try_from(vec!["even".parse().unwrap()]).unwrap();
    let tags = [even, Tags::default()];
    (0..count)
        .map(|n| {
            vm.tags = tags[n % 2].clone();
            vm.run(&mut Dice(n as u64), 5);
            vm.checkpoint(repo).unwrap()
        })
        .collect()
}

#[test]
fn a_policy_applies_only_to_checkpoints_with_the_tags() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let all = tagged(&mut repo, "vm", 6);
    let what = Forget {
        tags: vec!["even".parse().unwrap()],
        ..keep_last(1)
    };
    let report = repo.forget(&what).unwrap();
    let gone: Vec<CheckpointId> = report.forgotten.iter().map(|gone| gone.id).collect();
    assert_eq!(gone, [all[0], all[2]]);
    let reasons: Vec<_> = report
        .kept
        .iter()
        .map(|(one, why)| (one.id, why.len()))
        .collect();
    assert_eq!(
        reasons,
        [(all[1], 0), (all[3], 0), (all[4], 1), (all[5], 0)]
    );
    // No checkpoint has both tags, so the policy applies to none.
    let tags = vec!["even".parse().unwrap(), "odd".parse().unwrap()];
    let report = repo.forget(&Forget { tags, ..what }).unwrap();
    assert!(report.forgotten.is_empty());
    assert_eq!(repo.manifests().unwrap().len(), 4);
}

#[test]
fn a_tag_that_no_checkpoint_of_a_vm_has_forgets_nothing() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let of_one = tagged(&mut repo, "one", 2);
    let of_other = Vm::new("other", 10).checkpoint(&mut repo).unwrap();
    let mut what = Forget {
        policy: KeepPolicy {
            tags: vec!["even".parse().unwrap()],
            ..KeepPolicy::default()
        },
        ..Forget::default()
    };
    let error = repo.forget(&what).unwrap_err();
    assert!(matches!(&error, RepoError::NothingKept { vm } if vm == "other"));
    assert_eq!(repo.manifests().unwrap().len(), 3);
    what.vm = Some("one".into());
    assert_eq!(repo.forget(&what).unwrap().forgotten[0].id, of_one[1]);
    let left = repo.manifests().unwrap();
    let left: Vec<CheckpointId> = left.into_iter().map(|(id, _)| id).collect();
    assert_eq!(left, [of_one[0], of_other]);
}

#[test]
fn an_empty_policy_or_an_unknown_id_forgets_nothing() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let all = history(&mut repo, "vm", 2);
    assert!(
        repo.forget(&Forget::default())
            .unwrap()
            .forgotten
            .is_empty()
    );
    let ids = vec![all[0].0, CheckpointId([0; 32])];
    let error = repo.forget(&forget_ids(ids)).unwrap_err();
    assert_eq!(error.class(), ErrorClass::NotFound);
    assert_eq!(repo.manifests().unwrap().len(), 2);
}

/// The engine of a long watch, when its writer's parent was forgotten and pruned in between.
#[test]
fn a_writer_notices_what_another_process_pruned() {
    let dir = test_dir();
    let mut watch = init(dir.path());
    let mut dice = Dice(9);
    let mut vm = Vm::new("vm", 700);
    vm.run(&mut dice, 500);
    let first = vm.checkpoint(&mut watch).unwrap();

    let mut other = open(dir.path());
    other.forget(&forget_ids(vec![first])).unwrap();
    other.prune(false, &mut |_| {}).unwrap();

    // The watch still has the old index in memory; it must not rely on pruned blobs.
    let second = vm.checkpoint(&mut watch).unwrap();
    assert!(vm.compare(&mut watch, &second).unwrap());
    assert_clean(&mut other);
}

#[test]
fn prune_refuses_references_that_it_cannot_follow() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let all = history(&mut repo, "vm", 2);
    let manifest = dir.path().join("manifests").join(all[0].0.to_hex());
    let good = std::fs::read(&manifest).unwrap();
    std::fs::write(&manifest, &good[..good.len() - 1]).unwrap();
    let error = repo.prune(false, &mut |_| {}).unwrap_err();
    assert!(matches!(error, RepoError::Damaged { .. }), "{error}");
    std::fs::write(&manifest, good).unwrap();
    repo.prune(false, &mut |_| {}).unwrap();
    assert!(all[0].1.compare(&mut repo, &all[0].0).unwrap());
}

#[test]
fn the_index_can_be_rebuilt_from_the_packs() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let all = history(&mut repo, "vm", 4);
    let mut files: Vec<_> = std::fs::read_dir(dir.path().join("index"))
        .unwrap()
        .collect();
    std::fs::remove_file(files.pop().unwrap().unwrap().path()).unwrap();
    std::fs::write(files.pop().unwrap().unwrap().path(), b"rubbish").unwrap();
    let mut repo = open(dir.path());
    assert_eq!(
        repo.reader(WAIT).err().unwrap().class(),
        ErrorClass::Damaged
    );
    let report = repo.rebuild_index(&mut |_| {}).unwrap();
    assert_eq!(
        (
            report.packs,
            report.problems.len(),
            report.index_files_replaced
        ),
        (4, 0, 3)
    );
    assert_clean(&mut repo);
    for (id, vm) in &all {
        assert!(vm.compare(&mut repo, id).unwrap());
    }
}

/// A full checkpoint stores the pages of a lost pack again, so earlier checkpoints can be read.
#[test]
fn a_full_checkpoint_stores_the_pages_of_a_lost_pack_again() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 600);
    vm.run(&mut Dice(3), 400);
    let first = vm.checkpoint(&mut repo).unwrap();
    let pack = repo
        .stats()
        .map(|_| repo.index.packs()[0].name.to_string())
        .unwrap();
    std::fs::remove_file(repo.store.path(crate::store::local::Area::Packs, &pack)).unwrap();
    assert!(!repo.check(false, &mut |_| {}).unwrap().is_clean());
    assert!(vm.compare(&mut repo, &first).is_err());
    repo.rebuild_index(&mut |_| {}).unwrap();
    vm.forget_parent();
    vm.checkpoint(&mut repo).unwrap();
    assert_clean(&mut repo);
    assert!(vm.compare(&mut repo, &first).unwrap());
}

/// Packs that were moved to another disk, with links in their place.
#[test]
fn packs_behind_links_are_pruned_like_others() {
    let dir = test_dir();
    let elsewhere = test_dir();
    let mut repo = init(dir.path());
    let taken = history(&mut repo, "moved", 4);
    for name in repo.store.names(crate::store::local::Area::Packs).unwrap() {
        let path = repo.store.path(crate::store::local::Area::Packs, &name);
        let moved = elsewhere.path().join(&name);
        std::fs::copy(&path, &moved).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&moved, &path).unwrap();
    }
    let mut repo = open(dir.path());
    assert_clean(&mut repo);
    repo.forget(&forget_ids(vec![taken[0].0])).unwrap();
    repo.prune(false, &mut |_| {}).unwrap();
    repo.rebuild_index(&mut |_| {}).unwrap();
    assert_clean(&mut repo);
    for (id, vm) in &taken[1..] {
        assert!(vm.compare(&mut repo, id).unwrap());
    }
}
