//! Whom a restored VM's rights come from: the VM, and nobody who could have written its command line or
//! its program. What confined it confines it again.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stillframe_harness::cli::{Stillframe, binary};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::programs;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

const NOBODY: u32 = 65534;
const GROUP: &str = "4242";
const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// A folder of nobody's, with a repository.
struct Place {
    folder: tempfile::TempDir,
    stillframe: Stillframe,
}

impl Place {
    fn new() -> Result<Place> {
        let folder = tempfile::tempdir()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        chown(folder.path(), Some(NOBODY), None)?;
        Ok(Place { folder, stillframe })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A guest whose QEMU was never root.
    fn boot(&self, program: &Path, more: &[&str]) -> Result<Guest> {
        self.boot_after("", program, more)
    }

    /// The same, of which a line of shell is run before.
    fn boot_after(&self, before: &str, program: &Path, more: &[&str]) -> Result<Guest> {
        let script = self.path("start");
        let text = format!(
            "#!/bin/sh\n{before}\nfor word; do case $word in unix:*) chown {NOBODY} \"$(dirname \"${{word#unix:}}\")\";; esac; done\n\
             exec setpriv --reuid {NOBODY} --regid {NOBODY} --groups {GROUP} -- {} \"$@\"\n",
            program.display()
        );
        fs::write(&script, text)?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
        let mut setup = Setup::small(Kind::Private, "humble").with(more);
        setup.program = script;
        setup.boot()
    }

    /// Takes a checkpoint of the guest and ends it.
    fn checkpoint(&self, guest: &mut Guest) -> Result<Value> {
        let line = ["checkpoint", "--pid", &guest.pid_text()];
        let report = self.stillframe.json(&line)?;
        guest.kill()?;
        Ok(report)
    }

    fn restore(&self, more: &[&str]) -> Result<Restored> {
        Restored::start(&self.stillframe, "latest", self.folder.path(), more)
    }

    /// The words of a restore that is refused.
    fn refused(&self, more: &[&str]) -> Result<String> {
        let qmp = self.path("refused.qmp").display().to_string();
        let line = [&["restore", "latest", "--qmp", &qmp], more].concat();
        self.stillframe.fails(&line, 1)
    }
}

/// A control group (version 2) of a test's own; removed on drop.
struct ControlGroup {
    folder: PathBuf,
    /// As `/proc/PID/cgroup` has it.
    path: String,
}

impl ControlGroup {
    fn new(name: &str) -> Result<ControlGroup> {
        let mounts = fs::read_to_string("/proc/mounts")?;
        let root = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let point = words.next()?;
            (words.next()? == "cgroup2").then_some(point)
        });
        let path = format!("/stillframe-{name}-{}", std::process::id());
        ControlGroup::make(
            format!("{}{path}", root.context("no cgroup2")?).into(),
            path,
        )
    }

    fn inner(&self, name: &str) -> Result<ControlGroup> {
        ControlGroup::make(self.folder.join(name), format!("{}/{name}", self.path))
    }

    fn make(folder: PathBuf, path: String) -> Result<ControlGroup> {
        fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        Ok(ControlGroup { folder, path })
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        fs::write(self.folder.join(file), value).with_context(|| format!("{file}: {value}"))
    }

    /// A line of shell that joins it.
    fn join(&self) -> String {
        format!("echo $$ > {}/cgroup.procs", self.folder.display())
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // A process that has ended leaves it a little later.
        for _ in 0..500 {
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The control group of a process, or of this one.
fn group_of(pid: Option<i32>) -> Result<String> {
    let pid = pid.map_or("self".to_owned(), |pid| pid.to_string());
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"));
    Ok(path.context("no group")?.to_owned())
}

/// A line of `/proc/PID/status`, its words joined by one blank.
fn status(pid: i32, key: &str) -> Result<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let words: Vec<&str> = line.context("no such line")?.split_whitespace().collect();
    Ok(words.join(" "))
}

fn expect_owner(pid: i32, uid: u32, groups: &str) -> Result<()> {
    let all = [uid; 4].map(|uid| uid.to_string()).join(" ");
    for key in ["Uid:", "Gid:"] {
        let found = status(pid, key)?;
        ensure!(found == all, "{key} {found}");
    }
    let found = status(pid, "Groups:")?;
    ensure!(found == groups, "groups {found}");
    if uid != 0 {
        for key in ["CapPrm:", "CapEff:", "CapAmb:"] {
            let found = status(pid, key)?;
            ensure!(found.trim_matches('0').is_empty(), "{key} {found}");
        }
    }
    Ok(())
}

#[test]
fn a_vm_comes_back_as_the_user_it_ran_as() -> Result<()> {
    let place = Place::new()?;
    let mut guest = place.boot(Path::new(QEMU), &[])?;
    expect_owner(guest.pid(), NOBODY, GROUP)?;
    place.checkpoint(&mut guest)?;
    let restored = place.restore(&["--verify"])?;
    expect_owner(restored.pid, NOBODY, GROUP)?;
    let environment = fs::read(format!("/proc/{}/environ", restored.pid))?;
    let environment = String::from_utf8_lossy(&environment).into_owned();
    ensure!(!environment.contains("STILLFRAME"), "{environment}");
    restored.serial.wait_ticks(2, PATIENCE)?;
    drop(restored);
    // Where that user may make no socket, the folder is named.
    let elsewhere = tempfile::tempdir()?;
    let qmp = elsewhere.path().join("qmp").display().to_string();
    let line = ["restore", "latest", "--qmp", &qmp];
    let said = place.stillframe.fails(&line, 1)?;
    let folder = elsewhere.path().display().to_string();
    ensure!(said.contains("65534") && said.contains(&folder), "{said}");
    let line = ["clone", "latest", "--qmp", &qmp];
    let said = place.stillframe.fails(&line, 1)?;
    ensure!(
        said.contains("65534") && said.contains("--as-root"),
        "{said}"
    );
    let restored = place.restore(&["--as-root"])?;
    ensure!(status(restored.pid, "Uid:")?.starts_with("0 "));
    Ok(())
}

/// A program that the VM's user can exchange runs as that user while it is the recorded one, and not once it was
/// exchanged after the checkpoint.
#[test]
fn a_program_that_its_user_exchanged_is_not_run() -> Result<()> {
    let place = Place::new()?;
    let program = place.path("qemu-system-x86_64");
    programs::copy(Path::new(QEMU), &program)?;
    chown(&program, Some(NOBODY), None)?;
    let mut guest = place.boot(&program, &[])?;
    place.checkpoint(&mut guest)?;
    let restored = place.restore(&[])?;
    expect_owner(restored.pid, NOBODY, GROUP)?;
    let exe = fs::read_link(format!("/proc/{}/exe", restored.pid))?;
    ensure!(exe == fs::canonicalize(&program)?, "it runs {exe:?}");
    restored.serial.wait_ticks(2, PATIENCE)?;
    drop(restored);
    let said = place.refused(&["--as-root"])?;
    ensure!(said.contains("belongs to user 65534"), "{said}");
    let trace = place.path("was-run");
    fs::remove_file(&program)?;
    fs::write(
        &program,
        format!("#!/bin/sh\nid -u > {}\n", trace.display()),
    )?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    // Root's now, but in a folder of nobody's; then root's, and writable for everybody.
    for owner in [NOBODY, 0] {
        chown(&program, Some(owner), None)?;
        for more in [&[][..], &["--print-command"], &["--as-root"]] {
            let said = place.refused(more)?;
            ensure!(said.contains("--qemu PATH"), "{said}");
            let is_changed = said.contains("it is not the program that the VM ran");
            ensure!(is_changed != more.contains(&"--as-root"), "{said}");
        }
    }
    ensure!(!trace.exists(), "the program was run");
    let restored = place.restore(&["--qemu", QEMU])?;
    expect_owner(restored.pid, NOBODY, GROUP)?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    // What the restore added for itself is no part of the VM.
    let line = ["checkpoint", "--pid", &restored.pid.to_string()];
    place.stillframe.ok(&line)?;
    let shown = place.stillframe.ok(&["show", "latest", "--json"])?;
    ensure!(!shown.contains("stillframe-monitor"), "{shown}");
    Ok(())
}

/// A guest that broke out of a QEMU with a sandbox could exchange such a program, and would be out of the sandbox
/// after a restore.
#[test]
fn a_program_of_the_user_of_a_confined_vm_is_not_run() -> Result<()> {
    let place = Place::new()?;
    let program = place.path("qemu-system-x86_64");
    programs::copy(Path::new(QEMU), &program)?;
    chown(&program, Some(NOBODY), None)?;
    let mut guest = place.boot(&program, &["-sandbox", "on"])?;
    let report = place.checkpoint(&mut guest)?;
    let obstacle = report["obstacles"][0].as_str().unwrap_or_default();
    ensure!(obstacle.contains("--qemu PATH"), "{report}");
    let said = place.refused(&[])?;
    ensure!(said.contains("belongs to user 65534"), "{said}");
    let restored = place.restore(&["--qemu", QEMU])?;
    expect_owner(restored.pid, NOBODY, GROUP)?;
    restored.serial.wait_ticks(2, PATIENCE).map(drop)
}

/// What a guest that broke into its QEMU could write into the memory that `/proc/PID/cmdline` shows.
#[test]
fn a_program_named_by_the_command_line_runs_with_consent_only() -> Result<()> {
    let place = Place::new()?;
    let trace = place.path("was-run");
    let command = format!(
        "user,id=n0,guestfwd=tcp:10.0.2.100:80-cmd:touch {}",
        trace.display()
    );
    let more = ["-netdev", &command, "-device", "e1000,netdev=n0"];
    let mut guest = place.boot(Path::new(QEMU), &more)?;
    let report = place.checkpoint(&mut guest)?;
    // Known at the checkpoint.
    let obstacle = report["obstacles"][0].as_str().unwrap_or_default();
    ensure!(obstacle.contains("--allow-commands"), "{report}");
    let listed = place.stillframe.ok(&["list"])?;
    ensure!(listed.contains("1 obstacle (see `show`)"), "{listed}");
    let shown = place.stillframe.ok(&["show", "latest"])?;
    ensure!(
        shown.contains("--allow-commands") && shown.contains("65534"),
        "{shown}"
    );
    for more in [&[][..], &["--print-command"], &["--as-root"]] {
        let said = place.refused(more)?;
        ensure!(
            said.contains("--allow-commands") && said.contains("cmd:touch"),
            "{said}"
        );
    }
    let restored = place.restore(&["--allow-commands"])?;
    expect_owner(restored.pid, NOBODY, GROUP)?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    Ok(())
}

#[test]
fn a_vm_comes_back_in_its_control_group() -> Result<()> {
    let place = Place::new()?;
    let above = ControlGroup::new("owner")?;
    let group = above.inner("vm")?;
    let ours = group_of(None)?;
    let mut guest = place.boot_after(&group.join(), Path::new(QEMU), &[])?;
    ensure!(group_of(Some(guest.pid()))? == group.path);
    place.checkpoint(&mut guest)?;
    let shown = place.stillframe.ok(&["show", "latest"])?;
    ensure!(shown.contains(&group.path), "{shown}");

    let qmp = place.path("planned.qmp").display().to_string();
    let line = ["restore", "latest", "--qmp", &qmp, "--print-command"];
    let planned = || place.stillframe.json(&line).map(|plan| plan.to_string());
    let reported = format!("it is not in the control group {}", group.path);
    ensure!(!planned()?.contains(&reported), "{}", planned()?);
    let command = place.stillframe.ok(&line)?;
    let file = group.folder.join("cgroup.procs").display().to_string();
    ensure!(command.contains(&file), "{command}");

    let restored = place.restore(&["--verify"])?;
    let found = group_of(Some(restored.pid))?;
    ensure!(found == group.path, "it is in {found}");
    expect_owner(restored.pid, NOBODY, GROUP)?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    drop(restored);
    let restored = place.restore(&["--without-group"])?;
    ensure!(group_of(Some(restored.pid))? == ours);
    drop(restored);

    // The kernel refuses to add a process to a group beside a threaded one.
    let beside = above.inner("threads")?;
    beside.set("cgroup.type", "threaded")?;
    let said = place.refused(&[])?;
    ensure!(
        said.contains(&group.path) && said.contains("--without-group"),
        "{said}"
    );
    drop(beside);
    // Nothing runs in a frozen one; then there is none.
    group.set("cgroup.freeze", "1")?;
    let said = planned()?;
    ensure!(
        said.contains(&reported) && said.contains("frozen"),
        "{said}"
    );
    drop(group);
    let said = planned()?;
    ensure!(
        said.contains(&reported) && said.contains("no such group"),
        "{said}"
    );
    let restored = place.restore(&[])?;
    ensure!(group_of(Some(restored.pid))? == ours);
    restored.serial.wait_ticks(2, PATIENCE)?;
    Ok(())
}

/// The checkpoint is taken where `/proc` shows the label of a profile that no host has.
#[test]
fn a_confined_vm_does_not_come_back_unconfined() -> Result<()> {
    let place = Place::new()?;
    let mut guest = place.boot(Path::new(QEMU), &[])?;
    let (label, shows) = ("stillframe-no-such-profile (enforce)", place.path("label"));
    fs::write(&shows, format!("{label}\n"))?;
    let pid = guest.pid_text();
    let script = "mount --bind \"$0\" \"/proc/$1/attr/current\" && shift && exec \"$@\"";
    let inner = place.stillframe.command(&["checkpoint", "--pid", &pid])?;
    let variables = inner
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .args([shows.as_os_str(), pid.as_ref(), binary()?.as_os_str()])
        .args(inner.get_args())
        .envs(variables)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    guest.kill()?;
    let shown = place.stillframe.ok(&["show", "latest"])?;
    ensure!(shown.contains(label), "{shown}");
    for more in [&[][..], &["--lazy"]] {
        let said = place.refused(more)?;
        ensure!(
            said.contains(label) && said.contains("--without-label"),
            "{said}"
        );
    }
    let restored = place.restore(&["--without-label"])?;
    expect_owner(restored.pid, NOBODY, GROUP)?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    Ok(())
}
