//! Heartbeats show the guardian that the engine still does the work that threads of the VM wait for.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use stillframe_sys::process::{AddressRange, Process};
use stillframe_sys::uffd::Uffd;

use crate::in_words;

/// How often the engine writes a heartbeat.
pub const HEARTBEAT: Duration = Duration::from_millis(250);
/// The first miss.
const MISSED_AFTER: Duration = Duration::from_secs(2);
/// Time from the first miss to the second.
const MISSED_AGAIN_AFTER: Duration = Duration::from_millis(500);
/// Time for the threads of a killed engine to end. Threads in uninterruptible sleep do not end; none of them
/// returns to its own code.
const DYING_LIMIT: Duration = Duration::from_millis(200);

const BEAT: u8 = 1;
/// The byte that [`Heartbeat::let_go`] writes.
pub(crate) const LET_GO: u8 = 2;

/// The engine's end of the pipe.
#[derive(Debug)]
pub struct Heartbeat {
    pipe: File,
}

impl Heartbeat {
    /// A pipe: the guardian's end and the engine's.
    pub(crate) fn pipe() -> io::Result<(OwnedFd, Heartbeat)> {
        let (reader, writer) = io::pipe()?;
        rustix::io::ioctl_fionbio(&reader, true)?;
        rustix::io::ioctl_fionbio(&writer, true)?;
        let pipe = File::from(OwnedFd::from(writer));
        Ok((reader.into(), Heartbeat { pipe }))
    }

    /// Reports that the engine handles the VM's faults. To be called every [`HEARTBEAT`].
    pub fn beat(&self) {
        // A full pipe says as much as one more byte; without a guardian the next pause fails.
        let _ = (&self.pipe).write(&[BEAT]);
    }

    /// Reports that no thread of the VM waits for the engine any more, whatever becomes of it: all ranges are
    /// unregistered.
    pub fn let_go(&self) {
        // Lost, it is made up for when the engine's socket closes.
        let _ = (&self.pipe).write(&[LET_GO]);
    }
}

/// A thread of its own that beats: each of the others waits for storage, for QEMU or for another host now and then.
/// Dropped, it beats no more.
#[derive(Debug)]
pub struct Beating {
    _end: Sender<()>,
}

impl Beating {
    /// Beats from now on. `last` is done when it ends.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start(heartbeat: Heartbeat, last: fn(&Heartbeat)) -> io::Result<Beating> {
        let (sender, end) = mpsc::channel();
        let thread = thread::Builder::new().name("heartbeat".to_owned());
        thread.spawn(move || {
            heartbeat.beat();
            while end.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
                heartbeat.beat();
            }
            last(&heartbeat);
        })?;
        Ok(Beating { _end: sender })
    }
}

/// The engine as the guardian watches it.
pub(super) struct Watched {
    /// None once it has ended.
    pipe: Option<File>,
    engine: Process,
    registered: Option<Registered>,
    /// When the next heartbeat is missed.
    due: Instant,
    missed: bool,
}

/// The registered ranges, on which vCPUs may wait.
struct Registered {
    uffd: Uffd,
    ranges: Vec<AddressRange>,
}

impl Registered {
    fn release(self) {
        for range in self.ranges {
            // A range that is no longer mapped has no waiters.
            let _ = self.uffd.unregister(range);
        }
    }
}

/// The result of waiting for a due heartbeat.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Missed {
    /// It is the first one.
    Once,
    /// The engine hangs.
    Again,
}

impl Watched {
    /// Watches the process at the other end of `socket`: the descriptors are the pipe and, where vCPUs wait
    /// for the engine, its userfaultfd.
    pub(super) fn new(
        socket: &UnixStream,
        descriptors: Vec<OwnedFd>,
        ranges: Vec<(u64, u64)>,
    ) -> Result<Watched, String> {
        let mut descriptors = descriptors.into_iter();
        let pipe = descriptors.next().ok_or("no pipe came with the request")?;
        let registered = descriptors.next().map(|uffd| Registered {
            uffd: Uffd::adopt(uffd),
            ranges: ranges
                .into_iter()
                .map(|(start, end)| AddressRange { start, end })
                .collect(),
        });
        Ok(Watched {
            pipe: Some(File::from(pipe)),
            engine: engine(socket)?,
            registered,
            due: Instant::now() + MISSED_AFTER,
            missed: false,
        })
    }

