//! The guardian's side: what runs in the small process.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use stillframe_sys::infect::{self, StolenUffd};
use stillframe_sys::process::Process;

use crate::in_words;

use super::wire::{self, LastDuty, Reply, Request, WayBack};

/// The line that resumes a VM. The id is one the engine never uses, so that the engine skips the
/// answer. (QEMU docs/interop/qmp-spec: ids are echoed.)
const CONT: &[u8] = b"{\"execute\":\"cont\",\"id\":\"guardian\"}\n";
/// The line that pauses one.
const STOP: &[u8] = b"{\"execute\":\"stop\",\"id\":\"guardian\"}\n";
/// Resets QEMU's JSON lexer, in case the engine died in the middle of a command (qmp-spec 3.4:
/// a 0xFF byte flushes the parser).
const LEXER_RESET: &[u8] = b"\xff\n";
/// QEMU may be inside a slow `stop` (it drains its disks first); it reads our `cont` after that.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// An engine that VMs wait for shows that it is there four times a second.
const NO_SIGN_OF_LIFE_LIMIT: Duration = Duration::from_secs(2);
/// A QEMU that has not written for so long is done, or does not write for other reasons.
const STREAM_IDLE: Duration = Duration::from_secs(5);
/// After the first that is missed.
const SECOND_LOOK: Duration = Duration::from_millis(500);

struct Pause {
    deadline: Option<Instant>,
    fired: bool,
    way_back: WayBack,
}

/// Signs of life of an engine that the VM's writers wait for.
struct Pulse {
    pipe: File,
    engine: Process,
    /// When the next is missed.
    due: Instant,
    /// One was missed. The engine is killed at the second: what kept it from showing one may have kept
    /// the guardian from looking (a freezer that held both).
    missed: bool,
}

/// What a wait ended with.
enum Woken {
    Request,
    SignOfLife,
    PauseTooLong,
    NoSignOfLife,
    Stream,
}

/// What the guardian knows.
struct Watch {
    engine: UnixStream,
    qmp: Option<UnixStream>,
    pause: Option<Pause>,
    pulse: Option<Pulse>,
    last_duty: LastDuty,
    /// What holds QEMU in a pause, and whether it is to be let go.
    stream: Option<OwnedFd>,
    releasing: bool,
}

/// Serves the engine at the other end of standard input until that end closes. Returns the exit
/// code of the guardian process.
///
/// A panic or error here must not lose a paused VM: everything that can fail is answered or
/// ignored, and the way out of the loop always passes through the final resume.
pub fn run() -> i32 {
    ignore_signals();
    protect_from_oom();
    let Ok(stdin) = io::stdin().as_fd().try_clone_to_owned() else {
        return 1;
    };
    let mut watch = Watch {
        engine: UnixStream::from(stdin),
        qmp: None,
        pause: None,
        pulse: None,
        last_duty: LastDuty::Nothing,
        stream: None,
        releasing: false,
    };
    while let Ok(true) = watch.serve_one() {}
    match (&watch.pause, &watch.qmp) {
        (Some(open), _) if open.way_back == WayBack::Stream => watch.read_stream_to_the_end(),
        (Some(open), Some(qmp)) if !open.fired => say_after_engine_death(qmp, CONT),
        _ => {}
    }
    match (watch.last_duty, &watch.qmp) {
        (LastDuty::End { pid, start_time }, _) => {
            // Whoever has ended already needs no ending.
            let _ = the_process(pid, start_time)
                .map(|process| process.signal(signal_hook::consts::SIGKILL));
        }
        (LastDuty::Pause, Some(qmp)) => say_after_engine_death(qmp, STOP),
        (LastDuty::Pause, None) | (LastDuty::Nothing, _) => {}
    }
    0
}

impl Watch {
    /// Waits for one request, sign of life or deadline. `Ok(false)`: the engine is gone.
    fn serve_one(&mut self) -> io::Result<bool> {
        match self.wait()? {
            Woken::Request => return self.serve_request(),
            Woken::SignOfLife => self.take_sign_of_life(),
            Woken::PauseTooLong => {
                if let (Some(open), Some(qmp)) = (&mut self.pause, &mut self.qmp) {
                    open.deadline = None;
                    open.fired = match open.way_back {
                        WayBack::Command => qmp.write_all(CONT).is_ok(),
                        WayBack::Stream => true,
                    };
                    self.releasing = open.way_back == WayBack::Stream;
                }
            }
            Woken::Stream => self.read_stream(),
            Woken::NoSignOfLife => {
                if let Some(pulse) = &mut self.pulse {
                    if pulse.missed {
                        // It is gone already, or it will be: then its end of the socket closes.
                        let _ = pulse.engine.signal(signal_hook::consts::SIGKILL);
                    }
                    pulse.missed = true;
                    pulse.due = Instant::now() + SECOND_LOOK;
                }
            }
        }
        Ok(true)
    }

