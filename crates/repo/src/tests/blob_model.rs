//! Put and read against plain maps: every blob is read as it was stored.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;

use proptest::prelude::*;

use super::support::{Dice, SMALL_PACKS, Vm, WAIT, init, open, test_dir};
use crate::pack::PackLimits;
use crate::{ErrorClass, Put, RepoError};

#[derive(Debug, Clone)]
struct Blob {
    seed: u64,
    len: usize,
}

fn blob() -> impl Strategy<Value = Blob> {
    let len = prop_oneof![
        8 => Just(4096_usize),
        4 => 1..9000_usize,
        1 => 60_000..70_000_usize,
        1 => 65_530..65_540_usize,
        1 => Just(300_000_usize),
    ];
    (0..40_u64, len).prop_map(|(seed, len)| Blob { seed, len })
}

/// A manifest of an empty checkpoint of VM "blobs", to commit blobs only.
pub(super) fn empty_manifest() -> crate::Manifest {
    crate::Manifest {
        vm: "blobs".into(),
        time: jiff::Timestamp::now(),
        parent: None,
        tags: Default::default(),
        note: None,
        ram: Vec::new(),
        disks: Vec::new(),
        images: BTreeSet::new(),
        streams: Default::default(),
        pages: Default::default(),
        bytes_stored: 0,
        vm_record: serde_json::Value::Null,
        downtime_us: serde_json::Value::Null,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn behaves_like_a_map(small_packs: bool, rounds in prop::collection::vec((any::<bool>(), prop::collection::vec(blob(), 0..60)), 1..5)) {
        let dir = test_dir();
        let mut repo = init(dir.path());
        let mut model: HashMap<_, Vec<u8>> = HashMap::new();
        for (commit, blobs) in rounds {
            // Of a writer that is dropped, index files may describe some of them.
            repo.pack_limits = match small_packs && commit {
                true => SMALL_PACKS,
                false => PackLimits::STANDARD,
            };
            let mut round = HashMap::new();
            let mut writer = repo.begin(WAIT).unwrap();
            for blob in blobs {
                let bytes = Dice(blob.seed).bytes(blob.len);
                let id = writer.hasher().id(&bytes);
                let known = model.contains_key(&id) || round.contains_key(&id);
                prop_assert_eq!(writer.contains(&id).unwrap(), known);
                let put = writer.put(id, &bytes).unwrap();
                prop_assert_eq!(put, if known { Put::Duplicate } else { Put::New });
                round.insert(id, bytes);
            }
            if commit {
                writer.commit(empty_manifest()).unwrap();
                model.extend(round);
            }
        }
        for mut repo in [repo, open(dir.path())] {
            let reader = repo.reader(WAIT).unwrap();
            for (id, bytes) in &model {
                prop_assert_eq!(&reader.read(id).unwrap(), bytes);
            }
            let wanted: Vec<_> = model.keys().chain(model.keys()).copied().zip(0..).collect();
            let seen = Mutex::new(HashMap::new());
            reader.read_sorted(wanted.clone(), 3, &|tag: u32, bytes| {
                seen.lock().unwrap().insert(tag, bytes.to_vec());
                Ok::<(), RepoError>(())
            }).unwrap();
            let seen = seen.into_inner().unwrap();
            prop_assert_eq!(seen.len(), wanted.len());
            for (id, tag) in wanted {
                prop_assert_eq!(&seen[&tag], &model[&id]);
            }
        }
    }
}

#[test]
fn every_checkpoint_has_the_memory_of_the_vm() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut dice = Dice(1);
    let mut vm = Vm::new("a", 1300);
    let mut taken = Vec::new();
    for round in 0..50 {
        vm.run(&mut dice, if round == 0 { 900 } else { 40 });
        let id = vm.checkpoint(&mut repo).unwrap();
        taken.push((id, vm.clone()));
    }
    let mut repo = open(dir.path());
    for (id, vm) in &taken {
        assert!(vm.compare(&mut repo, id).unwrap());
    }
    // After 50 commits, the index still has few files.
    assert!(std::fs::read_dir(dir.path().join("index")).unwrap().count() < 34);
}

#[test]
fn a_dropped_writer_leaves_no_files() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut writer = repo.begin(WAIT).unwrap();
    for seed in 0..3000 {
        let bytes = Dice(seed * 2 + 1).bytes(40_000);
        let id = writer.hasher().id(&bytes);
        writer.put(id, &bytes).unwrap();
    }
    drop(writer);
    for folder in ["packs", "index", "manifests", "tmp", "locks"] {
        let left = walk(&dir.path().join(folder));
        assert!(left.is_empty(), "{left:?}");
    }
    assert!(repo.manifests().unwrap().is_empty());
}

