//! File systems that refuse writes: a full one, a read-only one. Needs root, to mount.

use std::path::Path;
use std::process::Command;

use super::support::{Dice, Vm, WAIT, forget_ids, init, open, test_dir};
use crate::{ErrorClass, RepoError};

/// A mount that ends with the test.
struct Mount<'a>(&'a Path);

impl<'a> Mount<'a> {
    fn new(arguments: &[&str], at: &'a Path) -> Mount<'a> {
        let status = Command::new("mount")
            .args(arguments)
            .arg(at)
            .status()
            .unwrap();
        assert!(
            status.success(),
            "this test mounts file systems: run it as root"
        );
        Mount(at)
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[test]
fn a_full_disk_is_reported_and_loses_nothing() {
    let place = test_dir();
    let mount = Mount::new(&["-t", "tmpfs", "-o", "size=3m", "none"], place.path());
    let dir = place.path().join("repo");
    let mut repo = init(&dir);
    let mut dice = Dice(6);
    let mut vm = Vm::new("vm", 400);
    vm.run(&mut dice, 150);
    let first = vm.checkpoint(&mut repo).unwrap();
    let at_first = vm.clone();
    let mut failures = 0;
    let mut committed = vec![(first, at_first)];
    for _ in 0..20 {
        vm.run(&mut dice, 300);
        match vm.checkpoint(&mut repo) {
            Ok(id) => committed.push((id, vm.clone())),
            Err(error) => {
                assert_eq!(error.class(), ErrorClass::NoSpace, "{error}");
                assert!(error.to_string().contains("no space left"), "{error}");
                failures += 1;
            }
        }
        // The files of a failed checkpoint are removed, and the rest is complete.
        assert_eq!(repo.check(true, &mut |_| {}).unwrap().problems, []);
    }
    assert!(failures > 5, "{failures}");
    for (id, vm) in &committed {
        assert!(vm.compare(&mut repo, id).unwrap());
    }
    // Forgetting and pruning work on the full disk, and free space. (Not for a repack: so all but the last are
    // forgotten, whose pages the last does not share.)
    let ids = committed.iter().map(|(id, _)| *id).collect();
    repo.forget(&forget_ids(ids)).unwrap();
    repo.prune(false, &mut |_| {}).unwrap();
    vm.checkpoint(&mut repo).unwrap();
    drop(mount);
}

#[test]
fn a_read_only_file_system_can_be_read() {
    let place = test_dir();
    let view = test_dir();
    let mut repo = init(place.path());
    let mut vm = Vm::new("vm", 300);
    vm.run(&mut Dice(2), 100);
    let id = vm.checkpoint(&mut repo).unwrap();
    drop(repo);
    let from = place.path().to_str().unwrap();
    let mount = Mount::new(&["-o", "bind,ro", from], view.path());
    let mut repo = open(view.path());
    assert!(vm.compare(&mut repo, &id).unwrap());
    assert_eq!(repo.check(true, &mut |_| {}).unwrap().problems, []);
    assert!(
        repo.prune(true, &mut |_| {}).is_ok(),
        "a dry run changes nothing"
    );
    for error in [
        repo.begin(WAIT).err().unwrap(),
        repo.prune(false, &mut |_| {}).unwrap_err(),
        repo.forget(&forget_ids(vec![id])).unwrap_err(),
    ] {
        assert!(matches!(error, RepoError::ReadOnly { .. }), "{error}");
        assert_eq!(error.class(), ErrorClass::ReadOnly);
    }
    drop(mount);
}

#[test]
fn only_its_owner_can_read_a_repository() {
    use std::os::unix::fs::PermissionsExt;
    let place = test_dir();
    let dir = place.path().join("above/repo");
    let mut repo = init(&dir);
    let mut vm = Vm::new("vm", 20);
    vm.run(&mut Dice(1), 20);
    vm.checkpoint(&mut repo).unwrap();
    let mut folders = vec![dir];
    while let Some(folder) = folders.pop() {
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700, "{}", folder.display());
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => assert_eq!(mode(&path), 0o600, "{}", path.display()),
            }
        }
    }
}
