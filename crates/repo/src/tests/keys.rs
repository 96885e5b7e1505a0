//! Passwords: added, removed, changed, and never lost.

use std::path::Path;
use std::sync::Arc;

use super::crash::{Disk, files_below, lay_out_anew};
use super::support::{CHEAP, Dice, Vm, init, test_dir};
use crate::crypto::Password;
use crate::crypto::key_file::KEYS_MAX;
use crate::store::local::LocalStore;
use crate::{ErrorClass, Keyring, RepoError, Repository};

fn keyring(dir: &Path, password: &str) -> Keyring {
    Keyring::open_at(LocalStore::new(dir), &Password::new(password), CHEAP).unwrap()
}

/// The password of `init`.
const FIRST: &str = "correct horse";

fn opens(dir: &Path, password: &str) -> bool {
    match Repository::open(dir, &Password::new(password)) {
        Ok(repo) => repo.manifests().is_ok(),
        Err(RepoError::WrongPassword { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn every_password_opens_the_same_repository() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 50);
    vm.run(&mut Dice(1), 40);
    let id = vm.checkpoint(&mut repo).unwrap();
    let keys = keyring(dir.path(), FIRST);
    let added = keys.add(&Password::new("second")).unwrap();
    assert!(opens(dir.path(), FIRST) && opens(dir.path(), "second"));
    let mut again = Repository::open(dir.path(), &Password::new("second")).unwrap();
    assert!(vm.compare(&mut again, &id).unwrap());
    // The list shows which key is in use.
    let list = keyring(dir.path(), "second").list().unwrap();
    assert_eq!(list.len(), 2);
    for key in &list {
        let label = key.label.as_ref().unwrap();
        assert!(!label.user.is_empty() && !label.host.is_empty());
        assert_eq!((key.used, &key.damage), (key.id == added, &None));
    }
    assert_eq!(repo.check(true, &mut |_| {}).unwrap().problems, []);
}

#[test]
fn a_password_that_works_always_remains() {
    let dir = test_dir();
    drop(init(dir.path()));
    let first = keyring(dir.path(), FIRST);
    let name = first.list().unwrap().remove(0).id;
    // The only key.
    let error = first.remove(&name[..6]).unwrap_err();
    assert!(
        matches!(&error, RepoError::KeyInUse { name: of } if *of == name),
        "{error}"
    );
    let second = first.add(&Password::new("second")).unwrap();
    // One of two keys, but the one that is known to open the repository.
    assert_eq!(
        first.remove(&name).unwrap_err().class(),
        ErrorClass::BadRequest
    );
    assert_eq!(first.remove("").unwrap_err().class(), ErrorClass::NotFound);
    assert_eq!(
        first.remove("xyz").unwrap_err().class(),
        ErrorClass::NotFound
    );
    assert_eq!(
        keyring(dir.path(), "second").remove(&name[..8]).unwrap(),
        name
    );
    assert!(!opens(dir.path(), FIRST) && opens(dir.path(), "second"));
    // Opened with a key that was removed meanwhile, it removes no other.
    assert!(first.remove(&second).is_err());
    assert!(opens(dir.path(), "second"));
}

#[test]
fn a_changed_password_opens_and_the_old_one_does_not() {
    let dir = test_dir();
    drop(init(dir.path()));
    keyring(dir.path(), FIRST)
        .add(&Password::new("other"))
        .unwrap();
    let (new, old) = keyring(dir.path(), FIRST)
        .change(&Password::new("changed"))
        .unwrap();
    assert_ne!(new, old);
    assert!(opens(dir.path(), "changed") && opens(dir.path(), "other"));
    assert!(!opens(dir.path(), FIRST));
}

/// Every wrong password is tried on each key file, so their number is limited.
#[test]
fn the_number_of_passwords_is_limited() {
    let dir = test_dir();
    drop(init(dir.path()));
    let keys = keyring(dir.path(), FIRST);
    for number in 1..KEYS_MAX {
        keys.add(&Password::new(format!("{number}"))).unwrap();
    }
    let error = keys.add(&Password::new("one more")).unwrap_err();
    assert!(matches!(error, RepoError::TooManyKeys { .. }), "{error}");
    assert!(!opens(dir.path(), "one more"));
}

/// The passwords that must open the repository after this many steps, and those that must not.
struct Milestone {
    events: usize,
    open: &'static [&'static str],
    closed: &'static [&'static str],
}

/// Adds, changes and removes passwords. Returns the state after each step.
fn change_keys(live: &Path, keys: Keyring) -> Vec<Milestone> {
    let faults = keys.store.faults.clone();
    let mut milestones = Vec::new();
    let mut reach = |open, closed| {
        milestones.push(Milestone {
            events: faults.event_count(),
            open,
            closed,
        });
    };
    keys.add(&Password::new("second")).unwrap();
    reach(&[FIRST, "second"], &[]);
    keys.change(&Password::new("third")).unwrap();
    reach(&["second", "third"], &[FIRST]);
    let mut keys = keyring(live, "third");
    let mut list = keys.list().unwrap().into_iter();
    let second = list.find(|key| !key.used).unwrap();
    keys.store = Arc::new(LocalStore::with_faults(live, faults.clone()));
    keys.remove(&second.id).unwrap();
    reach(&["third"], &[FIRST, "second"]);
    milestones
}

#[test]
fn a_password_survives_any_crash_of_the_machine() {
    let live = test_dir();
    drop(init(live.path()));
    let mut disk = Disk::with(files_below(live.path()));
    let keys = keyring(live.path(), FIRST);
    let faults = keys.store.faults.clone();
    faults.record();
    let milestones = change_keys(live.path(), keys);
    let mut dice = Dice(9);
    let mut tried = 0;
    for (at, event) in faults.events().iter().enumerate() {
        disk.apply(event);
        let mut after = milestones.iter();
        let reached = { after.clone() }.rfind(|milestone| milestone.events <= at + 1);
        // Passwords that are being removed may be gone; the others stay.
        let next = after.find(|milestone| milestone.events > at + 1);
        let going = next.map_or(&[][..], |milestone| milestone.closed);
        let open = reached.map_or(&[FIRST][..], |milestone| milestone.open);
        let closed = reached.map_or(&[][..], |milestone| milestone.closed);
        for round in 0..6 {
            let files = disk.crash(&mut || match round {
                0 => false,
                1 => true,
                _ => dice.below(2) == 0,
            });
            let dir = lay_out_anew(&files, live.path());
            let context = format!("after event {at}, {event:?}, round {round}");
            for password in open.iter().filter(|password| !going.contains(password)) {
                assert!(opens(dir.path(), password), "{context}: {password}");
            }
            for password in closed {
                assert!(!opens(dir.path(), password), "{context}: {password}");
            }
            let all = [FIRST, "second", "third"].into_iter();
            let left = all.filter(|password| opens(dir.path(), password)).count();
            // Of two passwords, one of which replaces the other, at least one opens.
            let changing = going.contains(&FIRST) && open.contains(&FIRST);
            assert!(left > usize::from(changing), "{context}");
            tried += 1;
        }
    }
    assert!(tried >= 60, "{tried}");
}
