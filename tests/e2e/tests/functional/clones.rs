//! `clone`: several VMs from one checkpoint, which share its memory and nothing else.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::committing::Committing;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::{expect_nothing_left, processes_with};
use stillframe_harness::memory::Image;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;
use stillframe_harness::serial::Serial;

/// A folder with a repository, and with room for clones and what they share.
struct Place {
    folder: tempfile::TempDir,
    stillframe: Stillframe,
}

impl Place {
    fn new() -> Result<Place> {
        let folder = tempfile::tempdir()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        Ok(Place { folder, stillframe })
    }

    fn base(&self) -> PathBuf {
        self.folder.path().join("base")
    }

    /// The line that asks for clones of the latest checkpoint.
    fn line(&self, count: u32, first: u32, more: &[&str]) -> Vec<String> {
        let at = |name: &str| self.folder.path().join(name).display().to_string();
        let mut line = ["clone", "latest", "--qmp"].map(str::to_owned).to_vec();
        line.extend([at("{}.qmp"), "--serial".to_owned()]);
        line.extend([format!("file:{}", at("{}.serial")), "-n".to_owned()]);
        line.extend([count.to_string(), "--first".to_owned(), first.to_string()]);
        line.extend(["--template-dir".to_owned(), at("base")]);
        line.extend(more.iter().map(|&word| word.to_owned()));
        line
    }

    fn clones(&self, count: u32, first: u32, more: &[&str]) -> Result<Vec<Restored>> {
        Ok(self.clones_with_stderr(count, first, more)?.0)
    }

    /// The clones, and the command's standard error.
    fn clones_with_stderr(
        &self,
        count: u32,
        first: u32,
        more: &[&str],
    ) -> Result<(Vec<Restored>, String)> {
        let mut line = self.line(count, first, more);
        line.push("--json".to_owned());
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let output = self.stillframe.run(&line)?;
        let stderr = String::from_utf8(output.stderr)?;
        ensure!(output.status.success(), "{stderr}");
        let reports = String::from_utf8(output.stdout)?;
        let reports = reports.lines().map(serde_json::from_str);
        let reports: Vec<Value> = reports.collect::<Result<_, _>>()?;
        let clone = |report: &Value| -> Result<Restored> {
            let number = &report["clone"];
            let serial = self.folder.path().join(format!("{number}.serial"));
            Ok(Restored {
                pid: report["pid"].as_i64().context("no pid")? as i32,
                qmp: report["qmp"].as_str().context("no monitor")?.into(),
                serial: Serial::new(&serial),
            })
        };
        let clones: Vec<Restored> = reports.iter().map(clone).collect::<Result<_>>()?;
        ensure!(clones.len() as u32 == count, "{reports:?}");
        Ok((clones, stderr))
    }

    fn refused(&self, more: &[&str], code: i32, words: &str) -> Result<()> {
        let line = self.line(1, 1, more);
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let said = self.stillframe.fails(&line, code)?;
        ensure!(said.contains(words), "{more:?}: {said}");
        let left = processes_with(&self.folder.path().join("1.qmp").display().to_string())?;
        ensure!(left == 0, "{more:?}: a QEMU is left");
        Ok(())
    }
}

/// The files of all bases, and what is in them.
fn files(base: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut files = Vec::new();
    for folder in std::fs::read_dir(base)? {
        let folder = folder?.path();
        if folder.is_dir() {
            for file in std::fs::read_dir(folder)? {
                let path = file?.path();
                files.push((path.clone(), std::fs::read(&path)?));
            }
        }
    }
    Ok(files)
}

/// A field of a process' memory, in KiB.
fn memory_kib(pid: i32, field: &str) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text.lines().find(|line| line.starts_with(field));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number
        .context("no such field")?
        .parse()
        .context("no number")
}

