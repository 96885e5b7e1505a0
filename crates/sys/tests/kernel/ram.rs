//! A child with memory that carries out commands on it, and userfaultfd's reports on that.

use crate::calls::call;
use crate::victim::{Victim, hear, say};
use std::time::{Duration, Instant};
use stillframe_sys::process::AddressRange;
use stillframe_sys::uffd::{Event, Uffd};

pub const PAGE: u64 = 4096;

/// The victim: some private anonymous memory and a shared memfd. It writes, reads or discards the pages that a
/// command names.
pub fn play(argument: &str) {
    let mut words = argument.split(' ');
    let pages: u64 = words.next().unwrap().parse().unwrap();
    let bytes = (pages * PAGE) as libc::c_long;
    let advice = if words.next() == Some("huge") {
        libc::MADV_HUGEPAGE
    } else {
        libc::MADV_NOHUGEPAGE
    };
    let file = call(libc::SYS_memfd_create, [c"ram".as_ptr() as i64, 0]);
    call(libc::SYS_ftruncate, [file, bytes]);
    let access = i64::from(libc::PROT_READ | libc::PROT_WRITE);
    let private = i64::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let regions = [
        call(libc::SYS_mmap, [0, bytes, access, private, -1, 0]),
        call(
            libc::SYS_mmap,
            [0, bytes, access, libc::MAP_SHARED.into(), file, 0],
        ),
    ];
    for region in regions {
        call(libc::SYS_madvise, [region, bytes, advice.into()]);
    }
    say(format!("ready {} {}", regions[0], regions[1]));
    while let Some(line) = hear() {
        let mut words = line.split(' ');
        let verb = words.next().unwrap().to_owned();
        let region = regions[words.next().unwrap().parse::<usize>().unwrap()];
        let mut sum = 0_u64;
        for page in words {
            let address = region + page.parse::<i64>().unwrap() * PAGE as i64;
            // SAFETY: an address within one of our mappings, which nothing else uses.
            unsafe {
                match verb.as_str() {
                    "write" => (address as *mut u64).write_volatile(address as u64),
                    "read" => sum = sum.wrapping_add((address as *const u64).read_volatile()),
                    "discard" => drop(call(
                        libc::SYS_madvise,
                        [address, PAGE as i64, libc::MADV_DONTNEED.into()],
                    )),
                    // Shared memory: a hole of its file.
                    "remove" => drop(call(
                        libc::SYS_madvise,
                        [address, PAGE as i64, libc::MADV_REMOVE.into()],
                    )),
                    // The kernel writes: 8 bytes of random.
                    "system-write" => drop(call(libc::SYS_getrandom, [address, 8, 0])),
                    _ => panic!("no verb {verb}"),
                }
            }
        }
        say(format!("done {sum}"));
    }
}

/// Private memory is region 0, the shared memfd is region 1.
pub struct Memory {
    pub victim: Victim,
    pub pages: u64,
    pub regions: [AddressRange; 2],
}

impl Memory {
    pub fn start(pages: u64, option: &str) -> Memory {
        let victim = Victim::start(&format!("memory {pages} {option}"));
        let mut starts = victim
            .ready
            .split(' ')
            .map(|start| start.parse::<u64>().unwrap());
        let mut region = || {
            let start = starts.next().unwrap();
            AddressRange {
                start,
                end: start + pages * PAGE,
            }
        };
        Memory {
            regions: [region(), region()],
            victim,
            pages,
        }
    }

    pub fn begin(&mut self, verb: &str, region: usize, pages: impl IntoIterator<Item = u64>) {
        let list: Vec<_> = pages.into_iter().map(|page| page.to_string()).collect();
        if !list.is_empty() {
            self.victim
                .send(&format!("{verb} {region} {}", list.join(" ")));
        } else {
            self.victim.send(&format!("{verb} {region}"));
        }
    }

    pub fn act(&mut self, verb: &str, region: usize, pages: impl IntoIterator<Item = u64>) -> u64 {
        self.begin(verb, region, pages);
        self.done()
    }

    pub fn done(&mut self) -> u64 {
        let line = self.victim.line();
        line.strip_prefix("done ")
            .unwrap_or_else(|| panic!("{line}"))
            .parse()
            .unwrap()
    }

    pub fn page(&self, region: usize, page: u64) -> AddressRange {
        let start = self.regions[region].start + page * PAGE;
        AddressRange {
            start,
            end: start + PAGE,
        }
    }
}

pub fn wait_for_event(uffd: &Uffd) -> Event {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match uffd.next_event().unwrap() {
            Some(event) => return event,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
        assert!(Instant::now() < deadline, "no fault was reported");
    }
}
