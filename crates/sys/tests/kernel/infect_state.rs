//! Infecting a process in any state: running, in a restartable sequence, one of many threads in the
//! same text, stopped, traced, sleeping deeply, dying, dead.

use crate::calls::{call, leak, without_signals};
use crate::victim::{Victim, hear, inject, say};
use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stillframe_sys::infect::{InfectError, inject_userfaultfd};
use stillframe_sys::memory::RemoteMemory;
use stillframe_sys::process::{Process, ProcessError};

static DONE: AtomicBool = AtomicBool::new(false);
static ROUNDS: AtomicU64 = AtomicU64::new(0);

std::arch::global_asm!(
    // fn(rounds, out): adds its own number to each register and vector register, round after round.
    ".globl stillframe_test_spin",
    "stillframe_test_spin:",
    "push rbx; push rbp; push r12; push r13; push r14; push r15; push rsi; push rdi",
    "movabs rax, 0x0101010101010101",
    "movq xmm15, rax",
    "pshufd xmm15, xmm15, 0x44",
    "mov rbx, rax; mov rcx, rax; mov rdx, rax; mov rsi, rax; mov rdi, rax; mov rbp, rax",
    "mov r8, rax; mov r9, rax; mov r10, rax; mov r11, rax; mov r12, rax; mov r13, rax",
    "mov r14, rax; mov r15, rax",
    "movdqa xmm0, xmm15; movdqa xmm1, xmm15; movdqa xmm7, xmm15; movdqa xmm14, xmm15",
    "2:",
    "add rax, 1; add rbx, 2; add rcx, 3; add rdx, 4; add rsi, 5; add rdi, 6; add rbp, 7",
    "add r8, 8; add r9, 9; add r10, 10; add r11, 11; add r12, 12; add r13, 13; add r14, 14",
    "add r15, 15",
    "paddq xmm0, xmm15; paddq xmm1, xmm15; paddq xmm7, xmm15; paddq xmm14, xmm15",
    "dec qword ptr [rsp]",
    "jnz 2b",
    "add rsp, 8",
    "xchg rax, [rsp]",
    "mov [rax + 8], rbx; mov [rax + 16], rcx; mov [rax + 24], rdx; mov [rax + 32], rsi",
    "mov [rax + 40], rdi; mov [rax + 48], rbp; mov [rax + 56], r8; mov [rax + 64], r9",
    "mov [rax + 72], r10; mov [rax + 80], r11; mov [rax + 88], r12; mov [rax + 96], r13",
    "mov [rax + 104], r14; mov [rax + 112], r15",
    "movdqu [rax + 120], xmm0; movdqu [rax + 136], xmm1; movdqu [rax + 152], xmm7",
    "movdqu [rax + 168], xmm14",
    "pop rbx",
    "mov [rax], rbx",
    "pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx",
    "ret",
    // fn(rseq, counter, done) -> whether aborted: counts in a restartable sequence until done.
    ".globl stillframe_test_sequence",
    "stillframe_test_sequence:",
    "lea rax, [rip + 9f]",
    "mov [rdi + 8], rax",
    "3: inc qword ptr [rsi]",
    "cmp byte ptr [rdx], 0",
    "je 3b",
    "4: mov qword ptr [rdi + 8], 0",
    "xor eax, eax",
    "ret",
    ".long 0x53053053",
    "5: mov eax, 1",
    "ret",
    ".pushsection .data.rel.local, \"aw\"",
    ".balign 32",
    "9: .long 0, 0",
    ".quad 3b, 4b - 3b, 5b",
    ".popsection",
);

// SAFETY: the two functions are defined in the assembly above with these signatures; the offset is a
// constant of glibc 2.35 and newer.
unsafe extern "C" {
    fn stillframe_test_spin(rounds: u64, out: *mut [u64; 23]);
    fn stillframe_test_sequence(area: *mut c_void, counter: *const u64, done: *const u8) -> c_int;
    /// Where glibc keeps the thread's `struct rseq`, relative to the thread pointer.
    static __rseq_offset: isize;
}

