//! Opening a repository and finding checkpoints: passwords, versions, names.

use jiff::Timestamp;
use serde_json::json;

use super::support::{Dice, Vm, WAIT, init, open, password, test_dir};
use crate::format::layout::{FORMAT_VERSION, FileKind, header_of_version};
use crate::{CheckpointId, ErrorClass, Password, RepoError, Repository};

#[test]
fn only_the_password_opens() {
    let dir = test_dir();
    drop(init(dir.path()));
    assert!(Repository::open(dir.path(), &password()).is_ok());
    let error = Repository::open(dir.path(), &Password::new("wrong")).unwrap_err();
    assert!(
        matches!(error, RepoError::WrongPassword { keys: 1, .. }),
        "{error}"
    );
    assert_eq!(error.class(), ErrorClass::WrongPassword);
}

#[test]
fn the_standard_password_cost_works() {
    let dir = test_dir();
    let repo = Repository::init(dir.path(), &password()).unwrap();
    assert_eq!(open(dir.path()).id(), repo.id());
}

#[test]
fn a_damaged_key_file_is_not_reported_as_a_wrong_password() {
    let dir = test_dir();
    drop(init(dir.path()));
    let key = std::fs::read_dir(dir.path().join("keys"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let mut bytes = std::fs::read(&key).unwrap();
    bytes[50] ^= 1;
    std::fs::write(&key, bytes).unwrap();
    let error = Repository::open(dir.path(), &Password::new("wrong")).unwrap_err();
    assert!(matches!(error, RepoError::Damaged { .. }), "{error}");
    std::fs::remove_file(key).unwrap();
    let error = Repository::open(dir.path(), &password()).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Damaged, "{error}");
}

#[test]
fn other_directories_are_not_opened_as_repositories() {
    let dir = test_dir();
    for path in [dir.path(), &dir.path().join("nothing")] {
        let error = Repository::open(path, &password()).unwrap_err();
        assert!(matches!(error, RepoError::NotARepository { .. }), "{error}");
    }
}

#[test]
fn init_needs_an_empty_directory() {
    let dir = test_dir();
    drop(init(&dir.path().join("a/b")));
    let again = Repository::init(&dir.path().join("a/b"), &password()).unwrap_err();
    assert!(matches!(again, RepoError::NotEmpty { .. }), "{again}");
    std::fs::write(dir.path().join("file"), "mine").unwrap();
    let error = Repository::init(dir.path(), &password()).unwrap_err();
    assert_eq!(error.class(), ErrorClass::BadRequest, "{error}");
    // An init that ended before its last step can be repeated.
    std::fs::remove_file(dir.path().join("a/b/config")).unwrap();
    drop(init(&dir.path().join("a/b")));
    assert!(Repository::open(&dir.path().join("a/b"), &password()).is_ok());
}

#[test]
fn a_future_version_is_refused() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 10);
    vm.run(&mut Dice(1), 5);
    vm.checkpoint(&mut repo).unwrap();
    let config = dir.path().join("config");
    let good = std::fs::read(&config).unwrap();
    let mut bytes = good.clone();
    bytes[..16].copy_from_slice(&header_of_version(FileKind::Config, FORMAT_VERSION + 1));
    std::fs::write(&config, bytes).unwrap();
    let error = Repository::open(dir.path(), &password()).unwrap_err();
    assert_eq!(error.class(), ErrorClass::FutureVersion);
    assert_eq!(
        error.to_string(),
        "config has format version 3, this program knows versions up to 2: use a newer stillframe"
    );
    let mut bytes = good;
    bytes[..16].copy_from_slice(&header_of_version(FileKind::Config, 0));
    std::fs::write(&config, bytes).unwrap();
    let error = Repository::open(dir.path(), &password()).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Damaged, "{error}");
}

/// Three checkpoints of VM "one" and one of VM "two", oldest first.
fn populated(repo: &mut Repository) -> Vec<CheckpointId> {
    let mut dice = Dice(1);
    let mut vms = [Vm::new("one", 20), Vm::new("two", 20)];
    [0, 0, 1, 0]
        .iter()
        .enumerate()
        .map(|(second, &which)| {
            vms[which].run(&mut dice, 5);
            let time = Timestamp::from_second(second as i64 * 10).unwrap();
            vms[which].checkpoint_at(repo, time).unwrap()
        })
        .collect()
}

