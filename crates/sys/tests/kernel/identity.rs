//! A process as a stable identity: what is read of it, and that nothing reaches another process that
//! was given its number.

use crate::victim::{Victim, hear, say};
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use stillframe_sys::infect::{InfectError, inject_userfaultfd};
use stillframe_sys::memory::{MemoryError, RemoteMemory, SharedMapping};
use stillframe_sys::pagemap::{Pagemap, PagemapError};
use stillframe_sys::process::{AddressRange, Process, ProcessError};

/// A victim with a pipe and some shared memory files, one of them without a descriptor.
pub fn play(_: &str) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(b"from the pipe").unwrap();
    let mut names = Vec::new();
    for (content, keep) in [("kept open", true), ("closed", false)] {
        let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(3 * 4096).unwrap();
        file.seek(std::io::SeekFrom::Start(4096)).unwrap();
        file.write_all(content.as_bytes()).unwrap();
        let access = i64::from(libc::PROT_READ | libc::PROT_WRITE);
        let fd = file.as_raw_fd().into();
        let shared = libc::MAP_SHARED.into();
        let address = crate::calls::call(libc::SYS_mmap, [0, 8192, access, shared, fd, 4096]);
        names.push(address.to_string());
        if keep {
            std::mem::forget(file);
        }
    }
    say(format!("ready {} {}", reader.as_raw_fd(), names.join(" ")));
    hear();
}

#[test]
fn what_proc_says_is_read() {
    let victim = Victim::start("state waiting");
    let process = &victim.process;
    let exe = std::env::current_exe().unwrap();
    assert_eq!(process.pid(), victim.pid());
    assert_eq!(process.exe().unwrap(), exe);
    assert_eq!(process.cwd().unwrap(), std::env::current_dir().unwrap());
    assert_eq!(process.command_line().unwrap(), [exe.as_os_str()]);
    assert_eq!(process.uid().unwrap(), 0);
    assert!(process.is_alive());
    assert!(!process.wait_exit(Duration::from_millis(5)));
    process.signal(0).unwrap();
    victim.wait_for_state('S');
    let text = process.mappings().unwrap();
    let text = text.iter().find(|mapping| mapping.executable).unwrap();
    assert!(text.readable && !text.writable && !text.shared);
    assert!(format!("{process:?}").contains(&victim.pid().to_string()));
    let again = Process::open(victim.pid()).unwrap();
    assert_eq!(again.start_time(), process.start_time());
    assert!(again.start_time() > 0);
    assert!((4096..1 << 30).contains(&process.resident_bytes().unwrap()));
    let ran = process.processor_time().unwrap();
    assert!(ran > Duration::ZERO && process.processor_time().unwrap() >= ran);
}

#[test]
fn arguments_may_be_empty_and_names_strange() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("a ) S 1 (b");
    std::fs::copy("/bin/sh", &program).unwrap();
    let mut child = spawn(Command::new(&program).args(["-c", "read x", ""]));
    let process = Process::open(child.id() as i32).unwrap();
    let seen = (
        process.command_line().unwrap(),
        process.run_state(),
        process.start_time(),
    );
    std::fs::remove_file(&program).unwrap();
    let exe = process.exe().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let (arguments, state, start_time) = seen;
    assert_eq!(
        arguments,
        [
            program.as_os_str(),
            "-c".as_ref(),
            "read x".as_ref(),
            "".as_ref()
        ]
    );
    assert!(matches!(state, Ok('S' | 'R' | 'D')), "{state:?}");
    assert!(start_time > 1);
    assert_eq!(
        exe,
        PathBuf::from(format!("{} (deleted)", program.display()))
    );
}

