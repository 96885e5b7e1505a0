//! Keeps everybody from resuming a VM whose memory is partly of one moment and partly of another.
//!
//! ```text
//!   QEMU: dump thread ──> [ pipe, full ] ──> nobody, until the VM is whole      `cont` of anybody: refused
//! ```
//!
//! QEMU resumes no VM while it dumps guest memory. So it is told to dump one page of it, into a pipe that is
//! full, of which it is given the other end, too: the dump stands still, also when this process and its
//! connection are gone. Who has made the VM whole again reads the pipe, which the kernel shows below
//! `/proc/PID/fd`; what fills it tells it from all others.

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

/// Under which QEMU keeps the two ends.
const INTO: &str = "stillframe-rewind-into";
const OUT_OF: &str = "stillframe-rewind-out-of";
/// The smallest pipe.
const PIPE_BYTES: usize = 4096;
/// What the filler begins with.
const MARK: &[u8; 32] = b"stillframe: a rewind is under wa";
/// For QEMU to write a page and some headers.
const RELEASE_LIMIT: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// Why a VM cannot be held, or let go.
#[derive(Debug, Error)]
pub enum HoldError {
    /// QEMU failed a command.
    #[error("cannot keep the VM from being resumed meanwhile")]
    Monitor(#[from] MonitorError),
    /// No pipe.
    #[error("cannot keep the VM from being resumed meanwhile: {action} a pipe failed")]
    Pipe {
        /// What was done with it.
        action: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Somebody dumps the VM's memory.
    #[error("somebody dumps this VM's memory (`query-dump`): wait until that is done")]
    Dumping,
    /// It is not let go.
    #[error(
        "the VM is whole, but QEMU has not ended within {limit_ms} ms what keeps it from being resumed: rewind it again"
    )]
    Timeout {
        /// The limit.
        limit_ms: u128,
    },
}

fn failed(action: &'static str) -> impl Fn(Errno) -> HoldError {
    move |errno| HoldError::Pipe {
        action,
        source: errno.into(),
    }
}

/// A VM that nobody can resume. Dropped, it stays so.
#[derive(Debug)]
pub struct Hold {
    read: OwnedFd,
}

impl Hold {
    /// Holds a VM, which is paused.
    pub fn take(monitor: &mut Monitor) -> Result<Hold, HoldError> {
        if monitor.is_dumping()? {
            return Err(HoldError::Dumping);
        }
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("making"))?;
        fcntl_setpipe_size(&write, PIPE_BYTES).map_err(failed("shrinking"))?;
        let mut filler = vec![0; PIPE_BYTES];
        filler[..MARK.len()].copy_from_slice(MARK);
        rustix::io::write(&write, &filler).map_err(failed("filling"))?;
        rustix::fs::fcntl_setfl(&read, OFlags::NONBLOCK).map_err(failed("setting up"))?;
        monitor.give(OUT_OF, read.as_fd())?;
        monitor.give(INTO, write.as_fd())?;
        monitor.begin_dump(INTO)?;
        monitor.expect_dump();
        Ok(Hold { read })
    }

    /// The hold that a process has left that was killed.
    pub fn left(monitor: &mut Monitor, qemu: &Process) -> Result<Option<Hold>, HoldError> {
        if !monitor.is_dumping()? {
            return Ok(None);
        }
        let found = find(qemu.pid()).map_err(|source| HoldError::Pipe {
            action: "looking for",
            source,
        })?;
        if found.is_some() {
            monitor.expect_dump();
        }
        Ok(found.map(|read| Hold { read }))
    }

    /// Lets the VM be resumed.
    pub fn release(self, monitor: &mut Monitor) -> Result<(), HoldError> {
        let deadline = Instant::now() + RELEASE_LIMIT;
        let mut piece = [0; PIPE_BYTES];
        while monitor.is_dumping()? {
            match rustix::io::read(&self.read, &mut piece) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => thread::sleep(LOOK_AGAIN),
                Err(errno) => return Err(failed("reading")(errno)),
            }
            if Instant::now() > deadline {
                return Err(HoldError::Timeout {
                    limit_ms: RELEASE_LIMIT.as_millis(),
                });
            }
        }
        // Another monitor may have been given it, by a process that was killed: it is only a descriptor.
        let _ = monitor.close_given(OUT_OF);
        Ok(())
    }
}

/// The end to read of the pipe that a process has, and that is filled as ours are.
fn find(pid: i32) -> io::Result<Option<OwnedFd>> {
    let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits() as i32;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        let is_pipe = fs::read_link(&path)
            .is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"pipe:"));
        if !is_pipe {
            continue;
        }
        // It may be closed by now.
        let Ok(pipe) = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(&path)
        else {
            continue;
        };
        if begins_with_mark(&pipe)? {
            return Ok(Some(pipe.into()));
        }
    }
    Ok(None)
}

/// Looks without taking anything out.
fn begins_with_mark(pipe: impl AsFd) -> io::Result<bool> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    match tee(&pipe, &write, MARK.len(), SpliceFlags::NONBLOCK) {
        Ok(length) if length == MARK.len() => {}
        Ok(_) | Err(Errno::AGAIN) => return Ok(false),
        Err(errno) => return Err(errno.into()),
    }
    let mut there = [0; MARK.len()];
    let length = rustix::io::read(&read, &mut there)?;
    Ok(length == MARK.len() && there == *MARK)
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
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        rustix::io::write(&write, MARK).expect("written");
        // What QEMU writes behind it changes nothing.
        rustix::io::write(&write, &[9; 50]).expect("written");
        drop(read);
        for _ in 0..2 {
            let found = find(own).expect("looked").expect("found");
            let there = rustix::io::ioctl_fionread(&found).expect("length");
            assert_eq!(there, 32 + 50);
        }
    }
}
