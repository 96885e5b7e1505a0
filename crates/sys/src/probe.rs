//! The abilities that this machine gives the engine: each is really used once, on a child of ours.

mod child;

use crate::infect::{InfectError, InjectedUffd, inject_userfaultfd};
use crate::memfd::{Access, Memfd};
use crate::memory::{RemoteMemory, SharedMapping};
use crate::pagemap::{HOST_PAGE_BYTES, Pagemap};
use crate::process::AddressRange;
use crate::uffd::{Event, Track, Uffd, Waiters, WriteProtectMode};
use child::{Child, PAGES};
use std::error::Error;
use std::sync::OnceLock;
use std::time::Duration;

/// Time for which a step of a trial may take: long, because a machine under load is none that lacks something.
const LIMIT: Duration = Duration::from_secs(10);

/// Something the engine needs of the machine or can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ability {
    /// The ability, in a few words.
    pub name: &'static str,
    /// Whether it can be done without.
    pub need: Need,
    /// Whether it is there.
    pub state: State,
}

/// Whether an ability can be done without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Nothing works without it.
    Required,
    /// Something works without it.
    Optional,
}

/// Whether an ability is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It was used.
    Present {
        /// The result of the trial.
        detail: String,
    },
    /// It failed.
    Missing {
        /// The failure.
        cause: String,
        /// The remedy.
        remedy: String,
    },
}

type Trial = fn(&Child) -> Result<String, Box<dyn Error>>;

/// An ability, how to try it, and what to do when that fails.
struct Entry {
    name: &'static str,
    need: Need,
    filtered_child: bool,
    trial: Trial,
    remedy: &'static str,
}

const ROOT: &str = "run as root, or with the capability CAP_SYS_PTRACE";
const KERNEL: &str =
    "use Linux 6.7 or newer, built with CONFIG_USERFAULTFD and CONFIG_PTE_MARKER_UFFD_WP";

const ENTRIES: [Entry; 9] = [
    Entry {
        name: "memory of other processes",
        need: Need::Required,
        filtered_child: false,
        trial: try_memory,
        remedy: ROOT,
    },
    Entry {
        name: "userfaultfd of other processes",
        need: Need::Required,
        filtered_child: false,
        trial: try_infect,
        remedy: "run as root (CAP_SYS_PTRACE), and allow ptrace: /proc/sys/kernel/yama/ptrace_scope \
               at most 2",
    },
    Entry {
        name: "asynchronous write tracking",
        need: Need::Required,
        filtered_child: false,
        trial: try_tracking,
        remedy: KERNEL,
    },
    Entry {
        name: "files in memory",
        need: Need::Required,
        filtered_child: false,
        trial: try_memfd,
        remedy: "mount /proc, and use a kernel with CONFIG_MEMFD_CREATE",
    },
    Entry {
        name: "shared memory of other processes",
        need: Need::Optional,
        filtered_child: false,
        trial: try_mapped_file,
        remedy: "run as root, or with the capability CAP_CHECKPOINT_RESTORE",
    },
    Entry {
        name: "sandboxed processes",
        need: Need::Optional,
        filtered_child: true,
        trial: try_infect,
        remedy: "run as root (CAP_SYS_ADMIN), without a seccomp filter of our own, on a kernel with \
               CONFIG_CHECKPOINT_RESTORE",
    },
    Entry {
        name: "synchronous write protection",
        need: Need::Optional,
        filtered_child: false,
        trial: try_synchronous,
        remedy: KERNEL,
    },
    DISCARDS,
    Entry {
        name: "missing pages",
        need: Need::Optional,
        filtered_child: false,
        trial: try_missing,
        remedy: KERNEL,
    },
];

/// Kernels from 6.7 to a fix of July 2026 pass over a page table that is gone (linux: fs/proc/task_mmu.c,
/// `pagemap_scan_pte_hole`).
const DISCARDS: Entry = Entry {
    name: "discards of 2 MiB",
    need: Need::Optional,
    filtered_child: false,
    trial: try_discards,
    remedy: "use a kernel with the fix of July 2026 (\"fs/proc/task_mmu: fix PAGEMAP_SCAN written state for PMD \
           holes\"); until then, VMs with free page reporting or virtio-mem are refused",
};

