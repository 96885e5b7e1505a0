//! Blocks `cont` for a VM that must not run: its memory is partly of one moment and partly of another, or it may run on
//! another host.
//!
//! ```text
//!   QEMU: dump thread ──> [ pipe, full ] ──> read when the VM may run      `cont` of any client: refused
//! ```
//!
//! QEMU refuses `cont` while it dumps guest memory. So a dump of one page is started into a full pipe. QEMU owns both
//! ends of the pipe, so the dump stays blocked after the death of the engine and of its connection. A later engine
//! finds the pipe below `/proc/PID/fd` by its content, which says why `cont` is blocked, and reads it once the VM may
//! run.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, tee};
use stillframe_qemu::monitor::{Monitor, MonitorError};
use stillframe_sys::process::Process;
use thiserror::Error;

/// Names under which QEMU keeps the two ends.
const INTO: &str = "stillframe-cont-into";
const OUT_OF: &str = "stillframe-cont-out-of";
/// Capacity of the pipe in bytes: the kernel's minimum.
const PIPE_BYTES: usize = 4096;
/// Bytes at the begin of the pipe's content that say why `cont` is blocked.
const MARK_BYTES: usize = 32;
/// Limit for QEMU to write one page and the ELF headers.
const RELEASE_LIMIT: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// Why `cont` is blocked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The VM is rewound: its memory is inconsistent.
    Rewind,
    /// The VM is given up: it may run on another host.
    HandOver,
}

impl Purpose {
    const ALL: [Purpose; 2] = [Purpose::Rewind, Purpose::HandOver];

    /// The begin of the pipe's content.
    fn mark(self) -> &'static [u8; MARK_BYTES] {
        match self {
            Purpose::Rewind => b"stillframe: a rewind is under wa",
            Purpose::HandOver => b"stillframe: given up, not settle",
        }
    }
}

/// Why `cont` could not be blocked or unblocked.
#[derive(Debug, Error)]
pub enum InhibitorError {
    /// QEMU failed a command.
    #[error("cannot block or unblock `cont` of a VM that must not run")]
    Monitor(#[from] MonitorError),
    /// A system call on the pipe failed.
    #[error("cannot block or unblock `cont` of a VM that must not run: {action} a pipe failed")]
    Pipe {
        /// The action that failed.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Another client's dump of guest memory is active.
    #[error(
        "another client dumps this VM's memory (`query-dump`): wait for its end, then try again"
    )]
    Dumping,
    /// The dump did not end in time.
    #[error(
        "the VM may run, but the dump that blocks `cont` did not end within {limit_ms} ms: try again"
    )]
    Timeout {
        /// The limit.
        limit_ms: u128,
    },
}

fn failed(action: &'static str) -> impl Fn(Errno) -> InhibitorError {
    move |errno| InhibitorError::Pipe {
        action,
        source: errno.into(),
    }
}

/// What is needed to block `cont` with one command.
#[derive(Debug)]
pub struct Prepared {
    read: OwnedFd,
    purpose: Purpose,
}

impl Prepared {
    /// Passes a full pipe to QEMU.
    pub fn new(monitor: &mut Monitor, purpose: Purpose) -> Result<Prepared, InhibitorError> {
        if monitor.is_dumping()? {
            return Err(InhibitorError::Dumping);
        }
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("making"))?;
        fcntl_setpipe_size(&write, PIPE_BYTES).map_err(failed("shrinking"))?;
        let mut padding = vec![0; PIPE_BYTES];
        padding[..MARK_BYTES].copy_from_slice(purpose.mark());
        rustix::io::write(&write, &padding).map_err(failed("filling"))?;
        rustix::fs::fcntl_setfl(&read, OFlags::NONBLOCK).map_err(failed("setting up"))?;
        monitor.give(OUT_OF, read.as_fd())?;
        monitor.give(INTO, write.as_fd())?;
        Ok(Prepared { read, purpose })
    }

    /// Blocks `cont` of a paused VM.
    pub fn engage(self, monitor: &mut Monitor) -> Result<ResumeInhibitor, InhibitorError> {
        monitor.begin_dump(INTO)?;
        monitor.expect_dump();
        let Prepared { read, purpose } = self;
        Ok(ResumeInhibitor { read, purpose })
    }

    /// Takes the pipe away from QEMU.
    pub fn discard(self, monitor: &mut Monitor) {
        // A QEMU that has ended has none.
        let _ = monitor.close_given(INTO);
        let _ = monitor.close_given(OUT_OF);
    }
}