pub fn play(argument: &str) {
    match argument {
        "spinning" => {
            end_when_told();
            say("ready");
            spin();
        }
        "crowded" => crowd(),
        "sequence" => {
            end_when_told();
            say(format!("ready {}", &raw const ROUNDS as u64));
            count_aborts();
        }
        "leaderless" => {
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                say("ready");
                hear();
                std::process::exit(7);
            });
            call(libc::SYS_exit, [0]);
        }
        "sleeping-deeply" => sleep_deeply(),
        "waiting" => {
            say("ready");
            hear();
        }
        _ => {
            let pid = argument.strip_prefix("debugging:").expect("a known state");
            call(
                libc::SYS_ptrace,
                [libc::PTRACE_SEIZE.into(), pid.parse().unwrap(), 0, 0],
            );
            say("ready");
            hear();
        }
    }
    say("right");
}

fn end_when_told() {
    without_signals(|| {
        hear();
        DONE.store(true, Ordering::SeqCst);
    });
}

fn spin() {
    const TURNS: u64 = 300_000;
    const START: u64 = 0x0101_0101_0101_0101;
    while !DONE.load(Ordering::SeqCst) {
        let mut out = [0; 23];
        // SAFETY: keeps the calling convention, and writes 23 words.
        unsafe { stillframe_test_spin(TURNS, &mut out) };
        let vector = START.wrapping_mul(TURNS + 1);
        let expected = std::array::from_fn(|at| match at as u64 {
            register @ 0..15 => START + TURNS * (register + 1),
            _ => vector,
        });
        assert_eq!(out, expected);
    }
}

