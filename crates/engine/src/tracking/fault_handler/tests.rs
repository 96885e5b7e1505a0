//! The fault handler on real memory, without a VM.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, Command, Stdio};

use stillframe_qemu::monitor::RamBlock;
use stillframe_sys::infect::inject_userfaultfd;
use stillframe_sys::process::Process;
use stillframe_sys::uffd::{Track, WriteProtectMode};

use super::*;
use crate::guardian::LET_GO;

/// A block of this process' own memory, in which nothing is registered.
fn block(memory: &[u8]) -> Arc<Block> {
    let process = Process::open(std::process::id() as i32).unwrap();
    let ram = RamBlock {
        name: "ram".to_owned(),
        page_bytes: PAGE_BYTES,
        offset: 0,
        used_bytes: PAGE_BYTES,
        total_bytes: PAGE_BYTES,
        address: (memory.as_ptr() as u64).next_multiple_of(PAGE_BYTES),
    };
    let mappings = process.mappings().unwrap();
    Arc::new(Block::open(&process, &mappings, &ram, false).unwrap())
}

/// A handler that reads something other than a fault ends. Only when everything is unregistered it reports
/// that no thread waits any more; in any case the capture is worthless.
#[test]
fn a_handler_that_fails_lets_go_or_falls_silent() {
    let memory = vec![1; 2 * PAGE];
    // A pipe cannot unregister a block's range.
    for (blocks, lets_go) in [(vec![], true), (vec![block(&memory)], false)] {
        let (events, mut garbage) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&events, true).unwrap();
        let (theirs, heartbeat) = Heartbeat::pipe().unwrap();
        let uffd = Arc::new(Uffd::adopt(events.into()));
        let own = Process::open(std::process::id() as i32).unwrap();
        let pagemap = Arc::new(Pagemap::open(&own).unwrap());
        let server = FaultHandler::start(uffd, pagemap, blocks.into_iter(), heartbeat).unwrap();
        assert!(server.take_failure().is_ok());
        garbage.write_all(&[7; 31]).unwrap();
        let mut said = Vec::new();
        rustix::io::ioctl_fionbio(&theirs, false).unwrap();
        // Up to the end of the thread.
        File::from(theirs).read_to_end(&mut said).unwrap();
        assert_eq!(said.contains(&LET_GO), lets_go, "{said:?}");
        for _ in 0..2 {
            let failure = server.take_failure();
            assert!(
                matches!(failure, Err(TrackerError::HandlerEnded)),
                "{failure:?}"
            );
        }
    }
}

/// The pages of a program's buffer, protected and armed as in a pause.
struct Armed {
    program: Child,
    pages: u64,
    handler: FaultHandler,
    /// The guardian's end.
    _heartbeats: OwnedFd,
}

impl Drop for Armed {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// `dd` reads blocks into one buffer: the next one is written to it by the kernel, page by page, as by a device.
fn armed(mib: u64) -> Armed {
    let mut dd = Command::new("dd");
    let block_bytes = format!("bs={mib}M");
    dd.args([
        &block_bytes,
        "iflag=fullblock",
        "of=/dev/null",
        "status=none",
    ]);
    let mut program = dd.stdin(Stdio::piped()).spawn().unwrap();
    let stdin = program.stdin.as_mut().unwrap();
    stdin.write_all(&vec![1; (mib as usize) << 20]).unwrap();
    until_read(stdin);
    let process = Process::open(program.id() as i32).unwrap();
    let mappings = process.mappings().unwrap();
    let is_buffer = |range: &AddressRange| range.end - range.start >= mib << 20;
    let mut ranges = mappings
        .iter()
        .filter(|it| it.path.is_none())
        .map(|it| it.range);
    let range = ranges.find(is_buffer).unwrap();
    let pages = (range.end - range.start) / PAGE_BYTES;
    let ram = RamBlock {
        name: "ram".to_owned(),
        page_bytes: PAGE_BYTES,
        offset: 0,
        used_bytes: pages * PAGE_BYTES,
        total_bytes: pages * PAGE_BYTES,
        address: range.start,
    };
    let block = Arc::new(Block::open(&process, &mappings, &ram, false).unwrap());
    let injected = inject_userfaultfd(&process, Duration::from_secs(5)).unwrap();
    let uffd = Arc::new(Uffd::handshake(injected.fd, WriteProtectMode::Sync).unwrap());
    uffd.register(range, Track::WriteProtect).unwrap();
    uffd.protect(range).unwrap();
    let (heartbeats, heartbeat) = Heartbeat::pipe().unwrap();
    let pagemap = Arc::new(Pagemap::open(&process).unwrap());
    let handler = FaultHandler::start(uffd, pagemap, [block].into_iter(), heartbeat).unwrap();
    handler.begin();
    for page in 0..pages {
        handler.claims(0).arm(page);
    }
    Armed {
        program,
        pages,
        handler,
        _heartbeats: heartbeats,
    }
}

fn until_read(pipe: &ChildStdin) {
    while rustix::io::ioctl_fionread(pipe).unwrap() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// QEMU's main thread may be a writer, and the copier begins when that thread has answered. A writer that waited for
/// the copier would wait for itself.
#[test]
fn no_writer_waits_for_a_copier_that_has_not_begun() {
    for (mib, is_saved) in [(32, true), (80, false)] {
        let mut armed = armed(mib);
        let block_pages = (mib << 20) / PAGE_BYTES;
        assert!(armed.pages >= block_pages);
        let mut stdin = armed.program.stdin.take().unwrap();
        let feeding = std::thread::spawn(move || {
            stdin.write_all(&vec![2; (mib as usize) << 20]).unwrap();
            until_read(&stdin);
        });
        let limit = Instant::now() + Duration::from_secs(60);
        while !feeding.is_finished() {
            assert!(Instant::now() < limit, "a writer waits");
            std::thread::sleep(Duration::from_millis(1));
        }
        armed.handler.wait_until_idle();
        let failure = armed.handler.take_failure();
        assert_eq!(failure.is_ok(), is_saved, "{mib} MiB: {failure:?}");
        let mut saved = 0;
        while let Some(page) = armed.handler.take_saved() {
            assert!(
                page.bytes.iter().all(|byte| *byte != 2),
                "page {}",
                page.page
            );
            saved += 1;
            armed.handler.recycle(page.bytes);
        }
        match is_saved {
            true => assert!(saved >= block_pages, "{saved} of {block_pages}"),
            false => assert_eq!(saved, SAVED_MAX as u64 + EXTRA_MAX),
        }
    }
}

/// While the copier is at work the handler makes no memory of its own: a writer waits for it.
#[test]
fn a_writer_waits_for_a_copier_that_is_at_work() {
    let mib = 32;
    let mut armed = armed(mib);
    let at_work = armed.handler.copier_at_work();
    let mut stdin = armed.program.stdin.take().unwrap();
    let feeding = std::thread::spawn(move || stdin.write_all(&vec![2; (mib as usize) << 20]));
    while armed.handler.saved.len() < SAVED_MAX {
        at_work.step();
    }
    let claims = armed.handler.claims(0);
    while !(0..armed.pages).any(|page| claims.is_wanted(page)) {
        at_work.step();
    }
    assert_eq!(armed.handler.saved.len(), SAVED_MAX);
    drop(armed);
    // The program was ended while it waited.
    assert!(feeding.join().unwrap().is_err());
}
