//! Handles Ctrl-C, SIGTERM and a closed terminal, and a limit for the size of files.
//!
//! ```text
//!   signals so far     0 .............. abort_at .............. abort_at + 1
//!                      work continues   aborted between two     the process exits at once
//!                                       steps of the work
//! ```
//!
//! An exit at once is safe too: the guardian resumes a paused VM, the kernel ends tracking, and the next command
//! removes a dead process's lock. An abort between two steps also removes the lock. Commands that would leave a VM
//! unusable (restore, clone, rewind) never exit at once.

use std::ffi::c_int;
use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
pub use stillframe_engine::pipeline::Interrupted;

use crate::exit::Exit;
use crate::output::Console;

/// The effect of signals after the one that aborts the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterAbort {
    /// The process exits at once.
    Exit,
    /// None: the abort continues.
    Wait,
}

/// The signals that this process has received.
#[derive(Debug, Clone)]
pub struct Interrupts {
    seen: Arc<AtomicU32>,
    abort_at: u32,
}

impl Interrupts {
    /// Handles signals from now on. Signal number `abort_at` aborts the work; the first signal prints the note `first`.
    pub fn listen(
        console: Console,
        abort_at: u32,
        first: &'static str,
        after_abort: AfterAbort,
    ) -> io::Result<Interrupts> {
        let seen = Arc::new(AtomicU32::new(0));
        let ignored = ignored_signals(&fs::read_to_string("/proc/self/status")?);
        let mut signals = Signals::new(handled(ignored))?;
        let counter = Arc::clone(&seen);
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for _ in signals.forever() {
                    match counter.fetch_add(1, Ordering::Relaxed) + 1 {
                        1 => console.note(first),
                        number if number > abort_at => match after_abort {
                            AfterAbort::Exit => process::exit(Exit::Failed.code()),
                            AfterAbort::Wait => console.note("still ending; please wait"),
                        },
                        _ => console.note("interrupted again: aborting the current work"),
                    }
                }
            })?;
        Ok(Interrupts { seen, abort_at })
    }

    /// Whether there was a signal.
    pub fn any(&self) -> bool {
        self.seen.load(Ordering::Relaxed) > 0
    }

    /// Whether the current work is to be aborted.
    pub fn aborts(&self) -> bool {
        self.seen.load(Ordering::Relaxed) >= self.abort_at
    }

    /// Runs `work`, which calls [`Interrupts::step`] on this thread between its steps. An abort unwinds `work` from
    /// there, like a panic, and drops everything that it holds.
    pub fn interruptible<T>(&self, work: impl FnOnce() -> T) -> Result<T, Interrupted> {
        // A progress sink cannot return "stop"; unwinding drops locks and trackers exactly as an error return does.
        // What `work` borrows is dropped only afterwards.
        panic::catch_unwind(AssertUnwindSafe(work)).map_err(|payload| {
            match payload.downcast::<Interrupted>() {
                Ok(interrupted) => *interrupted,
                Err(payload) => panic::resume_unwind(payload),
            }
        })
    }

    /// A point at which the work may be aborted.
    pub fn step(&self) {
        if self.aborts() {
            panic::resume_unwind(Box::new(Interrupted));
        }
    }
}

/// A file beyond the size that this process may write (`ulimit -f`) is an error of that write from here on. The signal would
/// end the process without a word.
pub fn outlive_file_limit() {
    // Without it the process ends as any other. Unlike an ignored signal, a handled one stays the default in QEMU.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// The signals to handle: all but those that were ignored at the start (`nohup`, a shell's background job).
fn handled(ignored: u64) -> impl Iterator<Item = c_int> {
    let handled = move |signal: &c_int| ignored & (1 << (signal - 1)) == 0;
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(handled)
}

/// The set of ignored signals in `/proc/PID/status` (proc_pid_status(5)): bit n-1 is signal n.
fn ignored_signals(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_ignored_at_the_start_stay_ignored() {
        let handled = |status| handled(ignored_signals(status)).collect::<Vec<_>>();
        assert_eq!(
            handled("Name:\tx\nSigIgn:\t0000000000001000\n"),
            [SIGINT, SIGTERM, SIGHUP]
        );
        assert_eq!(handled("SigIgn:\t0000000000001001\n"), [SIGINT, SIGTERM]);
        assert_eq!(handled("SigIgn:\t0000000000000003\n"), [SIGTERM]);
        assert_eq!(handled(""), [SIGINT, SIGTERM, SIGHUP]);
    }

    fn after(signals: u32) -> Interrupts {
        Interrupts {
            seen: Arc::new(AtomicU32::new(signals)),
            abort_at: 2,
        }
    }

    #[test]
    fn an_abort_ends_the_work_and_drops_what_it_held() {
        for (signals, expected) in [(0, Ok(7)), (1, Ok(7)), (2, Err(Interrupted))] {
            let interrupts = after(signals);
            let held = Arc::new(());
            let (clone, inside) = (Arc::clone(&held), interrupts.clone());
            let done = interrupts.interruptible(move || {
                let _held = clone;
                inside.step();
                7
            });
            assert_eq!(done, expected);
            assert_eq!(Arc::strong_count(&held), 1);
        }
    }

    #[test]
    #[should_panic(expected = "a bug")]
    fn other_panics_are_passed_on() {
        let _ = after(0).interruptible(|| panic!("a bug"));
    }
}
