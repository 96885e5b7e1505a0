//! What the tests do to the machine around Stillframe: file systems that are full or read-only, a
//! tracer, a kernel that lacks system calls. All of it real, and undone when dropped.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use nix::sys::ptrace;
use nix::unistd::Pid;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// A mounted folder.
#[derive(Debug)]
pub struct Mount {
    at: PathBuf,
}

impl Mount {
    /// A file system in memory of this many MiB.
    pub fn tmpfs(at: &Path, mib: u32) -> Result<Mount> {
        std::fs::create_dir_all(at)?;
        let size = format!("size={mib}m");
        Mount::new(at, &["-t", "tmpfs", "-o", &size, "stillframe-test"])
    }

    /// `from` once more at `at`, read-only.
    pub fn read_only(from: &Path, at: &Path) -> Result<Mount> {
        std::fs::create_dir_all(at)?;
        let mount = Mount::new(at, &["--bind", &from.display().to_string()])?;
        mount_command(at, &["-o", "remount,bind,ro"])?;
        Ok(mount)
    }

    /// An ext4 file system of this many MiB in a file beside it.
    pub fn image(at: &Path, mib: u64) -> Result<Mount> {
        std::fs::create_dir_all(at)?;
        let image = at.with_extension("img");
        std::fs::File::create(&image)?.set_len(mib << 20)?;
        let status = Command::new("mkfs.ext4").arg("-q").arg(&image).status()?;
        if !status.success() {
            bail!("mkfs.ext4 ended with {status}");
        }
        Mount::new(at, &["-o", "loop", &image.display().to_string()])
    }

    fn new(at: &Path, arguments: &[&str]) -> Result<Mount> {
        mount_command(at, arguments)?;
        Ok(Mount { at: at.to_owned() })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily, because a process that is just ending may still hold a file.
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).status();
    }
}

fn mount_command(at: &Path, arguments: &[&str]) -> Result<()> {
    let status = Command::new("mount").args(arguments).arg(at).status()?;
    match status.success() {
        true => Ok(()),
        false => bail!(
            "cannot mount {} (these tests need root): {status}",
            at.display()
        ),
    }
}

/// A tracer of a process, as a debugger would be one that lets it run.
#[derive(Debug)]
pub struct Tracer {
    // Dropping it ends the thread, and with the thread the kernel ends the tracing.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Tracer {
    /// Traces the main thread of `pid`.
    pub fn of(pid: i32) -> Result<Tracer> {
        let (stop, stopped) = mpsc::channel::<()>();
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let seized = ptrace::seize(Pid::from_raw(pid), ptrace::Options::empty());
            let _ = sender.send(seized);
            let _ = stopped.recv();
        });
        receiver
            .recv()?
            .with_context(|| format!("cannot trace process {pid}"))?;
        Ok(Tracer {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A call that an older kernel does not have.
#[derive(Debug, Clone, Copy)]
pub enum Missing {
    /// The whole system call.
    Call(i64),
    /// One request of ioctl(2).
    Ioctl(u64),
}

/// Runs `work` on a thread on which, and in whatever is started from which, the kernel answers
/// `missing` with the error that a kernel without it gives.
pub fn without<T: Send>(missing: Missing, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let filter = filter(missing)?;
    std::thread::scope(|scope| {
        let work = scope.spawn(move || {
            seccompiler::apply_filter(&filter).context("seccomp")?;
            work()
        });
        work.join()
            .map_err(|_| anyhow::anyhow!("the thread without a call panicked"))?
    })
}

fn filter(missing: Missing) -> Result<BpfProgram> {
    let (call, rules, errno) = match missing {
        Missing::Call(call) => (call, Vec::new(), libc::ENOSYS),
        Missing::Ioctl(request) => {
            let length = SeccompCmpArgLen::Dword;
            let is_it = SeccompCondition::new(1, length, SeccompCmpOp::Eq, request)?;
            (
                libc::SYS_ioctl,
                vec![SeccompRule::new(vec![is_it])?],
                libc::ENOTTY,
            )
        }
    };
    let filter = SeccompFilter::new(
        [(call, rules)].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(errno as u32),
        std::env::consts::ARCH.try_into()?,
    )?;
    Ok(filter.try_into()?)
}
