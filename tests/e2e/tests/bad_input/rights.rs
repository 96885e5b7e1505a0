//! Too few rights, and kernels that lack something. The kernel really refuses: the engine runs as
//! nobody, or behind a system call filter that answers as an older kernel would.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use stillframe_e2e::cli::{PASSWORD, Stillframe, binary, refusal};
use stillframe_e2e::guest::{Kind, Setup};
use stillframe_e2e::health::{expect_untouched, expect_whole};

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
        // The binary may lie where nobody may not go.
        let copy = folder.path().join("stillframe");
        fs::copy(binary()?, &copy)?;
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
    let guest = Setup::small(Kind::Private, "not-mine").boot()?;
    let mut monitor = guest.second_monitor()?;
    let nobody = Unprivileged::new()?;
    let pid = guest.pid_text();
    for line in [
        vec!["checkpoint", "--pid", &pid],
        vec!["watch", "--pid", &pid, "--every", "1s"],
    ] {
        let output = nobody.command(&line).output()?;
        let code = output.status.code().context("ended by a signal")?;
        let said = String::from_utf8_lossy(&output.stderr);
        // 1 where the machine does not let this user, 5 where this VM is another user's.
        ensure!(code == 1 || code == 5, "{line:?} ended with {code}: {said}");
        ensure!(
            said.contains("root") || said.contains("CAP_SYS_PTRACE"),
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

/// What `probe` and `checkpoint` say on a kernel without `missing`. The VM runs on a whole kernel.
fn on_lesser_kernel(stillframe: &Stillframe, pid: &str, missing: Missing) -> Result<[String; 2]> {
    without(missing, || {
        let probe = refusal(&mut stillframe.command(&["probe"])?, 1)?;
        let checkpoint = refusal(&mut stillframe.command(&["checkpoint", "--pid", pid])?, 1)?;
        Ok([probe, checkpoint])
    })
}

#[test]
fn an_old_kernel_is_told_by_what_it_lacks() -> Result<()> {
    let guest = Setup::small(Kind::Private, "old-kernel").boot()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let cases = [
        (Missing::Ioctl(PAGEMAP_SCAN), "PAGEMAP_SCAN"),
        (Missing::Ioctl(UFFDIO_API), "userfaultfd"),
        (Missing::Call(libc::SYS_userfaultfd), "userfaultfd"),
        (Missing::Call(libc::SYS_pidfd_open), "pidfd"),
        (Missing::Call(libc::SYS_pidfd_getfd), "pidfd_getfd"),
        (
            Missing::Call(libc::SYS_process_vm_readv),
            "process_vm_readv",
        ),
        (Missing::Call(libc::SYS_ptrace), "ptrace"),
    ];
    for (missing, name) in cases {
        let said = on_lesser_kernel(&stillframe, &guest.pid_text(), missing)
            .with_context(|| format!("without {name}"))?;
        ensure!(said[1].contains(name), "without {name}: {}", said[1]);
        ensure!(
            said[1].contains("stillframe probe"),
            "without {name}: {}",
            said[1]
        );
        expect_untouched(&guest, &mut monitor)?;
    }
    expect_whole(&stillframe, &[])?;
    // And nothing of all this keeps the same VM from being checkpointed where all is there.
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    Ok(())
}

/// A QEMU that itself may not make the one call that is made inside it.
#[test]
fn a_qemu_that_may_not_open_a_userfaultfd_is_checkpointed_or_refused_unharmed() -> Result<()> {
    let guest = without(Missing::Call(libc::SYS_userfaultfd), || {
        Setup::small(Kind::Private, "filtered").boot()
    })?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let line = ["checkpoint", "--pid", &guest.pid_text()];
    // With CAP_SYS_ADMIN the filter is suspended for that call; the tracer must not be filtered.
    stillframe.ok(&line)?;
    let said = without(Missing::Call(libc::SYS_kexec_load), || {
        stillframe.fails(&line, 5)
    })?;
    ensure!(
        said.contains("seccomp") || said.contains("userfaultfd"),
        "{said}"
    );
    expect_untouched(&guest, &mut monitor)?;
    expect_whole(&stillframe, &[])
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
