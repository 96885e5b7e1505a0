//! Infecting a process that may not do everything: seccomp filters, other users, limits, other
//! kinds of programs.

use crate::calls::{call, leak};
use crate::victim::{Victim, hear, inject, say};
use std::ffi::{c_int, c_long};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;
use stillframe_sys::infect::InfectError;
use stillframe_sys::memory::RemoteMemory;
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::process::{AddressRange, Process};
use stillframe_sys::uffd::{Track, Uffd, WriteProtectMode};

const NOBODY: c_long = 65534;

/// Answers of a seccomp filter (seccomp(2)).
const KILL: u32 = 0x8000_0000;
const TRAP: u32 = 0x0003_0000;
const ALLOW: u32 = 0x7fff_0000;
const fn error(errno: c_int) -> u32 {
    0x0005_0000 | errno as u32
}

pub fn play(argument: &str) {
    match argument {
        "kill" => forbid(&[libc::SYS_userfaultfd, libc::SYS_close], KILL),
        "trap" => forbid(&[libc::SYS_userfaultfd, libc::SYS_close], TRAP),
        "error" => forbid(&[libc::SYS_userfaultfd], error(libc::ENOMEM)),
        // As a filter that lists what is allowed, and has not thought of this one.
        "no-restart" => forbid(&[libc::SYS_restart_syscall, libc::SYS_userfaultfd], KILL),
        "nobody" => return play_nobody(),
        "no-descriptors" => drop(limit_descriptors(3)),
        "ignoring" => {
            // SAFETY: sets no handler.
            unsafe { libc::signal(libc::SIGTRAP, libc::SIG_IGN) };
        }
        "dispatched" => dispatch(),
        _ => panic!("no limits {argument}"),
    }
    say("ready");
    match argument {
        "no-restart" => {
            let time = leak(libc::timespec {
                tv_sec: 1,
                tv_nsec: 0,
            });
            assert_eq!(call(libc::SYS_nanosleep, [time, 0]), 0);
        }
        _ => drop(hear()),
    }
    match argument {
        "error" => {
            // Its filter is in force again.
            // SAFETY: takes a number.
            let result = unsafe { libc::syscall(libc::SYS_userfaultfd, 0) };
            let error = std::io::Error::last_os_error().raw_os_error();
            assert_eq!((result, error), (-1, Some(libc::ENOMEM)));
        }
        "kill" => {
            say("right");
            // SAFETY: takes a number. Never returns.
            unsafe { libc::syscall(libc::SYS_userfaultfd, 0) };
        }
        "ignoring" => {
            // SAFETY: reads the present setting only.
            let now = unsafe { libc::signal(libc::SIGTRAP, libc::SIG_IGN) };
            assert_eq!(now, libc::SIG_IGN);
        }
        _ => {}
    }
    say("right");
}

/// Filters itself: these calls get this answer, all others are allowed.
fn forbid(calls: &[c_long], answer: u32) {
    const LOAD_NUMBER: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let one = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let mut program = vec![one(LOAD_NUMBER, 0, 0)];
    for (at, number) in calls.iter().enumerate() {
        program.push(one(JUMP_IF_EQUAL, (calls.len() - at) as u8, *number as u32));
    }
    program.push(one(RETURN, 0, ALLOW));
    program.push(one(RETURN, 0, answer));
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    call(
        libc::SYS_prctl,
        [libc::PR_SET_NO_NEW_PRIVS.into(), 1, 0, 0, 0],
    );
    const MODE_FILTER: c_long = 1;
    call(
        libc::SYS_seccomp,
        [MODE_FILTER, 0, &raw const filter as c_long],
    );
}

/// Loses its rights; then reads bytes into the given memory, by system call.
fn play_nobody() {
    let access = i64::from(libc::PROT_READ | libc::PROT_WRITE);
    let private = i64::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let memory = call(libc::SYS_mmap, [0, 8 * 4096, access, private, -1, 0]);
    call(libc::SYS_setgid, [NOBODY]);
    call(libc::SYS_setuid, [NOBODY]);
    say(format!("ready {memory}"));
    hear();
    let (reader, mut writer) = std::io::pipe().unwrap();
    std::io::Write::write_all(&mut writer, b"hello").unwrap();
    let fd = c_long::from(reader.as_raw_fd());
    assert_eq!(call(libc::SYS_read, [fd, memory + 4096, 5]), 5);
    say("right");
    hear();
}

