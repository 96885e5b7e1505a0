//! What is no repository, or not one for this password, version or name.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use stillframe_harness::cli::{Stillframe, refusal};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_untouched, expect_whole};
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

use crate::host::Mount;

/// A command of every kind that opens a repository; `PID` stands for the VM's.
const EVERY_COMMAND: [&[&str]; 9] = [
    &["list"],
    &["show", "latest"],
    &["checkpoint", "--pid", "PID"],
    &["watch", "--pid", "PID", "--every", "1s", "--count", "1"],
    &["restore", "latest", "--qmp", "/nonexistent/qmp"],
    &["check"],
    &["forget", "--keep-last", "1"],
    &["prune"],
    &["inspect", "latest"],
];

fn for_pid<'a>(words: &[&'a str], pid: &'a str) -> Vec<&'a str> {
    let put = |&word: &&'a str| if word == "PID" { pid } else { word };
    words.iter().map(put).collect()
}

#[test]
fn a_wrong_password_opens_nothing_and_harms_nothing() -> Result<()> {
    let guest = Setup::small(Kind::Sandbox, "locked-out").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let pid = guest.pid_text();
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    let ids = checkpoints(&stillframe)?;
    for words in EVERY_COMMAND {
        let mut command = stillframe.command(&for_pid(words, &pid))?;
        let said = refusal(command.env("STILLFRAME_PASSWORD", "wrong horse"), 4)?;
        ensure!(said.contains("wrong password"), "{words:?}: {said}");
        ensure!(
            !said.contains("wrong horse"),
            "the password is shown: {said}"
        );
    }
    expect_untouched(&guest, &mut monitor)?;
    expect_whole(&stillframe, &ids)?;
    no_password_at_all(&stillframe)
}

/// Neither given, nor a terminal to ask on.
fn no_password_at_all(stillframe: &Stillframe) -> Result<()> {
    let said = refusal(
        stillframe
            .command(&["list"])?
            .env_remove("STILLFRAME_PASSWORD"),
        2,
    )?;
    ensure!(said.contains("--password-file"), "{said}");
    let mut two = stillframe.command(&["list"])?;
    let said = refusal(two.env("STILLFRAME_PASSWORD_FILE", "/dev/null"), 2)?;
    ensure!(said.contains("unset one of them"), "{said}");
    let mut missing = stillframe.command(&["list", "--password-file", "/nonexistent/password"])?;
    let said = refusal(missing.env_remove("STILLFRAME_PASSWORD"), 1)?;
    ensure!(said.contains("/nonexistent/password"), "{said}");
    Ok(())
}

#[test]
fn what_is_no_repository_is_named_and_left_alone() -> Result<()> {
    let guest = Setup::small(Kind::Private, "no-repository").booted()?;
    let mut monitor = guest.second_monitor()?;
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("empty"))?;
    fs::create_dir(path("other"))?;
    fs::write(path("other/letter"), "dear reader")?;
    fs::write(path("file"), "no folder")?;
    for name in ["empty", "other", "missing", "file"] {
        let stillframe = Stillframe::at(&path(name));
        for words in EVERY_COMMAND {
            let said = stillframe.fails(&for_pid(words, &guest.pid_text()), 1)?;
            ensure!(said.contains(name), "{name}, {words:?}: {said}");
        }
        // A file is no folder at all; for folders the error says how to make a repository.
        let said = stillframe.fails(&["list"], 1)?;
        ensure!(
            name == "file" || said.contains("stillframe init"),
            "{name}: {said}"
        );
    }
    for name in ["other", "file"] {
        Stillframe::at(&path(name)).fails(&["init"], 1)?;
    }
    ensure!(fs::read_dir(path("other"))?.count() == 1 && !path("missing").exists());
    expect_untouched(&guest, &mut monitor)
}

#[test]
fn init_never_overwrites_a_repository() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let config = fs::read(stillframe.repository().join("config"))?;
    let said = stillframe.fails(&["init"], 1)?;
    ensure!(said.contains("already"), "{said}");
    ensure!(config == fs::read(stillframe.repository().join("config"))?);
    ensure!(fs::read_dir(stillframe.repository().join("keys"))?.count() == 1);
    stillframe.ok(&["check"])?;
    Ok(())
}

/// No program writes this version of the format yet.
const FUTURE: u32 = 1000;

/// The same file as that version would begin it: its header with the right checksum
/// (docs/format.md).
fn of_the_future(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[8..12].copy_from_slice(&FUTURE.to_le_bytes());
    let check = *blake3::hash(&bytes[..12]).as_bytes();
    bytes[12..16].copy_from_slice(&check[..4]);
    bytes
}

