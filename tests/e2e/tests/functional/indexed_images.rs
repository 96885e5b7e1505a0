//! Images that are indexed: checkpoints refer to what they have, in place of storing it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::{PASSWORD, Stillframe};
use stillframe_harness::committing::{Committing, expect_no_copy};
use stillframe_harness::databases::Database;
use stillframe_harness::filling::Filling;
use stillframe_harness::health::expect_untouched;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::Running;

/// Takes a checkpoint with the guest's disk.
fn capture(it: &Committing, stillframe: &Stillframe) -> Result<Value> {
    let pid = it.guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    stillframe.json(&line)
}

fn id(report: &Value) -> Result<String> {
    Ok(report["checkpoint"].as_str().context("no id")?.to_owned())
}

fn bytes(report: &Value) -> Result<u64> {
    report["bytes_stored"].as_u64().context("no bytes")
}

/// A database guest whose disk, as it was at a checkpoint in another repository, is an image now.
struct Scene {
    it: Committing,
    stillframe: Stillframe,
    golden: PathBuf,
    /// Bytes that a checkpoint takes without an image.
    without: u64,
}

impl Scene {
    fn new(name: &str) -> Result<Scene> {
        let it = Committing::database(name, Database::Sqlite)?;
        let first = capture(&it, &it.stillframe)?;
        let golden = it.guest.folder().join("golden.img");
        let out = golden.display().to_string();
        let line = ["export", &id(&first)?, "--disk", "journal", "-o", &out];
        it.stillframe.ok(&line)?;
        Ok(Scene {
            stillframe: Stillframe::init(&it.guest.folder().join("beside"))?,
            without: bytes(&first)?,
            it,
            golden,
        })
    }

    fn index(&self, image: &Path) -> Result<Value> {
        self.stillframe
            .json(&["index", &image.display().to_string()])
    }

    fn exported(&self, id: &str) -> Result<Vec<u8>> {
        let file = self.it.guest.folder().join("exported");
        let out = file.display().to_string();
        let line = ["export", id, "--disk", "journal", "-o", &out];
        self.stillframe.ok(&line)?;
        let bytes = fs::read(&file)?;
        fs::remove_file(file)?;
        Ok(bytes)
    }
}

/// It stores what the image has, and neither needs nor keeps it.
#[test]
fn a_checkpoint_without_images_outlives_them() -> Result<()> {
    let scene = Scene::new("itself")?;
    let (it, stillframe) = (&scene.it, &scene.stillframe);
    scene.index(&scene.golden)?;
    let pid = it.guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    let report = stillframe.json(&[&line[..], &["--no-images"]].concat())?;
    let taken = id(&report)?;
    ensure!(bytes(&report)? > scene.without / 4 * 3, "{report}");
    let of_disk = report["disks"][0]["bytes_stored"].as_u64();
    ensure!(of_disk.is_some_and(|of_disk| of_disk > 0), "{report}");
    ensure!(of_disk < Some(bytes(&report)?), "{report}");
    let shown = stillframe.json(&["show", &taken])?;
    let images = shown["images"].as_array();
    ensure!(images.is_none_or(Vec::is_empty), "{shown}");
    stillframe.ok(&["prune"])?;
    let path = scene.golden.display().to_string();
    stillframe.ok(&["index", "--remove", &path])?;
    fs::remove_file(&scene.golden)?;
    stillframe.ok(&["prune"])?;
    ensure!(stillframe.json(&["check", "--read-data"])?["clean"] == true);
    let folder = it.guest.folder().join("restored");
    let disks = format!("--disks=new={}", folder.display());
    let restored = Restored::start(stillframe, &taken, it.guest.folder(), &[&disks, "--verify"])?;
    restored.serial.wait_more_committed(5)?;
    restored.crash()
}

