//! Infecting a process that is being hit by signals: none is lost, none comes twice, none ends what
//! it would not have ended.

use crate::calls::{call, leak, set_of, without_signals};
use crate::victim::{Victim, hear, inject, say};
use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use stillframe_sys::infect::{InfectError, inject_userfaultfd};
use stillframe_sys::memory::RemoteMemory;
use stillframe_sys::process::Process;

static COUNT: AtomicU64 = AtomicU64::new(0);
static SUM: AtomicU64 = AtomicU64::new(0);
static LAST: AtomicU64 = AtomicU64::new(0);
static STEPS: AtomicU64 = AtomicU64::new(0);
static DONE: AtomicBool = AtomicBool::new(false);

const QUEUED: c_int = 40;

extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    COUNT.fetch_add(1, Ordering::SeqCst);
    LAST.store(signal as u64, Ordering::SeqCst);
    // SAFETY: the kernel gives a siginfo to a handler installed with SA_SIGINFO.
    let value = unsafe { (*info).si_value().sival_ptr } as u64;
    SUM.fetch_add(value, Ordering::SeqCst);
}

fn handle(signal: c_int, flags: c_int) {
    // SAFETY: the handler only uses atomics.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = flags | libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
    }
}

/// The victim. It ends, and reports, when it receives a line.
pub fn play(argument: &str) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let listener = move || {
        hear();
        DONE.store(true, Ordering::SeqCst);
        std::io::Write::write_all(&mut writer, b"end").unwrap();
        std::mem::forget(writer);
    };
    let fd = c_long::from(std::os::fd::AsRawFd::as_raw_fd(&reader));
    match argument {
        "running" => {
            handle(QUEUED, 0);
            without_signals(listener);
            say(format!("ready {}", &raw const STEPS as u64));
            while !DONE.load(Ordering::SeqCst) {
                assert!(call(libc::SYS_getppid, []) > 1);
                STEPS.fetch_add(1, Ordering::SeqCst);
            }
        }
        "reading" => {
            handle(QUEUED, libc::SA_RESTART);
            without_signals(listener);
            say("ready");
            // Panics on EINTR.
            assert_eq!(call(libc::SYS_read, [fd, leak([0_u8; 8]), 8]), 3);
        }
        "sleeping" => {
            handle(libc::SIGALRM, 0);
            let every = libc::timeval {
                tv_sec: 0,
                tv_usec: 150,
            };
            let timer = libc::itimerval {
                it_interval: every,
                it_value: every,
            };
            without_signals(listener);
            say("ready");
            call(
                libc::SYS_setitimer,
                [libc::ITIMER_REAL.into(), leak(timer), 0],
            );
            sleep_among_signals();
        }
        interrupted => play_interrupted(interrupted, fd),
    }
    let (count, sum) = (COUNT.load(Ordering::SeqCst), SUM.load(Ordering::SeqCst));
    say(format!("{count} {sum}"));
}

fn sleep_among_signals() {
    let left = leak(libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    });
    while !DONE.load(Ordering::SeqCst) {
        let time = leak(libc::timespec {
            tv_sec: 0,
            tv_nsec: 400_000,
        });
        let clock = std::time::Instant::now();
        // SAFETY: both addresses stay valid.
        while unsafe { libc::syscall(libc::SYS_nanosleep, time, left) } != 0 {
            assert_eq!(
                std::io::Error::last_os_error().raw_os_error(),
                Some(libc::EINTR)
            );
            // SAFETY: two timespecs of ours.
            unsafe { *(time as *mut libc::timespec) = *(left as *const libc::timespec) };
        }
        assert!(clock.elapsed() >= Duration::from_micros(400));
    }
}

/// Says a line for every EINTR of a call, and for the signal handled before it.
fn play_interrupted(kind: &str, fd: c_long) {
    for signal in [
        libc::SIGUSR1,
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGTRAP,
        libc::SIGSYS,
    ] {
        handle(signal, 0);
    }
    let events = leak([0_u64; 64]);
    let epoll = call(libc::SYS_epoll_create1, [0]);
    let empty = leak(0_u64);
    let block = || {
        let set = leak(set_of(libc::SIGUSR1));
        call(
            libc::SYS_rt_sigprocmask,
            [libc::SIG_BLOCK.into(), set, 0, 8],
        );
    };
    let (number, arguments) = match kind {
        "read" => (libc::SYS_read, [fd, events, 8, 0, 0, 0]),
        "pause" => (libc::SYS_pause, [0; 6]),
        "epoll" => (libc::SYS_epoll_wait, [epoll, events, 8, -1, 0, 0]),
        "epoll-masked" => {
            block();
            (libc::SYS_epoll_pwait, [epoll, events, 8, -1, empty, 8])
        }
        "ppoll-masked" => {
            block();
            (libc::SYS_ppoll, [0, 0, 0, empty, 8, 0])
        }
        _ => panic!("no role {kind}"),
    };
    say(format!("ready {number}"));
    for round in 1.. {
        let [a, b, c, d, e, f] = arguments;
        // SAFETY: arguments made above for this call.
        let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
        let error = std::io::Error::last_os_error().raw_os_error();
        assert_eq!((result, error), (-1, Some(libc::EINTR)));
        assert_eq!(
            COUNT.load(Ordering::SeqCst),
            round,
            "an EINTR without a signal"
        );
        say(LAST.load(Ordering::SeqCst));
    }
}

