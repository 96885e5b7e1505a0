//! The guests: each is booted and saved once, and each migration begins with that state.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;

use crate::peers;
use stillframe_harness::debian::{DebianSetup, DebianWorkload};
use stillframe_harness::guest::{BOOT_LIMIT, Guest, Kind, Setup, Workload};
use stillframe_harness::network::Namespace;
use stillframe_harness::serial::Serial;

/// Memory of the workload of a small guest, in MiB. Quicksort has an array instead.
pub const WORKLOAD_MIB: u32 = 128;
/// Upper bound on the array of quicksort, in MiB. It is the array of the paper.
const ARRAY_MIB_MAX: u32 = 512;

/// Lower bound on the limit of a migration, in seconds.
const LIMIT_S_MIN: u64 = 30;

/// The RAM of the guests and the speed of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// MiB of RAM.
    pub ram_mib: u32,
    /// Mbit a second.
    pub mbit: u64,
}

impl Size {
    /// Upper bound on the time of a migration: all RAM crosses the link about seven times.
    pub fn limit(&self) -> Duration {
        let seconds = 60 * u64::from(self.ram_mib) / self.mbit.max(1);
        Duration::from_secs(seconds.max(LIMIT_S_MIN))
    }
}

/// What a guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Work {
    /// Hardly anything.
    Idle,
    /// It reads its memory all the time.
    Reader,
    /// It writes words at random places of 128 MiB.
    Writer,
    /// It writes whole pages of noise.
    Noise,
    /// It writes what is there already.
    Silent,
    /// It sorts an array over and over again.
    Quicksort,
    /// memcached with a cache of nine tenths of the RAM; its client only sets values.
    Memcached,
    /// PostgreSQL with several clients, half reads and half updates.
    Postgresql,
}

impl Work {
    /// All of them.
    pub const ALL: [Work; 8] = [
        Work::Idle,
        Work::Reader,
        Work::Writer,
        Work::Noise,
        Work::Silent,
        Work::Quicksort,
        Work::Memcached,
        Work::Postgresql,
    ];

    /// A short name.
    pub fn name(self) -> &'static str {
        match self {
            Work::Idle => "idle",
            Work::Reader => "reader",
            Work::Writer => "writer",
            Work::Noise => "noise",
            Work::Silent => "silent",
            Work::Quicksort => "quicksort",
            Work::Memcached => "memcached",
            Work::Postgresql => "postgresql",
        }
    }

    /// The same in words.
    pub fn words(self) -> &'static str {
        match self {
            Work::Idle => "An idle guest",
            Work::Reader => "A guest that reads its memory",
            Work::Writer => "A guest that writes words at random places",
            Work::Noise => "A guest that writes pages of noise",
            Work::Silent => "A guest that writes what is there already",
            Work::Quicksort => "A guest that sorts an array with quicksort",
            Work::Memcached => "A guest with memcached, sets only",
            Work::Postgresql => "A guest with PostgreSQL, half reads and half updates",
        }
    }

    /// Whether it is in the table that is recorded. The Debian guests are not: their preparation takes minutes.
    pub fn is_core(self) -> bool {
        self.debian().is_none()
    }

    /// Whether its writes suffice for a comparison of the ways to leave out pages.
    pub fn writes(self) -> bool {
        !matches!(self, Work::Idle | Work::Reader)
    }

    /// Whether the ways to compress pages are compared with it: its memory differs in that from the others'.
    pub fn compresses(self) -> bool {
        matches!(self, Work::Reader | Work::Quicksort | Work::Memcached)
    }

    /// The paper's results for such a guest.
    pub fn paper(self) -> &'static str {
        match self {
            Work::Quicksort => {
                "sorts a second during a migration, against pre-copy without D-Track: 15 to 32 % fewer with version 1 (table 2), \
                 -7.5 to +6 % with version 2 (table 3)."
            }
            Work::Memcached => {
                "total time, against pre-copy without D-Track: 10.92 % less at 1 GiB, 9.74 % at 2 GiB, 16.16 % at 4 GiB; with \
                 XBZRLE 3.88, 3.45 and 5.36 %, with compression 31.62, 34.66 and 29.33 % (table 1)."
            }
            Work::Postgresql => {
                "throughput and latency with version 2 are those of pre-copy without D-Track (figure 17)."
            }
            _ => "-",
        }
    }

    /// The differences from the paper's guest.
    pub fn differs(self) -> &'static str {
        match self {
            Work::Quicksort => {
                "the array takes half of the RAM, but 512 MiB at most; the paper's takes 512 MB. It is allocated once, and not \
                 once a sort."
            }
            Work::Memcached => {
                "the client is a program in the guest with one connection, and not memaslap on another host, so that only \
                 the migration crosses the link. The cache takes nine tenths of the RAM that is available after the boot, of \
                 values of 1024 letters. After every thousand sets the client reads one value, to check it."
            }
            Work::Postgresql => {
                "server and client are both in the guest: pgbench with four connections and transactions like those of YCSB, \
                 on rows of 1 kB that take an eighth of the RAM when they are new."
            }
            _ => "no such guest is in the paper.",
        }
    }

    fn debian(self) -> Option<DebianWorkload> {
        match self {
            Work::Memcached => Some(DebianWorkload::Memcached),
            Work::Postgresql => Some(DebianWorkload::Postgresql),
            _ => None,
        }
    }

    /// The workload of a small guest.
    fn workload(self, ram_mib: u32) -> Workload {
        let (pattern, tick_ms, writes_per_tick, share) = match self {
            Work::Reader => ("idle", 10, 1, 8),
            Work::Writer => ("random", 0, 50_000, 512),
            Work::Noise => ("sequential", 0, 4000, 512),
            Work::Silent => ("silent", 0, 4000, 512),
            Work::Quicksort => ("quicksort", 0, 2_000_000, 64),
            _ => ("idle", 1000, 1, 512),
        };
        let mib = match self {
            Work::Quicksort => (ram_mib / 2).min(ARRAY_MIB_MAX),
            _ => WORKLOAD_MIB,
        };
        Workload {
            mib,
            pattern,
            tick_ms,
            writes_per_tick,
            share,
        }
    }
}

