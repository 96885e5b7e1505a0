//! The guardian's side: what runs in the small process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::MlockAllFlags;
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use stillframe_sys::infect::{self, InfectError};
use stillframe_sys::process::{AddressRange, Process};

use crate::in_words;

use super::heartbeat::{Missed, Watched};
use super::resume::{self, Connection, Pause};
use super::wire::{self, Injection, OnDisconnect, Reply, Request, copy_name};

/// QEMU may be inside a slow `stop` (it drains its disks first); it reads our commands after that.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// The same limit, where a thread of the engine cannot end. Such a thread keeps the pipe that holds QEMU open,
/// which the end of the guardian alone would otherwise close.
const UNDEAD_LIMIT: Duration = Duration::from_secs(3600);

/// The event that ended a wait.
enum Woken {
    Request,
    Heartbeat,
    PauseDue,
    MemoryDue,
    NoHeartbeat,
    Stream,
}

/// QEMU that did not take a command is sent it again at this interval.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The state of the guardian.
struct Watch {
    engine: UnixStream,
    qmp: Option<Connection>,
    pause: Option<Pause>,
    heartbeat: Option<Watched>,
    on_disconnect: OnDisconnect,
    /// What the guest is to have of its memory, in bytes, if the engine took of it; and when at last.
    memory: Option<(u64, Instant)>,
    /// Descriptors that stay open until that is done, or another one is set.
    kept: Vec<OwnedFd>,
    /// The socket that holds QEMU in a pause with disks.
    hold: Option<OwnedFd>,
    /// The pipe that holds QEMU in a pause, and whether it is to be released.
    stream: Option<OwnedFd>,
    releasing: bool,
}

/// Carries out requests of the engine at the other end of standard input, until that end closes or the engine was
/// killed. Returns the exit code of the guardian process.
///
/// A panic or error here must not lose a paused VM. Every failure is answered or ignored, and the way out of the
/// loop always passes through [`Watch::engine_is_gone`].
pub fn run() -> i32 {
    ignore_signals();
    protect_from_oom();
    keep_private();
    let Ok(stdin) = io::stdin().as_fd().try_clone_to_owned() else {
        return 1;
    };
    let mut watch = Watch {
        engine: UnixStream::from(stdin),
        qmp: None,
        pause: None,
        heartbeat: None,
        on_disconnect: OnDisconnect::Nothing,
        memory: None,
        kept: Vec::new(),
        hold: None,
        stream: None,
        releasing: false,
    };
    while let Ok(true) = watch.serve_one() {}
    watch.engine_is_gone(ANSWER_LIMIT);
    0
}

impl Watch {
    /// Waits for one request, heartbeat or deadline. `Ok(false)`: the engine is gone.
    fn serve_one(&mut self) -> io::Result<bool> {
        match self.wait()? {
            Woken::Request => return self.serve_request(),
            Woken::Heartbeat => {
                let let_go = self.heartbeat.as_mut().is_some_and(Watched::read);
                if let_go {
                    self.heartbeat = None;
                }
            }
            Woken::PauseDue => {
                // Until the engine says that the pause is over, also where QEMU begins to write later.
                self.release();
                if let (Some(pause), Some(qmp)) = (&mut self.pause, &mut self.qmp) {
                    pause.look(qmp);
                }
            }
            Woken::MemoryDue => {
                if let (Some((bytes, _)), Some(qmp)) = (self.memory.take(), &mut self.qmp)
                    && qmp.give_back_memory(bytes).is_err()
                {
                    // QEMU does not read: when it does.
                    self.memory = Some((bytes, Instant::now() + AGAIN_AFTER));
                }
            }
            Woken::Stream => self.read_stream(),
            Woken::NoHeartbeat => return Ok(!self.kill_if_it_hangs()),
        }
        Ok(true)
    }

    /// The engine has missed a heartbeat. Whether it was killed.
    fn kill_if_it_hangs(&mut self) -> bool {
        let Some(heartbeat) = &mut self.heartbeat else {
            return false;
        };
        if heartbeat.miss() == Missed::Once {
            return false;
        }
        // With memory complete, or nothing protected, nothing waits for the engine.
        let waited_for =
            heartbeat.holds_userfaultfd() || self.on_disconnect != OnDisconnect::Nothing;
        if !waited_for {
            self.heartbeat = None;
            return false;
        }
        heartbeat.kill();
        self.engine_is_gone(UNDEAD_LIMIT);
        // The engine no longer uses a descriptor that one of its threads in uninterruptible sleep keeps open.
        if let Some(qmp) = &self.qmp {
            qmp.shut_down();
        }
        true
    }