/// Whether the kernel reports it when a process discards 2 MiB of private memory at once; tried once in the
/// life of this process.
pub fn reports_large_discards() -> bool {
    static REPORTS: OnceLock<bool> = OnceLock::new();
    *REPORTS.get_or_init(|| matches!(try_one(&DISCARDS).state, State::Present { .. }))
}

/// Tries all of them; takes a few milliseconds, and starts and ends some child processes.
pub fn run() -> Vec<Ability> {
    ENTRIES.iter().map(try_one).collect()
}

/// Tries those that nothing works without.
pub fn run_required() -> Vec<Ability> {
    let required = ENTRIES.iter().filter(|entry| entry.need == Need::Required);
    required.map(try_one).collect()
}

fn try_one(entry: &Entry) -> Ability {
    // A child of its own, so that one failure does not spoil the next trial.
    let result = Child::start(entry.filtered_child).and_then(|child| (entry.trial)(&child));
    let state = match result {
        Ok(detail) => State::Present { detail },
        Err(error) => State::Missing {
            cause: with_causes(error.as_ref()),
            remedy: remedy(entry.remedy, is_filtered()),
        },
    };
    Ability {
        name: entry.name,
        need: entry.need,
        state,
    }
}

/// A filter of our own looks like missing rights, also to root.
fn remedy(usual: &str, filtered: bool) -> String {
    match filtered {
        false => usual.to_owned(),
        true => format!(
            "this process is under a seccomp filter (a container's, or SystemCallFilter= of a \
             service): run it without one; else {usual}"
        ),
    }
}

fn is_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mode = status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp:"));
    mode.is_some_and(|mode| mode.trim() != "0")
}

fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

fn try_memory(child: &Child) -> Result<String, Box<dyn Error>> {
    let memory = RemoteMemory::open(&child.process);
    let start = child.private.start;
    memory.write(start, b"probe")?;
    let mut bytes = [0; 5];
    memory.read(start, &mut bytes)?;
    if &bytes != b"probe" {
        return Err("what was written is not read back".into());
    }
    Ok("read and written".into())
}

fn inject(child: &Child) -> Result<InjectedUffd, InfectError> {
    inject_userfaultfd(&child.process, LIMIT)
}

fn try_infect(child: &Child) -> Result<String, Box<dyn Error>> {
    let injected = inject(child)?;
    let limits = if injected.user_mode_only {
        ", for user mode only"
    } else {
        ""
    };
    Ok(format!(
        "a process was stopped for {} µs{limits}",
        injected.stopped_us
    ))
}

fn try_tracking(child: &Child) -> Result<String, Box<dyn Error>> {
    let uffd = Uffd::handshake(inject(child)?.fd, WriteProtectMode::Async)?;
    let pagemap = Pagemap::open(&child.process)?;
    for region in [child.private, child.shared] {
        uffd.register(region, Track::WriteProtect)?;
        uffd.protect(region)?;
        let page = page(region, 2);
        child.write(page.start)?;
        child.await_answer(LIMIT)?;
        let mut written = Vec::new();
        pagemap.take_written(region, &mut written)?;
        if written != [page] {
            return Err(format!("{page} was written, but the kernel says {written:?}").into());
        }
    }
    Ok("writes to private and shared memory were found".into())
}

fn try_discards(child: &Child) -> Result<String, Box<dyn Error>> {
    child.fill_large()?;
    child.await_answer(LIMIT)?;
    let uffd = Uffd::handshake(inject(child)?.fd, WriteProtectMode::Async)?;
    let pagemap = Pagemap::open(&child.process)?;
    uffd.register(child.large, Track::WriteProtect)?;
    uffd.protect(child.large)?;
    child.discard_large()?;
    child.await_answer(LIMIT)?;
    let mut written = Vec::new();
    pagemap.take_written(child.large, &mut written)?;
    match written == [child.large] {
        true => Ok("reported".into()),
        false => Err(format!(
            "{} were discarded, but the kernel reports {written:?}",
            child.large
        )
        .into()),
    }
}

fn try_memfd(_: &Child) -> Result<String, Box<dyn Error>> {
    let memfd = Memfd::create("stillframe-probe")?;
    memfd.write_all(b"probe")?;
    memfd.reopen(Access::Read)?;
    memfd.reopen(Access::Write)?;
    Ok("created and reopened".into())
}