/// A checkpoint of many packs, which are described before it ends.
#[test]
fn a_large_checkpoint_is_described_in_pieces() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    repo.pack_limits = SMALL_PACKS;
    let files = |folder: &str| walk(&dir.path().join(folder)).len();
    let put_all = |writer: &mut crate::Writer<'_>, expected: Put| {
        for seed in 0..400 {
            let bytes = Dice(seed * 2 + 1).bytes(4096);
            let id = writer.hasher().id(&bytes);
            assert_eq!(writer.put(id, &bytes).unwrap(), expected);
        }
    };
    let mut writer = repo.begin(WAIT).unwrap();
    put_all(&mut writer, Put::New);
    put_all(&mut writer, Put::Duplicate);
    assert!(files("index") > 0 && files("packs") > 1);
    // Index files describe some of its packs, so these stay.
    drop(writer);
    assert!(files("index") > 0);
    assert!(repo.check(true, &mut |_| {}).unwrap().is_clean());
    repo.prune(false, &mut |_| {}).unwrap();
    assert_eq!(files("packs"), 0);
    let mut writer = repo.begin(WAIT).unwrap();
    put_all(&mut writer, Put::New);
    // Blobs that are stored again are counted like others.
    for seed in 0..400 {
        let bytes = Dice(seed * 2 + 1).bytes(4096);
        let id = writer.hasher().id(&bytes);
        assert_eq!(writer.put_again(id, &bytes).unwrap(), Put::New);
    }
    put_all(&mut writer, Put::Duplicate);
    let stored = writer.commit(empty_manifest()).unwrap().bytes_stored;
    let packs = walk(&dir.path().join("packs")).into_iter();
    let packs: u64 = packs.map(|file| file.metadata().unwrap().len()).sum();
    assert!((packs + 1..packs * 2).contains(&stored), "{packs} {stored}");
    put_all(&mut repo.begin(WAIT).unwrap(), Put::Duplicate);
    assert!(repo.check(true, &mut |_| {}).unwrap().is_clean());
}

fn walk(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(walk(&path)),
            false => files.push(path),
        }
    }
    files
}

#[test]
fn bytes_under_a_wrong_id_are_never_recorded() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut writer = repo.begin(WAIT).unwrap();
    let id = writer.hasher().id(b"one");
    writer.put(id, b"two").unwrap();
    let error = writer.commit(empty_manifest()).unwrap_err();
    assert!(
        matches!(error, RepoError::ContentMismatch { id: found } if found == id),
        "{error}"
    );
    assert!(repo.manifests().unwrap().is_empty());
    // Also with many blobs after it, and the error is reported once.
    let mut writer = repo.begin(WAIT).unwrap();
    writer.put(id, b"two").unwrap();
    let mut errors = Vec::new();
    for seed in 0..2000 {
        let bytes = Dice(seed).bytes(20_000);
        let id = writer.hasher().id(&bytes);
        errors.extend(writer.put(id, &bytes).err());
    }
    assert!(matches!(errors[0], RepoError::ContentMismatch { .. }));
    assert!(
        errors[1..]
            .iter()
            .all(|e| matches!(e, RepoError::WriterFailed))
    );
}

#[test]
fn empty_and_oversized_blobs_are_refused() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut writer = repo.begin(WAIT).unwrap();
    let big = vec![1; crate::pack::BLOB_BYTES_MAX + 1];
    for bytes in [&[][..], &big] {
        let id = writer.hasher().id(bytes);
        assert_eq!(
            writer.put(id, bytes).unwrap_err().class(),
            ErrorClass::BadRequest
        );
    }
    let id = writer.hasher().id(&big[1..]);
    writer.put(id, &big[1..]).unwrap();
    writer.commit(empty_manifest()).unwrap();
    assert!(repo.reader(WAIT).unwrap().read(&id).unwrap() == big[1..]);
}

/// Blobs that are not deduplicated: twice in one pack, and in several packs.
#[test]
fn blobs_stored_again_are_read_checked_and_pruned_like_others() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 300);
    vm.run(&mut Dice(5), 200);
    let id = vm.checkpoint(&mut repo).unwrap();
    for _ in 0..3 {
        let mut writer = repo.begin(WAIT).unwrap();
        for bytes in vm.pages.iter().chain(&vm.pages) {
            let id = writer.hasher().id(bytes);
            assert_eq!(writer.put_again(id, bytes).unwrap(), Put::New);
        }
        writer.commit(empty_manifest()).unwrap();
    }
    for mut repo in [repo, open(dir.path())] {
        assert_eq!(repo.check(true, &mut |_| {}).unwrap().problems, []);
        assert!(vm.compare(&mut repo, &id).unwrap());
        repo.prune(false, &mut |_| {}).unwrap();
        assert_eq!(repo.check(true, &mut |_| {}).unwrap().problems, []);
        assert!(vm.compare(&mut repo, &id).unwrap());
    }
}
