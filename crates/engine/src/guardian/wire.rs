//! The messages between the engine and its guardian: one JSON line a message over a socket pair, descriptors with
//! it as `SCM_RIGHTS`.
//!
//! ```text
//!   engine                          guardian
//!     Inject {pid, call, ..} -->      (ptrace)          <-- Injected + userfaultfd | Ok | Failed
//!     Watch + QMP socket     -->                        <-- Ok
//!     Stream + pipe          -->                        <-- Ok      the end that holds QEMU in a pause
//!     Hold + socket          -->                        <-- Ok      what holds QEMU in the next pause, too
//!     Pausing {limit_ms, ..} -->                        <-- Ok      then the engine stops the VM
//!     Release                -->                        <-- Ok      QEMU is not to be held any longer
//!     Resumed                -->                        <-- Pause {fired}
//!     GiveUp + directory     -->      (renames)         <-- Pause {fired} | Failed
//!     Heartbeat + pipe, uffd -->                        <-- Ok      then heartbeats, or it kills the engine
//!     OnDisconnect {action}  -->                        <-- Ok
//!     TakingMemory {..}      -->                        <-- Ok      then the balloon is inflated
//!     MemoryGivenBack        -->                        <-- Ok
//!     (end of file)          -->      unregisters ranges unless the engine did, resumes the VM if between Pausing
//!                                     and Resumed, gives memory back, carries out the on-disconnect action, exits
//! ```

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stillframe_qemu::monitor::EndCommands;
use stillframe_sys::fdpass;

/// Longest message either side sends, in bytes; both sides are ours, so this only bounds a bug. The address
/// ranges of 4096 RAM blocks take 140 KiB.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// Bytes received with one call.
const RECEIVE_BYTES: usize = 4096;

/// A message from the engine to the guardian.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Make a system call inside this process.
    Inject {
        /// Process id of QEMU.
        pid: i32,
        /// Its start time, so that a reused pid is never touched.
        start_time: u64,
        /// Bound for the whole injection.
        limit_ms: u64,
        /// The call.
        call: Injection,
    },
    /// The action when the engine is gone.
    OnDisconnect {
        /// That.
        action: OnDisconnect,
    },
    /// The engine is about to inflate the balloon.
    TakingMemory {
        /// What the guest has to have again, in bytes.
        bytes: u64,
        /// It gets it when this has passed without a `MemoryGivenBack`, or the engine is gone.
        limit_ms: u64,
    },
    /// The guest was told to take its memory back.
    MemoryGivenBack,
    /// The QMP socket (descriptor with the message) on which a paused VM is resumed.
    Watch,
    /// The pipe (descriptor with the message) that QEMU saves its device state into, and waits for.
    Stream,
    /// The socket (descriptor with the message) that QEMU waits for in the next pause, before it saves its device state.
    Hold,
    /// The engine is about to stop the VM.
    Pausing {
        /// The VM is resumed when this has passed without a `Resumed`.
        limit_ms: u64,
        /// How.
        way_back: WayBack,
    },
    /// The guardian is to read all that QEMU still writes into the pipe.
    Release,
    /// The VM runs again.
    Resumed,
    /// Rename a file in the directory that comes with this, and never resume the VM: both, or neither.
    GiveUp {
        /// Its name.
        from: String,
        /// Its new name.
        to: String,
    },
    /// The engine will write heartbeats into a pipe (the first descriptor with this), and is to be killed
    /// when it does not. Where vCPUs wait for the engine, a copy of its userfaultfd is the second descriptor.
    Heartbeat {
        /// The address ranges that are registered with that userfaultfd: start and end of each.
        ranges: Vec<(u64, u64)>,
    },
}

/// A system call that QEMU makes for the engine.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Injection {
    /// Open a userfaultfd and hand it over.
    Userfaultfd {
        /// Whether the process keeps a copy.
        share: bool,
    },
    /// Close a descriptor.
    Close {
        /// Its number.
        fd: i32,
    },
    /// Discard private memory.
    Discard {
        /// Start and end of each range.
        ranges: Vec<(u64, u64)>,
    },
}