    /// Does the remaining work, once; QEMU's answers are awaited for this long.
    fn engine_is_gone(&mut self, limit: Duration) {
        // First: QEMU's main thread may wait for a page, and answer nothing before it has it.
        if let Some(mut heartbeat) = self.heartbeat.take()
            && !heartbeat.read()
        {
            heartbeat.release();
        }
        let deadline = Instant::now() + limit;
        let in_the_middle = self.pause.is_some() || self.on_disconnect != OnDisconnect::Nothing;
        self.let_go_of_hold();
        if let (Some(pause), Some(qmp)) = (self.pause.take(), &mut self.qmp) {
            let stream = self.stream.as_ref().map(AsFd::as_fd);
            qmp.resume_alone(pause.way_back(), stream, deadline);
        }
        if let (Some((bytes, _)), Some(qmp)) = (self.memory.take(), &mut self.qmp) {
            qmp.give_back_memory_alone(bytes, deadline);
        }
        let action = std::mem::replace(&mut self.on_disconnect, OnDisconnect::Nothing);
        match (action, &mut self.qmp) {
            (OnDisconnect::End { pid, start_time }, _) => {
                // A process that has ended needs no signal.
                let _ = the_process(pid, start_time)
                    .map(|process| process.signal(signal_hook::consts::SIGKILL));
            }
            (OnDisconnect::Pause, Some(qmp)) => qmp.stop_alone(deadline),
            (OnDisconnect::EndCopies { disks }, Some(qmp)) => {
                let names: Vec<String> = (0..disks).map(copy_name).collect();
                for name in &names {
                    qmp.yank_alone(name, deadline);
                }
                // QEMU connects to them no more, and what it still sends there fails now.
                self.kept.clear();
                for name in &names {
                    qmp.end_copy_alone(name, deadline);
                }
            }
            (OnDisconnect::EndSnapshots(commands), Some(qmp)) => {
                qmp.end_snapshots_alone(commands, deadline);
            }
            (
                OnDisconnect::Pause
                | OnDisconnect::EndCopies { .. }
                | OnDisconnect::EndSnapshots(_),
                None,
            )
            | (OnDisconnect::Nothing, _) => {}
        }
        if let (true, Some(qmp)) = (in_the_middle, &mut self.qmp) {
            qmp.let_go_alone(deadline);
        }
    }

    fn serve_request(&mut self) -> io::Result<bool> {
        let Some((request, mut descriptors)) = wire::receive::<Request>(&self.engine)? else {
            return Ok(false);
        };
        let mut handed_over = None;
        let heartbeats = matches!(request, Request::Heartbeat { .. });
        let reply = match request {
            Request::Inject {
                pid,
                start_time,
                limit_ms,
                call,
            } => {
                let limit = Duration::from_millis(limit_ms);
                let (reply, fd) = injected((pid, start_time), call, limit);
                handed_over = fd;
                reply
            }
            Request::OnDisconnect { action } => {
                self.on_disconnect = action;
                self.kept = descriptors;
                Reply::Ok
            }
            Request::TakingMemory { bytes, limit_ms } => {
                let due = Instant::now().checked_add(Duration::from_millis(limit_ms));
                self.memory = due.map(|due| (bytes, due));
                ok_or_failed(due.map(drop).ok_or("no such time".to_owned()))
            }
            Request::MemoryGivenBack => {
                self.memory = None;
                Reply::Ok
            }
            Request::Watch | Request::Stream | Request::Hold => {
                self.keep(&request, descriptors.pop());
                Reply::Ok
            }
            Request::Release => {
                self.release();
                Reply::Ok
            }
            Request::Pausing { limit_ms, way_back } => {
                let limit = Duration::from_millis(limit_ms);
                self.pause = Some(Pause::new(limit, way_back));
                self.releasing = false;
                Reply::Ok
            }
            Request::Resumed => {
                self.hold = None;
                let pause = self.pause.take();
                let fired = pause.is_some_and(|pause| pause.was_resumed());
                self.releasing = false;
                Reply::Pause { fired }
            }
            Request::GiveUp { from, to } => self.give_up(descriptors.pop(), &from, &to),
            Request::Heartbeat { ranges } => {
                let watched = Watched::new(&self.engine, descriptors, ranges);
                ok_or_failed(watched.map(|watched| self.heartbeat = Some(watched)))
            }
        };
        let descriptor = handed_over.as_ref().map(AsFd::as_fd);
        wire::send(&self.engine, &reply, descriptor.as_slice())?;
        if heartbeats {
            stay_in_memory();
        }
        Ok(true)
    }

