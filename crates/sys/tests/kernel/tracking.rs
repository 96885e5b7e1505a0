//! Write tracking in the memory of a child, all the way: inject, handshake, register, protect. The reference is the
//! record of the commands that the child received.

use crate::ram::{Memory, PAGE, wait_for_event};
use crate::victim::inject;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;
use stillframe_sys::infect::inject_userfaultfd;
use stillframe_sys::memory::{MemoryError, RemoteMemory};
use stillframe_sys::pagemap::{Pagemap, PagemapError};
use stillframe_sys::process::AddressRange;
use stillframe_sys::uffd::{Event, Track, Uffd, UffdError, WriteProtectMode};

impl Memory {
    fn inject(&self, mode: WriteProtectMode) -> Uffd {
        Uffd::handshake(inject(&self.victim.process).unwrap().fd, mode).unwrap()
    }

    /// Arms asynchronous tracking of both regions.
    fn track(&self) -> (Uffd, Pagemap) {
        let uffd = self.inject(WriteProtectMode::Async);
        for region in self.regions {
            uffd.register(region, Track::WriteProtect).unwrap();
            uffd.protect(region).unwrap();
        }
        (uffd, Pagemap::open(&self.victim.process).unwrap())
    }

    /// The page numbers in ranges of addresses, which have to be sorted, disjoint and joined.
    fn numbers(&self, region: usize, ranges: &[AddressRange]) -> BTreeSet<u64> {
        for pair in ranges.windows(2) {
            assert!(pair[0].end < pair[1].start, "{} and {}", pair[0], pair[1]);
        }
        let whole = self.regions[region];
        let pages = ranges.iter().flat_map(|range| {
            assert!(!range.is_empty() && range.intersect(&whole) == Some(*range));
            (range.start - whole.start) / PAGE..(range.end - whole.start) / PAGE
        });
        pages.collect()
    }

    fn take(&self, pagemap: &Pagemap, region: usize) -> BTreeSet<u64> {
        let mut out = Vec::new();
        pagemap
            .take_written(self.regions[region], &mut out)
            .unwrap();
        self.numbers(region, &out)
    }

    fn peek(&self, pagemap: &Pagemap, region: usize) -> BTreeSet<u64> {
        let mut out = Vec::new();
        pagemap
            .peek_written(self.regions[region], &mut out)
            .unwrap();
        self.numbers(region, &out)
    }
}

const PAGES: u64 = 64;