fn only_file(folder: &Path) -> Result<std::path::PathBuf> {
    let entry = fs::read_dir(folder)?.next().context("an empty folder")??;
    Ok(entry.path())
}

#[test]
fn a_format_of_the_future_is_refused_by_name_and_number() -> Result<()> {
    let guest = Setup::small(Kind::Private, "future").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let pid = guest.pid_text();
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    let ids = checkpoints(&stillframe)?;
    let config = stillframe.repository().join("config");
    let today = fs::read(&config)?;
    fs::write(&config, of_the_future(&today))?;
    for words in EVERY_COMMAND {
        let said = stillframe.fails(&for_pid(words, &pid), 1)?;
        ensure!(
            said.contains(&format!("version {FUTURE}")),
            "{words:?}: {said}"
        );
        ensure!(said.contains("newer stillframe"), "{words:?}: {said}");
    }
    fs::write(&config, today)?;
    // Key and index files are named by the hash of their bytes; manifests by a keyed one, which
    // cannot be made from outside.
    for (area, command) in [
        ("keys", vec!["list"]),
        ("index", vec!["checkpoint", "--pid", &pid]),
    ] {
        let file = only_file(&stillframe.repository().join(area))?;
        let today = fs::read(&file)?;
        let tomorrow = of_the_future(&today);
        let name = blake3::hash(&tomorrow).to_hex().to_string();
        let other = file.with_file_name(name);
        fs::remove_file(&file)?;
        fs::write(&other, tomorrow)?;
        let said = stillframe.fails(&command, 1)?;
        ensure!(
            said.contains(&format!("version {FUTURE}")) && said.contains("newer stillframe"),
            "{area}: {said}"
        );
        fs::remove_file(&other)?;
        fs::write(&file, today)?;
    }
    expect_untouched(&guest, &mut monitor)?;
    expect_whole(&stillframe, &ids)
}

/// Two VMs in one repository: `old` with enough checkpoints that two of their ids must begin with
/// the same digit, `new` with one.
fn two_vms(repository: &Path) -> Result<(Stillframe, [Guest; 2])> {
    let stillframe = Stillframe::init(repository)?;
    let guests = [
        Setup::small(Kind::Private, "old").start()?,
        Setup::small(Kind::Private, "new").start()?,
    ];
    for (vm, count) in [("old", "17"), ("new", "1")] {
        stillframe.ok(&["watch", "--vm", vm, "--every", "10ms", "--count", count])?;
    }
    Ok((stillframe, guests))
}

#[test]
fn names_that_mean_nothing_or_too_much_are_explained() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (stillframe, _guests) = two_vms(&folder.path().join("repo"))?;
    let ids = checkpoints(&stillframe)?;
    let whole_but_wrong = "0".repeat(64);
    let nothing = [
        (vec![whole_but_wrong.as_str()], 1, "no checkpoint is called"),
        (
            vec!["latest~17", "--vm", "old"],
            1,
            "no checkpoint is called 'latest~17' for VM 'old'",
        ),
        (vec!["latest", "--vm", "nobody"], 1, "for VM 'nobody'"),
        (
            vec!["latest"],
            2,
            "several VMs (new, old): name one with --vm NAME",
        ),
        (vec!["newest"], 2, "'latest~N'"),
        (vec!["latest~"], 2, "'latest~N'"),
        (vec!["latest~-1"], 2, "'latest~N'"),
        (vec!["latest~99999999999999999999"], 2, "'latest~N'"),
        (vec![""], 2, "no checkpoint name"),
        (vec!["../config"], 2, "no checkpoint name"),
    ];
    for (names, code, words) in nothing {
        for command in [&["show"][..], &["restore", "--qmp", "/nonexistent/qmp"]] {
            let line = [command, &names].concat();
            let said = stillframe.fails(&line, code)?;
            ensure!(said.contains(words), "{line:?}: {said}");
        }
    }
    expect_whole(&stillframe, &ids)?;
    ambiguous(&stillframe, &ids)
}

/// The start of two ids names none; all digits of one name it.
fn ambiguous(stillframe: &Stillframe, ids: &[String]) -> Result<()> {
    let alike = |digit: &&str| ids.iter().filter(|id| id.starts_with(*digit)).count() > 1;
    let digits: Vec<String> = (0..16).map(|digit| format!("{digit:x}")).collect();
    let digit = digits
        .iter()
        .map(String::as_str)
        .find(alike)
        .context("17 ids, 16 digits")?;
    for command in [vec!["show", digit], vec!["forget", digit]] {
        let said = stillframe.fails(&command, 2)?;
        ensure!(said.contains("give more digits"), "{said}");
    }
    for id in ids.iter().filter(|id| id.starts_with(digit)) {
        ensure!(stillframe.json(&["show", id])?["checkpoint"] == id.as_str());
    }
    Ok(())
}