    /// Takes the descriptor of a request.
    fn keep(&mut self, request: &Request, descriptor: Option<OwnedFd>) {
        match request {
            Request::Watch => {
                self.qmp = descriptor.map(UnixStream::from).map(Connection::new);
            }
            Request::Hold => self.hold = descriptor,
            _ => self.stream = descriptor,
        }
    }

    /// The record gets its name and the VM is resumed no more, in one step: this process can die before or after,
    /// but an engine never finds one without the other. The file lies in memory, where other files of the host do not
    /// delay it.
    fn give_up(&mut self, directory: Option<OwnedFd>, from: &str, to: &str) -> Reply {
        if self.pause.as_ref().is_some_and(Pause::was_resumed) {
            self.pause = None;
            return Reply::Pause { fired: true };
        }
        let renamed = directory
            .ok_or(rustix::io::Errno::BADF)
            .and_then(|directory| rustix::fs::renameat(&directory, from, &directory, to));
        match renamed {
            Ok(()) => {
                self.pause = None;
                self.releasing = false;
                Reply::Pause { fired: false }
            }
            Err(errno) => Reply::Failed {
                reason: errno.to_string(),
            },
        }
    }

    /// QEMU is not to be held from here on, whatever it waits for, until a pause is over.
    fn release(&mut self) {
        self.let_go_of_hold();
        self.releasing = true;
    }

    /// The engine may have it open still.
    fn let_go_of_hold(&mut self) {
        if let Some(hold) = self.hold.take() {
            // It was shut down already.
            let _ = rustix::net::shutdown(&hold, rustix::net::Shutdown::Both);
        }
    }

    /// Reads what QEMU wrote into the pipe that holds it, so that it continues.
    fn read_stream(&self) {
        if let Some(stream) = &self.stream {
            resume::drain(stream.as_fd());
        }
    }