fn some_pages() -> impl Strategy<Value = BTreeSet<u64>> {
    prop_oneof![
        prop::collection::btree_set(0..PAGES, 0..24),
        (0..PAGES, 0..PAGES).prop_map(|(a, b)| (a.min(b)..a.max(b)).collect()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A scan takes exactly the pages written since the last scan, in any mixture of rounds. It does not matter
    /// which pages were populated before, nor how the range is cut into calls.
    #[test]
    fn exactly_the_written_pages_are_taken(
        before in [some_pages(), some_pages()],
        rounds in prop::collection::vec(([some_pages(), some_pages()], 1..PAGES), 1..5),
        huge in any::<bool>(),
    ) {
        let mut memory = Memory::start(PAGES, if huge { "huge" } else { "small" });
        for (region, pages) in before.iter().enumerate() {
            memory.act("write", region, pages.iter().copied());
        }
        let (_uffd, pagemap) = memory.track();
        for (written, cut) in rounds {
            for (region, pages) in written.into_iter().enumerate() {
                memory.act("write", region, pages.iter().copied());
                prop_assert_eq!(&memory.peek(&pagemap, region), &pages);
                let whole = memory.regions[region];
                let middle = whole.start + cut * PAGE;
                let mut out = Vec::new();
                let head = AddressRange { end: middle, ..whole };
                pagemap.take_written(head, &mut out).unwrap();
                let in_head = memory.numbers(region, &out);
                prop_assert_eq!(in_head, pages.range(..cut).copied().collect());
                out.clear();
                pagemap.take_written(AddressRange { start: middle, ..whole }, &mut out).unwrap();
                let in_tail = memory.numbers(region, &out);
                prop_assert_eq!(in_tail, pages.range(cut..).copied().collect());
                prop_assert_eq!(memory.peek(&pagemap, region), BTreeSet::new());
            }
        }
    }
}

/// More regions than one call returns, in one range.
#[test]
fn scans_go_on_where_a_call_ends() {
    let mut memory = Memory::start(40_000, "small");
    let (_uffd, pagemap) = memory.track();
    for region in [0, 1] {
        let even: BTreeSet<u64> = (0..memory.pages).step_by(2).collect();
        memory.act("write", region, even.iter().copied());
        assert!(memory.peek(&pagemap, region) == even);
        assert!(memory.take(&pagemap, region) == even);
        assert_eq!(memory.take(&pagemap, region), BTreeSet::new());
        // Ranges that meet where one call ended and the next began are joined.
        memory.act("write", region, 0..memory.pages);
        assert_eq!(memory.take(&pagemap, region).len() as u64, memory.pages);
    }
}

#[test]
fn writes_by_the_kernel_are_reported() {
    let mut memory = Memory::start(8, "small");
    memory.act("write", 0, 0..4);
    let (_uffd, pagemap) = memory.track();
    for region in [0, 1] {
        memory.act("system-write", region, [1, 6]);
        assert_eq!(memory.take(&pagemap, region), BTreeSet::from([1, 6]));
    }
}

/// Pages that may have content are found after protection too, where an untouched page has a marker, and one that was only
/// read the kernel's page of zeros. A page with content is never left out.
#[test]
fn untouched_pages_are_told_from_pages_with_content() {
    let mut memory = Memory::start(20_000, "small");
    let written: BTreeSet<u64> = (0..memory.pages).step_by(3).collect();
    memory.act("write", 0, written.iter().copied());
    memory.act("read", 0, (1..memory.pages).step_by(6));
    let (_uffd, pagemap) = memory.track();
    let mut found = Vec::new();
    let whole = memory.regions[0];
    for _ in 0..2 {
        pagemap.may_have_content(whole, &mut found).unwrap();
        assert!(memory.numbers(0, &found) == written);
        found.clear();
        memory.act("read", 0, (4..memory.pages).step_by(6));
    }
    pagemap.populated(whole, &mut found).unwrap();
    let all: BTreeSet<u64> = (0..memory.pages).collect();
    assert!(
        memory.numbers(0, &found) == all,
        "markers count as populated"
    );
    // Read before protection, never touched, and read after it.
    memory.act("write", 0, [1, 2, 4]);
    found.clear();
    pagemap.may_have_content(whole, &mut found).unwrap();
    let expected = &written | &BTreeSet::from([1, 2, 4]);
    assert!(memory.numbers(0, &found) == expected);
    assert_eq!(memory.take(&pagemap, 0), BTreeSet::from([1, 2, 4]));
}

#[test]
fn what_is_populated_and_present() {
    let mut memory = Memory::start(8, "small");
    memory.act("write", 0, [1, 2, 5]);
    let pagemap = Pagemap::open(&memory.victim.process).unwrap();
    let populated = |memory: &Memory| {
        let (mut populated, mut present) = (Vec::new(), Vec::new());
        pagemap
            .populated(memory.regions[0], &mut populated)
            .unwrap();
        pagemap.present(memory.regions[0], &mut present).unwrap();
        (memory.numbers(0, &populated), memory.numbers(0, &present))
    };
    let written = BTreeSet::from([1, 2, 5]);
    assert_eq!(populated(&memory), (written.clone(), written.clone()));
    // Protection leaves a marker where there is no page.
    let _tracking = memory.track();
    assert_eq!(populated(&memory), ((0..8).collect(), written));
    // A private page that is discarded counts as written: it reads as zero now.
    memory.act("discard", 0, [2]);
    assert_eq!(populated(&memory).1, BTreeSet::from([1, 5]));
    assert_eq!(memory.take(&pagemap, 0), BTreeSet::from([2]));
}

/// So the engine finds both in one scan: a page that is reported as written, and a hole in its place.
#[test]
fn a_shared_page_that_was_written_and_removed_is_reported_as_written() {
    let mut memory = Memory::start(8, "small");
    memory.act("write", 1, [3, 4, 5]);
    let (_uffd, pagemap) = memory.track();
    memory.act("write", 1, [3]);
    // Of page 5 only the hole shows that it is gone.
    memory.act("remove", 1, [3, 5]);
    assert_eq!(memory.take(&pagemap, 1), BTreeSet::from([3]));
}

#[test]
fn memory_that_is_not_tracked_is_refused() {
    let mut memory = Memory::start(8, "small");
    let pagemap = Pagemap::open(&memory.victim.process).unwrap();
    let mut out = Vec::new();
    let result = pagemap.take_written(memory.regions[0], &mut out);
    assert!(
        matches!(result, Err(PagemapError::NotTracked { .. })),
        "{result:?}"
    );
    let (uffd, _) = memory.track();
    uffd.unregister(memory.regions[1]).unwrap();
    pagemap.take_written(memory.regions[0], &mut out).unwrap();
    let result = pagemap.take_written(memory.regions[1], &mut out);
    assert!(
        matches!(result, Err(PagemapError::NotTracked { .. })),
        "{result:?}"
    );
    memory.act("write", 1, 0..8);
}

/// The effect of the engine's death: the child continues, asynchronous or synchronous.
#[test]
fn closing_the_descriptor_frees_the_child() {
    let mut memory = Memory::start(8, "small");
    let (uffd, _) = memory.track();
    drop(uffd);
    memory.act("write", 0, 0..8);
    let uffd = memory.inject(WriteProtectMode::Sync);
    for region in [0, 1] {
        uffd.register(memory.regions[region], Track::WriteProtect)
            .unwrap();
        uffd.protect(memory.regions[region]).unwrap();
    }
    memory.begin("write", 1, 0..8);
    wait_for_event(&uffd);
    assert_eq!(memory.victim.word(), None, "the writer did not wait");
    drop(uffd);
    memory.done();
    memory.act("write", 0, 0..8);
    // And it can be tracked again.
    let (_uffd, pagemap) = memory.track();
    memory.act("write", 1, [3]);
    assert_eq!(memory.take(&pagemap, 1), BTreeSet::from([3]));
}

/// The actions of a second owner of the descriptor when the first hangs: the child continues, though copies stay
/// open.
#[test]
fn unregistering_frees_the_child() {
    let mut memory = Memory::start(8, "small");
    let injected = inject(&memory.victim.process).unwrap();
    let other = Uffd::adopt(injected.fd.try_clone().unwrap());
    let uffd = Uffd::handshake(injected.fd, WriteProtectMode::Sync).unwrap();
    for region in [0, 1] {
        uffd.register(memory.regions[region], Track::WriteProtect)
            .unwrap();
        uffd.protect(memory.regions[region]).unwrap();
        memory.begin("write", region, 0..8);
        wait_for_event(&uffd);
        assert_eq!(memory.victim.word(), None, "the writer did not wait");
        other.unregister(memory.regions[region]).unwrap();
        memory.done();
        // Once more does no harm.
        other.unregister(memory.regions[region]).unwrap();
    }
}

/// Each first write waits for us, with the old content still in place.
#[test]
fn synchronous_protection_shows_the_old_content() {
    let mut memory = Memory::start(8, "small");
    let bytes = RemoteMemory::open(&memory.victim.process);
    for region in [0, 1] {
        memory.act("write", region, 0..4);
        let old: Vec<u8> = vec![0x5a; PAGE as usize];
        bytes.write(memory.page(region, 2).start, &old).unwrap();
        let uffd = memory.inject(WriteProtectMode::Sync);
        uffd.register(memory.regions[region], Track::WriteProtect)
            .unwrap();
        uffd.protect(memory.regions[region]).unwrap();
        assert_eq!(uffd.next_event().unwrap(), None);
        // Page 6 was never touched: protected all the same.
        memory.begin("write", region, [2, 6]);
        for page in [2, 6] {
            let Event::Fault {
                address,
                write,
                protected,
            } = wait_for_event(&uffd);
            assert_eq!((address, write), (memory.page(region, page).start, true));
            assert!(protected);
            let mut seen = vec![1; PAGE as usize];
            bytes.read(address, &mut seen).unwrap();
            assert_eq!(
                seen,
                if page == 2 {
                    old.clone()
                } else {
                    vec![0; PAGE as usize]
                }
            );
            assert_eq!(memory.victim.word(), None);
            uffd.unprotect(memory.page(region, page)).unwrap();
        }
        memory.done();
        assert_eq!(
            memory.act("read", region, [2]),
            memory.page(region, 2).start
        );
        memory.act("write", region, [2, 6]);
        assert_eq!(uffd.next_event().unwrap(), None);
    }
}

#[test]
fn a_range_has_one_watcher() {
    let memory = Memory::start(8, "small");
    let (_uffd, _) = memory.track();
    let second = memory.inject(WriteProtectMode::Async);
    let result = second.register(memory.regions[0], Track::WriteProtect);
    assert!(matches!(result, Err(UffdError::Busy { .. })), "{result:?}");
}

/// Makes every access to a page fail as an access to memory that the hardware lost (hwpoison). The kernel leaves
/// the marker of such a page (`PTE_MARKER_POISONED`), without any loss of memory.
fn poison(uffd: &Uffd, page: AddressRange) {
    const UFFDIO_POISON: u64 = 0xc020_aa08;
    let mut argument = [page.start, page.len(), 0, 0];
    // SAFETY: `struct uffdio_poison` is four numbers of 64 bits: start, length, mode, pages done.
    let result = unsafe {
        libc::ioctl(
            uffd.as_fd().as_raw_fd(),
            UFFDIO_POISON,
            argument.as_mut_ptr(),
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// A page that the hardware lost is reported as written, and reading it fails, alone or among others. The pages
/// beside it are read and tracked as before.
#[test]
fn a_poisoned_page_is_reported_and_cannot_be_read() {
    for mode in [WriteProtectMode::Async, WriteProtectMode::Sync] {
        let mut memory = Memory::start(8, "small");
        memory.act("write", 0, 0..8);
        let uffd = memory.inject(mode);
        uffd.register(memory.regions[0], Track::WriteProtect)
            .unwrap();
        uffd.protect(memory.regions[0]).unwrap();
        let pagemap = Pagemap::open(&memory.victim.process).unwrap();
        memory.act("discard", 0, [3]);
        poison(&uffd, memory.page(0, 3));
        let mut found = Vec::new();
        pagemap.written(memory.regions[0], &mut found).unwrap();
        assert_eq!(memory.numbers(0, &found), BTreeSet::from([3]));
        found.clear();
        pagemap
            .may_have_content(memory.regions[0], &mut found)
            .unwrap();
        assert_eq!(memory.numbers(0, &found), (0..8).collect());

        let remote = RemoteMemory::open(&memory.victim.process);
        let lost = memory.page(0, 3).start;
        for (first, pages) in [(3, 1), (0, 8)] {
            let mut buffer = vec![0; (pages * PAGE) as usize];
            let result = remote.read(memory.page(0, first).start, &mut buffer);
            assert!(
                matches!(result, Err(MemoryError::NotMapped { address, .. }) if address == lost),
                "{result:?}"
            );
        }
        let mut buffer = vec![0; PAGE as usize];
        for page in [2, 4] {
            remote
                .read(memory.page(0, page).start, &mut buffer)
                .unwrap();
            assert_eq!(buffer[..8], memory.page(0, page).start.to_ne_bytes());
        }
        // Protecting what lies around it does not bring it back.
        uffd.protect(memory.regions[0]).unwrap();
        assert!(remote.read(lost, &mut buffer).is_err());
        memory.act("discard", 0, [3]);
        remote.read(lost, &mut buffer).unwrap();
        assert!(buffer.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn what_cannot_be_watched_is_refused() {
    let memory = Memory::start(8, "small");
    let uffd = memory.inject(WriteProtectMode::Sync);
    let mappings = memory.victim.process.mappings().unwrap();
    let text = mappings
        .iter()
        .find(|mapping| mapping.executable)
        .unwrap()
        .range;
    let crooked = AddressRange {
        start: memory.regions[0].start + 1,
        ..memory.regions[0]
    };
    for range in [text, crooked] {
        let result = uffd.register(range, Track::WriteProtect);
        assert!(
            matches!(result, Err(UffdError::Unsupported { .. })),
            "{result:?}"
        );
    }
    let result = uffd.protect(memory.regions[0]);
    assert!(
        matches!(result, Err(UffdError::NotRegistered { .. })),
        "{result:?}"
    );
}

#[test]
fn a_dead_child_is_gone() {
    let mut memory = Memory::start(8, "small");
    let (uffd, pagemap) = memory.track();
    memory.victim.kill();
    let mut out = Vec::new();
    let result = pagemap.take_written(memory.regions[0], &mut out);
    assert!(
        matches!(result, Err(PagemapError::Gone { .. })),
        "{result:?}"
    );
    for result in [
        uffd.protect(memory.regions[0]),
        uffd.register(memory.regions[0], Track::WriteProtect),
    ] {
        assert!(matches!(result, Err(UffdError::Gone)), "{result:?}");
    }
    let result = inject_userfaultfd(&memory.victim.process, Duration::from_secs(1));
    assert!(result.is_err(), "{result:?}");
}