/// How a VM that was stopped comes to run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WayBack {
    /// QEMU resumes it by itself, as soon as the pipe that holds it is read or closed.
    Stream,
    /// The command `cont`.
    Command,
}

/// On-disconnect action: the guardian's action when the engine is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnDisconnect {
    /// Nothing.
    Nothing,
    /// End a QEMU that was started for a restore and has not run yet.
    End {
        /// Its process id.
        pid: i32,
        /// Its start time.
        start_time: u64,
    },
    /// Pause the VM: the memory it runs on is not complete.
    Pause,
    /// End the jobs that copy disks: nothing takes what they send any more.
    EndCopies {
        /// How many there may be ([`copy_name`]).
        disks: usize,
    },
    /// Take away the snapshots of disks: else QEMU copies what the guest overwrites into memory, without end.
    EndSnapshots(EndCommands),
}

/// The names of jobs that copy disks, and of their nodes in QEMU, begin like this.
pub const COPY: &str = "stillframe-disk-";

/// The name of a job that copies a disk, and of its node in QEMU.
pub fn copy_name(number: usize) -> String {
    format!("{COPY}{number}")
}

/// A message from the guardian to the engine.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// Done.
    Ok,
    /// The userfaultfd comes with this message.
    Injected {
        /// The number of the process' own copy.
        remote_fd: i32,
        /// Kernel-mode faults are not delivered (unprivileged QEMU).
        user_mode_only: bool,
        /// How long QEMU's main thread was stopped.
        stopped_us: u64,
    },
    /// The answer to `Resumed` and `GiveUp`: whether the watchdog had to resume the VM.
    Pause {
        /// True when the limit passed first.
        fired: bool,
    },
    /// The request failed.
    Failed {
        /// Why, in words for the user.
        reason: String,
    },
}

/// Sends one message, and descriptors with it.
pub(super) fn send<M: Serialize>(
    socket: &UnixStream,
    message: &M,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    fdpass::send(socket, &line, descriptors)
}

/// Receives one message and its descriptors; `Ok(None)` at the end of file.
pub(super) fn receive<M: DeserializeOwned>(
    socket: &UnixStream,
) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let mut line = Vec::new();
    let mut descriptors = Vec::new();
    while line.last() != Some(&b'\n') {
        if line.len() >= MESSAGE_BYTES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "message too long",
            ));
        }
        // One message is in flight at a time (every request is answered before the next). So reading past the line
        // end cannot swallow a second message.
        let mut piece = [0u8; RECEIVE_BYTES];
        let (read, received) = fdpass::receive(socket, &mut piece)?;
        descriptors.extend(received);
        if read == 0 {
            return match line.is_empty() {
                true => Ok(None),
                false => Err(io::ErrorKind::UnexpectedEof.into()),
            };
        }
        line.extend_from_slice(&piece[..read]);
    }
    Ok(Some((serde_json::from_slice(&line)?, descriptors)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    /// More RAM blocks than one receive call returns.
    #[test]
    fn long_messages_and_several_descriptors_arrive() {
        let (near, far) = UnixStream::pair().unwrap();
        let ranges: Vec<(u64, u64)> = (0..4096).map(|n| (n << 44, (n << 44) + 4096)).collect();
        let sent = Request::Heartbeat {
            ranges: ranges.clone(),
        };
        let sender = std::thread::spawn(move || {
            send(&near, &sent, &[near.as_fd(), near.as_fd()]).unwrap();
        });
        let (received, descriptors) = receive::<Request>(&far).unwrap().unwrap();
        sender.join().unwrap();
        assert!(matches!(received, Request::Heartbeat { ranges: got } if got == ranges));
        assert_eq!(descriptors.len(), 2);
        // They are copies of the sender's end.
        drop(descriptors);
        assert!(receive::<Request>(&far).unwrap().is_none());
    }
}