/// The main thread and 50 others make the same C library call, and check what it returns.
fn crowd() {
    let threads: Vec<_> = (0..50)
        .map(|_| std::thread::spawn(call_and_check))
        .collect();
    end_when_told();
    say("ready");
    call_and_check();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

fn call_and_check() {
    let own = call(libc::SYS_gettid, []);
    let mut value = 0;
    while !DONE.load(Ordering::SeqCst) {
        assert_eq!(call(libc::SYS_gettid, []), own);
        // Six arguments that have to arrive: futex wait with a value that does not match.
        let word = AtomicI64::new(value);
        let arguments = [&raw const word as c_long, 0, value + 1, 0, 0, 0];
        // SAFETY: the word lives until the call returns.
        let result = unsafe {
            let [a, b, c, d, e, f] = arguments;
            libc::syscall(libc::SYS_futex, a, b, c, d, e, f)
        };
        let error = std::io::Error::last_os_error().raw_os_error();
        assert_eq!((result, error), (-1, Some(libc::EAGAIN)));
        value = (value + 1) & 0xffff;
        // Or the main thread would hardly get to run among all these threads.
        if value % 256 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Counts how often a restartable sequence was aborted. It does nothing but being in one.
fn count_aborts() {
    let pointer: *mut u8;
    // SAFETY: on x86-64 the thread control block begins with its own address.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) pointer) };
    // SAFETY: set by the C library, which has registered that area for this thread.
    let area = unsafe { pointer.offset(__rseq_offset) };
    let counter = 0_u64;
    // SAFETY: keeps the calling convention; the kernel knows the area, and the sequence is
    // described as rseq(2) says.
    while unsafe { stillframe_test_sequence(area.cast(), &raw const counter, DONE.as_ptr().cast()) }
        != 0
    {
        ROUNDS.fetch_add(1, Ordering::SeqCst);
    }
}

/// As vfork(2) does: sleeps where no signal reaches, until the child is gone.
fn sleep_deeply() {
    extern "C" fn child(_: *mut c_void) -> c_int {
        let time = libc::timespec {
            tv_sec: 1,
            tv_nsec: 500_000_000,
        };
        // SAFETY: sleeps and leaves; uses nothing of the parent's.
        unsafe {
            libc::syscall(libc::SYS_nanosleep, &raw const time, 0);
            libc::syscall(libc::SYS_exit, 0);
        }
        0
    }
    let stack = leak([0_u64; 8192]) as *mut u64;
    say("ready");
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the child runs `child` alone, on its own stack.
    let pid = unsafe { libc::clone(child, stack.add(8192).cast(), flags, std::ptr::null_mut()) };
    assert!(pid > 0);
    hear();
}

/// Ends a victim and has it confirm that it saw nothing.
fn end_well(mut victim: Victim) {
    victim.send("end");
    assert_eq!(victim.line(), "right");
    assert!(victim.end().success());
}

#[test]
fn a_running_thread_keeps_its_registers() {
    let victim = Victim::start("state spinning");
    for _ in 0..500 {
        drop(inject(&victim.process).unwrap());
    }
    end_well(victim);
}

#[test]
fn other_threads_in_the_same_text_notice_nothing() {
    let victim = Victim::start("state crowded");
    for _ in 0..40 {
        drop(inject(&victim.process).unwrap());
    }
    end_well(victim);
}

/// Were it not aborted, the sequence would never be again: the kernel has forgotten it.
#[test]
fn a_restartable_sequence_is_aborted() {
    let victim = Victim::start("state sequence");
    let memory = RemoteMemory::open(&victim.process);
    let address = victim.ready.parse().unwrap();
    let aborts = || {
        let mut bytes = [0; 8];
        memory.read(address, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    };
    for _ in 0..40 {
        let before = aborts();
        drop(inject(&victim.process).unwrap());
        victim.wait_until("was not aborted", || aborts() > before);
    }
    end_well(victim);
}

#[test]
fn a_stopped_process_is_refused_and_stays_stopped() {
    let victim = Victim::start("state waiting");
    victim.process.signal(libc::SIGSTOP).unwrap();
    victim.wait_for_state('T');
    for _ in 0..5 {
        let result = inject(&victim.process);
        assert!(
            matches!(result, Err(InfectError::Stopped { .. })),
            "{result:?}"
        );
        victim.wait_for_state('T');
    }
    victim.process.signal(libc::SIGCONT).unwrap();
    victim.wait_in_call(libc::SYS_read);
    drop(inject(&victim.process).unwrap());
    end_well(victim);
}

/// A tracer in this process could be an infection of ours that is about to end: it is waited for.
#[test]
fn a_traced_process_is_refused() {
    let victim = Victim::start("state waiting");
    let pid = victim.pid();
    std::thread::scope(|scope| {
        let debugger = scope.spawn(|| {
            // SAFETY: takes numbers only.
            let result = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
            assert_eq!(result, 0);
            let result = inject_userfaultfd(&victim.process, Duration::from_millis(50));
            // SAFETY: takes no argument.
            let own = unsafe { libc::gettid() };
            assert!(
                matches!(result, Err(InfectError::Traced { tracer, .. }) if tracer == own),
                "{result:?}"
            );
            scope.spawn(|| drop(inject(&victim.process).unwrap()));
            std::thread::sleep(Duration::from_millis(20));
        });
        debugger.join().unwrap();
    });
    end_well(victim);
}

#[test]
fn a_process_traced_by_another_one_is_refused_at_once() {
    let victim = Victim::start("state waiting");
    let debugger = Victim::start(&format!("state debugging:{}", victim.pid()));
    let result = inject(&victim.process);
    assert!(
        matches!(result, Err(InfectError::Traced { tracer, .. }) if tracer == debugger.pid()),
        "{result:?}"
    );
    end_well(debugger);
    victim.wait_until("is still traced", || inject(&victim.process).is_ok());
    end_well(victim);
}

#[test]
fn infections_of_one_process_take_turns() {
    let victim = Victim::start("state spinning");
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..100).for_each(|_| drop(inject(&victim.process).unwrap())));
        }
    });
    end_well(victim);
}

#[test]
fn a_thread_that_sleeps_deeply_is_given_up_in_time() {
    let mut victim = Victim::start("state sleeping-deeply");
    victim.wait_for_state('D');
    let clock = Instant::now();
    let result = inject_userfaultfd(&victim.process, Duration::from_millis(100));
    assert!(
        matches!(result, Err(InfectError::Timeout { state: 'D', .. })),
        "{result:?}"
    );
    assert!(clock.elapsed() < Duration::from_millis(1000));
    assert_eq!(victim.process.run_state().unwrap(), 'D');
    // No process holds it any more, and nothing is left behind.
    victim.wait_in_call(libc::SYS_read);
    drop(inject(&victim.process).unwrap());
    victim.send("end");
    assert_eq!(victim.line(), "right");
}