    fn wait(&self) -> io::Result<Woken> {
        let pause = self.pause.as_ref().and_then(Pause::due);
        let heartbeat = self.heartbeat.as_ref().map(Watched::due);
        let memory = self.memory.map(|(_, due)| due);
        let first = [pause, heartbeat, memory].into_iter().flatten().min();
        loop {
            let left = first.map(|at| at.saturating_duration_since(Instant::now()));
            let timeout = left.map(|left| Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            });
            let mut waited = vec![PollFd::new(&self.engine, PollFlags::IN)];
            let pipe = self.heartbeat.as_ref().and_then(Watched::pipe);
            waited.extend(pipe.map(|pipe| PollFd::from_borrowed_fd(pipe, PollFlags::IN)));
            let heartbeats = waited.len();
            let stream = self.stream.as_ref().filter(|_| self.releasing);
            waited.extend(stream.map(|stream| PollFd::new(stream, PollFlags::IN)));
            match poll(&mut waited, timeout.as_ref()) {
                Ok(0) if pause.is_some() && pause == first => return Ok(Woken::PauseDue),
                Ok(0) if memory.is_some() && memory == first => return Ok(Woken::MemoryDue),
                Ok(0) => return Ok(Woken::NoHeartbeat),
                Ok(_) if !waited[0].revents().is_empty() => return Ok(Woken::Request),
                Ok(_)
                    if waited[heartbeats..]
                        .iter()
                        .any(|fd| !fd.revents().is_empty()) =>
                {
                    return Ok(Woken::Stream);
                }
                Ok(_) => return Ok(Woken::Heartbeat),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The process that the engine means; or why it cannot be opened, in words.
fn the_process(pid: i32, start_time: u64) -> Result<Process, String> {
    let process = Process::open(pid).map_err(|error| in_words(&error))?;
    match process.start_time() == start_time {
        true => Ok(process),
        false => Err("the process has ended and its pid was reused".to_owned()),
    }
}

/// Has this process make a system call. Returns the answer, and the descriptor that goes with it.
fn injected(
    (pid, start_time): (i32, u64),
    call: Injection,
    limit: Duration,
) -> (Reply, Option<OwnedFd>) {
    let made = the_process(pid, start_time).and_then(|process| {
        let made = inject(&process, call, limit);
        made.map_err(|error| in_words(&error))
    });
    made.unwrap_or_else(|reason| (Reply::Failed { reason }, None))
}

fn inject(
    process: &Process,
    call: Injection,
    limit: Duration,
) -> Result<(Reply, Option<OwnedFd>), InfectError> {
    let reply = match call {
        Injection::Userfaultfd { share } => {
            let opened = match share {
                true => infect::duplicate_userfaultfd(process, limit)?,
                false => infect::inject_userfaultfd(process, limit)?,
            };
            let reply = Reply::Injected {
                remote_fd: opened.remote_fd,
                user_mode_only: opened.user_mode_only,
                stopped_us: opened.stopped_us,
            };
            return Ok((reply, Some(opened.fd)));
        }
        Injection::Close { fd } => {
            infect::close_fd(process, fd, limit)?;
            Reply::Ok
        }
        Injection::Discard { ranges } => {
            let ranges = ranges.into_iter();
            let ranges = ranges.map(|(start, end)| AddressRange { start, end });
            infect::discard(process, ranges.collect(), limit)?;
            Reply::Ok
        }
    };
    Ok((reply, None))
}

fn ok_or_failed(done: Result<(), String>) -> Reply {
    match done {
        Ok(()) => Reply::Ok,
        Err(reason) => Reply::Failed { reason },
    }
}

/// Signals meant for the engine (a closed terminal, a polite stop of the whole group) must not end
/// the process that cleans up behind it. A handler that only sets a flag is as good as ignoring.
fn ignore_signals() {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGHUP, SIGTERM] {
        // Failing to register leaves the default action, which is what we had.
        let _ = signal_hook::flag::register(signal, Arc::clone(&flag));
    }
}

/// The kernel must not kill us in an injection to free a few hundred KiB.
fn protect_from_oom() {
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
}

/// It has what opens a VM's memory: no core dump, and only root may look inside. To be called after
/// what only the owner of `/proc/self` may write.
fn keep_private() {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    // Both work for every process, of itself.
    let _ = rustix::process::setrlimit(Resource::Core, none);
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    // The program was started through a link, and would be called by its name.
    let _ = rustix::thread::set_name(c"stillframe");
}

/// The program may lie on the storage that hangs: its pages must not have to be read again.
fn stay_in_memory() {
    // Without the right to, they stay for as long as the kernel likes.
    let _ = rustix::mm::mlockall(MlockAllFlags::CURRENT);
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::wire::WayBack;
    use super::*;

    const CHILD: &str = "TEST_GUARDIAN_KEEPS_PRIVATE";

    /// A guardian that watches over a pause with this limit.
    fn on_watch(limit: Duration) -> Watch {
        let (engine, _) = UnixStream::pair().unwrap();
        let (near, _) = UnixStream::pair().unwrap();
        Watch {
            engine,
            qmp: Some(Connection::new(near)),
            pause: Some(Pause::new(limit, WayBack::Stream)),
            heartbeat: None,
            on_disconnect: OnDisconnect::Nothing,
            memory: None,
            kept: Vec::new(),
            hold: None,
            stream: None,
            releasing: false,
        }
    }

    /// The record gets its name exactly when the VM is resumed no more.
    #[test]
    fn a_vm_is_given_up_with_its_record_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Some(std::fs::File::open(folder.path()).unwrap().into());
        let is_there = |name: &str| folder.path().join(name).exists();
        std::fs::write(folder.path().join("new"), "").unwrap();

        let mut watch = on_watch(Duration::from_secs(60));
        let reply = watch.give_up(open(), "absent", "given-up");
        assert!(matches!(reply, Reply::Failed { .. }) && watch.pause.is_some());
        let reply = watch.give_up(None, "new", "given-up");
        assert!(matches!(reply, Reply::Failed { .. }) && watch.pause.is_some());
        assert!(is_there("new"));

        let mut late = on_watch(Duration::ZERO);
        let mut qmp = late.qmp.take().unwrap();
        late.pause.as_mut().unwrap().look(&mut qmp);
        let reply = late.give_up(open(), "new", "given-up");
        assert!(matches!(reply, Reply::Pause { fired: true }));
        assert!(is_there("new") && !is_there("given-up"));

        let reply = watch.give_up(open(), "new", "given-up");
        assert!(matches!(reply, Reply::Pause { fired: false }) && watch.pause.is_none());
        assert!(!is_there("new") && is_there("given-up"));
    }

    /// In a process of its own, because it cannot be undone.
    #[test]
    fn it_cannot_be_dumped() {
        if std::env::var_os(CHILD).is_some() {
            keep_private();
            let behavior = rustix::process::dumpable_behavior().unwrap();
            assert_eq!(behavior, DumpableBehavior::NotDumpable);
            assert_eq!(rustix::process::getrlimit(Resource::Core).current, Some(0));
            return;
        }
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "guardian::process::tests::it_cannot_be_dumped"])
            .env(CHILD, "1")
            .status();
        assert!(status.unwrap().success());
    }
}
