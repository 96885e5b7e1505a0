//! Damage of every kind to every file: a check that reads everything finds it, nothing panics, and no read
//! returns wrong bytes.

use std::path::{Path, PathBuf};

use super::support::{Dice, Vm, copy_tree, init, open, password, test_dir};
use crate::{CheckpointId, Repository};

/// A small repository with all kinds of files, several of each, and the VMs that it must restore.
fn make(dir: &Path) -> Vec<(CheckpointId, Vm)> {
    let mut repo = init(dir);
    let mut dice = Dice(8);
    let mut vm = Vm::new("vm", 520);
    (0..3)
        .map(|round| {
            vm.run(&mut dice, if round == 0 { 60 } else { 12 });
            (vm.checkpoint(&mut repo).unwrap(), vm.clone())
        })
        .collect()
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(files_below(&path)),
            false => files.push(path),
        }
    }
    files.sort();
    files
}

/// Opens, checks and reads a damaged repository. Returns the problems, or why it did not open.
fn examine(dir: &Path, taken: &[(CheckpointId, Vm)], context: &str) -> Vec<String> {
    let mut repo = match Repository::open(dir, &password()) {
        Ok(repo) => repo,
        Err(error) => return vec![error.to_string()],
    };
    for (id, vm) in taken {
        // An error is correct, and so are the right bytes; wrong bytes are not.
        if let Ok(same) = vm.compare(&mut repo, id) {
            assert!(same, "{context}: read wrong bytes");
        }
    }
    // A check of the structure alone must not panic either.
    repo.check(false, &mut |_| {}).unwrap();
    let report = repo.check(true, &mut |_| {}).unwrap();
    report.problems.iter().map(ToString::to_string).collect()
}

struct Bench {
    dir: tempfile::TempDir,
    files: Vec<PathBuf>,
    taken: Vec<(CheckpointId, Vm)>,
}

impl Bench {
    fn new() -> Bench {
        let dir = test_dir();
        let taken = make(dir.path());
        let files = files_below(dir.path());
        let bench = Bench { dir, files, taken };
        for folder in ["keys", "packs", "index", "manifests"] {
            assert!(
                bench
                    .files
                    .iter()
                    .any(|f| f.starts_with(bench.dir.path().join(folder))),
                "{folder}"
            );
        }
        assert_eq!(
            examine(bench.dir.path(), &bench.taken, "undamaged"),
            Vec::<String>::new()
        );
        bench
    }

    /// Damages one file, examines the repository, and restores the file.
    fn damage(&self, file: &Path, how: &str, damaged: &[u8]) {
        let context = format!(
            "{} {how}",
            file.strip_prefix(self.dir.path()).unwrap().display()
        );
        let good = std::fs::read(file).unwrap();
        assert_ne!(good, damaged, "{context}: no damage");
        std::fs::write(file, damaged).unwrap();
        let found = examine(self.dir.path(), &self.taken, &context);
        assert!(!found.is_empty(), "{context}: not found");
        std::fs::write(file, good).unwrap();
    }
}

#[test]
fn flipped_bits_and_cuts_and_additions_are_found() {
    let bench = Bench::new();
    let mut dice = Dice(31);
    for round in 0..1000 {
        // Small files as often as large ones.
        let file = &bench.files[dice.below(bench.files.len() as u64) as usize];
        let mut bytes = std::fs::read(file).unwrap();
        let at = dice.below(bytes.len() as u64) as usize;
        match round % 10 {
            0..7 => {
                let bit = dice.below(8);
                bytes[at] ^= 1 << bit;
                bench.damage(file, &format!("bit {bit} of byte {at}"), &bytes);
            }
            7 | 8 => bench.damage(file, &format!("cut to {at}"), &bytes[..at]),
            _ => {
                bytes.extend(dice.bytes(1 + at % 40));
                bench.damage(file, "with something appended", &bytes);
            }
        }
    }
}

#[test]
fn flipped_bits_of_small_files_and_of_the_ends_of_a_pack_are_found() {
    let bench = Bench::new();
    let kinds = ["config", "keys", "index", "manifests", "packs"].map(|kind| {
        let of_kind = |file: &&PathBuf| file.starts_with(bench.dir.path().join(kind));
        bench.files.iter().find(of_kind).unwrap()
    });
    for file in kinds {
        let good = std::fs::read(file).unwrap();
        let ends = (0..64.min(good.len())).chain(good.len().saturating_sub(30)..good.len());
        for at in ends {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << (at % 8);
            bench.damage(file, &format!("byte {at}"), &bytes);
        }
    }
}

#[test]
fn swapped_contents_are_found() {
    let bench = Bench::new();
    for (at, first) in bench.files.iter().enumerate() {
        for second in &bench.files[at + 1..] {
            let (one, two) = (
                std::fs::read(first).unwrap(),
                std::fs::read(second).unwrap(),
            );
            std::fs::write(first, &two).unwrap();
            std::fs::write(second, &one).unwrap();
            let context = format!("{} swapped with {}", first.display(), second.display());
            assert!(
                !examine(bench.dir.path(), &bench.taken, &context).is_empty(),
                "{context}"
            );
            std::fs::write(first, one).unwrap();
            std::fs::write(second, two).unwrap();
        }
    }
}

#[test]
fn missing_and_foreign_files_are_found() {
    let bench = Bench::new();
    let other = test_dir();
    make(other.path());
    for file in &bench.files {
        let good = std::fs::read(file).unwrap();
        std::fs::remove_file(file).unwrap();
        let context = format!("{} removed", file.display());
        let found = examine(bench.dir.path(), &bench.taken, &context);
        // A missing manifest is a forgotten checkpoint: see `Repository::check`.
        let is_manifest = file.starts_with(bench.dir.path().join("manifests"));
        assert_eq!(found.is_empty(), is_manifest, "{context}: {found:?}");
        std::fs::write(file, good).unwrap();
    }
    for file in files_below(other.path()) {
        let inside = file.strip_prefix(other.path()).unwrap();
        let here = bench.dir.path().join(inside);
        if here.exists() {
            continue;
        }
        std::fs::create_dir_all(here.parent().unwrap()).unwrap();
        std::fs::copy(&file, &here).unwrap();
        let context = format!("{} of another repository", inside.display());
        let found = examine(bench.dir.path(), &bench.taken, &context);
        // A key file has meaning only for its own password and repository.
        let is_key = inside.starts_with("keys");
        assert_eq!(found.is_empty(), is_key, "{context}: {found:?}");
        std::fs::remove_file(here).unwrap();
    }
    std::fs::write(bench.dir.path().join("manifests/notes.txt"), "mine").unwrap();
    std::fs::write(bench.dir.path().join("packs/notes.txt"), "mine").unwrap();
    assert_eq!(examine(bench.dir.path(), &bench.taken, "notes").len(), 2);
}

/// A copy of a repository without its empty folders.
#[test]
fn empty_folders_may_be_missing() {
    let from = test_dir();
    let taken = make(from.path());
    let to = test_dir();
    copy_tree(from.path(), to.path());
    for folder in ["locks", "tmp"] {
        std::fs::remove_dir(to.path().join(folder)).unwrap();
    }
    assert_eq!(examine(to.path(), &taken, "copy"), Vec::<String>::new());
    let mut repo = open(to.path());
    let mut vm = taken[2].1.clone();
    vm.run(&mut Dice(1), 5);
    vm.checkpoint(&mut repo).unwrap();
}