/// A frozen process stops when asked, but does not get to do anything.
#[test]
fn a_frozen_process_is_given_up_in_time() {
    for role in ["state waiting", "call epoll-handled", "state spinning"] {
        let mut victim = Victim::start(role);
        let group = ControlGroup::new(victim.pid());
        group.freeze(true);
        for _ in 0..3 {
            let result = inject_userfaultfd(&victim.process, Duration::from_millis(20));
            assert!(
                matches!(result, Err(InfectError::Timeout { .. })),
                "{role}: {result:?}"
            );
        }
        group.freeze(false);
        drop(inject(&victim.process).unwrap());
        if role.starts_with("call") {
            assert_eq!(victim.word(), None, "the call was ended");
            continue;
        }
        end_well(victim);
    }
}

/// A control group (version 2) of one process; removed on drop, when that has ended or is in another.
struct ControlGroup {
    path: std::path::PathBuf,
    root: std::path::PathBuf,
    pid: i32,
}

impl ControlGroup {
    fn new(pid: i32) -> ControlGroup {
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        let root = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let path = words.next()?;
            (words.next()? == "cgroup2").then(|| std::path::PathBuf::from(path))
        });
        let root = root.expect("a mounted cgroup2");
        let path = root.join(format!("stillframe-test-{pid}"));
        std::fs::create_dir(&path).unwrap();
        let group = ControlGroup { path, root, pid };
        group.take(&group.path);
        group
    }

    fn take(&self, into: &std::path::Path) {
        std::fs::write(into.join("cgroup.procs"), self.pid.to_string()).unwrap();
    }

    /// Waits until the kernel says that it is (or is no longer) frozen.
    fn freeze(&self, frozen: bool) {
        std::fs::write(
            self.path.join("cgroup.freeze"),
            if frozen { "1" } else { "0" },
        )
        .unwrap();
        let wanted = format!("frozen {}", u8::from(frozen));
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let events = std::fs::read_to_string(self.path.join("cgroup.events")).unwrap();
            if events.contains(&wanted) {
                return;
            }
            assert!(Instant::now() < deadline, "{events}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let _ = std::fs::write(self.path.join("cgroup.freeze"), "0");
        let _ = std::fs::write(self.root.join("cgroup.procs"), self.pid.to_string());
        let _ = std::fs::remove_dir(&self.path);
    }
}

#[test]
fn a_process_without_its_main_thread_is_gone() {
    let mut victim = Victim::start("state leaderless");
    let result = inject(&victim.process);
    assert!(
        matches!(result, Err(InfectError::Gone { .. })),
        "{result:?}"
    );
    assert!(victim.process.is_alive());
    victim.send("end");
    assert_eq!(victim.end().code(), Some(7));
}

#[test]
fn a_zombie_is_gone() {
    let victim = Victim::start("state waiting");
    victim.process.signal(libc::SIGKILL).unwrap();
    assert!(victim.process.wait_exit(Duration::from_secs(30)));
    victim.wait_for_state('Z');
    let result = inject(&victim.process);
    assert!(
        matches!(result, Err(InfectError::Gone { .. })),
        "{result:?}"
    );
    let result = Process::open(victim.pid());
    assert!(
        matches!(result, Err(ProcessError::NotFound { .. })),
        "{result:?}"
    );
}

/// Killed at any moment of an infection: an error, no hang, and its end belongs to its parent.
#[test]
fn a_process_killed_midway_is_gone() {
    for round in 0..60 {
        let mut victim = Victim::start("state spinning");
        let process = victim.process.clone();
        std::thread::scope(|scope| {
            let infecting = scope.spawn(|| {
                while let Ok(injected) = inject(&process) {
                    drop(injected);
                }
                inject(&process).expect_err("it is dead")
            });
            std::thread::sleep(Duration::from_micros(37 * round));
            process.signal(libc::SIGKILL).unwrap();
            let error = infecting.join().unwrap();
            assert!(matches!(error, InfectError::Gone { .. }), "{error:?}");
        });
        let status = victim.kill();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(libc::SIGKILL)
        );
    }
}