#[test]
fn checkpoints_are_found_by_name() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    assert_eq!(
        repo.resolve("latest", None).unwrap_err().class(),
        ErrorClass::NotFound
    );
    let ids = populated(&mut repo);
    let find = |name: &str, vm| repo.resolve(name, vm).map(|(id, _)| id);
    assert_eq!(find("latest", Some("one")).unwrap(), ids[3]);
    assert_eq!(find("latest~0", Some("one")).unwrap(), ids[3]);
    assert_eq!(find("latest~2", Some("one")).unwrap(), ids[0]);
    assert_eq!(find("latest", Some("two")).unwrap(), ids[2]);
    for (name, vm) in [
        ("latest~3", "one"),
        ("latest~1", "two"),
        ("latest", "three"),
        ("latest~99999999999999", "two"),
    ] {
        assert_eq!(
            find(name, Some(vm)).unwrap_err().class(),
            ErrorClass::NotFound,
            "{name}"
        );
    }
    let error = find("latest", None).unwrap_err();
    assert!(
        matches!(&error, RepoError::SeveralVms { labels } if labels == &["one", "two"]),
        "{error}"
    );
    for id in &ids {
        let text = id.to_hex();
        assert_eq!(find(&text, None).unwrap(), *id);
        assert_eq!(find(&text[..12].to_uppercase(), None).unwrap(), *id);
    }
    assert_eq!(
        find(&ids[2].to_hex()[..12], Some("one"))
            .unwrap_err()
            .class(),
        ErrorClass::NotFound
    );
    for name in [
        "",
        "latest~",
        "latest~x",
        "latest~-1",
        "latestt",
        "xyz",
        "~1",
        &"a".repeat(65),
    ] {
        assert!(
            matches!(find(name, None), Err(RepoError::BadName { .. })),
            "{name}"
        );
    }
}

#[test]
fn a_prefix_of_several_ids_names_them() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 4);
    let mut ids: Vec<CheckpointId> = (0..17)
        .map(|_| {
            vm.run(&mut Dice(1), 1);
            vm.checkpoint(&mut repo).unwrap()
        })
        .collect();
    ids.sort();
    // 17 ids, 16 first digits: two of them share one.
    let first = |id: &CheckpointId| id.to_hex()[..1].to_owned();
    let pair = ids
        .windows(2)
        .find(|pair| first(&pair[0]) == first(&pair[1]))
        .unwrap();
    let digit = first(&pair[0]);
    let expected: Vec<CheckpointId> = ids
        .iter()
        .copied()
        .filter(|id| first(id) == digit)
        .collect();
    match repo.resolve(&digit, None).unwrap_err() {
        RepoError::Ambiguous { candidates, .. } => assert_eq!(candidates, expected),
        error => panic!("{error}"),
    }
}

#[test]
fn every_file_and_blob_can_be_shown() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let ids = populated(&mut repo);
    let stats = repo.stats().unwrap();
    assert_eq!((stats.checkpoints, stats.packs), (4, 4));
    let show = |path: &str| repo.inspect(path.as_ref()).unwrap();
    let only = |folder: &str| {
        let mut path = dir.path().join(folder);
        while path.is_dir() {
            path = std::fs::read_dir(&path)
                .unwrap()
                .next()
                .unwrap()
                .unwrap()
                .path();
        }
        path
    };
    assert_eq!(show("config")["repository"], json!(repo.id().to_string()));
    assert_eq!(
        repo.inspect(&only("keys")).unwrap()["derivation"],
        "argon2id"
    );
    let pack = repo.inspect(&only("packs")).unwrap();
    assert_eq!(pack["frames"][0]["offset"], 48);
    let index = repo.inspect(&only("index")).unwrap();
    assert_eq!(index["packs"].as_array().unwrap().len(), 1);
    let manifest = show(&format!("manifests/{}", ids[0]));
    assert_eq!(manifest["body"]["vm"], "one");
    assert!(repo.inspect("nothing/here".as_ref()).is_err());
    assert!(repo.inspect("packs/ab/abcd".as_ref()).is_err());

    let root = repo.manifest(&ids[0]).unwrap().ram[0].root;
    let shown = repo.inspect_blob(&root).unwrap();
    assert_eq!(
        (&shown["kind"], &shown["pages"]),
        (&json!("page table root"), &json!(20))
    );
    let segment = shown["segments"][0].as_str().unwrap();
    let segment = stillframe_page::hash::ContentId::from_hex(segment).unwrap();
    let shown = repo.inspect_blob(&segment).unwrap();
    assert_eq!(shown["kind"], "page table segment");
    assert_eq!(shown["pages"].as_array().unwrap().len(), 20);
    let lock = repo.reader(WAIT).map(|_reader| only("locks")).unwrap();
    assert!(!lock.exists());
}

/// A party that can write the storage can create a pipe there: no read blocks on it.
#[test]
fn a_pipe_in_the_place_of_a_file_is_refused_at_once() {
    for place in [
        "locks/0123.lock",
        "leases/0123.lease",
        "keys/0123",
        "index/",
    ] {
        let dir = test_dir();
        let mut repo = init(dir.path());
        let mut path = dir.path().join(place);
        if place == "index/" {
            path.push("00".repeat(32));
        }
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let (done, wait) = std::sync::mpsc::channel();
        let dir_path = dir.path().to_owned();
        let work = std::thread::spawn(move || {
            let wrong = crate::Password::new("wrong");
            let opened = crate::Repository::open(&dir_path, &wrong).map(|_| ());
            let failed = match place {
                "keys/0123" => opened,
                "leases/0123.lease" => repo.forget(&crate::Forget::default()).map(|_| ()),
                _ => repo.reader(WAIT).map(|_| ()),
            };
            done.send(failed.unwrap_err().to_string()).unwrap();
        });
        let said = wait.recv_timeout(WAIT);
        assert!(
            said.as_ref().is_ok_and(|said| said.contains(place)),
            "{said:?}"
        );
        work.join().unwrap();
    }
}
