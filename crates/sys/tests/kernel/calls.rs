//! The role of a victim whose main thread waits in some system call, and says how it returned.

use crate::victim::{hear, say};
use std::ffi::c_long;
use std::fs::File;
use std::io::Write;
use std::os::fd::{IntoRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

static WORD: AtomicU32 = AtomicU32::new(0);
static HANDLED: AtomicU32 = AtomicU32::new(0);

/// A system call to wait in, and what ends the wait.
struct Wait {
    number: c_long,
    arguments: [c_long; 6],
    wake: Box<dyn FnOnce() + Send>,
}

pub fn play(argument: &str) {
    let wait = prepare(argument);
    let wake = wait.wake;
    without_signals(move || {
        if hear().as_deref() == Some("go") {
            wake();
        }
        hear();
        std::process::exit(0);
    });
    say(format!("ready {}", wait.number));
    let [a, b, c, d, e, f] = wait.arguments;
    let clock = std::time::Instant::now();
    // SAFETY: the arguments are those that `prepare` has made for this call, and stay valid.
    let result = unsafe { libc::syscall(wait.number, a, b, c, d, e, f) };
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    let elapsed = clock.elapsed().as_millis();
    let errno = if result < 0 { errno } else { 0 };
    // accept returns a descriptor; which one does not matter.
    let result = if wait.number == libc::SYS_accept4 {
        result.min(0)
    } else {
        result
    };
    say(format!(
        "{result} {errno} {} {elapsed}",
        HANDLED.load(Ordering::SeqCst)
    ));
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn prepare(kind: &str) -> Wait {
    let groups = [
        on_a_pipe,
        for_time,
        on_a_socket,
        for_a_signal,
        for_another,
        for_completion,
    ];
    let found = groups.iter().find_map(|group| group(kind));
    found.unwrap_or_else(|| panic!("no call {kind}"))
}

/// A time limit that no test reaches.
fn long() -> c_long {
    leak(libc::timespec {
        tv_sec: 30,
        tv_nsec: 0,
    })
}

fn on_a_pipe(kind: &str) -> Option<Wait> {
    let (reader, mut writer) = pipe();
    let fd = c_long::from(reader);
    let hello = move || writer.write_all(b"hello").unwrap();
    let ready = leak(libc::pollfd {
        fd: reader,
        events: libc::POLLIN,
        revents: 0,
    });
    let mask = leak(set_of(libc::SIGUSR1));
    Some(match kind {
        "read" => wait(libc::SYS_read, [fd, leak([0_u8; 64]), 64], hello),
        "poll" => wait(libc::SYS_poll, [ready, 1, 30_000], hello),
        "ppoll" => wait(libc::SYS_ppoll, [ready, 1, 0, 0, 8], hello),
        "ppoll-timed" => wait(libc::SYS_ppoll, [ready, 1, long(), 0, 8], hello),
        "ppoll-masked" => {
            count(libc::SIGUSR1, 0);
            wait(libc::SYS_ppoll, [ready, 1, long(), mask, 8], hello)
        }
        "select" | "pselect" => {
            let mut set = [0_u64; 16];
            set[0] = 1 << reader;
            let number = if kind == "select" {
                libc::SYS_select
            } else {
                libc::SYS_pselect6
            };
            wait(number, [fd + 1, leak(set), 0, 0, 0], hello)
        }
        _ if kind.starts_with("epoll") => wait_epoll(kind, reader, mask, Box::new(hello)),
        _ => return None,
    })
}

fn for_time(kind: &str) -> Option<Wait> {
    let time = leak(libc::timespec {
        tv_sec: 0,
        tv_nsec: 700_000_000,
    });
    let clock = libc::CLOCK_MONOTONIC.into();
    match kind {
        "nanosleep" => Some(wait(libc::SYS_nanosleep, [time, 0], || ())),
        "clock-nanosleep" => Some(wait(libc::SYS_clock_nanosleep, [clock, 0, time, 0], || ())),
        _ => None,
    }
}

/// Sockets with a time limit: their calls return a plain EINTR.
fn on_a_socket(kind: &str) -> Option<Wait> {
    let buffer = leak([0_u8; 64]);
    let (mut near, mut far) = UnixStream::pair().unwrap();
    near.set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    near.set_write_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    Some(match kind {
        "receive-timed" | "read-timed" => {
            let fd = near.into_raw_fd().into();
            let hello = move || far.write_all(b"hello").unwrap();
            match kind {
                "read-timed" => wait(libc::SYS_read, [fd, buffer, 64], hello),
                _ => wait(libc::SYS_recvfrom, [fd, buffer, 64, 0, 0, 0], hello),
            }
        }
        "send-timed" => {
            near.set_nonblocking(true).unwrap();
            while near.write(&[0; 4096]).is_ok() {}
            near.set_nonblocking(false).unwrap();
            wait(
                libc::SYS_sendto,
                [near.into_raw_fd().into(), buffer, 5, 0, 0, 0],
                move || {
                    std::thread::spawn(move || std::io::copy(&mut far, &mut std::io::sink()));
                },
            )
        }
        "accept-timed" => {
            let directory = tempfile::tempdir().unwrap().keep();
            let path = directory.join("socket");
            let fd = UnixListener::bind(&path).unwrap().into_raw_fd().into();
            let limit = leak(libc::timeval {
                tv_sec: 30,
                tv_usec: 0,
            });
            let (level, option) = (libc::SOL_SOCKET.into(), libc::SO_RCVTIMEO.into());
            call(libc::SYS_setsockopt, [fd, level, option, limit, 16]);
            wait(libc::SYS_accept4, [fd, 0, 0, 0], move || {
                UnixStream::connect(&path).unwrap();
                std::fs::remove_dir_all(directory).unwrap();
            })
        }
        _ => return None,
    })
}

fn for_a_signal(kind: &str) -> Option<Wait> {
    let wake = signal_main(libc::SIGUSR2);
    Some(match kind {
        "sigtimedwait" => {
            block(libc::SIGUSR2);
            let set = leak(set_of(libc::SIGUSR2));
            wait(libc::SYS_rt_sigtimedwait, [set, 0, 0, 8], wake)
        }
        "pause" => {
            count(libc::SIGUSR2, 0);
            wait(libc::SYS_pause, [], wake)
        }
        "sigsuspend" => {
            count(libc::SIGUSR2, 0);
            block(libc::SIGUSR2);
            let set = leak(set_of(libc::SIGUSR1));
            wait(libc::SYS_rt_sigsuspend, [set, 8], wake)
        }
        _ => return None,
    })
}

/// Until another thread gives something free.
fn for_another(kind: &str) -> Option<Wait> {
    Some(match kind {
        "futex" | "futex-timed" => {
            let timeout = if kind == "futex" { 0 } else { long() };
            let word = address(&raw const WORD);
            wait(
                libc::SYS_futex,
                [word, libc::FUTEX_WAIT.into(), 0, timeout],
                move || {
                    WORD.store(1, Ordering::SeqCst);
                    call(libc::SYS_futex, [word, libc::FUTEX_WAKE.into(), 1]);
                },
            )
        }
        "semop" => {
            let semaphore = call(libc::SYS_semget, [libc::IPC_PRIVATE.into(), 1, 0o600]);
            let take = leak(libc::sembuf {
                sem_num: 0,
                sem_op: -1,
                sem_flg: 0,
            });
            let give = leak(libc::sembuf {
                sem_num: 0,
                sem_op: 1,
                sem_flg: 0,
            });
            wait(libc::SYS_semop, [semaphore, take, 1], move || {
                call(libc::SYS_semop, [semaphore, give, 1]);
                std::thread::sleep(Duration::from_millis(50));
                call(libc::SYS_semctl, [semaphore, 0, libc::IPC_RMID.into()]);
            })
        }
        "flock" => {
            let file = tempfile::NamedTempFile::new().unwrap();
            let again = File::open(file.path()).unwrap().into_raw_fd().into();
            file.as_file().lock().unwrap();
            wait(libc::SYS_flock, [again, libc::LOCK_EX.into()], move || {
                drop(file)
            })
        }
        _ => return None,
    })
}

/// Until input or output is complete. None was begun, and nothing wakes these; see the test.
fn for_completion(kind: &str) -> Option<Wait> {
    Some(match kind {
        "io-uring" => {
            const GET_EVENTS: c_long = 1;
            let parameters = leak([0_u8; 120]);
            let ring = call(libc::SYS_io_uring_setup, [8, parameters]);
            wait(
                libc::SYS_io_uring_enter,
                [ring, 0, 1, GET_EVENTS, 0, 0],
                || (),
            )
        }
        "io-getevents" => {
            let context = leak(0_u64);
            call(libc::SYS_io_setup, [8, context]);
            // SAFETY: written by io_setup(2).
            let context = unsafe { *(context as *const u64) } as c_long;
            wait(
                libc::SYS_io_getevents,
                [context, 1, 8, leak([0_u64; 32]), 0],
                || (),
            )
        }
        _ => return None,
    })
}

fn wait_epoll(kind: &str, reader: RawFd, mask: c_long, wake: Box<dyn FnOnce() + Send>) -> Wait {
    let epoll = call(libc::SYS_epoll_create1, [0]);
    let event = leak(libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: 0,
    });
    call(
        libc::SYS_epoll_ctl,
        [epoll, libc::EPOLL_CTL_ADD.into(), reader.into(), event],
    );
    let events = leak([0_u64; 64]);
    match kind {
        "epoll" => wait(libc::SYS_epoll_wait, [epoll, events, 8, -1], wake),
        "epoll-timed" => wait(libc::SYS_epoll_wait, [epoll, events, 8, 30_000], wake),
        "epoll-handled" => {
            count(libc::SIGUSR2, 0);
            wait(libc::SYS_epoll_wait, [epoll, events, 8, -1], wake)
        }
        "epoll-pwait2" => wait(
            libc::SYS_epoll_pwait2,
            [epoll, events, 8, long(), 0, 8],
            wake,
        ),
        _ => {
            count(libc::SIGUSR1, 0);
            wait(libc::SYS_epoll_pwait, [epoll, events, 8, -1, mask, 8], wake)
        }
    }
}

fn wait<const N: usize>(
    number: c_long,
    given: [c_long; N],
    wake: impl FnOnce() + Send + 'static,
) -> Wait {
    let mut arguments = [0; 6];
    arguments[..N].copy_from_slice(&given);
    Wait {
        number,
        arguments,
        wake: Box::new(wake),
    }
}

pub fn call<const N: usize>(number: c_long, given: [c_long; N]) -> c_long {
    let Wait {
        arguments: [a, b, c, d, e, f],
        ..
    } = wait(number, given, || ());
    // SAFETY: callers give arguments that fit the call, with addresses that stay valid.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    assert!(
        result >= 0,
        "system call {number}: {}",
        std::io::Error::last_os_error()
    );
    result
}

