//! A repository or an image whose file system is full, or whose files may not grow.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::{Stillframe, behind, refusal};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_untouched, expect_whole, processes_with};
use stillframe_harness::images::{drive, make_image};
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{PATIENCE, Running};

use crate::host::Mount;

/// Fills a file system to the last byte with this file, then leaves `room` bytes.
fn fill(ballast: &Path, room: u64) -> Result<()> {
    use std::io::Write;
    let mut file = fs::File::create(ballast)?;
    let block = [1; 1 << 12];
    while file.write_all(&block).is_ok() {}
    let filled = file.metadata()?.len();
    file.set_len(filled.saturating_sub(room))?;
    Ok(())
}

/// A repository on a file system of its own, which a ballast file can fill.
struct Small {
    stillframe: Stillframe,
    ballast: PathBuf,
    _mount: Mount,
}

impl Small {
    fn new(at: &Path) -> Result<Small> {
        let mount = Mount::tmpfs(at, 160)?;
        Ok(Small {
            stillframe: Stillframe::init(&at.join("repo"))?,
            ballast: at.join("ballast"),
            _mount: mount,
        })
    }

    /// Fills the file system to the last byte, then leaves `room` bytes.
    fn fill(&self, room: u64) -> Result<()> {
        fill(&self.ballast, room)
    }