/// Starts a program that was written just now. A fork of some other test may still have inherited, for a moment,
/// the descriptor that it was written through.
pub fn spawn(command: &mut Command) -> std::process::Child {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                assert!(Instant::now() < deadline, "{error}");
                std::thread::sleep(Duration::from_millis(1));
            }
            other => {
                let child = other.unwrap();
                // The parent continues a little before the program has its arguments.
                let arguments = format!("/proc/{}/cmdline", child.id());
                while std::fs::read(&arguments).unwrap().is_empty() {
                    assert!(Instant::now() < deadline, "no arguments");
                    std::thread::yield_now();
                }
                return child;
            }
        }
    }
}

#[test]
fn there_is_no_such_process() {
    let thread = std::thread::spawn(|| {
        // SAFETY: takes no argument.
        let tid = unsafe { libc::gettid() };
        let result = Process::open(tid);
        assert!(
            matches!(result, Err(ProcessError::NotFound { .. })),
            "{result:?}"
        );
    });
    thread.join().unwrap();
    for pid in [0, -1, i32::MIN, i32::MAX] {
        let result = Process::open(pid);
        assert!(
            matches!(result, Err(ProcessError::NotFound { .. })),
            "{result:?}"
        );
    }
}

#[test]
fn descriptors_and_mapped_files_are_fetched() {
    let victim = Victim::start("identity");
    let words: Vec<u64> = victim
        .ready
        .split(' ')
        .map(|word| word.parse().unwrap())
        .collect();
    let mut pipe = std::fs::File::from(victim.process.fetch_fd(words[0] as i32).unwrap());
    let mut bytes = [0; 13];
    pipe.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"from the pipe");
    let result = victim.process.fetch_fd(999);
    assert!(
        matches!(result, Err(ProcessError::NoSuchFd { fd: 999, .. })),
        "{result:?}"
    );

    let mappings = victim.process.mappings().unwrap();
    for (address, content) in [(words[1], "kept open"), (words[2], "closed")] {
        let mapping = mappings
            .iter()
            .find(|mapping| mapping.range.contains(address))
            .unwrap();
        assert_eq!((mapping.range.start, mapping.file_offset), (address, 4096));
        assert!(mapping.shared && mapping.writable && mapping.range.len() == 8192);
        for writable in [false, true] {
            let file = victim.process.open_mapping(mapping, writable).unwrap();
            assert_eq!(file.metadata().unwrap().ino(), mapping.inode);
            let shared = SharedMapping::map(&file, 4096, 8192, writable).unwrap();
            let mut text = vec![0; content.len()];
            shared.read(0, &mut text).unwrap();
            assert_eq!(text, content.as_bytes());
        }
        // The process reads the bytes that we write there.
        let file = victim.process.open_mapping(mapping, true).unwrap();
        let shared = SharedMapping::map(&file, 4096, 8192, true).unwrap();
        shared.write(5000, b"hi").unwrap();
        let mut seen = [0; 2];
        RemoteMemory::open(&victim.process)
            .read(address + 5000, &mut seen)
            .unwrap();
        assert_eq!(&seen, b"hi");
        let mut moved = mapping.clone();
        moved.range.end += 4096;
        let result = victim.process.open_mapping(&moved, false);
        assert!(
            matches!(result, Err(ProcessError::MappingGone { .. })),
            "{result:?}"
        );
        let result = victim.process.open_mapping(
            &stillframe_sys::process::Mapping {
                inode: 1,
                ..mapping.clone()
            },
            false,
        );
        assert!(
            matches!(result, Err(ProcessError::MappingGone { .. })),
            "{result:?}"
        );
    }
    let anonymous = mappings.iter().find(|mapping| mapping.inode == 0).unwrap();
    let result = victim.process.open_mapping(anonymous, false);
    assert!(
        matches!(result, Err(ProcessError::NoFile { .. })),
        "{result:?}"
    );
}

