//! A local user without rights who was there first: directories, files and links of his where root keeps its
//! own, and what he could read of this process.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stillframe_harness::cli::{PASSWORD, Stillframe, binary, refusal};
use stillframe_harness::filling::{Filling, runtime_file};
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::processes_with;
use stillframe_harness::programs;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;
use stillframe_harness::serial::Serial;

const NOBODY: u32 = 65534;

/// A small VM without a guest: its firmware runs. With a repository that root has, or nobody.
struct Small {
    folder: tempfile::TempDir,
    qemu: Child,
    user: u32,
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Small {
    fn start(user: u32) -> Result<Small> {
        let folder = tempfile::tempdir()?;
        chown(folder.path(), Some(user), Some(user))?;
        // The binary may lie where nobody may not go.
        programs::copy(&binary()?, &folder.path().join("stillframe"))?;
        let monitor = format!("unix:{}/qmp,server=on,wait=off", folder.path().display());
        let qemu = as_user(user, "qemu-system-x86_64", folder.path())
            .args([
                "-machine", "pc", "-accel", "tcg", "-m", "32", "-display", "none",
            ])
            .args(["-no-user-config", "-nodefaults", "-qmp", &monitor])
            .stdout(Stdio::null())
            .spawn()?;
        let small = Small { folder, qemu, user };
        drop(Qmp::connect(&small.at("qmp"))?);
        small.ok(&["init"])?;
        small.ok(&["checkpoint", "--pid", &small.qemu.id().to_string()])?;
        Ok(small)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.at(name).display().to_string()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let program = self.text("stillframe");
        let mut command = as_user(self.user, &program, self.folder.path());
        command
            .env("STILLFRAME_REPOSITORY", self.at("repo"))
            .env("STILLFRAME_PASSWORD", PASSWORD)
            .args(arguments);
        command
    }

    fn ok(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command(arguments).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{arguments:?}: {said}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs `clone` or `restore`; the new VM, and the output.
    fn new_vm(&self, arguments: &[&str], name: &str) -> Result<(Restored, Value)> {
        let qmp = self.text(name);
        let more = ["--qmp", &qmp, "--json"];
        let report: Value = serde_json::from_str(&self.ok(&[arguments, &more].concat())?)?;
        let restored = Restored {
            pid: report["pid"].as_i64().context("no pid")? as i32,
            qmp: qmp.into(),
            serial: Serial::new(&self.at("none")),
        };
        Ok((restored, report))
    }
}

fn as_user(user: u32, program: &str, folder: &Path) -> Command {
    let mut command = Command::new("setpriv");
    let user = user.to_string();
    command
        .args(["--reuid", &user, "--regid", &user, "--clear-groups", "--"])
        .arg(program)
        .current_dir(folder)
        .stdin(Stdio::null());
    command
}

/// The templates in a directory: name, and whether there is one.
fn templates(base: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.is_dir()).collect()
}

#[test]
fn a_template_directory_of_another_user_is_refused() -> Result<()> {
    let small = Small::start(0)?;
    let (base, target) = (small.at("shared/base"), small.at("target"));
    // As /dev/shm is; nobody was there first.
    fs::create_dir(small.at("shared"))?;
    fs::set_permissions(small.at("shared"), fs::Permissions::from_mode(0o1777))?;
    fs::create_dir(&base)?;
    symlink(&target, base.join("lock"))?;
    chown(&base, Some(NOBODY), Some(NOBODY))?;
    let (qmp, shared) = (small.text("c.qmp"), small.text("shared/base"));
    let line = ["clone", "latest", "--qmp", &qmp, "--template-dir", &shared];
    let refused = |mode: u32, words: &str| -> Result<()> {
        fs::set_permissions(&base, fs::Permissions::from_mode(mode))?;
        let said = refusal(&mut small.command(&line), 1)?;
        ensure!(said.contains(words), "{said}");
        ensure!(!target.exists(), "root made what the link points to");
        ensure!(templates(&base).is_empty(), "memory was written there");
        ensure!(processes_with(&small.text("c.qmp"))? == 0, "a QEMU is left");
        Ok(())
    };
    refused(0o777, "belongs to user 65534")?;
    chown(&base, Some(0), Some(0))?;
    refused(0o770, "open to other users (mode 770)")?;
    refused(0o700, "lock is a symbolic link")?;
    // A link instead of a directory.
    fs::remove_dir_all(&base)?;
    fs::create_dir(small.at("elsewhere"))?;
    symlink(small.at("elsewhere"), &base)?;
    let said = refusal(&mut small.command(&line), 1)?;
    ensure!(said.contains("is a symbolic link"), "{said}");
    ensure!(templates(&small.at("elsewhere")).is_empty());
    Ok(())
}

#[test]
fn a_template_that_was_changed_is_made_anew() -> Result<()> {
    let small = Small::start(0)?;
    let base = small.text("base");
    let line = ["clone", "latest", "--template-dir", &base, "--verify"];
    let (_, first) = small.new_vm(&line, "1.qmp")?;
    ensure!(first["template_us"].as_u64() > Some(0), "{first}");
    let (_, again) = small.new_vm(&line, "2.qmp")?;
    ensure!(again["template_us"] == 0, "it is not used again: {again}");
    let template = templates(&small.at("base")).pop().context("none")?;
    let memory = template.join("0.ram");
    let metadata = fs::metadata(&memory)?;
    ensure!(metadata.mode() & 0o7777 == 0o400, "{metadata:?}");
    ensure!(fs::metadata(&template)?.mode() & 0o7777 == 0o700);
    // Other bytes of the same length, at the same time, with the same mode.
    let mut bytes = fs::read(&memory)?;
    bytes[0x10_0000..0x10_1000].fill(0x5a);
    fs::remove_file(&memory)?;
    fs::write(&memory, bytes)?;
    fs::set_permissions(&memory, fs::Permissions::from_mode(0o400))?;
    File::open(&memory)?.set_modified(metadata.modified()?)?;
    let (_, third) = small.new_vm(&line, "3.qmp")?;
    ensure!(third["verify"]["differing"] == 0, "{third}");
    ensure!(third["template_us"].as_u64() > Some(0), "{third}");
    Ok(())
}

#[test]
fn refused_clones_leave_no_memory_and_forgotten_memory_goes() -> Result<()> {
    let small = Small::start(0)?;
    let base = small.text("base");
    let qmp = small.text("c.qmp");
    let line = ["clone", "latest", "--template-dir", &base, "--qmp", &qmp];
    let line = [&line[..], &["--replace", "no such=word"]].concat();
    let said = refusal(&mut small.command(&line), 1)?;
    ensure!(said.contains("nothing to replace"), "{said}");
    ensure!(templates(&small.at("base")).is_empty(), "memory is left");
    // A directory for nobody else by default, in memory.
    let (clone, _) = small.new_vm(&["clone", "latest"], "d.qmp")?;
    let mapped = fs::read_to_string(format!("/proc/{}/maps", clone.pid))?;
    let file = mapped.lines().find(|line| line.ends_with("/0.ram"));
    let file = file.and_then(|line| line.split_whitespace().last());
    let file = Path::new(file.context("no template is mapped")?);
    ensure!(file.starts_with("/dev/shm/stillframe-0"), "{file:?}");
    ensure!(fs::metadata("/dev/shm/stillframe-0")?.mode() & 0o7777 == 0o700);
    let listed = small.ok(&["clone", "--templates", "--json"])?;
    let name = file.parent().and_then(Path::file_name).context("no name")?;
    let checkpoint = name.to_string_lossy();
    let checkpoint = checkpoint.rsplit('-').next().context("no id")?;
    ensure!(listed.contains(checkpoint), "{listed}");
    small.ok(&["forget", checkpoint])?;
    ensure!(!file.exists(), "the forgotten checkpoint's memory is left");
    ensure!(clone.monitor()?.status()? == "running");
    // Named, any directory.
    let (_clone, _) = {
        small.ok(&["checkpoint", "--pid", &small.qemu.id().to_string()])?;
        small.new_vm(&["clone", "latest", "--template-dir", &base], "e.qmp")?
    };
    ensure!(templates(&small.at("base")).len() == 1);
    small.ok(&["clone", "--drop-templates", "--template-dir", &base])?;
    ensure!(templates(&small.at("base")).is_empty(), "they are left");
    Ok(())
}

/// A user's own VM is his to checkpoint, restore and clone; nothing of it needs a right that he does not have.
#[test]
fn an_ordinary_user_has_directories_of_his_own() -> Result<()> {
    let small = Small::start(NOBODY)?;
    let runtime = small.text("run");
    let mine = |path: &Path| -> Result<bool> {
        let metadata = fs::metadata(path)?;
        Ok(metadata.uid() == NOBODY && metadata.mode() & 0o77 == 0)
    };
    fs::create_dir(&runtime)?;
    let qmp = small.text("r.qmp");
    let mut line = small.command(&["restore", "latest", "--qmp", &qmp]);
    line.env("XDG_RUNTIME_DIR", &runtime);
    // Root's is no place for it.
    let said = refusal(&mut line, 1)?;
    ensure!(said.contains("cannot create"), "{said}");
    chown(&runtime, Some(NOBODY), Some(NOBODY))?;
    ensure!(line.output()?.status.success(), "no restore");
    let _restored = Restored {
        pid: *stillframe_harness::health::pids_with(&qmp)?
            .first()
            .context("no VM")?,
        qmp: qmp.into(),
        serial: Serial::new(&small.at("none")),
    };
    ensure!(mine(&small.at("run/stillframe"))?);
    let base = small.text("base");
    small.new_vm(&["clone", "latest", "--template-dir", &base], "c.qmp")?;
    ensure!(mine(&small.at("base"))?);
    Ok(())
}

/// Nobody's folder, and files of his under each name that was ever used beside a monitor.
#[test]
fn files_beside_the_monitor_are_neither_written_nor_believed() -> Result<()> {
    let mut guest = Setup::small(Kind::Pc, "beside").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    guest.kill()?;
    let folder = tempfile::tempdir()?;
    let target = guest.folder().join("target");
    let name = |suffix: &str| folder.path().join(format!("restored.qmp{suffix}"));
    symlink(&target, name(".log"))?;
    for suffix in [".filling", ".filling.new", ".filling-pages"] {
        fs::write(name(suffix), "{}")?;
        chown(name(suffix), Some(NOBODY), Some(NOBODY))?;
    }
    chown(folder.path(), Some(NOBODY), Some(NOBODY))?;
    let refused = |more: &[&str], words: &str| -> Result<()> {
        let qmp = name("").display().to_string();
        let line = [&["restore", "--qmp", &qmp], more].concat();
        let said = refusal(&mut stillframe.command(&line)?, 1)?;
        ensure!(said.contains(words), "{more:?}: {said}");
        ensure!(!target.exists(), "root made what the link points to");
        Ok(())
    };
    let log = name(".log").display().to_string();
    refused(&["latest", "--log", &log], "is a symbolic link")?;
    let slowly = ["--limit-fill", "1M"];
    let mut filling = Filling::start(&stillframe, "latest", folder.path(), &slowly)?;
    filling.wait_runs()?;
    filling.running.kill()?;
    let (qmp, serial) = (filling.qmp.clone(), filling.serial.clone());
    filling.running.end()?;
    ensure!(!target.exists(), "root made what the link points to");
    for suffix in [".filling", ".filling.new", ".filling-pages"] {
        ensure!(fs::read(name(suffix))? == b"{}", "{suffix} was written");
    }
    // The files of an unfinished restore are in a folder that only root can write to. The record in them is compared
    // with the process.
    let record = runtime_file(&qmp, ".filling")?;
    let metadata = fs::metadata(&record)?;
    ensure!((metadata.uid(), metadata.mode() & 0o777) == (0, 0o600));
    let written: Value = serde_json::from_slice(&fs::read(&record)?)?;
    let mut other = written.clone();
    other["uid"] = NOBODY.into();
    fs::write(&record, other.to_string())?;
    refused(&["--resume"], "runs as user 0, not 65534")?;
    fs::set_permissions(&record, fs::Permissions::from_mode(0o666))?;
    refused(&["--resume"], "open to other users")?;
    fs::set_permissions(&record, fs::Permissions::from_mode(0o600))?;
    fs::write(&record, written.to_string())?;
    let resumed = Filling::resume(&stillframe, &qmp, &serial, &[])?;
    let (restored, _) = resumed.complete()?;
    restored.serial.wait_ticks(9, PATIENCE)?;
    Ok(())
}

/// Waiting for a password, killed by a signal that dumps core; and a password command that looks for the
/// password in its environment.
#[test]
fn no_core_dump_and_no_password_for_children() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let line = ["--password-command", "echo >waits; exec sleep 20", "list"];
    // A shell's background is deaf to SIGQUIT, and what it starts too.
    let mut command = Command::new("env");
    let shell = "umask 077; ulimit -S -c unlimited; exec \"$0\" \"$@\"";
    let mut waiting = command
        .args(["--default-signal=QUIT", "sh", "-c", shell])
        .arg(binary()?)
        .args(line)
        .env("STILLFRAME_REPOSITORY", stillframe.repository())
        .current_dir(folder.path())
        .spawn()?;
    let deadline = Instant::now() + PATIENCE;
    while !folder.path().join("waits").exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    stillframe_harness::running::signal(waiting.id(), "QUIT")?;
    let status = waiting.wait()?;
    ensure!(status.signal() == Some(3), "{status}");
    ensure!(!status.core_dumped(), "a core was dumped");
    let prints = format!("test -z \"$STILLFRAME_PASSWORD\" && echo '{PASSWORD}'");
    stillframe.ok(&["--password-command", &prints, "list"])?;
    Ok(())
}