/// Infects a process again and again until `work` is done.
fn while_infecting<R>(process: &Process, work: impl FnOnce() -> R) -> R {
    let done = AtomicBool::new(false);
    let (begin, begun) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let infecting = scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                match inject_userfaultfd(process, Duration::from_secs(10)) {
                    Ok(_) => drop(begin.send(())),
                    Err(InfectError::Stopped { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            begun
                .recv_timeout(Duration::from_secs(10))
                .expect("a first infection");
            work()
        }));
        done.store(true, Ordering::SeqCst);
        infecting.join().unwrap();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn queue(process: &Process, signal: c_int, value: u64) {
    let value = libc::sigval {
        sival_ptr: value as *mut c_void,
    };
    // SAFETY: takes numbers only.
    assert_eq!(unsafe { libc::sigqueue(process.pid(), signal, value) }, 0);
}

#[test]
fn every_queued_signal_arrives_once() {
    for role in ["running", "reading"] {
        let mut victim = Victim::start(&format!("signals {role}"));
        let process = victim.process.clone();
        while_infecting(&process, || {
            for value in 1..=4000 {
                queue(&process, QUEUED, value);
                if value % 8 == 0 {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
        });
        victim.send("end");
        assert_eq!(victim.line(), format!("4000 {}", 4000 * 4001 / 2), "{role}");
        assert!(victim.end().success(), "{role}");
    }
}

#[test]
fn a_sleeper_hit_by_a_timer_sleeps_on() {
    let mut victim = Victim::start("signals sleeping");
    let process = victim.process.clone();
    while_infecting(&process, || std::thread::sleep(Duration::from_secs(1)));
    victim.send("end");
    let line = victim.line();
    let count: u64 = line.split(' ').next().unwrap().parse().unwrap();
    assert!(count > 100, "{line}");
    assert!(victim.end().success());
}

/// A signal may hit any part of an infection: the call that it interrupts returns EINTR, once.
#[test]
fn every_signal_ends_one_call() {
    for kind in ["read", "pause", "epoll", "epoll-masked", "ppoll-masked"] {
        let mut victim = Victim::start(&format!("signals {kind}"));
        let process = victim.process.clone();
        let number: i64 = victim.ready.parse().unwrap();
        while_infecting(&process, || {
            for _ in 0..300 {
                victim.wait_in_call(number);
                process.signal(libc::SIGUSR1).unwrap();
                assert_eq!(victim.line(), libc::SIGUSR1.to_string(), "{kind}");
            }
        });
        assert_eq!(victim.word(), None, "{kind}");
    }
}

/// Signals of faults cannot be blocked meanwhile: they are held back and sent again.
#[test]
fn signals_of_faults_sent_by_others_arrive() {
    let mut victim = Victim::start("signals read");
    let process = victim.process.clone();
    while_infecting(&process, || {
        for round in 0..400 {
            victim.wait_in_call(libc::SYS_read);
            let signal = [libc::SIGSEGV, libc::SIGTRAP, libc::SIGSYS, libc::SIGBUS][round % 4];
            if round % 3 == 0 {
                queue(&process, signal, 7);
            } else {
                process.signal(signal).unwrap();
            }
            assert_eq!(victim.line(), signal.to_string());
        }
    });
    assert_eq!(victim.word(), None);
}

/// SIGSTOP cannot be blocked either. The process stops, stays stopped and can be continued.
#[test]
fn a_process_that_is_stopped_stays_stopped() {
    let mut victim = Victim::start("signals running");
    let process = victim.process.clone();
    let memory = RemoteMemory::open(&process);
    let address = victim.ready.parse().unwrap();
    let steps = || {
        let mut bytes = [0; 8];
        memory.read(address, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    };
    while_infecting(&process, || {
        for round in 0..100 {
            process.signal(libc::SIGSTOP).unwrap();
            victim.wait_for_state('T');
            let before = steps();
            // An injection that was in progress may still be at it, but does not let it continue.
            std::thread::sleep(Duration::from_micros(70 * (round % 7)));
            victim.wait_for_state('T');
            assert_eq!(steps(), before, "it went on");
            process.signal(libc::SIGCONT).unwrap();
            victim.wait_until("does not continue", || steps() > before);
        }
    });
    drop(inject(&process).unwrap());
    victim.send("end");
    assert_eq!(victim.line(), "0 0");
    assert!(victim.end().success());
}
