//! Infecting a thread that waits in a system call: the call continues as if nothing had happened.

use crate::victim::{Victim, inject};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a call returned.
#[derive(Debug)]
struct Returned {
    result: i64,
    errno: i32,
    /// How many signals were handled by then.
    handled: u32,
    elapsed_ms: u64,
}

struct Waiting {
    victim: Victim,
    number: i64,
}

impl Waiting {
    fn start(kind: &str) -> Waiting {
        let victim = Victim::start(&format!("call {kind}"));
        let number = victim.ready.parse().unwrap();
        victim.wait_in_call(number);
        Waiting { victim, number }
    }

    fn infect(&self) {
        let before = self.victim.descriptors();
        let injected = inject(&self.victim.process).unwrap();
        assert!(!injected.user_mode_only);
        assert_eq!(
            self.victim.descriptors(),
            before,
            "the victim's copy is left open"
        );
    }

    fn returned(&mut self) -> Returned {
        let line = self.victim.line();
        let mut parts = line.split(' ').map(|part| part.parse::<i64>().unwrap());
        let mut next = || parts.next().unwrap();
        Returned {
            result: next(),
            errno: next() as i32,
            handled: next() as u32,
            elapsed_ms: next() as u64,
        }
    }

    fn wake(&mut self) -> Returned {
        if let Some(word) = self.victim.word() {
            panic!("system call {} returned early: {word}", self.number);
        }
        self.victim.send("go");
        self.returned()
    }
}

/// Calls, what they return when woken, and with which errno.
const CALLS: [(&str, i64, i32); 25] = [
    ("read", 5, 0),
    ("poll", 1, 0),
    ("ppoll", 1, 0),
    ("ppoll-timed", 1, 0),
    ("ppoll-masked", 1, 0),
    ("select", 1, 0),
    ("pselect", 1, 0),
    ("epoll", 1, 0),
    ("epoll-timed", 1, 0),
    ("epoll-handled", 1, 0),
    ("epoll-masked", 1, 0),
    ("epoll-pwait2", 1, 0),
    ("futex", 0, 0),
    ("futex-timed", 0, 0),
    ("receive-timed", 5, 0),
    ("read-timed", 5, 0),
    ("send-timed", 5, 0),
    ("accept-timed", 0, 0),
    ("sigtimedwait", libc::SIGUSR2 as i64, 0),
    ("pause", -1, libc::EINTR),
    ("sigsuspend", -1, libc::EINTR),
    ("semop", 0, 0),
    ("flock", 0, 0),
    ("nanosleep", 0, 0),
    ("clock-nanosleep", 0, 0),
];

#[test]
fn every_waiting_call_goes_on() {
    for (kind, result, errno) in CALLS {
        let mut waiting = Waiting::start(kind);
        for _ in 0..5 {
            waiting.infect();
        }
        let returned = waiting.wake();
        assert_eq!(
            (returned.result, returned.errno),
            (result, errno),
            "{kind}: {returned:?}"
        );
        let signals = u32::from(matches!(kind, "pause" | "sigsuspend"));
        assert_eq!(returned.handled, signals, "{kind}: {returned:?}");
    }
}

/// Signals that are ignored by default reach a traced thread all the same. It must not show.
#[test]
fn ignored_signals_end_no_call() {
    // A program with a handler has to expect EINTR from epoll_wait(2).
    for (kind, result, errno) in CALLS
        .into_iter()
        .filter(|(kind, ..)| *kind != "epoll-handled" && *kind != "epoll-masked")
    {
        let mut waiting = Waiting::start(kind);
        let done = AtomicBool::new(false);
        let process = waiting.victim.process.clone();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    process.signal(libc::SIGWINCH).unwrap();
                    std::thread::sleep(Duration::from_micros(50));
                }
            });
            for _ in 0..50 {
                waiting.infect();
            }
            done.store(true, Ordering::SeqCst);
        });
        let returned = waiting.wake();
        assert_eq!(
            (returned.result, returned.errno),
            (result, errno),
            "{kind}: {returned:?}"
        );
    }
}

/// Nothing can end these waits here but an EINTR, and none may.
#[test]
fn waiting_for_input_and_output_goes_on() {
    for kind in ["io-uring", "io-getevents"] {
        let mut waiting = Waiting::start(kind);
        for _ in 0..5 {
            waiting.infect();
            waiting.victim.wait_in_call(waiting.number);
        }
        assert_eq!(waiting.victim.word(), None, "{kind}");
    }
}

/// A sleep that was interrupted again and again takes as long as one that was not.
#[test]
fn sleeps_have_the_right_total() {
    for kind in ["nanosleep", "clock-nanosleep"] {
        let mut control = Waiting::start(kind);
        let mut waiting = Waiting::start(kind);
        let clock = Instant::now();
        while clock.elapsed() < Duration::from_millis(500) {
            waiting.infect();
            std::thread::sleep(Duration::from_millis(20));
        }
        let (slept, alone) = (waiting.returned(), control.returned());
        assert_eq!((slept.result, alone.result), (0, 0));
        assert!(slept.elapsed_ms >= 700, "{slept:?}");
        // Started anew at its last interruption it would sleep 400 ms longer at least.
        assert!(
            slept.elapsed_ms < alone.elapsed_ms + 300,
            "{slept:?} {alone:?}"
        );
    }
}

/// A signal that the call keeps out, but the thread does not, must not end the call just because we had to put the
/// thread's own mask in place.
#[test]
fn a_signal_kept_out_by_the_call_does_not_end_it() {
    for kind in ["ppoll-masked", "epoll-masked"] {
        let mut waiting = Waiting::start(kind);
        waiting.victim.process.signal(libc::SIGUSR1).unwrap();
        waiting.infect();
        waiting.infect();
        let returned = waiting.wake();
        assert_eq!(
            (returned.result, returned.errno),
            (1, 0),
            "{kind}: {returned:?}"
        );
        assert_eq!(returned.handled, 1, "{kind}: the signal was handled once");
    }
}

/// A signal with a handler ends these calls, infected or not. None may be swallowed.
#[test]
fn a_signal_that_ends_a_call_still_does() {
    for kind in ["pause", "sigsuspend", "epoll-handled"] {
        for round in 0..40 {
            let mut waiting = Waiting::start(kind);
            std::thread::scope(|scope| {
                let process = &waiting.victim.process;
                let infecting =
                    scope.spawn(|| (0..10).for_each(|_| drop(inject(process).unwrap())));
                // Let the signal hit every part of an infection.
                std::thread::sleep(Duration::from_micros(40 * round));
                process.signal(libc::SIGUSR2).unwrap();
                infecting.join().unwrap();
            });
            let returned = waiting.returned();
            assert_eq!(
                (returned.result, returned.errno),
                (-1, libc::EINTR),
                "{kind}"
            );
            assert_eq!(returned.handled, 1, "{kind}");
        }
    }
}