    /// Makes a little room, and takes it away for a moment, again and again.
    fn flicker(&self, times: u32) -> Result<()> {
        use std::io::{Seek, SeekFrom, Write};
        let mut file = fs::File::options().write(true).open(&self.ballast)?;
        for _ in 0..times {
            let full = file.metadata()?.len();
            file.set_len(full.saturating_sub(2 << 20))?;
            std::thread::sleep(Duration::from_millis(7));
            file.seek(SeekFrom::End(0))?;
            while file.write_all(&[1; 1 << 12]).is_ok() {}
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn free(&self) -> Result<()> {
        Ok(fs::remove_file(&self.ballast)?)
    }
}

/// A guest that writes other pages each time it runs, however shortly.
fn busy_guest(name: &str) -> Result<Guest> {
    let mut setup = Setup::small(Kind::Private, name);
    setup.workload.pattern = "random";
    setup.workload.tick_ms = 5;
    setup.workload.writes_per_tick = 50;
    setup.boot()
}

#[test]
fn a_checkpoint_that_finds_no_space_fails_clearly_and_the_next_succeeds() -> Result<()> {
    let guest = busy_guest("full")?;
    let mut monitor = guest.second_monitor()?;
    let small = Small::new(&guest.folder().join("small"))?;
    let stillframe = &small.stillframe;
    let line = ["checkpoint", "--pid", &guest.pid_text()];
    // So full that not even a lock fits, then with room for that but not for what is new.
    for room in [0, 64 << 10] {
        small.fill(room)?;
        ensure!(stillframe.fails(&line, 1)?.contains("no space left"));
        expect_untouched(&guest, &mut monitor)?;
        small.free()?;
        expect_whole(stillframe, &[])?;
    }
    stillframe.ok(&line)?;
    let ids = checkpoints(stillframe)?;
    guest.serial.wait_more(4, PATIENCE)?;
    small.fill(64 << 10)?;
    let said = stillframe.fails(&line, 1)?;
    ensure!(
        said.contains("no space left") && said.contains("stillframe prune"),
        "{said}"
    );
    ensure!(checkpoints(stillframe)? == ids);
    // The way out that the error names works in the space there is.
    stillframe.ok(&["prune"])?;
    expect_whole(stillframe, &ids)?;
    small.free()?;
    small.fill(0)?;
    // Reading needs no space at all.
    stillframe.ok(&["show", "latest"])?;
    stillframe.ok(&["check", "--read-data"])?;
    small.free()?;
    stillframe.ok(&line)?;
    expect_whole(stillframe, &ids)?;
    // Nothing of the failures is left over.
    ensure!(stillframe.json(&["prune"])?["packs_unindexed"] == 0);
    stillframe.ok(&["check", "--read-data"])?;
    expect_untouched(&guest, &mut monitor)
}

/// `ulimit -f` ends a process with a signal, unless it handles that.
#[test]
fn a_checkpoint_beyond_the_limit_of_a_file_fails_clearly() -> Result<()> {
    let guest = busy_guest("limited")?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let line = ["checkpoint", "--pid", &guest.pid_text()];
    let limit = ["-c", "ulimit -f 2048; exec \"$0\" \"$@\""];
    let mut limited = behind("sh", &limit, &stillframe.command(&line)?);
    let said = refusal(&mut limited, 1)?;
    ensure!(said.contains("ulimit -f"), "{said}");
    expect_untouched(&guest, &mut monitor)?;
    expect_whole(&stillframe, &[])?;
    stillframe.ok(&line)?;
    stillframe.ok(&["check", "--read-data"])?;
    expect_untouched(&guest, &mut monitor)
}

/// A watch that compares every checkpoint with all of memory.
fn watch(
    small: &Small,
    guest: &Guest,
    every: &str,
    schedule: &str,
    more: &[&str],
) -> Result<Running> {
    let pid = guest.pid_text();
    let line = [
        "watch",
        "--pid",
        &pid,
        "--every",
        every,
        "--schedule",
        schedule,
        "--verify",
        "--json",
    ];
    Running::start(small.stillframe.command(&[&line, more].concat())?)
}

/// What was written before and during the failures must not be missing from the first checkpoint
/// that fits again.
fn outlives_a_full_disk(every: &str, schedule: &str) -> Result<()> {
    let guest = busy_guest("full-watch")?;
    let mut monitor = guest.second_monitor()?;
    let small = Small::new(&guest.folder().join("small"))?;
    let mut watch = watch(&small, &guest, every, schedule, &[])?;
    for _ in 0..2 {
        let whole = watch.results()?.len();
        watch.wait_results(whole + 2)?;
        small.fill(64 << 10)?;
        watch.wait_words_again("no checkpoint this time: no space left")?;
        let before = watch.results()?.len();
        small.free()?;
        let results = watch.wait_results(before + 2)?;
        ensure!(results[before]["parent"] == results[before - 1]["checkpoint"]);
        let exact = |result: &Value| result["verify"]["differing"] == 0;
        ensure!(results.iter().all(exact), "{results:?}");
    }
    watch.signal("TERM")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    expect_untouched(&guest, &mut monitor)?;
    small.stillframe.ok(&["check", "--read-data"])?;
    Ok(())
}

#[test]
fn a_watch_outlives_a_full_disk_and_misses_no_page() -> Result<()> {
    outlives_a_full_disk("700ms", "pre-copy")
}

/// The next checkpoints are captured while this one finds no space, and must not be taken for complete.
#[test]
fn a_watch_without_a_rest_outlives_a_full_disk_too() -> Result<()> {
    outlives_a_full_disk("50ms", "copy-on-write")?;
    outlives_a_full_disk("10ms", "stop-copy")
}

/// The disk is full for moments only, so that one checkpoint finds no space and those captured behind it,
/// which wait because it is slow, would: they are worth nothing all the same.
#[test]
fn a_checkpoint_behind_one_that_failed_is_not_stored() -> Result<()> {
    let guest = busy_guest("full-moments")?;
    let mut monitor = guest.second_monitor()?;
    let small = Small::new(&guest.folder().join("small"))?;
    let slow = ["--limit-write", "4M"];
    let mut watch = watch(&small, &guest, "10ms", "stop-copy", &slow)?;
    watch.wait_results(2)?;
    small.fill(0)?;
    // How often a moment meets a checkpoint depends on the machine.
    let failures = |watch: &Running| watch.err().matches("no space left").count();
    for _ in 0..160 {
        small.flicker(25)?;
        // Ten in a row would end the watch.
        if failures(&watch) >= 4 {
            break;
        }
    }
    ensure!(failures(&watch) >= 4, "{}", watch.err());
    small.free()?;
    let before = watch.results()?.len();
    let results = watch.wait_results(before + 3)?;
    let exact = |result: &Value| result["verify"]["differing"] == 0;
    ensure!(results.iter().all(exact), "{results:?}");
    watch.signal("TERM")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    expect_untouched(&guest, &mut monitor)?;
    small.stillframe.ok(&["check", "--read-data"])?;
    Ok(())
}

/// Memory that clones share, on a file system that is too small for it: no clone, and nothing left.
#[test]
fn clones_without_room() -> Result<()> {
    let guest = Setup::small(Kind::Private, "large").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let pid = guest.pid_text();
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    let small = guest.folder().join("small");
    let _mount = Mount::tmpfs(&small, 64)?;
    let base = small.join("base");
    let qmp = guest.folder().join("clone.qmp").display().to_string();
    let base_dir = format!("--template-dir={}", base.display());
    let line = ["clone", "latest", "--qmp", &qmp, &base_dir];
    let said = stillframe.fails(&line, 1)?;
    ensure!(said.contains("has no room for"), "{said}");
    let left = fs::read_dir(&base)?
        .flatten()
        .filter(|entry| entry.path().is_dir());
    ensure!(left.count() == 0, "part of it is left");
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// A byte a page in the runtime directory is what another process would need to continue: without room for it no VM
/// is started, and the file is named.
#[test]
fn a_lazy_restore_without_room_for_its_notes() -> Result<()> {
    let guest = Setup::small(Kind::Private, "notes").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    let small = guest.folder().join("small");
    let _mount = Mount::tmpfs(&small, 1)?;
    // All but a page of it: for the directory and QEMU's log there is room.
    fs::write(small.join("ballast"), vec![1; (1 << 20) - (8 << 10)])?;
    let runtime = small.join("runtime");
    let qmp = guest.folder().join("x.qmp").display().to_string();
    let mut command = stillframe.command(&["restore", "latest", "--lazy", "--qmp", &qmp])?;
    let said = refusal(command.env("STILLFRAME_RUNTIME_DIR", &runtime), 1)?;
    ensure!(
        said.contains("cannot make room in") && said.contains("x.qmp.filling-pages"),
        "{said}"
    );
    ensure!(said.contains("No space left"), "{said}");
    ensure!(processes_with(&qmp)? == 0, "a QEMU is left behind");
    let left: Vec<_> = fs::read_dir(&runtime)?.flatten().collect();
    let notes = |name: &str| name.contains(".filling");
    ensure!(
        !left
            .iter()
            .any(|entry| notes(&entry.file_name().to_string_lossy())),
        "{left:?} is left"
    );
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

#[test]
fn an_export_that_finds_no_space_leaves_no_half_file() -> Result<()> {
    let guest = Setup::small(Kind::Private, "no-room").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    let at = guest.folder().join("small");
    let _mount = Mount::tmpfs(&at, 8)?;
    for format in ["mapped-ram", "migration", "raw", "elf"] {
        let file = at.join("export").display().to_string();
        let line = ["export", "latest", "--format", format, "-o", &file];
        let said = stillframe.fails(&line, 1)?;
        ensure!(
            said.contains("cannot write") && said.contains("No space left"),
            "{format}: {said}"
        );
        ensure!(
            fs::read_dir(&at)?.next().is_none(),
            "{format}: something is left"
        );
    }
    Ok(())
}

/// QEMU stops a guest whose image finds no space (`werror=enospc`). A watch goes on, leaves it stopped, and misses nothing that
/// it writes when its user has made room.
#[test]
fn a_vm_that_qemu_stops_for_its_full_image_stays_stopped() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let small = folder.path().join("small");
    let _mount = Mount::tmpfs(&small, 96)?;
    let (image, ballast) = (small.join("disk.img"), small.join("ballast"));
    make_image(&image, "raw", 64)?;
    let words = drive(&image, "raw");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let setup = Setup::small(Kind::Private, "full-image").with(&words);
    let guest = setup.with_drivers("sf.journal=vda").boot()?;
    guest.serial.wait_line("committed 3", PATIENCE)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let pid = guest.pid_text();
    let line = ["watch", "--pid", &pid, "--every", "500ms", "--json"];
    let more = ["--disks", "capture", "--pause-limit", "60s"];
    let mut watch = Running::start(stillframe.command(&[&line[..], &more].concat())?)?;
    watch.wait_results(2)?;

    let mut monitor = guest.second_monitor()?;
    fill(&ballast, 0)?;
    monitor.wait_event("BLOCK_IO_ERROR", PATIENCE)?;
    let stopped = watch.results()?.len();
    watch.wait_results(stopped + 3)?;
    ensure!(monitor.status()? == "io-error", "it was run, or paused");

    fs::remove_file(&ballast)?;
    monitor.execute("cont", json!({}))?;
    let committed = guest.serial.wait_more_committed(5)?;
    let running = watch.results()?.len();
    let taken = watch.wait_results(running + 2)?;
    watch.signal("INT")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0) && ended.errors() == 0, "{ended:?}");
    expect_untouched(&guest, &mut monitor)?;

    let last = taken
        .last()
        .and_then(|report| report["checkpoint"].as_str());
    let disks = format!("--disks=new={}", folder.path().join("new").display());
    let restored = Restored::start(
        &stillframe,
        last.context("no checkpoint")?,
        folder.path(),
        &[&disks, "--verify"],
    )?;
    restored.serial.wait_more_committed(5)?;
    let goes_on = restored.serial.committed();
    ensure!(goes_on > Some(committed), "{goes_on:?} after {committed}");
    restored.crash()
}