/// By an oracle that knows nothing of us: one clone has the memory of the original, while others have gone
/// on, each for itself.
#[test]
fn clones_share_memory_and_nothing_else() -> Result<()> {
    for kind in [Kind::Private, Kind::FileShared, Kind::Pc] {
        let place = Place::new()?;
        let mut guest = Setup::small(kind, "original").booted()?;
        let pid = guest.pid_text();
        let watch = ["watch", "--pid", &pid, "--every", "200ms", "--count", "3"];
        place.stillframe.ok(&watch)?;
        let mut monitor = guest.second_monitor()?;
        monitor.execute("stop", json!({}))?;
        place.stillframe.ok(&["checkpoint", "--pid", &pid])?;
        let original = Image::take(guest.pid(), &mut monitor)?;
        drop(monitor);
        guest.kill()?;
        let running = place.clones(2, 1, &[])?;
        let shared = files(&place.base())?;
        for clone in &running {
            clone.serial.wait_ticks(10, PATIENCE)?;
            expect_nothing_left(clone.pid, &mut clone.monitor()?)?;
        }
        let standing = place.clones(1, 3, &["--paused", "--verify"])?;
        let image = Image::take(standing[0].pid, &mut standing[0].monitor()?)?;
        let differing = original.differing(&image)?;
        ensure!(differing.is_empty(), "{}: {differing:?}", kind.name());
        ensure!(files(&place.base())? == shared, "a clone wrote to the base");
        let mut images = Vec::new();
        for clone in &running {
            clone.monitor()?.execute("stop", json!({}))?;
            images.push(Image::take(clone.pid, &mut clone.monitor()?)?);
        }
        ensure!(!original.differing(&images[0])?.is_empty());
        ensure!(!images[1].differing(&images[0])?.is_empty());
        // One that has not run has next to nothing of its own; QEMU itself needs about 25 MiB.
        let own = memory_kib(standing[0].pid, "Anonymous:")?;
        ensure!(own < 60 << 10, "{}: {own} KiB of its own", kind.name());
        // And it can be checkpointed like any other VM.
        let pid = standing[0].pid.to_string();
        place
            .stillframe
            .ok(&["checkpoint", "--pid", &pid, "--verify"])?;
    }
    Ok(())
}

#[test]
fn twenty_five_clones_go_on_side_by_side() -> Result<()> {
    let place = Place::new()?;
    let mut setup = Setup::small(Kind::Private, "many");
    setup.ram_mib = 96;
    setup.workload.mib = 8;
    let mut guest = setup.boot()?;
    let pid = guest.pid_text();
    place.stillframe.ok(&["checkpoint", "--pid", &pid])?;
    guest.kill()?;
    let clones = place.clones(25, 1, &[])?;
    let mut names = Vec::new();
    for clone in &clones {
        // All of its memory is checked in eight ticks.
        clone.serial.wait_ticks(9, 4 * PATIENCE)?;
        let mut monitor = clone.monitor()?;
        let name = monitor.execute("query-name", json!({}))?["name"].clone();
        names.push(name.as_str().context("no name")?.to_owned());
    }
    let expected: Vec<String> = (1..=25).map(|number| format!("many-{number}")).collect();
    ensure!(names == expected, "{names:?}");
    Ok(())
}

/// What a clone writes to a disk stays its own; a disk that another process writes to is not for clones.
#[test]
fn disks_of_clones() -> Result<()> {
    let place = Place::new()?;
    let disk = place.folder.path().join("disk.img");
    std::fs::File::create(&disk)?.set_len(4 << 20)?;
    let drive = format!("file={},format=raw,if=virtio,id=d0", disk.display());
    let mut guest = Setup::small(Kind::Private, "with-disk")
        .with(&["-drive", &drive])
        .boot()?;
    let pid = guest.pid_text();
    place.stillframe.ok(&["checkpoint", "--pid", &pid])?;
    place.refused(&["--disks-as-they-are"], 1, "disk")?;
    guest.kill()?;
    let clones = place.clones(2, 1, &[])?;
    for clone in &clones {
        clone.serial.wait_ticks(3, PATIENCE)?;
        let command = "qemu-io d0 \"write -P 0xAB 0 64k\"";
        clone.monitor()?.human(command)?;
        let said = clone
            .monitor()?
            .human("qemu-io d0 \"read -P 0xAB 0 64k\"")?;
        ensure!(!said.contains("failed"), "{said}");
    }
    let bytes = std::fs::read(&disk)?;
    ensure!(
        bytes.iter().all(|&byte| byte == 0),
        "the disk was written to"
    );
    Ok(())
}

