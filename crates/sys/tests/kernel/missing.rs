//! Missing pages in the memory of a child: lazy restore in small.

use crate::ram::{Memory, PAGE, wait_for_event};
use crate::victim::inject;
use std::time::Duration;
use stillframe_sys::infect::{InfectError, close_fd, discard, duplicate_userfaultfd};
use stillframe_sys::process::AddressRange;
use stillframe_sys::uffd::{Event, Track, Uffd, UffdError, Waiters};

const LIMIT: Duration = Duration::from_secs(60);

/// Pages are filled when they are first touched.
#[test]
fn missing_pages_are_served() {
    let mut memory = Memory::start(8, "small");
    for region in [0, 1] {
        let fd = inject(&memory.victim.process).unwrap().fd;
        let uffd = Uffd::handshake_missing(fd).unwrap();
        uffd.register(memory.regions[region], Track::Missing)
            .unwrap();
        memory.begin("read", region, [3]);
        let event = wait_for_event(&uffd);
        let address = memory.page(region, 3).start;
        assert_eq!(
            event,
            Event::Fault {
                address,
                write: false,
                protected: false
            }
        );
        let content: Vec<u8> = (0..2 * PAGE).map(|at| (at / PAGE) as u8 + 1).collect();
        uffd.copy(address, &content, Waiters::Wake).unwrap();
        assert_eq!(memory.done(), 0x0101_0101_0101_0101);
        // Its neighbour came with it, without a fault.
        assert_eq!(memory.act("read", region, [4]), 0x0202_0202_0202_0202);
        let again = uffd.copy(address, &content, Waiters::Wake);
        assert!(matches!(again, Err(UffdError::Exists { .. })), "{again:?}");
        let partly = uffd.copy(memory.page(region, 2).start, &content, Waiters::Wake);
        let Err(UffdError::Exists { range }) = partly else {
            panic!("{partly:?}")
        };
        assert_eq!(range.start, address);
        assert_eq!(memory.act("read", region, [2]), 0x0101_0101_0101_0101);
        memory.begin("write", region, [0]);
        wait_for_event(&uffd);
        uffd.zero(AddressRange {
            end: memory.page(region, 2).start,
            ..memory.regions[region]
        })
        .unwrap();
        memory.done();
        assert_eq!(
            memory.act("read", region, [0, 1]),
            memory.page(region, 0).start
        );
        // Waking without populating: the thread tries again, and faults again.
        memory.begin("read", region, [7]);
        assert_eq!(
            wait_for_event(&uffd),
            wait_after_wake(&uffd, memory.page(region, 7))
        );
        // Without the descriptor missing pages are zero.
        drop(uffd);
        assert_eq!(memory.done(), 0);
    }
}

fn wait_after_wake(uffd: &Uffd, page: AddressRange) -> Event {
    uffd.wake(page).unwrap();
    wait_for_event(uffd)
}

/// A thread that waits for a page can be left waiting when the page is there.
#[test]
fn a_waiter_may_be_held() {
    let mut memory = Memory::start(8, "small");
    let fd = inject(&memory.victim.process).unwrap().fd;
    let uffd = Uffd::handshake_missing(fd).unwrap();
    uffd.register(memory.regions[0], Track::Missing).unwrap();
    let page = memory.page(0, 3);
    memory.begin("read", 0, [3]);
    wait_for_event(&uffd);
    uffd.copy(page.start, &[1; PAGE as usize], Waiters::Leave)
        .unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let pid = memory.victim.process.pid();
    let waits_in = std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap();
    assert_eq!(waits_in, "handle_userfault");
    uffd.wake(page).unwrap();
    assert_eq!(memory.done(), 0x0101_0101_0101_0101);
}

/// A page that is given up after it was filled is reported as missing again, and discarding it waits for no
/// handler.
#[test]
fn a_discarded_page_is_missing_again() {
    let mut memory = Memory::start(8, "small");
    let fd = inject(&memory.victim.process).unwrap().fd;
    let uffd = Uffd::handshake_missing(fd).unwrap();
    uffd.register(memory.regions[0], Track::Missing).unwrap();
    let page = memory.page(0, 3);
    uffd.copy(page.start, &[1; PAGE as usize], Waiters::Wake)
        .unwrap();
    assert_eq!(memory.act("read", 0, [3]), 0x0101_0101_0101_0101);
    memory.act("discard", 0, [3]);
    memory.begin("read", 0, [3]);
    wait_for_event(&uffd);
    uffd.zero(page).unwrap();
    assert_eq!(memory.done(), 0);
}

/// The process that handles the faults may die: readers wait, and another process continues.
#[test]
fn a_successor_serves_what_is_left() {
    let mut memory = Memory::start(8, "small");
    let process = memory.victim.process.clone();
    for region in [0, 1] {
        let shared = duplicate_userfaultfd(&process, LIMIT).unwrap();
        let first = Uffd::handshake_missing(shared.fd).unwrap();
        first
            .register(memory.regions[region], Track::Missing)
            .unwrap();
        memory.begin("read", region, [3]);
        let asked = wait_for_event(&first);
        // It has read the message and dies before it answers.
        drop(first);
        let second = Uffd::adopt(process.fetch_fd(shared.remote_fd).unwrap());
        assert_eq!(memory.victim.word(), None, "no handler has served the page");
        second.wake(memory.regions[region]).unwrap();
        assert_eq!(wait_for_event(&second), asked);
        second
            .copy(
                memory.page(region, 3).start,
                &[1; PAGE as usize],
                Waiters::Wake,
            )
            .unwrap();
        assert_eq!(memory.done(), 0x0101_0101_0101_0101);
        second.unregister(memory.regions[region]).unwrap();
        close_fd(&process, shared.remote_fd, LIMIT).unwrap();
        assert_eq!(memory.act("read", region, [4]), 0);
        assert!(process.fetch_fd(shared.remote_fd).is_err());
        let again = close_fd(&process, shared.remote_fd, LIMIT);
        assert!(
            matches!(again, Err(InfectError::Refused { .. })),
            "{again:?}"
        );
    }
}

/// Pages that were there are missing again, and others are not.
#[test]
fn what_the_process_is_made_to_discard_is_missing() {
    let mut memory = Memory::start(8, "small");
    let process = memory.victim.process.clone();
    for page in [2, 3, 4, 6] {
        memory.act("write", 0, [page]);
    }
    let kept = memory.act("read", 0, [4]);
    let shared = duplicate_userfaultfd(&process, LIMIT).unwrap();
    let uffd = Uffd::handshake_missing(shared.fd).unwrap();
    uffd.register(memory.regions[0], Track::Missing).unwrap();
    let two = AddressRange {
        start: memory.page(0, 2).start,
        end: memory.page(0, 3).end,
    };
    discard(&process, vec![two, memory.page(0, 6)], LIMIT).unwrap();
    assert_eq!(memory.act("read", 0, [4]), kept);
    for page in [2, 3, 6] {
        memory.begin("read", 0, [page]);
        wait_for_event(&uffd);
        uffd.copy(
            memory.page(0, page).start,
            &[1; PAGE as usize],
            Waiters::Wake,
        )
        .unwrap();
        assert_eq!(memory.done(), 0x0101_0101_0101_0101);
    }
    let nowhere = AddressRange {
        start: 1 << 12,
        end: 2 << 12,
    };
    let refused = discard(&process, vec![nowhere], LIMIT);
    assert!(
        matches!(refused, Err(InfectError::Refused { .. })),
        "{refused:?}"
    );
}
