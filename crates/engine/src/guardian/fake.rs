//! A guardian for unit tests: answers as the process does, and notes the requests.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread;

use super::Guardian;
use super::wire::{self, Injection, OnDisconnect, Reply, Request};

/// What the guardian was informed of, for the test to look at.
#[derive(Debug, Default)]
struct Heard {
    /// Whether it resumes the VM if the engine ends.
    armed: bool,
    /// Its watchdog has resumed the VM: the answer to the next `Resumed`.
    fired: bool,
    on_disconnect: Option<OnDisconnect>,
    closed: Vec<i32>,
}

/// The other end of a guardian.
#[derive(Debug, Clone, Default)]
pub(crate) struct FakeGuardian(Arc<Mutex<Heard>>);

impl FakeGuardian {
    pub(crate) fn start() -> (FakeGuardian, Guardian) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let fake = FakeGuardian::default();
        let heard = fake.0.clone();
        // It ends with the connection.
        thread::spawn(move || {
            while let Ok(Some((request, _))) = wire::receive(&theirs) {
                let reply = heard.lock().unwrap().hear(request);
                if wire::send(&theirs, &reply, &[]).is_err() {
                    break;
                }
            }
        });
        let guardian = Guardian {
            socket: ours,
            child: None,
        };
        (fake, guardian)
    }

    /// Whether it resumes the VM if the engine ends.
    pub(crate) fn is_armed(&self) -> bool {
        self.0.lock().unwrap().armed
    }

    /// What it does with a VM whose memory is not complete if the engine ends.
    pub(crate) fn on_disconnect(&self) -> Option<OnDisconnect> {
        self.0.lock().unwrap().on_disconnect.clone()
    }

    /// The descriptors that it closed in QEMU.
    pub(crate) fn closed(&self) -> Vec<i32> {
        self.0.lock().unwrap().closed.clone()
    }

    /// The limit of the pause passes.
    pub(crate) fn fire(&self) {
        self.0.lock().unwrap().fired = true;
    }
}

impl Heard {
    fn hear(&mut self, request: Request) -> Reply {
        match request {
            Request::Pausing { .. } => self.armed = true,
            // No file is renamed: no test looks for it.
            Request::Resumed | Request::GiveUp { .. } => {
                self.armed = false;
                return Reply::Pause {
                    fired: std::mem::take(&mut self.fired),
                };
            }
            Request::OnDisconnect { action } => self.on_disconnect = Some(action),
            Request::Inject { call, .. } => match call {
                Injection::Close { fd } => self.closed.push(fd),
                Injection::Discard { .. } => {}
                Injection::Userfaultfd { .. } => {
                    return Reply::Failed {
                        reason: "there is no process".to_owned(),
                    };
                }
            },
            Request::Watch
            | Request::Stream
            | Request::Hold
            | Request::Release
            | Request::TakingMemory { .. }
            | Request::MemoryGivenBack
            | Request::Heartbeat { .. } => {}
        }
        Reply::Ok
    }
}
