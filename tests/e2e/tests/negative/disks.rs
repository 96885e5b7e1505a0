//! Disks: a checkpoint holds memory, so a restore must meet the disks its guest remembers, and must
//! never give one disk two users.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_untouched, expect_whole, processes_with};
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

/// A guest with one disk and a checkpoint of it.
struct WithDisk {
    guest: Guest,
    stillframe: Stillframe,
    disk: PathBuf,
    // After the guest: ends last.
    folder: tempfile::TempDir,
}

impl WithDisk {
    fn new(name: &str, drive: &str) -> Result<WithDisk> {
        let folder = tempfile::tempdir()?;
        let disk = folder.path().join("disk.img");
        fs::File::create(&disk)?.set_len(4 << 20)?;
        let drive = format!("file={},format=raw,{drive}", disk.display());
        let guest = Setup::small(Kind::Private, name)
            .with(&["-drive", &drive])
            .boot()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
        Ok(WithDisk {
            guest,
            stillframe,
            disk,
            folder,
        })
    }

    /// Both with and without leave to use the disks as they are.
    fn refused(&self, words: &str) -> Result<()> {
        self.refused_with(&[], words)?;
        self.refused_with(&["--disks-as-they-are"], words)
    }

    fn refused_with(&self, more: &[&str], words: &str) -> Result<()> {
        let qmp = self.folder.path().join("refused.qmp").display().to_string();
        let line = [&["restore", "latest", "--qmp", &qmp], more].concat();
        let said = self.stillframe.fails(&line, 1)?;
        ensure!(
            said.contains(words) && said.contains("disk"),
            "{more:?}: {said}"
        );
        ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
        Ok(())
    }

    /// Restores and sees the guest tick.
    fn accepted(&self, more: &[&str]) -> Result<Restored> {
        let restored = Restored::start(&self.stillframe, "latest", self.folder.path(), more)?;
        restored.serial.wait_ticks(2, PATIENCE)?;
        Ok(restored)
    }
}

#[test]
fn a_writable_disk_is_only_used_unchanged_and_by_nobody_else() -> Result<()> {
    let mut it = WithDisk::new("writable", "if=virtio")?;
    let mut monitor = it.guest.second_monitor()?;
    let ids = checkpoints(&it.stillframe)?;
    it.refused("is open in process")?;
    expect_untouched(&it.guest, &mut monitor)?;
    it.guest.kill()?;
    // Another program, not only the old QEMU.
    let open = fs::OpenOptions::new().append(true).open(&it.disk)?;
    it.refused("is open in process")?;
    drop(open);
    let restored = it.accepted(&[])?;
    it.refused("is open in process")?;
    drop(restored);

    let original = fs::metadata(&it.disk)?;
    let mut bytes = fs::read(&it.disk)?;
    bytes[4096] = 1;
    fs::write(&it.disk, &bytes)?;
    it.refused_with(&[], "since the checkpoint")?;
    drop(it.accepted(&["--disks-as-they-are"])?);
    fs::OpenOptions::new()
        .write(true)
        .open(&it.disk)?
        .set_len(original.len() + 512)?;
    it.refused_with(&[], "since the checkpoint")?;

    let away = it.disk.with_extension("away");
    fs::rename(&it.disk, &away)?;
    it.refused("is missing")?;
    // The same content under the same name is still another file.
    fs::copy(&away, &it.disk)?;
    it.refused_with(&[], "since the checkpoint")?;
    expect_whole(&it.stillframe, &ids)
}

#[test]
fn a_read_only_disk_may_have_two_users() -> Result<()> {
    let it = WithDisk::new("readable", "if=virtio,readonly=on")?;
    let mut monitor = it.guest.second_monitor()?;
    let restored = it.accepted(&["--verify"])?;
    expect_untouched(&it.guest, &mut monitor)?;
    drop(restored);
    fs::OpenOptions::new()
        .write(true)
        .open(&it.disk)?
        .set_len(8 << 20)?;
    it.refused_with(&[], "since the checkpoint")
}

#[test]
fn what_was_written_to_a_temporary_disk_is_known_to_be_lost() -> Result<()> {
    let it = WithDisk::new("temporary", "if=ide,snapshot=on")?;
    let mut monitor = it.guest.second_monitor()?;
    it.refused_with(&[], "snapshot=on")?;
    let restored = it.accepted(&["--disks-as-they-are"])?;
    expect_untouched(&it.guest, &mut monitor)?;
    drop(restored);
    expect_untouched(&it.guest, &mut monitor)
}

#[test]
fn a_ram_file_that_is_in_use_is_not_written() -> Result<()> {
    let mut guest = Setup::small(Kind::FileShared, "ram-file").boot()?;
    let mut monitor = guest.second_monitor()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    let qmp = folder.path().join("refused.qmp").display().to_string();
    for more in [None, Some("--disks-as-they-are")] {
        let mut line = vec!["restore", "latest", "--qmp", &qmp];
        line.extend(more);
        let said = stillframe.fails(&line, 1)?;
        ensure!(
            said.contains("the RAM file") && said.contains("end it first"),
            "{said}"
        );
    }
    expect_untouched(&guest, &mut monitor)?;
    guest.kill()?;
    let restored = Restored::start(&stillframe, "latest", folder.path(), &["--verify"])?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    Ok(())
}