/// How a guest is started.
enum Start {
    Small(Setup),
    Debian(DebianSetup),
}

impl Start {
    fn new(work: Work, ram_mib: u32) -> Start {
        match work.debian() {
            Some(workload) => Start::Debian(DebianSetup {
                workload,
                ram_mib,
                agent: false,
                extra: Vec::new(),
            }),
            None => Start::Small(Setup {
                ram_mib,
                workload: work.workload(ram_mib),
                ..Setup::new(Kind::Private)
            }),
        }
    }

    /// Starts it and waits until it is at work.
    fn boot(&self) -> Result<Guest> {
        let setup = match self {
            Start::Small(setup) => setup,
            Start::Debian(setup) => return setup.boot(),
        };
        let guest = setup.start()?;
        guest.serial.wait_ticks(3, BOOT_LIMIT)?;
        Ok(guest)
    }

    fn arguments(&self, folder: &Path) -> Result<Vec<String>> {
        match self {
            Start::Small(setup) => setup.arguments(folder),
            Start::Debian(setup) => setup.arguments(folder),
        }
    }
}

/// A guest at work, saved.
pub struct Saved {
    work: Work,
    size: Size,
    start: Start,
    file: PathBuf,
}

impl Saved {
    /// Boots it, and saves it into a file in `folder`.
    pub fn new(work: Work, size: Size, folder: &Path) -> Result<Saved> {
        Saved::of(Start::new(work, size.ram_mib), (work, size), folder)
    }

    /// The same of an idle guest whose workload has filled three quarters of its RAM. QEMU allocates all of it at its
    /// start: how soon this machine's own host has memory is not what is measured.
    pub fn filled(shared: bool, size: Size, folder: &Path) -> Result<Saved> {
        let work = Work::Idle;
        let workload = Workload {
            mib: size.ram_mib / 4 * 3,
            ..work.workload(size.ram_mib)
        };
        let backend = match shared {
            true => "memfd,share=on",
            false => "ram",
        };
        let object = format!(
            "memory-backend-{backend},id=mem,size={}M,prealloc=on",
            size.ram_mib
        );
        let setup = Setup {
            ram_mib: size.ram_mib,
            workload,
            ..Setup::new(Kind::Private).with(&[
                "-machine",
                "memory-backend=mem",
                "-object",
                &object,
            ])
        };
        Saved::of(Start::Small(setup), (work, size), folder)
    }

    fn of(start: Start, (work, size): (Work, Size), folder: &Path) -> Result<Saved> {
        let guest = start.boot()?;
        let file = folder.join(format!("{}.mapped-ram", work.name()));
        peers::save_mapped_ram(&mut guest.second_monitor()?, &file)?;
        Ok(Saved {
            work,
            size,
            start,
            file,
        })
    }

    /// What it does.
    pub fn work(&self) -> Work {
        self.work
    }

    /// Its RAM, and the speed of the link.
    pub fn size(&self) -> Size {
        self.size
    }

    /// The file with its state, which `mapped-ram` reads.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// A QEMU on that host which waits for its state.
    pub fn start(&self, host: &Namespace) -> Result<Guest> {
        let words = host.words();
        let [program, file] = &words;
        Guest::start(Kind::Private, Path::new(program), |folder| {
            let before = [file.clone(), "qemu-system-x86_64".to_owned()];
            let waiting = ["-incoming", "defer"].map(str::to_owned);
            Ok([&before[..], &self.start.arguments(folder)?, &waiting].concat())
        })
    }

    /// Waits until the guest on this serial port has done more of its work.
    pub fn wait_more(&self, serial: &Serial, limit: Duration) -> Result<()> {
        match self.start {
            Start::Small(_) => serial.wait_more(2, limit).map(drop),
            Start::Debian(_) => serial.wait_more_units(2, limit).map(drop),
        }
    }
}
