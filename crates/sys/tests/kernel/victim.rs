//! Victims: this test binary started again, playing a role on its *main thread* instead of running
//! tests. A constructor does that before the test harness gets to start.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};
use stillframe_sys::infect::{InfectError, InjectedUffd, inject_userfaultfd};
use stillframe_sys::process::Process;

const ROLE: &str = "STILLFRAME_TEST_ROLE";

/// No test waits longer than this for a victim: it is lost then.
const PATIENCE: Duration = Duration::from_secs(30);

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = play_role;

extern "C" fn play_role() {
    let Ok(text) = std::env::var(ROLE) else {
        return;
    };
    let (role, argument) = text.split_once(' ').unwrap_or((&text, ""));
    // Unwinding out of here aborts, and the test sees the victim's output end.
    match role {
        "call" => crate::calls::play(argument),
        "signals" => crate::infect_signals::play(argument),
        "state" => crate::infect_state::play(argument),
        "limits" => crate::infect_limits::play(argument),
        "identity" => crate::identity::play(argument),
        "memory" => crate::ram::play(argument),
        _ => panic!("no role {role}"),
    }
    std::process::exit(0);
}

/// A line to the test.
pub fn say(text: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .expect("the test listens");
}

/// A line from the test; nothing when it is done with us.
pub fn hear() -> Option<String> {
    let mut line = String::new();
    let count = std::io::stdin()
        .lock()
        .read_line(&mut line)
        .expect("the test speaks");
    (count > 0).then(|| line.trim().to_owned())
}

pub fn inject(process: &Process) -> Result<InjectedUffd, InfectError> {
    inject_userfaultfd(process, Duration::from_secs(10))
}

/// A child process in some role.
pub struct Victim {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    pub process: Process,
    /// The text after the word `ready` in its first line.
    pub ready: String,
}

impl Victim {
    /// Starts a victim and waits for its first line, which begins with `ready`.
    pub fn start(role: &str) -> Victim {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // SAFETY: prctl(2) is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let input = child.stdin.take().unwrap();
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let process = Process::open(child.id() as i32).unwrap();
        let mut victim = Victim {
            child,
            input,
            lines,
            process,
            ready: String::new(),
        };
        let first = victim.line();
        let rest = first
            .strip_prefix("ready")
            .unwrap_or_else(|| panic!("{role}: {first}"));
        victim.ready = rest.trim().to_owned();
        victim
    }

    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    pub fn send(&mut self, text: &str) {
        writeln!(self.input, "{text}").expect("the victim lives");
    }

    /// The victim's next line.
    pub fn line(&mut self) -> String {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(error) => panic!("no word from the victim ({error}): {}", self.describe()),
        }
    }

    /// The next unread word of the victim, if there is one.
    pub fn word(&mut self) -> Option<String> {
        self.lines.recv_timeout(Duration::from_millis(1)).ok()
    }

    fn describe(&self) -> String {
        let read = |name: &str| {
            std::fs::read_to_string(format!("/proc/{}/{name}", self.pid())).unwrap_or_default()
        };
        format!("syscall {} status {}", read("syscall"), read("status"))
    }

    /// Waits until its main thread sleeps in this system call.
    pub fn wait_in_call(&self, number: i64) {
        let wanted = format!("{number} ");
        self.wait_until("is not in the expected call", || {
            let text = std::fs::read_to_string(format!("/proc/{}/syscall", self.pid()));
            text.is_ok_and(|text| text.starts_with(&wanted))
        });
    }

    /// Waits until `/proc` shows its main thread in this state.
    pub fn wait_for_state(&self, state: char) {
        self.wait_until("does not get into the state", || {
            self.process.run_state().is_ok_and(|now| now == state)
        });
    }

    pub fn wait_until(&self, complaint: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !condition() {
            assert!(
                Instant::now() < deadline,
                "the victim {complaint}: {}",
                self.describe()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for its end and says how it ended.
    pub fn end(mut self) -> std::process::ExitStatus {
        drop(std::mem::replace(&mut self.input, dead_end()));
        self.child.wait().unwrap()
    }

    pub fn kill(&mut self) -> std::process::ExitStatus {
        self.child.kill().unwrap();
        self.child.wait().unwrap()
    }

    /// How many descriptors it has open.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .unwrap()
            .count()
    }
}

/// Something to put in the place of a pipe that is closed.
fn dead_end() -> ChildStdin {
    let (_, writer) = std::io::pipe().unwrap();
    ChildStdin::from(std::os::fd::OwnedFd::from(writer))
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