    fn serve_request(&mut self) -> io::Result<bool> {
        let Some((request, descriptor)) = wire::receive::<Request>(&self.engine)? else {
            return Ok(false);
        };
        let mut handed_over = None;
        let reply = match request {
            Request::Steal {
                pid,
                start_time,
                limit_ms,
                share,
            } => match open_userfaultfd(pid, start_time, limit_ms, share) {
                Ok(opened) => {
                    handed_over = Some(opened.fd);
                    Reply::Stolen {
                        remote_fd: opened.remote_fd,
                        user_mode_only: opened.user_mode_only,
                        stopped_us: opened.stopped_us,
                    }
                }
                Err(reason) => Reply::Failed { reason },
            },
            Request::Close {
                pid,
                start_time,
                fd,
                limit_ms,
            } => ok_or_failed(close(pid, start_time, fd, limit_ms)),
            Request::LastDuty { duty } => {
                self.last_duty = duty;
                Reply::Ok
            }
            Request::Watch => {
                self.qmp = descriptor.map(UnixStream::from);
                Reply::Ok
            }
            Request::Stream => {
                self.stream = descriptor;
                Reply::Ok
            }
            Request::Release => {
                self.releasing = true;
                Reply::Ok
            }
            Request::Pausing { limit_ms, way_back } => {
                let deadline = Instant::now().checked_add(Duration::from_millis(limit_ms));
                self.pause = Some(Pause {
                    deadline,
                    fired: false,
                    way_back,
                });
                self.releasing = false;
                Reply::Ok
            }
            Request::Resumed => {
                let fired = self.pause.take().is_some_and(|open| open.fired);
                self.releasing = false;
                Reply::Pause { fired }
            }
            Request::WatchOver => ok_or_failed(self.watch_over(descriptor)),
        };
        let descriptor = handed_over.as_ref().map(AsFd::as_fd);
        wire::send(&self.engine, &reply, descriptor)?;
        Ok(true)
    }

    /// Reads what lies in the pipe, so that QEMU can go on. It is nobody's.
    fn read_stream(&self) {
        let mut piece = [0; 4096];
        while let Some(stream) = &self.stream
            && rustix::io::read(stream, &mut piece).is_ok_and(|read| read > 0)
        {}
    }

    /// The engine is gone, or as good as gone: a thread of it that hangs may keep its end of the pipe open.
    fn read_stream_to_the_end(&self) {
        let Some(stream) = &self.stream else { return };
        let idle = Timespec {
            tv_sec: STREAM_IDLE.as_secs() as i64,
            tv_nsec: 0,
        };
        let mut waited = [PollFd::new(stream, PollFlags::IN)];
        while matches!(poll(&mut waited, Some(&idle)), Ok(1))
            && waited[0].revents() == PollFlags::IN
        {
            self.read_stream();
        }
    }

    fn watch_over(&mut self, pipe: Option<OwnedFd>) -> Result<(), String> {
        let parent = rustix::process::getppid().map(rustix::process::Pid::as_raw_pid);
        let engine = Process::open(parent.unwrap_or_default()).map_err(|error| in_words(&error))?;
        let pipe = pipe.ok_or("no pipe came with the request")?;
        self.pulse = Some(Pulse {
            pipe: File::from(pipe),
            engine,
            due: Instant::now() + NO_SIGN_OF_LIFE_LIMIT,
            missed: false,
        });
        Ok(())
    }

    fn take_sign_of_life(&mut self) {
        let Some(pulse) = &mut self.pulse else { return };
        let mut signs = [0; 64];
        match pulse.pipe.read(&mut signs) {
            // The engine has let go of the VM.
            Ok(0) => self.pulse = None,
            _ => {
                pulse.due = Instant::now() + NO_SIGN_OF_LIFE_LIMIT;
                pulse.missed = false;
            }
        }
    }

