//! What Ctrl-C, SIGTERM and a closed terminal do.
//!
//! ```text
//!   signals so far     0 ........... patience ............ patience + 1
//!                      work goes on  given up between two  the process ends at once
//!                                    steps of the work
//! ```
//!
//! Ending at once is safe too (the guardian resumes a paused VM, the kernel ends tracking, the next
//! user removes a dead process' lock); giving up between two steps also takes our lock away. Only a
//! restore would leave something behind, a QEMU that waits for ever: it never ends at once.

use std::ffi::c_int;
use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
pub use stillframe_engine::pipeline::Interrupted;

use crate::exit::Exit;
use crate::output::Console;

/// What happens when the user loses patience with the giving up, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtLast {
    /// The process ends at once.
    End,
    /// Nothing: the work is given up, only not at once.
    Wait,
}

/// Signals that asked this process to end.
#[derive(Debug, Clone)]
pub struct Interrupts {
    seen: Arc<AtomicU32>,
    patience: u32,
}

impl Interrupts {
    /// Listens from now on. Work is given up at signal number `patience`; `first` is what the user
    /// is told at the first.
    pub fn listen(
        console: Console,
        patience: u32,
        first: &'static str,
        at_last: AtLast,
    ) -> io::Result<Interrupts> {
        let seen = Arc::new(AtomicU32::new(0));
        let ignored = ignored_signals(&fs::read_to_string("/proc/self/status")?);
        let mut signals = Signals::new(wanted(ignored))?;
        let counter = Arc::clone(&seen);
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for _ in signals.forever() {
                    match counter.fetch_add(1, Ordering::Relaxed) + 1 {
                        1 => console.note(first),
                        number if number > patience => match at_last {
                            AtLast::End => process::exit(Exit::Failed.code()),
                            AtLast::Wait => console.note("being given up; please wait"),
                        },
                        _ => console.note("interrupted again: giving the running work up"),
                    }
                }
            })?;
        Ok(Interrupts { seen, patience })
    }

    /// Whether the user wants an end.
    pub fn any(&self) -> bool {
        self.seen.load(Ordering::Relaxed) > 0
    }

    /// Runs `work`, which calls [`Interrupts::step`] on this thread now and then. When the user's
    /// patience ends, it is left there, as by a panic: everything it held is dropped.
    pub fn interruptible<T>(&self, work: impl FnOnce() -> T) -> Result<T, Interrupted> {
        // The verbs' progress sinks have no way to say "stop"; unwinding drops locks and trackers
        // exactly as an error return would. What `work` borrowed is only dropped afterwards.
        panic::catch_unwind(AssertUnwindSafe(work)).map_err(|payload| {
            match payload.downcast::<Interrupted>() {
                Ok(interrupted) => *interrupted,
                Err(payload) => panic::resume_unwind(payload),
            }
        })
    }

    /// A point at which the work may be left.
    pub fn step(&self) {
        if self.seen.load(Ordering::Relaxed) >= self.patience {
            panic::resume_unwind(Box::new(Interrupted));
        }
    }
}

/// What this process was started deaf to (`nohup`, a shell's background job) it stays deaf to.
fn wanted(ignored: u64) -> impl Iterator<Item = c_int> {
    let heard = move |signal: &c_int| ignored & (1 << (signal - 1)) == 0;
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(heard)
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
    fn a_process_stays_deaf_to_what_it_was_started_deaf_to() {
        let heard = |status| wanted(ignored_signals(status)).collect::<Vec<_>>();
        assert_eq!(
            heard("Name:\tx\nSigIgn:\t0000000000001000\n"),
            [SIGINT, SIGTERM, SIGHUP]
        );
        assert_eq!(heard("SigIgn:\t0000000000001001\n"), [SIGINT, SIGTERM]);
        assert_eq!(heard("SigIgn:\t0000000000000003\n"), [SIGTERM]);
        assert_eq!(heard(""), [SIGINT, SIGTERM, SIGHUP]);
    }

    fn after(signals: u32) -> Interrupts {
        Interrupts {
            seen: Arc::new(AtomicU32::new(signals)),
            patience: 2,
        }
    }

    #[test]
    fn work_is_left_when_patience_ends_and_what_it_held_is_dropped() {
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
    fn other_panics_go_on() {
        let _ = after(0).interruptible(|| panic!("a bug"));
    }
}
