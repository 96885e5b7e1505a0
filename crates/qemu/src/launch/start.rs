//! Running the new QEMU and handing it the device state.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use stillframe_sys::private_dir;
use stillframe_sys::process::Process;

use super::helper::{self, Order};
use super::overlays::MadeOverlays;
use super::{LaunchError, LaunchOptions, LaunchPlan};
use crate::monitor::{Monitor, MonitorError};
use crate::qmp::{Client, QmpError};

/// Pause between two checks whether QEMU is ready, in milliseconds.
const LOOK_AGAIN_MS: u64 = 2;

/// signal(7).
const SIGKILL: i32 = 9;

/// How long a QEMU that closed its monitor may take to end, in seconds.
const END_LIMIT_SECONDS: u64 = 5;

/// The end of the log that an error message shows, in bytes.
const LAST_WORDS_BYTES: u64 = 4096;

/// A new QEMU that waits for its state. It is killed when this is dropped without [`keep`].
///
/// [`keep`]: Launched::keep
#[derive(Debug)]
pub struct Launched {
    /// Its process.
    pub process: Process,
    /// A monitor of our own, over a connection that ends with this process; the user's is free from the
    /// beginning.
    pub monitor: Monitor,
    /// Its version.
    pub version: String,
    pub(super) owned: OwnedQemu,
}

impl Launched {
    /// Lets the VM live on its own from here on, beyond this process.
    pub fn keep(mut self) -> (Process, Monitor) {
        if let Some(mut child) = self.owned.child.take() {
            // If this process outlives the VM, a thread must take its exit status. Without it the VM's process
            // stays a zombie until this process ends, which is harmless.
            let reaper = std::thread::Builder::new().name("qemu-reaper".to_owned());
            let _ = reaper.spawn(move || child.wait());
        }
        self.owned.adopted = None;
        (self.process, self.monitor)
    }
}

/// The child process and its log; killed and reaped when dropped.
#[derive(Debug)]
pub(super) struct OwnedQemu {
    child: Option<Child>,
    /// The process that another program started, instead of a child.
    adopted: Option<Process>,
    log: PathBuf,
    /// Where this QEMU's words begin in the log.
    log_start: u64,
    /// How it ended by itself, if it did.
    code: Option<i32>,
}

impl Drop for OwnedQemu {
    fn drop(&mut self) {
        self.end();
    }
}

impl OwnedQemu {
    pub(super) fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both fail only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Some(adopted) = self.adopted.take() {
            let _ = adopted.signal(SIGKILL);
            adopted.wait_exit(Duration::from_secs(END_LIMIT_SECONDS));
        }
    }

    /// A QEMU that another program started. Its messages are that program's.
    pub(super) fn adopted(process: Process) -> OwnedQemu {
        OwnedQemu {
            child: None,
            adopted: Some(process),
            log: PathBuf::new(),
            log_start: 0,
            code: None,
        }
    }

    /// The exit status, if QEMU has ended by itself.
    fn has_ended(&mut self) -> Option<String> {
        if self.adopted.as_ref().is_some_and(|qemu| !qemu.is_alive()) {
            return Some("an unknown status".to_owned());
        }
        let status = self.child.as_mut()?.try_wait().ok()??;
        self.code = status.code();
        Some(status.to_string())
    }

    fn has_ended_within(&mut self, limit: Duration) -> Option<String> {
        let deadline = Instant::now() + limit;
        loop {
            let status = self.has_ended();
            if status.is_some() || Instant::now() >= deadline {
                return status;
            }
            std::thread::sleep(Duration::from_millis(LOOK_AGAIN_MS));
        }
    }

    pub(super) fn last_words(&self) -> String {
        last_words(&self.log, self.log_start).unwrap_or_default()
    }

    /// Ends QEMU and makes an error of what went wrong while `doing` something.
    pub(super) fn fail(&mut self, doing: &'static str, source: MonitorError) -> LaunchError {
        if let MonitorError::Qmp(QmpError::Closed) = source {
            let limit = Duration::from_secs(END_LIMIT_SECONDS);
            if let Some(status) = self.has_ended_within(limit) {
                return self.exited(doing, status);
            }
        }
        self.end();
        LaunchError::Monitor {
            doing,
            source: Box::new(source),
            log: self.last_words(),
        }
    }

    fn exited(&self, doing: &'static str, status: String) -> LaunchError {
        LaunchError::Exited {
            doing,
            status,
            log: self.last_words(),
        }
    }

    pub(super) fn timed_out(&mut self, doing: &'static str, limit: Duration) -> LaunchError {
        self.end();
        LaunchError::Timeout {
            doing,
            limit_ms: limit.as_millis(),
            log: self.last_words(),
        }
    }
}