/// A blocked `cont`. Dropping it leaves `cont` blocked.
#[derive(Debug)]
pub struct ResumeInhibitor {
    read: OwnedFd,
    purpose: Purpose,
}

impl ResumeInhibitor {
    /// Blocks `cont` of a paused VM.
    pub fn engage(
        monitor: &mut Monitor,
        purpose: Purpose,
    ) -> Result<ResumeInhibitor, InhibitorError> {
        Prepared::new(monitor, purpose)?.engage(monitor)
    }

    /// The inhibitor of an earlier engine that was killed, if there is one.
    pub fn left_behind(
        monitor: &mut Monitor,
        qemu: &Process,
    ) -> Result<Option<ResumeInhibitor>, InhibitorError> {
        if !monitor.is_dumping()? {
            return Ok(None);
        }
        let found = find(qemu.pid()).map_err(|source| InhibitorError::Pipe {
            action: "looking for",
            source,
        })?;
        if found.is_some() {
            monitor.expect_dump();
        }
        Ok(found.map(|(read, purpose)| ResumeInhibitor { read, purpose }))
    }

    /// Why `cont` is blocked.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Unblocks `cont`.
    pub fn release(self, monitor: &mut Monitor) -> Result<(), InhibitorError> {
        let deadline = Instant::now() + RELEASE_LIMIT;
        let mut piece = [0; PIPE_BYTES];
        while monitor.is_dumping()? {
            match rustix::io::read(&self.read, &mut piece) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => thread::sleep(LOOK_AGAIN),
                Err(errno) => return Err(failed("reading")(errno)),
            }
            if Instant::now() > deadline {
                return Err(InhibitorError::Timeout {
                    limit_ms: RELEASE_LIMIT.as_millis(),
                });
            }
        }
        // An earlier engine may have used another monitor; the descriptor is harmless there.
        let _ = monitor.close_given(OUT_OF);
        Ok(())
    }
}

/// The read end of a pipe of this process whose content begins with a mark.
fn find(pid: i32) -> io::Result<Option<(OwnedFd, Purpose)>> {
    let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits() as i32;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        let is_pipe = fs::read_link(&path)
            .is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"pipe:"));
        if !is_pipe {
            continue;
        }
        // QEMU may have closed it meanwhile.
        let Ok(pipe) = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(&path)
        else {
            continue;
        };
        if let Some(purpose) = marked(&pipe)? {
            return Ok(Some((pipe.into(), purpose)));
        }
    }
    Ok(None)
}

/// What the begin of the content says; the content stays in the pipe.
fn marked(pipe: impl AsFd) -> io::Result<Option<Purpose>> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    match tee(&pipe, &write, MARK_BYTES, SpliceFlags::NONBLOCK) {
        Ok(length) if length == MARK_BYTES => {}
        Ok(_) | Err(Errno::AGAIN) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    }
    let mut there = [0; MARK_BYTES];
    let length = rustix::io::read(&read, &mut there)?;
    let known = |purpose: &Purpose| length == MARK_BYTES && there == *purpose.mark();
    Ok(Purpose::ALL.into_iter().find(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_known_by_what_fills_it_and_stays_full() {
        let own = std::process::id().cast_signed();
        let (_other, write) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        rustix::io::write(&write, &[7; 100]).expect("written");
        assert!(find(own).expect("looked").is_none());
        for purpose in Purpose::ALL {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
            rustix::io::write(&write, purpose.mark()).expect("written");
            // Bytes that QEMU writes after it change nothing.
            rustix::io::write(&write, &[9; 50]).expect("written");
            drop(read);
            for _ in 0..2 {
                let (found, why) = find(own).expect("looked").expect("found");
                let there = rustix::io::ioctl_fionread(&found).expect("length");
                assert_eq!((there, why), (32 + 50, purpose));
            }
        }
    }
}