/// Of memory and of a disk. Both are restored from it.
#[test]
fn a_checkpoint_refers_to_what_an_image_has() -> Result<()> {
    let scene = Scene::new("indexed")?;
    let (it, stillframe) = (&scene.it, &scene.stillframe);
    let indexed = scene.index(&scene.golden)?;
    ensure!(indexed["found"] == "new", "{indexed}");
    let report = capture(it, stillframe)?;
    let taken = id(&report)?;
    let stored = bytes(&report)?;
    // The file system's metadata and the database are a small part of it; the kernel and the programs are the rest.
    ensure!(stored < scene.without, "{stored} of {}", scene.without);
    let shown = stillframe.json(&["show", &taken])?;
    let images = shown["images"].as_array().context("no images")?;
    ensure!(images.len() == 1, "{shown}");
    let path = scene.golden.display().to_string();
    let text = stillframe.ok(&["show", &taken])?;
    ensure!(
        text.contains("needs image") && text.contains(&path),
        "{text}"
    );
    ensure!(stillframe.json(&["check", "--read-data"])?["clean"] == true);
    stillframe.ok(&["prune"])?;
    let text = stillframe.ok(&["show", &taken, "--contents"])?;
    ensure!(text.contains("in image"), "{text}");

    let before = it.guest.serial.wait_more_committed(3)?;
    let folder = it.guest.folder().join("restored");
    let disks = format!("--disks=new={}", folder.display());
    let restored = Restored::start(stillframe, &taken, it.guest.folder(), &[&disks, "--verify"])?;
    restored.serial.wait_more_committed(5)?;
    expect_no_copy(&mut restored.monitor()?)?;
    restored.crash()?;
    let mut monitor = it.guest.second_monitor()?;
    expect_untouched(&it.guest, &mut monitor)?;
    it.guest.serial.wait_more_committed(before.min(2))?;

    // A copy needs no image.
    let copy = it.guest.folder().join("copied");
    Stillframe::init(&copy)?;
    let to = copy.display().to_string();
    stillframe.ok(&[
        "copy",
        &taken,
        "--to",
        &to,
        "--to-password-file",
        &password(it)?,
    ])?;
    let disk = scene.exported(&taken)?;
    fs::rename(&scene.golden, it.guest.folder().join("away"))?;
    let copied = Stillframe::at(&copy);
    ensure!(copied.json(&["check", "--read-data"])?["clean"] == true);
    let out = it.guest.folder().join("from-copy").display().to_string();
    copied.ok(&["export", "latest", "--disk", "journal", "-o", &out])?;
    ensure!(fs::read(&out)? == disk, "the copy's disk differs");
    Ok(())
}

/// The password that all repositories of the tests have, in a file.
fn password(it: &Committing) -> Result<String> {
    let file = it.guest.folder().join("password");
    fs::write(&file, PASSWORD)?;
    Ok(file.display().to_string())
}

/// It is refused by name before a VM is started, and all is well again when the image is back.
#[test]
fn without_its_image_a_checkpoint_is_not_restored() -> Result<()> {
    let scene = Scene::new("image-gone")?;
    let (it, stillframe) = (&scene.it, &scene.stillframe);
    scene.index(&scene.golden)?;
    let taken = id(&capture(it, stillframe)?)?;
    let disk = scene.exported(&taken)?;
    let away = it.guest.folder().join("away");
    fs::rename(&scene.golden, &away)?;
    let path = scene.golden.display().to_string();
    let qmp = it.guest.folder().join("never.qmp");
    let line = ["restore", &taken, "--qmp", &qmp.display().to_string()];
    let new = format!("--disks=new={}", it.guest.folder().join("new").display());
    for more in ["--quiet", "--lazy"] {
        let error = stillframe.fails(&[&line[..], &[more, &new]].concat(), 3)?;
        ensure!(
            error.contains(&path) && error.contains("stillframe index"),
            "{error}"
        );
    }
    ensure!(!qmp.exists() && !it.guest.folder().join("new").exists());
    let pid = it.guest.pid_text();
    let rewind = ["rewind", &taken, "--pid", &pid];
    let error = stillframe.fails(&rewind, 3)?;
    ensure!(error.contains(&path), "{error}");
    let checked = stillframe.run(&["check"])?;
    let problems = String::from_utf8_lossy(&checked.stdout);
    ensure!(
        checked.status.code() == Some(3) && problems.contains(&path),
        "{checked:?}"
    );
    let refused = stillframe.fails(&["index", "--remove", &path], 1)?;
    ensure!(refused.contains(&taken[..16]), "{refused}");

    // The next increment would rest on it.
    let next = capture(it, stillframe)?;
    ensure!(next["changed_images"][0] == path, "{next}");
    let shown = stillframe.json(&["show", &id(&next)?])?;
    ensure!(
        shown["images"].as_array().is_some_and(Vec::is_empty),
        "{shown}"
    );

    let moved = scene.index(&away)?;
    ensure!(
        moved["found"] == "moved" && moved["from"] == path,
        "{moved}"
    );
    ensure!(stillframe.json(&["check", "--read-data"])?["clean"] == true);
    ensure!(scene.exported(&taken)? == disk);
    let restored = Restored::start(
        stillframe,
        &taken,
        it.guest.folder(),
        &[
            &format!("--disks=new={}", it.guest.folder().join("again").display()),
            "--lazy",
        ],
    )?;
    restored.serial.wait_more_committed(5)?;
    restored.crash()
}