fn pipe() -> (RawFd, File) {
    let (reader, writer) = std::io::pipe().unwrap();
    (
        reader.into_raw_fd(),
        File::from(std::os::fd::OwnedFd::from(writer)),
    )
}

/// Memory that stays valid for good, as an argument of a system call.
pub fn leak<T: 'static>(value: T) -> c_long {
    address(Box::leak(Box::new(value)))
}

fn address<T>(value: *const T) -> c_long {
    value as c_long
}

pub fn set_of(signal: i32) -> u64 {
    1 << (signal - 1)
}

fn block(signal: i32) {
    let set = leak(set_of(signal));
    call(
        libc::SYS_rt_sigprocmask,
        [libc::SIG_BLOCK.into(), set, 0, 8],
    );
}

/// Starts a thread that gets no signal, not even in its first moments: they are all meant for the
/// main thread.
pub fn without_signals(work: impl FnOnce() + Send + 'static) {
    let own = leak(0_u64);
    call(
        libc::SYS_rt_sigprocmask,
        [libc::SIG_SETMASK.into(), leak(u64::MAX), own, 8],
    );
    std::thread::spawn(work);
    call(
        libc::SYS_rt_sigprocmask,
        [libc::SIG_SETMASK.into(), own, 0, 8],
    );
}

extern "C" fn handler(_: i32) {
    HANDLED.fetch_add(1, Ordering::SeqCst);
}

/// Counts deliveries of a signal, with these SA_ flags.
pub fn count(signal: i32, flags: i32) {
    // SAFETY: the handler only adds to an atomic.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
    }
}

fn signal_main(signal: i32) -> impl FnOnce() + Send + 'static {
    let pid = std::process::id() as c_long;
    move || {
        call(libc::SYS_tgkill, [pid, pid, signal.into()]);
    }
}