    fn wait(&self) -> io::Result<Woken> {
        let pause = self.pause.as_ref().and_then(|open| open.deadline);
        let pulse = self.pulse.as_ref().map(|pulse| pulse.due);
        let first = [pause, pulse].into_iter().flatten().min();
        loop {
            let left = first.map(|at| at.saturating_duration_since(Instant::now()));
            let timeout = left.map(|left| Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            });
            let mut waited = vec![PollFd::new(&self.engine, PollFlags::IN)];
            let pipe = self.pulse.as_ref().map(|pulse| &pulse.pipe);
            waited.extend(pipe.map(|pipe| PollFd::new(pipe, PollFlags::IN)));
            let signs = waited.len();
            let stream = self.stream.as_ref().filter(|_| self.releasing);
            waited.extend(stream.map(|stream| PollFd::new(stream, PollFlags::IN)));
            match poll(&mut waited, timeout.as_ref()) {
                Ok(0) if pause.is_some() && pause == first => return Ok(Woken::PauseTooLong),
                Ok(0) => return Ok(Woken::NoSignOfLife),
                Ok(_) if !waited[0].revents().is_empty() => return Ok(Woken::Request),
                Ok(_) if waited[signs..].iter().any(|fd| !fd.revents().is_empty()) => {
                    return Ok(Woken::Stream);
                }
                Ok(_) => return Ok(Woken::SignOfLife),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The process that the engine means; why it is not to be had, in words.
fn the_process(pid: i32, start_time: u64) -> Result<Process, String> {
    let process = Process::open(pid).map_err(|error| in_words(&error))?;
    match process.start_time() == start_time {
        true => Ok(process),
        false => Err("the process has ended and its pid was reused".to_owned()),
    }
}

fn open_userfaultfd(
    pid: i32,
    start_time: u64,
    limit_ms: u64,
    share: bool,
) -> Result<StolenUffd, String> {
    let open = match share {
        true => infect::share_userfaultfd,
        false => infect::steal_userfaultfd,
    };
    let process = the_process(pid, start_time)?;
    open(&process, Duration::from_millis(limit_ms)).map_err(|error| in_words(&error))
}

fn close(pid: i32, start_time: u64, fd: i32, limit_ms: u64) -> Result<(), String> {
    let process = the_process(pid, start_time)?;
    infect::close_fd(&process, fd, Duration::from_millis(limit_ms))
        .map_err(|error| in_words(&error))
}

fn ok_or_failed(done: Result<(), String>) -> Reply {
    match done {
        Ok(()) => Reply::Ok,
        Err(reason) => Reply::Failed { reason },
    }
}

/// The engine died. Its QMP connection is ours alone now: say what is to be done, and wait for QEMU to
/// answer, because closing the connection with the command unread could lose it.
fn say_after_engine_death(qmp: &UnixStream, line: &[u8]) {
    let mut qmp = qmp;
    let deadline = Instant::now() + ANSWER_LIMIT;
    // QEMU gone, or never reading: there is no VM any more, or nothing more can be done.
    if qmp
        .write_all(LEXER_RESET)
        .and_then(|()| qmp.write_all(line))
        .is_err()
    {
        return;
    }
    let mut seen = Vec::new();
    let mut piece = [0u8; 4096];
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        if qmp
            .set_read_timeout(Some(left.max(Duration::from_millis(1))))
            .is_err()
        {
            return;
        }
        match qmp.read(&mut piece) {
            Ok(0) => return,
            Ok(read) => seen.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return,
        }
        if seen.split(|&byte| byte == b'\n').any(is_our_answer) {
            return;
        }
    }
}

fn is_our_answer(line: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(line)
        .is_ok_and(|value| value.get("id").and_then(|id| id.as_str()) == Some("guardian"))
}

/// Signals meant for the engine (a closed terminal, a polite stop of the whole group) must not end
/// the one that cleans up behind it. A handler that only sets a flag is as good as ignoring.
fn ignore_signals() {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGHUP, SIGTERM] {
        // Failing to register leaves the default action, which is what we had.
        let _ = signal_hook::flag::register(signal, Arc::clone(&flag));
    }
}

/// A few hundred KiB must not be what the kernel frees by killing us in an injection.
fn protect_from_oom() {
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
}