#[test]
fn a_read_only_directory_is_read_and_not_written() -> Result<()> {
    let guest = Setup::small(Kind::Private, "read-only").booted()?;
    let mut monitor = guest.second_monitor()?;
    let writable = Stillframe::init(&guest.folder().join("repo"))?;
    let pid = guest.pid_text();
    writable.ok(&["checkpoint", "--pid", &pid])?;
    let ids = checkpoints(&writable)?;
    let at = guest.folder().join("read-only");
    let _mount = Mount::read_only(writable.repository(), &at)?;
    let stillframe = Stillframe::at(&at);
    expect_whole(&stillframe, &ids)?;
    stillframe.ok(&["show", "latest"])?;
    stillframe.ok(&["check", "--read-data"])?;
    let writing: [&[&str]; 4] = [
        &["checkpoint", "--pid", &pid],
        &["forget", "latest"],
        &["prune"],
        &["rebuild-index"],
    ];
    for words in writing {
        let said = stillframe.fails(words, 1)?;
        ensure!(said.contains("read-only file system"), "{words:?}: {said}");
    }
    let new = Stillframe::at(&at.join("new"));
    ensure!(new.fails(&["init"], 1)?.contains("read-only file system"));
    expect_untouched(&guest, &mut monitor)?;
    expect_whole(&writable, &ids)
}

/// Passwords come and go, and what they open stays as it is.
#[test]
fn passwords_are_added_changed_and_taken_away() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let file = |name: &str| -> Result<String> {
        let path = folder.path().join(name);
        fs::write(&path, format!("the password {name}\n"))?;
        Ok(path.display().to_string())
    };
    let (second, third) = (file("second")?, file("third")?);
    let with = |password: &'_ str, words: &[&'_ str]| -> Vec<String> {
        let all = ["--password-file", password].into_iter();
        all.chain(words.iter().copied())
            .map(str::to_owned)
            .collect()
    };
    let run = |line: &[String]| -> Result<String> {
        stillframe.ok(&line.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let refused = |line: &[String], code: i32| -> Result<String> {
        stillframe.fails(&line.iter().map(String::as_str).collect::<Vec<_>>(), code)
    };
    stillframe.ok(&["key", "add", "--new-password-file", &second])?;
    run(&with(&second, &["list"]))?;
    let keys = stillframe.json(&["key", "list"])?;
    let keys = keys.as_array().context("no list")?;
    ensure!(keys.len() == 2, "{keys:?}");
    let first = keys
        .iter()
        .find(|key| key["used"] == true)
        .context("none in use")?;
    let first = first["key"].as_str().context("no id")?;
    // A password that is known to be right is left.
    let said = stillframe.fails(&["key", "remove", first], 1)?;
    ensure!(said.contains("stays"), "{said}");
    let said = run(&with(&second, &["key", "remove", first]))?;
    ensure!(said.contains("removed key"), "{said}");
    stillframe.fails(&["list"], 4)?;
    run(&with(
        &second,
        &["key", "passwd", "--new-password-file", &third],
    ))?;
    refused(&with(&second, &["list"]), 4)?;
    run(&with(&third, &["check", "--read-data"]))?;
    Ok(())
}

/// A copy is complete by itself, under another key, and is known when it comes again.
#[test]
fn a_copy_in_another_repository_is_restored() -> Result<()> {
    let guest = Setup::small(Kind::Memfd, "copied").booted()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let pid = guest.pid_text();
    stillframe.ok(&["watch", "--pid", &pid, "--every", "300ms", "--count", "3"])?;
    let password = folder.path().join("other.password");
    fs::write(&password, "another one")?;
    let password = password.display().to_string();
    let there = folder.path().join("there");
    let other = Stillframe::at(&there);
    other.ok(&["init", "--password-file", &password])?;
    let to = there.display().to_string();
    let line = [
        "copy",
        "latest",
        "--to",
        &to,
        "--to-password-file",
        &password,
    ];
    let copied = stillframe.json(&line)?;
    ensure!(copied["known"] == false, "{copied}");
    let again = stillframe.json(&line)?;
    ensure!(
        again["known"] == true && again["copy"] == copied["copy"],
        "{again}"
    );
    // Nothing of the first repository is needed.
    fs::remove_dir_all(stillframe.repository())?;
    let clean = other.json(&["check", "--read-data", "--password-file", &password])?;
    ensure!(
        clean["clean"] == true && clean["checkpoints"] == 1,
        "{clean}"
    );
    let options = ["--verify", "--password-file", &password];
    let restored = Restored::start(&other, "latest", folder.path(), &options)?;
    restored.serial.wait_more(10, PATIENCE)?;
    Ok(())
}