fn try_mapped_file(child: &Child) -> Result<String, Box<dyn Error>> {
    let mappings = child.process.mappings()?;
    let found = mappings
        .iter()
        .find(|mapping| mapping.range.contains(child.shared.start));
    let mapping = found.ok_or("the memory of the child is not among its mappings")?;
    let file = child.process.open_mapping(mapping, true)?;
    SharedMapping::map(&file, mapping.file_offset, child.shared.len(), true)?;
    Ok("mapped here as well".into())
}

fn try_synchronous(child: &Child) -> Result<String, Box<dyn Error>> {
    let uffd = Uffd::handshake(inject(child)?.fd, WriteProtectMode::Sync)?;
    for region in [child.private, child.shared] {
        uffd.register(region, Track::WriteProtect)?;
        uffd.protect(region)?;
        let page = page(region, 1);
        child.write(page.start)?;
        expect(
            &uffd,
            Event::Fault {
                address: page.start,
                write: true,
                protected: true,
            },
        )?;
        uffd.unprotect(page)?;
        child.await_answer(LIMIT)?;
    }
    Ok("a writer waited".into())
}

fn try_missing(child: &Child) -> Result<String, Box<dyn Error>> {
    let uffd = Uffd::handshake_missing(inject(child)?.fd)?;
    for region in [child.private, child.shared] {
        uffd.register(region, Track::Missing)?;
        let page = page(region, PAGES - 1);
        child.write(page.start)?;
        expect(
            &uffd,
            Event::Fault {
                address: page.start,
                write: true,
                protected: false,
            },
        )?;
        uffd.copy(page.start, &[0; HOST_PAGE_BYTES as usize], Waiters::Wake)?;
        child.await_answer(LIMIT)?;
    }
    Ok("pages were supplied on demand".into())
}

fn page(region: AddressRange, number: u64) -> AddressRange {
    let start = region.start + number * HOST_PAGE_BYTES;
    AddressRange {
        start,
        end: start + HOST_PAGE_BYTES,
    }
}

fn expect(uffd: &Uffd, expected: Event) -> Result<(), Box<dyn Error>> {
    child::await_readable(uffd, LIMIT)?;
    match uffd.next_event()? {
        Some(event) if event == expected => Ok(()),
        other => Err(format!("{expected:?} was expected, but there came {other:?}").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Process;

    #[test]
    fn a_process_with_a_filter_or_namespaces_of_its_own_is_confined() {
        let own = Process::open(std::process::id().cast_signed()).unwrap();
        assert!(
            !own.is_confined(),
            "this test needs a place without a filter"
        );
        assert!(!Child::start(false).unwrap().process.is_confined());
        assert!(Child::start(true).unwrap().process.is_confined());
        let mut elsewhere = std::process::Command::new("unshare")
            .args(["--mount", "sleep", "60"])
            .spawn()
            .unwrap();
        let process = Process::open(elsewhere.id().cast_signed()).unwrap();
        let is_seen = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            process.is_confined()
        });
        elsewhere.kill().unwrap();
        elsewhere.wait().unwrap();
        assert!(is_seen);
    }

    #[test]
    fn everything_is_there() {
        for ability in run() {
            assert!(
                matches!(ability.state, State::Present { .. }),
                "{ability:?}"
            );
        }
    }

    #[test]
    fn what_fails_says_why_and_what_to_do() {
        let entry = Entry {
            name: "something",
            need: Need::Optional,
            filtered_child: false,
            trial: |child| {
                child.process.signal(libc::SIGKILL)?;
                child.process.wait_exit(LIMIT);
                try_memory(child)
            },
            remedy: "do something",
        };
        let State::Missing { cause, remedy } = try_one(&entry).state else {
            panic!("it cannot be there")
        };
        assert!(cause.contains("has ended"), "{cause}");
        assert_eq!(remedy, "do something");
    }

    #[test]
    fn a_filter_of_our_own_is_named_before_missing_rights() {
        assert_eq!(remedy("run as root", false), "run as root");
        assert!(remedy("run as root", true).starts_with("this process is under a seccomp filter"));
    }
}
