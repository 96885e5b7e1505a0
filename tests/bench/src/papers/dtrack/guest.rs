//! The guests: each is booted and saved once, and each migration begins with that state.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::peers;
use stillframe_harness::guest::{BOOT_LIMIT, Guest, Kind, Setup, Workload};
use stillframe_harness::network::Namespace;

/// RAM of a guest, in MiB.
pub const RAM_MIB: u32 = 512;

/// What a guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
}

impl Work {
    /// All of them.
    pub const ALL: [Work; 5] = [
        Work::Idle,
        Work::Reader,
        Work::Writer,
        Work::Noise,
        Work::Silent,
    ];

    /// A short name.
    pub fn name(self) -> &'static str {
        match self {
            Work::Idle => "idle",
            Work::Reader => "reader",
            Work::Writer => "writer",
            Work::Noise => "noise",
            Work::Silent => "silent",
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
        }
    }

    fn workload(self) -> Workload {
        let (pattern, tick_ms, writes_per_tick, share) = match self {
            Work::Idle => ("idle", 1000, 1, 512),
            Work::Reader => ("idle", 10, 1, 8),
            Work::Writer => ("random", 0, 50_000, 512),
            Work::Noise => ("sequential", 0, 4000, 512),
            Work::Silent => ("silent", 0, 4000, 512),
        };
        Workload {
            mib: 128,
            pattern,
            tick_ms,
            writes_per_tick,
            share,
        }
    }
}

/// A guest at work, saved.
pub struct Saved {
    work: Work,
    setup: Setup,
    file: PathBuf,
}

impl Saved {
    /// Boots it, and saves it into a file in `folder`.
    pub fn new(work: Work, folder: &Path) -> Result<Saved> {
        let setup = Setup {
            ram_mib: RAM_MIB,
            workload: work.workload(),
            ..Setup::new(Kind::Private)
        };
        let guest = setup.start()?;
        guest.serial.wait_ticks(3, BOOT_LIMIT)?;
        let file = folder.join(format!("{}.mapped-ram", work.name()));
        peers::save_mapped_ram(&mut guest.second_monitor()?, &file)?;
        Ok(Saved { work, setup, file })
    }

    /// What it does.
    pub fn work(&self) -> Work {
        self.work
    }

    /// The file with its state, which `mapped-ram` reads.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// A QEMU on that host which waits for its state.
    pub fn start(&self, host: &Namespace) -> Result<Guest> {
        let words = host.words();
        let [program, file] = &words;
        let waiting = self.setup.clone().with(&["-incoming", "defer"]);
        Guest::start(Kind::Private, Path::new(program), |folder| {
            let before = [file.clone(), "qemu-system-x86_64".to_owned()];
            Ok([&before[..], &waiting.arguments(folder)?].concat())
        })
    }
}