/// Clones of a VM that runs on: each goes on from the checkpoint with a disk of its own, and none of what it commits is
/// missing on it.
#[test]
fn clones_have_the_disks_of_the_checkpoint() -> Result<()> {
    for it in [
        Committing::journal("cloned-raw", "raw")?,
        Committing::journal("cloned-qcow2", "qcow2")?,
        Committing::journal_of_nodes("cloned-nodes", "qcow2")?,
    ] {
        let place = Place::new()?;
        let pid = it.guest.pid_text();
        let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
        place.stillframe.ok(&line)?;
        // The recorded disk is the VM's, which writes to it.
        place.refused(&[], 1, "--disks new=DIR")?;
        place.refused(
            &[&format!("--disks=new={}", place.base().display())],
            1,
            "name another",
        )?;
        let folder = place.folder.path().join("disks");
        let words = format!("--disks=new={}", folder.display());
        let clones = place.clones(2, 1, &[&words])?;
        let bases = images(&folder)?;
        ensure!(bases.len() == 1, "{bases:?}");
        let found = it.records_of_raw(&bases[0].0)?;
        let later = place.clones(1, 3, &[&words])?;
        for (number, clone) in clones.iter().chain(&later).enumerate() {
            let last = clone.serial.wait_more_committed(5)?;
            ensure!(last > found, "{last} after {found}");
            let pid = clone.pid.to_string();
            let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
            let report = place.stillframe.json(&line)?;
            let id = report["checkpoint"].as_str().context("no id")?;
            let image = place.folder.path().join(format!("{number}.img"));
            let to = image.display().to_string();
            place
                .stillframe
                .ok(&["export", id, "--disk", "journal", "-o", &to])?;
            ensure!(it.records_of_raw(&image)? >= last, "records are missing");
        }
        it.guest.serial.wait_more_committed(3)?;
        ensure!(
            images(&folder)? == bases,
            "the images were written to, or made anew"
        );
        let own = || {
            std::fs::read_dir("/var/tmp").map(|entries| {
                let names = entries.flatten().map(|entry| entry.file_name());
                names
                    .filter(|name| name.to_string_lossy().starts_with("stillframe-clone-"))
                    .count()
            })
        };
        ensure!(own()? == 0, "overlays have a name still");
        drop((clones, later));
        let drop = ["clone", "--drop-templates", "--template-dir"];
        let folder_text = folder.display().to_string();
        place
            .stillframe
            .ok(&[&drop[..], &[&folder_text]].concat())?;
        ensure!(images(&folder)?.is_empty(), "images are left");
    }
    Ok(())
}

/// The images that clones share, each with its inode and its time of change.
fn images(folder: &Path) -> Result<Vec<(PathBuf, u64, i64)>> {
    let mut found = Vec::new();
    for template in std::fs::read_dir(folder)?.flatten() {
        if !template.path().is_dir() {
            continue;
        }
        for file in std::fs::read_dir(template.path())?.flatten() {
            let (path, metadata) = (file.path(), file.metadata()?);
            if path.extension().is_some_and(|end| end == "img") {
                found.push((path, metadata.ino(), metadata.ctime()));
            }
        }
    }
    Ok(found)
}

#[test]
fn what_clones_share_is_kept_within_a_budget() -> Result<()> {
    let place = Place::new()?;
    let guest = Setup::small(Kind::Private, "kept").booted()?;
    let pid = guest.pid_text();
    let folders = || -> Result<usize> {
        let entries = std::fs::read_dir(place.base())?;
        Ok(entries
            .flatten()
            .filter(|entry| entry.path().is_dir())
            .count())
    };
    for round in 0..2u32 {
        place.stillframe.ok(&["checkpoint", "--pid", &pid])?;
        drop(place.clones(1, 1, &[])?);
        ensure!(folders()? == round as usize + 1);
    }
    // Used again; no more is made.
    drop(place.clones(1, 1, &[])?);
    ensure!(folders()? == 2);
    // A template larger than the budget is not kept, and the command reports it.
    let (clones, stderr) = place.clones_with_stderr(1, 1, &["--template-budget", "1M"])?;
    ensure!(
        stderr.contains("--template-budget") && folders()? == 0,
        "{stderr}"
    );
    drop(clones);
    // With a budget for none, what a clone needs lives as long as it does.
    let clones = place.clones(1, 1, &["--template-budget", "0"])?;
    ensure!(folders()? == 0);
    clones[0].serial.wait_ticks(9, PATIENCE)?;
    Ok(())
}

#[test]
fn clones_that_cannot_be() -> Result<()> {
    let place = Place::new()?;
    let folder = place.folder.path().display().to_string();
    let socket = format!("socket,path={folder}/tool,server=on,wait=off,id=c0");
    let guest = Setup::small(Kind::Private, "tap7")
        .with(&["-chardev", &socket, "-device", "virtio-serial"])
        .with(&["-device", "virtserialport,chardev=c0,name=tool.0"])
        .boot()?;
    let pid = guest.pid_text();
    place.stillframe.ok(&["checkpoint", "--pid", &pid])?;
    place.refused(&["--replace", "tap9=tap{}"], 1, "nothing to replace")?;
    place.refused(&["--replace", "tap9"], 2, "OLD=NEW")?;
    let line = ["clone", "latest", "-n", "2", "--qmp", "/tmp/one.qmp"];
    let said = place.stillframe.fails(&line, 2)?;
    ensure!(said.contains("a monitor of its own"), "{said}");
    // The original runs on beside them: what it listens on stays its own.
    let clones = place.clones(2, 4, &["--replace", "tap7=eth{}"])?;
    for (number, clone) in (4..).zip(&clones) {
        let name = clone.monitor()?.execute("query-name", json!({}))?["name"].clone();
        ensure!(name == json!(format!("eth{number}-{number}")), "{name}");
        ensure!(place.folder.path().join(format!("tool-{number}")).exists());
    }
    ensure!(guest.second_monitor()?.status()? == "running");
    Ok(())
}