fn limit_descriptors(count: u64) -> u64 {
    let limit = libc::rlimit {
        rlim_cur: count,
        rlim_max: count,
    };
    // SAFETY: reads one rlimit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    count
}

/// Has its own system calls, but those of the C library, turned into SIGSYS (as Wine does).
fn dispatch() {
    extern "C" fn handler(_: c_int) {
        // SAFETY: leaves at once.
        unsafe { libc::_exit(99) };
    }
    // SAFETY: the handler does not return.
    unsafe { libc::signal(libc::SIGSYS, handler as *const () as usize) };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut libraries = maps.lines().filter(|line| line.contains("libc.so"));
    let text = libraries.rfind(|line| line.contains("r-xp")).unwrap();
    let (start, end) = text.split(' ').next().unwrap().split_once('-').unwrap();
    let start = i64::from_str_radix(start, 16).unwrap();
    let end = i64::from_str_radix(end, 16).unwrap();
    const SET_DISPATCH: c_long = 59;
    const ON: c_long = 1;
    call(libc::SYS_prctl, [SET_DISPATCH, ON, start, end - start, 0]);
}

fn end_well(mut victim: Victim) {
    victim.send("end");
    assert_eq!(victim.line(), "right");
    assert!(victim.end().success());
}

/// Their filters would kill, or answer otherwise. They do not see our calls, and are in force after.
#[test]
fn seccomp_filters_are_suspended_and_put_back() {
    for role in ["trap", "error"] {
        let victim = Victim::start(&format!("limits {role}"));
        for _ in 0..20 {
            drop(inject(&victim.process).unwrap());
        }
        end_well(victim);
    }
    let mut victim = Victim::start("limits kill");
    drop(inject(&victim.process).unwrap());
    victim.send("end");
    assert_eq!(victim.line(), "right");
    let status = victim.end();
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&status),
        Some(libc::SIGSYS)
    );
}

/// An interrupted sleep continues through restart_syscall(2), which its filter would answer by death.
#[test]
fn a_filter_that_forbids_restarts_does_not_kill() {
    let mut victim = Victim::start("limits no-restart");
    for _ in 0..10 {
        victim.wait_for_state('S');
        drop(inject(&victim.process).unwrap());
    }
    assert_eq!(victim.line(), "right");
    assert!(victim.end().success());
}

/// Without CAP_SYS_ADMIN the effect of a filter is unknown: refused, and nothing happens.
#[test]
fn a_filter_that_cannot_be_suspended_is_refused() {
    let mut victim = Victim::start("limits kill");
    let process = victim.process.clone();
    let engine = std::thread::spawn(move || {
        drop_capabilities([SYS_ADMIN, 0]);
        for _ in 0..5 {
            let result = inject(&process);
            assert!(
                matches!(result, Err(InfectError::Sandboxed { .. })),
                "{result:?}"
            );
        }
        let free = Victim::start("state waiting");
        drop(inject(&free.process).unwrap());
    });
    engine.join().unwrap();
    victim.send("end");
    assert_eq!(victim.line(), "right");
}

const SYS_ADMIN: u32 = 1 << 21;

/// Takes capabilities (0 to 31, 32 to 63) from the calling thread.
pub fn drop_capabilities(lost: [u32; 2]) {
    const VERSION_3: u32 = 0x2008_0522;
    let header = leak([VERSION_3, 0]);
    let sets = leak([[0_u32; 3]; 2]);
    call(libc::SYS_capget, [header, sets]);
    // SAFETY: leaked just now.
    let words = unsafe { &mut *(sets as *mut [[u32; 3]; 2]) };
    for ([effective, permitted, _], lost) in words.iter_mut().zip(lost) {
        *effective &= !lost;
        *permitted &= !lost;
    }
    call(libc::SYS_capset, [header, sets]);
}

/// As libvirt runs QEMU. Asynchronous tracking sees even what the kernel writes.
#[test]
fn an_unprivileged_process_gives_a_limited_userfaultfd() {
    let mut victim = Victim::start("limits nobody");
    let injected = inject(&victim.process).unwrap();
    assert!(injected.user_mode_only);
    let uffd = Uffd::handshake(injected.fd, WriteProtectMode::Async).unwrap();
    let start = victim.ready.parse().unwrap();
    let range = AddressRange {
        start,
        end: start + 8 * 4096,
    };
    uffd.register(range, Track::WriteProtect).unwrap();
    uffd.protect(range).unwrap();
    victim.send("write");
    assert_eq!(victim.line(), "right");
    let mut written = Vec::new();
    Pagemap::open(&victim.process)
        .unwrap()
        .take_written(range, &mut written)
        .unwrap();
    assert_eq!(
        written,
        [AddressRange {
            start: start + 4096,
            end: start + 2 * 4096
        }]
    );
}

