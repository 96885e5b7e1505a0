//! Too few rights, and kernels that lack something. The kernel really refuses: the engine runs as
//! nobody, or behind a system call filter that answers as an older kernel would.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use stillframe_harness::cli::{PASSWORD, Stillframe, binary, refusal};
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::{expect_untouched, expect_whole};
use stillframe_harness::programs;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

use crate::host::{Missing, without};

const NOBODY: u32 = 65534;

/// `_IOWR('f', 16, struct pm_scan_arg)`, 96 bytes (linux/fs.h).
const PAGEMAP_SCAN: u64 = 0xc060_6610;
/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`, 24 bytes (linux/userfaultfd.h).
const UFFDIO_API: u64 = 0xc018_aa3f;

/// `stillframe` as a user without any right, in a folder of that user's.
struct Unprivileged {
    folder: tempfile::TempDir,
}

impl Unprivileged {
    fn new() -> Result<Unprivileged> {
        let folder = tempfile::tempdir()?;
        chown(folder.path(), Some(NOBODY), Some(NOBODY))?;
        // The binary may lie in a directory that this user cannot access.
        let copy = folder.path().join("stillframe");
        programs::copy(&binary()?, &copy)?;
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755))?;
        let unprivileged = Unprivileged { folder };
        let made = unprivileged.command(&["init"]).output()?;
        ensure!(made.status.success(), "{made:?}");
        Ok(unprivileged)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        let nobody = NOBODY.to_string();
        command
            .args([
                "--reuid",
                &nobody,
                "--regid",
                &nobody,
                "--clear-groups",
                "--",
            ])
            .arg(self.folder.path().join("stillframe"))
            .args(arguments)
            .current_dir(self.folder.path())
            .env("STILLFRAME_REPOSITORY", self.repository())
            .env("STILLFRAME_PASSWORD", PASSWORD);
        command
    }

    fn repository(&self) -> std::path::PathBuf {
        self.folder.path().join("repo")
    }
}

#[test]
fn without_rights_it_says_which_are_missing() -> Result<()> {
    let guest = Setup::small(Kind::Private, "not-mine").booted()?;
    let mut monitor = guest.second_monitor()?;
    let nobody = Unprivileged::new()?;
    let pid = guest.pid_text();
    for line in [
        vec!["checkpoint", "--pid", &pid],
        vec!["watch", "--pid", &pid, "--every", "1s"],
        // A VM that may not be examined is no VM that is not there.
        vec!["checkpoint", "--vm", "not-mine"],
    ] {
        let said = refusal(&mut nobody.command(&line), 5)?;
        ensure!(
            said.contains("root") && said.contains("CAP_SYS_PTRACE"),
            "{line:?}: {said}"
        );
    }
    let of_root = Stillframe::init(&guest.folder().join("repo"))?;
    fs::set_permissions(of_root.repository(), fs::Permissions::from_mode(0o700))?;
    let mut command = nobody.command(&["list"]);
    let said = refusal(
        command.env("STILLFRAME_REPOSITORY", of_root.repository()),
        1,
    )?;
    ensure!(said.contains("cannot read"), "{said}");
    expect_untouched(&guest, &mut monitor)?;
    expect_whole(&Stillframe::at(&nobody.repository()), &[])
}

/// What `probe` and `checkpoint` say behind a filter without `missing`. The VM is not behind it.
fn behind_filter(stillframe: &Stillframe, pid: &str, missing: Missing) -> Result<[String; 2]> {
    without(missing, || {
        let probe = stillframe.command(&["probe"])?.output()?;
        let printed = String::from_utf8_lossy(&probe.stdout).into_owned();
        ensure!(
            probe.status.code() == Some(1),
            "probe found nothing missing: {printed}"
        );
        let checkpoint = refusal(&mut stillframe.command(&["checkpoint", "--pid", pid])?, 1)?;
        Ok([printed, checkpoint])
    })
}

/// As in a container, or on an older kernel: each call answers as if it did not exist.
#[test]
fn what_the_kernel_does_not_do_is_named_before_the_vm_is_touched() -> Result<()> {
    let guest = Setup::small(Kind::Private, "old-kernel").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let cases = [
        (Missing::Ioctl(PAGEMAP_SCAN), "asynchronous write tracking"),
        (Missing::Ioctl(UFFDIO_API), "asynchronous write tracking"),
        (
            Missing::Call(libc::SYS_userfaultfd),
            "userfaultfd of other processes",
        ),
        (
            Missing::Call(libc::SYS_pidfd_getfd),
            "userfaultfd of other processes",
        ),
        (
            Missing::Call(libc::SYS_ptrace),
            "userfaultfd of other processes",
        ),
        (
            Missing::Call(libc::SYS_process_vm_readv),
            "memory of other processes",
        ),
        (Missing::Call(libc::SYS_memfd_create), "files in memory"),
    ];
    for (missing, ability) in cases {
        let about = || format!("{missing:?} ({ability})");
        let said = behind_filter(&stillframe, &guest.pid_text(), missing).with_context(about)?;
        ensure!(said[0].contains(ability), "{}: {}", about(), said[0]);
        let named = said[1].contains(&format!("{ability} is missing"));
        ensure!(
            named && said[1].contains("stillframe probe"),
            "{}: {}",
            about(),
            said[1]
        );
    }
    expect_untouched(&guest, &mut monitor)?;
    expect_whole(&stillframe, &[])?;
    // And nothing of all this keeps the same VM from being checkpointed where all is there.
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    Ok(())
}

/// Over this VM's page map lies a file that answers PAGEMAP_SCAN as kernels before 6.7 do.
#[test]
fn a_page_map_that_cannot_be_scanned_is_told_and_the_vm_let_go() -> Result<()> {
    let guest = Setup::small(Kind::Memfd, "no-scan").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let inner = stillframe.command(&["checkpoint", "--vm", "no-scan"])?;
    let script = format!(
        "mount --bind /dev/null /proc/{}/pagemap && exec \"$@\"",
        guest.pid()
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script, "sh"]);
    command.arg(inner.get_program()).args(inner.get_args());
    command.env("STILLFRAME_REPOSITORY", stillframe.repository());
    command.env("STILLFRAME_PASSWORD", PASSWORD);
    let said = refusal(&mut command, 1)?;
    ensure!(
        said.contains("PAGEMAP_SCAN") && said.contains("Linux 6.7"),
        "{said}"
    );
    expect_untouched(&guest, &mut monitor)?;
    expect_whole(&stillframe, &[])
}

/// A QEMU that itself may not make the one call that is made inside it.
#[test]
fn a_filtered_qemu_takes_the_right_to_lift_its_filter() -> Result<()> {
    let guest = without(Missing::Call(libc::SYS_userfaultfd), || {
        Setup::small(Kind::Private, "filtered").booted()
    })?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let line = ["checkpoint", "--pid", &guest.pid_text()];
    stillframe.ok(&line)?;
    let said = refusal(&mut bounded("sys_admin", &stillframe.command(&line)?), 5)?;
    ensure!(
        said.contains("CAP_SYS_ADMIN") && said.contains("seccomp"),
        "{said}"
    );
    // A tracer that is filtered itself may lift no filter.
    let any = Missing::Call(libc::SYS_kexec_load);
    let said = without(any, || stillframe.fails(&line, 1))?;
    ensure!(said.contains("seccomp"), "{said}");
    expect_untouched(&guest, &mut monitor)?;
    expect_whole(&stillframe, &[])
}

/// The same command as root, but for one capability.
fn bounded(lost: &str, command: &Command) -> Command {
    let mut bounded = Command::new("setpriv");
    bounded.args(["--bounding-set", &format!("-{lost}"), "--"]);
    bounded.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            bounded.env(name, value);
        }
    }
    bounded
}

#[test]
fn root_without_the_right_to_trace_is_told_so() -> Result<()> {
    let guest = Setup::small(Kind::Private, "untraceable").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let line = ["checkpoint", "--pid", &guest.pid_text()];
    let said = refusal(&mut bounded("sys_ptrace", &stillframe.command(&line)?), 5)?;
    ensure!(said.contains("CAP_SYS_PTRACE"), "{said}");
    expect_untouched(&guest, &mut monitor)?;
    stillframe.ok(&line)?;
    expect_whole(&stillframe, &[])
}

/// As under libvirt: QEMU is a user without rights, the engine is root.
#[test]
fn a_qemu_without_rights_of_its_own_is_checkpointed_and_restored_as_such() -> Result<()> {
    let mut kinds = vec![Kind::Private, Kind::Memfd];
    match Path::new("/dev/kvm").exists() {
        true => kinds.push(Kind::KvmBootSector),
        false => eprintln!("without KVM: this machine has no /dev/kvm"),
    }
    for kind in kinds {
        let guest = Setup::small(kind, "humble")
            .with(&["-run-with", "user=nobody"])
            .boot()?;
        expect_nobody(guest.pid())?;
        let mut monitor = guest.second_monitor()?;
        let folder = tempfile::tempdir()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        chown(folder.path(), Some(NOBODY), None)?;
        let line = [
            "watch", "--vm", "humble", "--every", "300ms", "--count", "3", "--verify",
        ];
        for report in stillframe.json_lines(&line)? {
            ensure!(report["verify"]["differing"] == 0, "{kind:?}: {report}");
        }
        expect_untouched(&guest, &mut monitor)?;
        let mut more = vec!["--verify", "--disks-as-they-are"];
        // QEMU opened it as root before it became nobody, and so must the new one.
        if kind == Kind::KvmBootSector {
            more.push("--as-root");
        }
        let restored = Restored::start(&stillframe, "latest", folder.path(), &more)?;
        restored.serial.wait_ticks(2, PATIENCE)?;
        expect_nobody(restored.pid)?;
    }
    Ok(())
}

fn expect_nobody(pid: i32) -> Result<()> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let uid = status.lines().find_map(|line| line.strip_prefix("Uid:\t"));
    let nobody = uid.is_some_and(|ids| ids.split('\t').all(|id| id == "65534"));
    ensure!(nobody, "QEMU runs as {uid:?}");
    Ok(())
}

#[test]
fn a_password_file_nobody_may_read_is_named() -> Result<()> {
    let nobody = Unprivileged::new()?;
    let secret = tempfile::NamedTempFile::new()?;
    let path = secret.path().display().to_string();
    let said = password_from(&nobody, secret.path())?;
    ensure!(said.contains(&path) && said.contains("denied"), "{said}");
    Ok(())
}

fn password_from(nobody: &Unprivileged, file: &Path) -> Result<String> {
    let file = file.display().to_string();
    let mut command = nobody.command(&["list", "--password-file", &file]);
    refusal(command.env_remove("STILLFRAME_PASSWORD"), 1)
}