/// The restore says what it lacks, and fills it in when the image is as it was.
#[test]
fn an_image_is_cut_off_during_a_lazy_restore() -> Result<()> {
    let scene = Scene::new("image-cut")?;
    let (it, stillframe) = (&scene.it, &scene.stillframe);
    scene.index(&scene.golden)?;
    let taken = id(&capture(it, stillframe)?)?;
    let folder = tempfile::tempdir()?;
    let disks = format!("--disks=new={}", folder.path().join("new").display());
    // Paused, the guest reads nothing that is in the image before it is cut off.
    let slowly = [&disks, "--paused", "--verify", "--limit-fill", "4M"];
    let mut filling = Filling::start(stillframe, &taken, folder.path(), &slowly)?;
    filling.wait_runs()?;
    let image = fs::read(&scene.golden)?;
    fs::write(&scene.golden, [])?;
    let path = scene.golden.display().to_string();
    (filling.running).wait_words(&format!("image {path} cannot be used: it is too short"))?;
    fs::write(&scene.golden, image)?;
    let (restored, _) = filling.complete()?;
    restored.monitor()?.execute("cont", json!({}))?;
    restored.serial.wait_more_committed(5)?;
    restored.crash()
}

/// An increment that rests on an image which changed would be worth nothing: a full checkpoint is taken in its place.
#[test]
fn a_watch_stores_all_anew_when_its_image_changes() -> Result<()> {
    let scene = Scene::new("image-changed")?;
    let (it, stillframe) = (&scene.it, &scene.stillframe);
    scene.index(&scene.golden)?;
    let pid = it.guest.pid_text();
    let watch = ["watch", "--pid", &pid, "--every", "1s", "--count", "5"];
    let more = ["--disks", "capture", "--pause-limit", "60s", "--json"];
    let watch = stillframe.command(&[&watch[..], &more].concat())?;
    let mut watch = Running::start(watch)?;
    watch.wait_results(2)?;
    let mut spoiled = fs::read(&scene.golden)?;
    let at = spoiled
        .iter()
        .position(|&byte| byte != 0)
        .context("zeros")?;
    spoiled[at] ^= 1;
    fs::write(&scene.golden, spoiled)?;
    let taken = watch.end()?.results()?;
    let ids = taken.iter().map(id).collect::<Result<Vec<_>>>()?;
    let needs = |id: &String| -> Result<bool> {
        let shown = stillframe.json(&["show", id])?;
        Ok(shown["images"]
            .as_array()
            .is_some_and(|images| !images.is_empty()))
    };
    let needs = ids.iter().map(needs).collect::<Result<Vec<bool>>>()?;
    ensure!(needs[0] && !needs[needs.len() - 1], "{needs:?}");
    let last = &ids[ids.len() - 1];
    let folder = it.guest.folder().join("restored");
    let disks = format!("--disks=new={}", folder.display());
    let restored = Restored::start(stillframe, last, it.guest.folder(), &[&disks])?;
    restored.serial.wait_more_committed(5)?;
    restored.crash()
}

/// Where the disk is not in the checkpoint, the guest's page cache is found in the image.
#[test]
fn pages_that_are_in_an_image_are_counted() -> Result<()> {
    let scene = Scene::new("image-counted")?;
    let (it, stillframe) = (&scene.it, &scene.stillframe);
    let pid = it.guest.pid_text();
    let take = || stillframe.json(&["checkpoint", "--pid", &pid, "--disks", "none"]);
    let contents = |report: &Value| -> Result<Value> {
        let mut shown = stillframe.json(&["show", &id(report)?, "--contents"])?;
        Ok(shown["contents"].take())
    };
    scene.index(&scene.golden)?;
    let classes = contents(&take()?)?;
    let in_image = classes["in_image"].as_u64().context("no such class")?;
    ensure!(in_image > 4 && classes["on_disk"] == 0, "{classes}");
    // A checkpoint that names no image has stored its pages.
    fs::remove_file(&scene.golden)?;
    let classes = contents(&take()?)?;
    ensure!(classes["in_image"] == 0, "{classes}");
    Ok(())
}

/// The disk of a running VM is no image.
#[test]
fn what_a_vm_writes_to_is_not_indexed() -> Result<()> {
    let mut it = Committing::journal("index-running", "qcow2")?;
    let disk = it.disk.display().to_string();
    let error = it.stillframe.fails(&["index", &disk], 1)?;
    ensure!(error.contains("a VM may write to it"), "{error}");
    it.guest.kill()?;
    ensure!(it.stillframe.json(&["index", &disk])?["found"] == "new");
    ensure!(it.stillframe.json(&["index", &disk])?["found"] == "known");
    let text = it.stillframe.ok(&["index", "--list"])?;
    ensure!(
        text.contains(&disk) && text.contains("as it was indexed"),
        "{text}"
    );
    it.stillframe.ok(&["index", "--remove", &disk])?;
    it.stillframe.ok(&["prune"])?;
    ensure!(
        it.stillframe
            .json(&["inspect", &it.stillframe.repository().display().to_string()])?["packs"]
            == 0
    );
    let checked = Command::new("qemu-img")
        .arg("check")
        .arg(&it.disk)
        .output()?;
    ensure!(checked.status.success(), "{checked:?}");
    Ok(())
}