fn last_words(log: &Path, start: u64) -> std::io::Result<String> {
    let mut file = File::open(log)?;
    let end = file.metadata()?.len();
    file.seek(SeekFrom::Start(
        start.max(end.saturating_sub(LAST_WORDS_BYTES)),
    ))?;
    let mut bytes = Vec::new();
    file.take(LAST_WORDS_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// A process that is to become the new QEMU. It is killed when this is dropped.
#[derive(Debug)]
pub struct Starting {
    /// Its process.
    pub process: Process,
    /// Makes it continue, and is its monitor's connection then; closed without a word it ends.
    ours: UnixStream,
    gone: bool,
    owned: OwnedQemu,
    plan: LaunchPlan,
    overlays: MadeOverlays,
}

/// Starts a process that becomes the planned QEMU on [`Starting::go`], and that ends if this process ends before.
///
/// # Errors
/// [`LaunchError::Run`] and others, when there is no process.
pub fn start(plan: &LaunchPlan, options: &LaunchOptions) -> Result<Starting, LaunchError> {
    let overlays = MadeOverlays::make(&plan.overlays)?;
    let (owned, ours) = spawn(plan, options)?;
    let pid = owned.child.as_ref().map_or(0, Child::id);
    Ok(Starting {
        process: Process::open(i32::try_from(pid).unwrap_or(0))?,
        ours,
        gone: false,
        owned,
        plan: plan.clone(),
        overlays,
    })
}

impl Starting {
    /// Lets it become QEMU.
    pub fn go(&mut self) {
        if !std::mem::replace(&mut self.gone, true) {
            // It fails only where the process has ended, which is found out by waiting for it.
            let _ = helper::go(&self.ours);
        }
    }

    /// Releases the helper and waits up to `timeout` until the monitor answers. QEMU waits for incoming state then,
    /// with all its memory empty.
    ///
    /// # Errors
    /// Anything that keeps QEMU from starting, with its own words from the log.
    pub fn wait(mut self, timeout: Duration) -> Result<Launched, LaunchError> {
        const DOING: &str = "starting";
        self.go();
        let Starting {
            process,
            ours,
            mut owned,
            plan,
            overlays,
            ..
        } = self;
        let client = match Client::over(ours, timeout) {
            Ok(client) => client,
            Err(QmpError::Closed) => {
                let limit = Duration::from_secs(END_LIMIT_SECONDS);
                let Some(status) = owned.has_ended_within(limit) else {
                    return Err(owned.fail(DOING, QmpError::Closed.into()));
                };
                if owned.code == Some(helper::EXIT_NOT_STARTED) {
                    let words = owned.last_words();
                    return Err(LaunchError::NotStarted { words });
                }
                // Another version may not understand the command line.
                plan.check_version()?;
                return Err(owned.exited(DOING, status));
            }
            Err(QmpError::Busy { .. } | QmpError::Timeout { .. }) => {
                return Err(owned.timed_out(DOING, timeout));
            }
            Err(error) => return Err(owned.fail(DOING, error.into())),
        };
        // It has opened them.
        drop(overlays);
        plan.expect_label(&process)?;
        let mut monitor = Monitor::new(client, process.pid(), plan.cwd.clone());
        let version = monitor.version();
        let version = version.map_err(|error| owned.fail(DOING, error))?;
        plan.expect_version(version.clone())?;
        let features = monitor.cpu_features();
        let features = features.map_err(|error| owned.fail(DOING, error))?;
        plan.expect_features(&features)?;
        Ok(Launched {
            process,
            monitor,
            version,
            owned,
        })
    }
}

/// Opens QEMU's log, locked for as long as QEMU has it open: the lock shows whether the log is in use.
fn open_log(path: &Path) -> Result<File, LaunchError> {
    loop {
        let log = private_dir::open_to_append(path)?;
        // Where there are no locks they show nothing, and nothing is removed.
        let _ = flock(&log, FlockOperation::NonBlockingLockShared);
        let metadata = log.metadata().map_err(|source| LaunchError::Log {
            path: path.to_owned(),
            source,
        })?;
        // Removed between the two, as the log of a QEMU that has ended?
        if metadata.nlink() > 0 {
            return Ok(log);
        }
    }
}

/// Starts the helper that becomes QEMU, in a session of its own. So neither the end of this process nor that of its
/// terminal reaches the VM. Also returns our end of its socket.
fn spawn(
    plan: &LaunchPlan,
    options: &LaunchOptions,
) -> Result<(OwnedQemu, UnixStream), LaunchError> {
    let log_failed = |source| LaunchError::Log {
        path: options.log.clone(),
        source,
    };
    let log = open_log(&options.log)?;
    let log_start = log.metadata().map_err(log_failed)?.len();
    let path = fs::canonicalize(&options.log).map_err(log_failed)?;
    let errors = log.try_clone().map_err(log_failed)?;
    let folder = options.qmp.parent().filter(|_| plan.credentials.is_some());
    let order = Order {
        program: plan.exe.clone(),
        arguments: plan.arguments.iter().skip(1).cloned().collect(),
        credentials: plan.credentials.clone(),
        monitor: true,
        socket_folder: folder.map(Path::to_owned),
    };
    let failed = |source| LaunchError::Run {
        program: plan.exe.clone(),
        source,
    };
    // The guardian, which ends QEMU if this process dies, must know QEMU first, so it waits. The helper replaces
    // itself: the pid stays the same.
    let (mut command, ours) = helper::command(&plan.helper, &order).map_err(failed)?;
    let child = command
        .current_dir(&plan.cwd)
        .stdout(log)
        .stderr(errors)
        .spawn()
        .map_err(failed)?;
    // With our copy of the helper's end open, its death would go unnoticed.
    drop(command);
    let owned = OwnedQemu {
        child: Some(child),
        adopted: None,
        log: path,
        log_start,
        code: None,
    };
    helper::send(&ours, &order).map_err(failed)?;
    Ok((owned, ours))
}