#[test]
fn a_process_without_room_for_a_descriptor_refuses() {
    let victim = Victim::start("limits no-descriptors");
    let result = inject(&victim.process);
    let Err(InfectError::Refused {
        call: "userfaultfd",
        source,
        ..
    }) = result
    else {
        panic!("{result:?}")
    };
    assert_eq!(source.raw_os_error(), Some(libc::EMFILE));
    end_well(victim);
}

#[test]
fn an_ignored_sigtrap_stays_ignored() {
    let victim = Victim::start("limits ignoring");
    for _ in 0..20 {
        drop(inject(&victim.process).unwrap());
    }
    end_well(victim);
}

/// Its system calls are intercepted by the process itself when they come from elsewhere than the C
/// library. Waiting in the C library it can be infected; stopped elsewhere its SIGSYS is kept from it.
#[test]
fn a_process_that_intercepts_its_calls_survives() {
    let victim = Victim::start("limits dispatched");
    for _ in 0..20 {
        match inject(&victim.process) {
            Ok(_)
            | Err(InfectError::Faulted {
                signal: libc::SIGSYS,
                ..
            }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    end_well(victim);
}

/// A 32-bit program: waits for ever in pause(2), called by `int 0x80`.
#[test]
fn a_32_bit_process_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("program");
    std::fs::write(&path, small_program()).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    let mut child = crate::identity::spawn(&mut Command::new(&path));
    let process = Process::open(child.id() as i32).unwrap();
    while process.run_state().unwrap() != 'S' {
        std::thread::sleep(Duration::from_millis(1));
    }
    let result = inject(&process);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        matches!(result, Err(InfectError::Unsupported { .. })),
        "{result:?}"
    );
}

/// The smallest ELF32 that does it.
fn small_program() -> Vec<u8> {
    const BASE: u32 = 0x0040_0000;
    // mov eax, 29 (pause); int 0x80; jmp back
    let code = [0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7];
    let size = 52 + 32 + code.len() as u32;
    let mut file = vec![0x7f, b'E', b'L', b'F', 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let half = |file: &mut Vec<u8>, value: u16| file.extend(value.to_le_bytes());
    let word = |file: &mut Vec<u8>, value: u32| file.extend(value.to_le_bytes());
    // Executable, i386, version; entry, program headers, no sections; flags.
    half(&mut file, 2);
    half(&mut file, 3);
    for value in [1, BASE + 84, 52, 0, 0] {
        word(&mut file, value);
    }
    for value in [52, 32, 1, 0, 0, 0] {
        half(&mut file, value);
    }
    // One segment: load all of it, readable and executable.
    for value in [1, 0, BASE, BASE, size, size, 5, 4096] {
        word(&mut file, value);
    }
    file.extend(code);
    file
}

/// No text of the victim is ever written, whatever it is doing.
#[test]
fn the_text_stays_as_it_is() {
    let victim = Victim::start("state spinning");
    let memory = RemoteMemory::open(&victim.process);
    let read_text = || {
        let mappings = victim.process.mappings().unwrap();
        let text = mappings
            .iter()
            .filter(|mapping| mapping.executable && mapping.readable);
        text.map(|mapping| {
            let mut bytes = vec![0; mapping.range.len() as usize];
            memory.read(mapping.range.start, &mut bytes).unwrap();
            bytes
        })
        .collect::<Vec<_>>()
    };
    let before = read_text();
    let copied_before = copied_text(victim.pid());
    for _ in 0..50 {
        drop(inject(&victim.process).unwrap());
    }
    assert!(read_text() == before);
    // A page that had been written and put back would be a private copy now.
    assert_eq!(copied_text(victim.pid()), copied_before);
    drop(victim);
}

fn copied_text(pid: i32) -> Vec<String> {
    let mut text = String::new();
    std::fs::File::open(format!("/proc/{pid}/smaps"))
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    let mut executable = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        let second = line.split_ascii_whitespace().nth(1).unwrap_or_default();
        if second.len() == 4 && second.ends_with('p') {
            executable = second.contains('x');
        } else if executable && line.starts_with("Anonymous:") {
            lines.push(line.to_owned());
        }
    }
    lines
}
