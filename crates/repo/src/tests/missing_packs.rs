//! Missing packs: the next checkpoint is complete without them, and stores their blobs again as far as possible.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::support::{Dice, Vm, WAIT, init, open, test_dir};
use crate::{CheckpointId, Repository};

struct Bench {
    dir: tempfile::TempDir,
    repo: Repository,
    vm: Vm,
    first: CheckpointId,
}

impl Bench {
    fn new() -> Bench {
        let dir = test_dir();
        let mut repo = init(dir.path());
        let mut vm = Vm::new("vm", 520);
        vm.run(&mut Dice(3), 60);
        let first = vm.checkpoint(&mut repo).unwrap();
        Bench {
            dir,
            repo,
            vm,
            first,
        }
    }

    fn packs(&self) -> Vec<PathBuf> {
        let folders = fs::read_dir(self.dir.path().join("packs")).unwrap();
        let files = folders.flat_map(|folder| fs::read_dir(folder.unwrap().path()).unwrap());
        files.map(|file| file.unwrap().path()).collect()
    }

    /// Takes a full checkpoint of the same memory. Returns it, and the packs that were reported as missing.
    fn again(&mut self) -> (CheckpointId, Vec<String>) {
        self.vm.forget_parent();
        let id = self.vm.checkpoint(&mut self.repo).unwrap();
        (id, self.repo.begin(WAIT).unwrap().missing_packs())
    }

    fn whole(&mut self, id: &CheckpointId) -> bool {
        self.vm.compare(&mut self.repo, id).is_ok_and(|same| same)
    }

    fn expect_healed(&mut self, id: &CheckpointId) {
        assert!(self.whole(id));
        // Independent of which index file is read first.
        self.repo = open(self.dir.path());
        assert!(self.whole(id) && self.whole(&self.first.clone()));
        // Nothing needs the missing pack any more, so prune removes its entry.
        self.repo.prune(false, &mut |_| {}).unwrap();
        assert_eq!(
            self.repo.check(true, &mut |_| {}).unwrap().problems.len(),
            0
        );
        assert!(self.whole(id));
    }
}

fn relative(root: &Path, file: &Path) -> String {
    file.strip_prefix(root).unwrap().display().to_string()
}

#[test]
fn a_pack_removed_while_the_repository_is_open_is_noticed() {
    let mut bench = Bench::new();
    let [pack] = bench.packs().try_into().unwrap();
    let gone = relative(bench.dir.path(), &pack);
    // A folder that has not changed for long, as in a repository that was opened long ago.
    let folder = fs::File::open(pack.parent().unwrap()).unwrap();
    folder
        .set_modified(SystemTime::now() - Duration::from_secs(60))
        .unwrap();
    assert_eq!(
        bench.repo.begin(WAIT).unwrap().missing_packs(),
        Vec::<String>::new()
    );
    fs::remove_file(pack).unwrap();
    assert!(!bench.whole(&bench.first.clone()));
    let (second, missing) = bench.again();
    assert_eq!(missing, [gone]);
    bench.expect_healed(&second);
}

#[test]
fn a_pack_cut_short_is_noticed_when_the_repository_is_opened() {
    let mut bench = Bench::new();
    let [pack] = bench.packs().try_into().unwrap();
    let file = fs::File::options().write(true).open(&pack).unwrap();
    file.set_len(pack.metadata().unwrap().len() / 2).unwrap();
    bench.repo = open(bench.dir.path());
    let (second, missing) = bench.again();
    assert_eq!(missing, [relative(bench.dir.path(), &pack)]);
    bench.expect_healed(&second);
}

#[test]
fn a_pack_that_is_put_back_is_used_again() {
    let mut bench = Bench::new();
    let [pack] = bench.packs().try_into().unwrap();
    let elsewhere = bench.dir.path().join("elsewhere");
    fs::rename(&pack, &elsewhere).unwrap();
    assert_eq!(bench.repo.begin(WAIT).unwrap().missing_packs().len(), 1);
    // As if packs were moved to another disk.
    std::os::unix::fs::symlink(&elsewhere, &pack).unwrap();
    let (second, missing) = bench.again();
    assert_eq!(missing, Vec::<String>::new());
    assert!(bench.whole(&second) && bench.whole(&bench.first.clone()));
    // Only the manifest is new.
    assert_eq!(bench.packs().len(), 1);
}

#[test]
fn a_failed_inspection_is_repeated() {
    let mut bench = Bench::new();
    let mut dice = Dice(4);
    let mut folders: Vec<PathBuf> = Vec::new();
    // The folder that is inspected first loses its pack, the other cannot be inspected.
    while folders.len() < 2 {
        bench.vm.run(&mut dice, 10);
        bench.vm.checkpoint(&mut bench.repo).unwrap();
        let packs = bench.packs();
        folders = packs
            .iter()
            .filter_map(|pack| pack.parent().map(Path::to_owned))
            .collect();
        folders.sort();
        folders.dedup();
    }
    // All packs have been inspected.
    drop(bench.repo.begin(WAIT).unwrap());
    let (lost, broken) = (&folders[0], &folders[folders.len() - 1]);
    let gone: Vec<PathBuf> = bench
        .packs()
        .into_iter()
        .filter(|pack| pack.starts_with(lost))
        .collect();
    for pack in &gone {
        fs::remove_file(pack).unwrap();
    }
    let folder = fs::File::open(lost).unwrap();
    folder
        .set_modified(SystemTime::now() - Duration::from_secs(60))
        .unwrap();
    let hidden = bench.dir.path().join("hidden");
    fs::rename(broken, &hidden).unwrap();
    std::os::unix::fs::symlink(broken, broken).unwrap();
    assert!(bench.repo.begin(WAIT).is_err());
    fs::remove_file(broken).unwrap();
    fs::rename(&hidden, broken).unwrap();
    let mut expected: Vec<String> = gone
        .iter()
        .map(|pack| relative(bench.dir.path(), pack))
        .collect();
    expected.sort();
    assert_eq!(bench.repo.begin(WAIT).unwrap().missing_packs(), expected);
}