    pub(super) fn pipe(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// Whether threads of the VM wait on the userfaultfd.
    pub(super) fn holds_userfaultfd(&self) -> bool {
        self.registered.is_some()
    }

    /// Reads the engine's bytes; `true` when it reported that no thread of the VM waits any more.
    pub(super) fn read(&mut self) -> bool {
        let Some(pipe) = &mut self.pipe else {
            return false;
        };
        let mut bytes = [0; 64];
        loop {
            match pipe.read(&mut bytes) {
                Ok(0) => {
                    self.pipe = None;
                    return false;
                }
                Ok(read) if bytes[..read].contains(&LET_GO) => return true,
                Ok(_) => {
                    self.due = Instant::now() + MISSED_AFTER;
                    self.missed = false;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }

    /// No heartbeat came in time.
    pub(super) fn miss(&mut self) -> Missed {
        self.due = Instant::now() + MISSED_AGAIN_AFTER;
        match std::mem::replace(&mut self.missed, true) {
            false => Missed::Once,
            true => Missed::Again,
        }
    }

    /// Kills the engine. When this returns, none of its threads runs its own code any more.
    pub(super) fn kill(&self) {
        // One that has ended needs no killing.
        let _ = self.engine.signal(signal_hook::consts::SIGKILL);
        self.engine.wait_exit(DYING_LIMIT);
    }

    /// Unregisters all ranges, which wakes every waiting thread of the VM.
    pub(super) fn release(self) {
        if let Some(registered) = self.registered {
            registered.release();
        }
    }
}

/// The process at the other end of a socket pair. The parent alone would not do: with the engine dead, that is
/// the process that inherited the guardian.
fn engine(socket: &UnixStream) -> Result<Process, String> {
    let maker = rustix::net::sockopt::socket_peercred(socket).map_err(|error| in_words(&error))?;
    let engine = Process::open(maker.pid.as_raw_pid()).map_err(|error| in_words(&error))?;
    match rustix::process::getppid() == Some(maker.pid) {
        true => Ok(engine),
        false => Err("the engine has ended".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched() -> (Watched, Heartbeat) {
        let (theirs, ours) = Heartbeat::pipe().unwrap();
        let watched = Watched {
            pipe: Some(File::from(theirs)),
            engine: Process::open(std::process::id() as i32).unwrap(),
            registered: None,
            due: Instant::now(),
            missed: false,
        };
        (watched, ours)
    }

    #[test]
    fn a_heartbeat_makes_up_for_one_that_was_missed() {
        let (mut watched, heartbeat) = watched();
        assert_eq!(watched.miss(), Missed::Once);
        heartbeat.beat();
        assert!(!watched.read());
        assert_eq!(watched.miss(), Missed::Once);
        assert_eq!(watched.miss(), Missed::Again);
    }

    /// The thread that wrote the heartbeats ended; the VM may wait for it.
    #[test]
    fn the_end_of_the_pipe_is_no_letting_go() {
        let (mut watched, heartbeat) = watched();
        heartbeat.beat();
        drop(heartbeat);
        let due = watched.due();
        assert!(!watched.read() && watched.pipe().is_none());
        assert!(watched.due() > due, "the last heartbeat counts");
        assert_eq!(watched.miss(), Missed::Once);
        assert_eq!(watched.miss(), Missed::Again);
    }

    #[test]
    fn letting_go_is_reported() {
        let (mut watched, heartbeat) = watched();
        heartbeat.beat();
        heartbeat.let_go();
        drop(heartbeat);
        assert!(watched.read());
    }
}
