//! Locks: which waits for which, and which are stale.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::support::{Dice, Vm, WAIT, init, open, test_dir};
use crate::format::lock_record::{LockKind, LockRecord};
use crate::store::local::Step;
use crate::store::lock::Lock;
use crate::{ErrorClass, RepoError, Repository};

const SHORT: Duration = Duration::from_millis(150);

/// Creates a lock file as another process would, from that of this process with a change. Its time is `minutes`
/// ago by the clock of the file system.
fn plant(repo: &Repository, kind: &str, minutes: u64, change: &dyn Fn(&mut Value)) {
    let lock = Lock::take(&repo.store, LockKind::Shared, WAIT).unwrap();
    let folder = repo.dir().join("locks");
    let own = std::fs::read_dir(&folder)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let mut record: Value = serde_json::from_slice(&std::fs::read(own).unwrap()).unwrap();
    drop(lock);
    record["kind"] = json!(kind);
    change(&mut record);
    serde_json::from_value::<LockRecord>(record.clone()).unwrap();
    let path = folder.join("0123.lock");
    std::fs::write(&path, record.to_string()).unwrap();
    age(&path, minutes);
}

fn age(path: &Path, minutes: u64) {
    let old = SystemTime::now() - Duration::from_secs(minutes * 60);
    let file = std::fs::File::options().append(true).open(path);
    file.unwrap().set_modified(old).unwrap();
}

fn ago(minutes: i64) -> Value {
    json!((Timestamp::now() - SignedDuration::from_mins(minutes)).to_string())
}

/// Whether a planted exclusive lock stops a writer.
fn stops(change: &dyn Fn(&mut Value)) -> bool {
    stops_after(0, change)
}

/// The same for a lock that was last refreshed `minutes` ago.
fn stops_after(minutes: u64, change: &dyn Fn(&mut Value)) -> bool {
    let dir = test_dir();
    let mut repo = init(dir.path());
    plant(&repo, "exclusive", minutes, change);
    let stopped = match repo.begin(SHORT) {
        Ok(_) => false,
        Err(RepoError::Locked { by }) => {
            assert_eq!(by.kind, LockKind::Exclusive);
            true
        }
        Err(error) => panic!("{error}"),
    };
    // A process that finds a stale lock removes it; a live one stays.
    assert_eq!(dir.path().join("locks/0123.lock").exists(), stopped);
    stopped
}

#[test]
fn the_lock_of_a_living_process_holds() {
    assert!(stops(&|_| {}));
    assert!(stops(&|record| record["refreshed"] = ago(29)));
    // Stopped, or on a suspended machine: it may continue at any moment.
    assert!(stops_after(31, &|record| record["refreshed"] = ago(31)));
}

#[test]
fn the_lock_of_a_dead_process_is_stale() {
    let mut child = Command::new("true").stdout(Stdio::null()).spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    assert!(!stops(&|record| record["pid"] = json!(pid)));
    // The process number is in use again, by a process that started later.
    assert!(!stops(&|record| record["start_time"] = json!(1)));
    // An earlier boot of this machine.
    assert!(!stops(&|record| record["boot"] = json!("another boot")));
}

#[test]
fn the_lock_of_a_zombie_is_stale() {
    let mut child = Command::new("sleep").arg("100").spawn().unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let started: u64 = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .nth(19)
        .unwrap()
        .parse()
        .unwrap();
    let pid = child.id();
    let plant_child = |record: &mut Value| {
        record["pid"] = json!(pid);
        record["start_time"] = json!(started);
    };
    assert!(stops(&plant_child));
    child.kill().unwrap();
    let deadline = Instant::now() + WAIT;
    while stops(&plant_child) {
        assert!(Instant::now() < deadline);
    }
    child.wait().unwrap();
}

#[test]
fn an_unknown_process_counts_as_alive_until_its_lock_is_old() {
    for other in [
        &(|record: &mut Value| record["pid_namespace"] = json!("pid:[1]")) as &dyn Fn(&mut Value),
        &|record| {
            record["host"] = json!("elsewhere");
            record["boot"] = json!("another boot");
        },
        &|record| {
            record["machine"] = json!("another machine");
            record["boot"] = json!("another boot");
        },
    ] {
        let gone_here = |record: &mut Value| {
            record["pid"] = json!(u32::MAX >> 1);
            other(record);
        };
        assert!(stops(&gone_here));
        assert!(!stops_after(31, &gone_here));
        // The clock of the other machine may have any value, and so may a forged time.
        assert!(stops_after(29, &|record| {
            gone_here(record);
            record["refreshed"] = ago(31);
        }));
        assert!(!stops_after(31, &|record| {
            gone_here(record);
            record["refreshed"] = json!("9999-12-30T00:00:00Z");
        }));
    }
}

#[test]
fn half_a_lock_file_blocks_until_it_is_old() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let path = dir.path().join("locks/0123.lock");
    std::fs::write(&path, "{\"vers").unwrap();
    assert_eq!(
        repo.begin(SHORT).err().unwrap().class(),
        ErrorClass::Damaged
    );
    age(&path, 31);
    assert!(repo.begin(SHORT).is_ok());
    assert!(!path.exists());
}