/// Without the right to follow links in `map_files`, a descriptor of the process does.
#[test]
fn a_mapped_file_is_found_through_a_descriptor() {
    let victim = Victim::start("identity");
    let words: Vec<u64> = victim
        .ready
        .split(' ')
        .map(|word| word.parse().unwrap())
        .collect();
    let process = victim.process.clone();
    let unprivileged = std::thread::spawn(move || {
        const SYS_ADMIN_AND_CHECKPOINT_RESTORE: [u32; 2] = [1 << 21, 1 << (40 - 32)];
        crate::infect_limits::drop_capabilities(SYS_ADMIN_AND_CHECKPOINT_RESTORE);
        let mappings = process.mappings().unwrap();
        let find = |address| {
            mappings
                .iter()
                .find(|mapping| mapping.range.contains(address))
                .unwrap()
        };
        let file = process.open_mapping(find(words[1]), true).unwrap();
        assert_eq!(file.metadata().unwrap().ino(), find(words[1]).inode);
        let result = process.open_mapping(find(words[2]), true);
        assert!(
            matches!(result, Err(ProcessError::Permission { .. })),
            "{result:?}"
        );
    });
    unprivileged.join().unwrap();
}

#[test]
fn the_end_of_a_process_is_noticed() {
    let mut victim = Victim::start("state waiting");
    let process = victim.process.clone();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| process.wait_exit(Duration::from_secs(60)));
        process.signal(libc::SIGKILL).unwrap();
        assert!(waiting.join().unwrap());
    });
    assert!(!process.is_alive());
    victim.kill();
    assert!(process.wait_exit(Duration::ZERO));
    assert_all_gone(&process);
}

fn assert_all_gone(process: &Process) {
    let gone =
        |error: ProcessError| assert!(matches!(error, ProcessError::Gone { .. }), "{error:?}");
    assert!(!process.is_alive());
    gone(process.signal(libc::SIGKILL).unwrap_err());
    gone(process.fetch_fd(0).unwrap_err());
    gone(process.exe().unwrap_err());
    gone(process.cwd().unwrap_err());
    gone(process.command_line().unwrap_err());
    gone(process.uid().unwrap_err());
    gone(process.run_state().unwrap_err());
    gone(process.mappings().unwrap_err());
    gone(process.resident_bytes().unwrap_err());
    assert_eq!(process.processor_time(), None);
    let memory = RemoteMemory::open(process);
    let address = &raw const BYTE as u64;
    for result in [memory.read(address, &mut [0]), memory.write(address, &[1])] {
        assert!(
            matches!(result, Err(MemoryError::Gone { .. })),
            "{result:?}"
        );
    }
    let result = inject_userfaultfd(process, Duration::from_secs(1));
    assert!(
        matches!(
            result,
            Err(InfectError::Gone { .. } | InfectError::Process(ProcessError::Gone { .. }))
        ),
        "{result:?}"
    );
}

/// At the same address in every victim, unless addresses are randomised; reading it must fail anyway.
static BYTE: u8 = 0;

/// The number of a process that has ended is given to another one: everything still says "gone", and
/// nothing reaches the newcomer.
#[test]
fn a_number_that_was_given_away_is_not_followed() {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        assert!(Instant::now() < deadline, "the number was never given away");
        let mut first = Victim::start("state waiting");
        let old = first.process.clone();
        let pagemap = Pagemap::open(&old).unwrap();
        first.kill();
        // The next process is to get this number again; another process may be faster.
        std::fs::write("/proc/sys/kernel/ns_last_pid", (old.pid() - 1).to_string()).unwrap();
        let mut newcomer = spawn(Command::new("/bin/sleep").arg("60"));
        if newcomer.id() as i32 == old.pid() {
            assert_all_gone(&old);
            let range = AddressRange {
                start: 4096,
                end: 8192,
            };
            let result = pagemap.populated(range, &mut Vec::new());
            assert!(
                matches!(result, Err(PagemapError::Gone { .. })),
                "{result:?}"
            );
            assert!(
                newcomer.try_wait().unwrap().is_none(),
                "the newcomer was hit"
            );
        }
        let found = newcomer.id() as i32 == old.pid();
        newcomer.kill().unwrap();
        newcomer.wait().unwrap();
        if found {
            return;
        }
    }
}