#[test]
fn removers_wait_for_writers_and_writers_for_removers() {
    let dir = test_dir();
    let mut writing = init(dir.path());
    let store = open(dir.path()).store.clone();
    let take = |kind, wait| Lock::take(&store, kind, wait);

    let writer = writing.begin(WAIT).unwrap();
    assert!(
        matches!(take(LockKind::Exclusive, SHORT), Err(RepoError::Locked { by }) if by.kind == LockKind::Shared)
    );
    assert!(take(LockKind::Shared, SHORT).is_ok());
    // While a remover waits, new writers wait, too; when the writer ends, the remover is next.
    std::thread::scope(|scope| {
        let remover = scope.spawn(|| take(LockKind::Exclusive, WAIT).map(|_| Instant::now()));
        while std::fs::read_dir(dir.path().join("locks")).unwrap().count() < 2 {
            std::thread::yield_now();
        }
        std::thread::sleep(SHORT);
        assert!(matches!(
            take(LockKind::Shared, SHORT),
            Err(RepoError::Locked { .. })
        ));
        let ended = Instant::now();
        drop(writer);
        assert!(remover.join().unwrap().unwrap() >= ended);
    });
    let exclusive = take(LockKind::Exclusive, SHORT).unwrap();
    assert!(matches!(
        writing.begin(SHORT),
        Err(RepoError::Locked { .. })
    ));
    assert!(matches!(
        take(LockKind::Exclusive, SHORT),
        Err(RepoError::Locked { .. })
    ));
    drop(exclusive);
    assert!(writing.begin(SHORT).is_ok());
    assert_eq!(
        std::fs::read_dir(dir.path().join("locks")).unwrap().count(),
        0
    );
}

/// A lock that is kept for the next writer stays one file, and is released as soon as a remover waits.
#[test]
fn a_kept_lock_is_released_for_a_remover() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let store = open(dir.path()).store.clone();
    // A lock file that is still being written has another name, and blocks no process.
    let locks = || {
        let mut names = store.names(crate::store::local::Area::Locks).unwrap();
        names.retain(|name| name.ends_with(".lock"));
        names
    };
    repo.keep_lock(true);
    assert!(repo.begin(WAIT).is_ok());
    let kept = locks();
    assert_eq!(kept.len(), 1);
    assert!(repo.begin(WAIT).is_ok());
    assert_eq!(locks(), kept);
    std::thread::scope(|scope| {
        let remover = scope.spawn(|| Lock::take(&store, LockKind::Exclusive, WAIT));
        while locks().len() < 2 {
            std::thread::yield_now();
        }
        // The next writer releases the kept lock, and is refused as long as the remover exists.
        assert!(matches!(repo.begin(SHORT), Err(RepoError::Locked { .. })));
        assert!(!locks().contains(&kept[0]));
        assert!(matches!(
            (remover.join().unwrap(), repo.begin(SHORT)),
            (Ok(_), Err(RepoError::Locked { .. }))
        ));
    });
    assert!(repo.begin(SHORT).is_ok());
    repo.keep_lock(false);
    assert_eq!(locks().len(), 0);
    // A lock that was removed as stale is not kept.
    repo.keep_lock(true);
    assert!(repo.begin(SHORT).is_ok());
    store
        .remove(crate::store::local::Area::Locks, &locks()[0])
        .unwrap();
    assert!(repo.begin(SHORT).is_ok());
    assert_eq!(locks().len(), 1);
}

#[test]
fn exclusive_means_exclusive() {
    let dir = test_dir();
    let repo = init(dir.path());
    let inside = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..10 {
                    let lock =
                        Lock::take(&repo.store, LockKind::Exclusive, Duration::from_secs(60))
                            .unwrap();
                    assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                    inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    drop(lock);
                }
            });
        }
    });
}

#[test]
fn a_writer_whose_lock_was_removed_records_nothing() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 300);
    vm.run(&mut Dice(5), 100);
    let mut writer = repo.begin(WAIT).unwrap();
    let manifest = vm.write(&mut writer, None, Timestamp::now()).unwrap();
    for lock in std::fs::read_dir(dir.path().join("locks")).unwrap() {
        std::fs::remove_file(lock.unwrap().path()).unwrap();
    }
    let error = writer.commit(manifest).unwrap_err();
    assert!(matches!(error, RepoError::LockLost { .. }), "{error}");
    assert!(repo.manifests().unwrap().is_empty());
    assert!(vm.checkpoint(&mut repo).is_ok());
}

/// The lock is removed at the last moment: after it was checked, before the manifest has its name.
#[test]
fn a_manifest_written_without_a_lock_is_removed() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 300);
    vm.run(&mut Dice(5), 100);
    let locks = dir.path().join("locks");
    repo.store.faults.before_each(move |step| {
        if matches!(step, Step::Rename(_, to) if to.parent().unwrap().ends_with("manifests")) {
            std::fs::remove_dir_all(&locks).unwrap();
        }
    });
    let error = vm.checkpoint(&mut repo).unwrap_err();
    assert!(matches!(error, RepoError::LockLost { .. }), "{error}");
    assert!(repo.manifests().unwrap().is_empty());
    repo.store.faults.before_each(|_| {});
    let id = vm.checkpoint(&mut repo).unwrap();
    assert!(vm.compare(&mut repo, &id).unwrap());
}

#[test]
fn two_writers_at_once_both_commit() {
    let dir = test_dir();
    drop(init(dir.path()));
    let committed = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|number| {
                let mut repo = open(dir.path());
                scope.spawn(move || {
                    // Both write the same pages, so that blobs are stored twice.
                    let mut dice = Dice(55);
                    let mut vm = Vm::new(&format!("vm-{number}"), 500);
                    (0..40)
                        .map(|_| {
                            vm.run(&mut dice, 20);
                            (vm.checkpoint(&mut repo).unwrap(), vm.clone())
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect::<Vec<_>>()
    });
    let mut repo = open(dir.path());
    let verify = |repo: &mut Repository| {
        assert_eq!(repo.check(true, &mut |_| {}).unwrap().problems, []);
        for (id, vm) in committed.iter().step_by(7) {
            assert!(vm.compare(repo, id).unwrap());
        }
    };
    verify(&mut repo);
    repo.prune(false, &mut |_| {}).unwrap();
    verify(&mut repo);
}
