//! What the kernel does to pages without changing their content: collapsing them to huge pages and splitting
//! these (THP), swapping them out (zswap included), and moving them (compaction). Every checkpoint is exact.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{BOOT_LIMIT, Guest, Kind, Setup};
use stillframe_harness::health::{expect_untouched, memory_kib};
use stillframe_harness::kernel::{self, Setting, Squeeze, Swap};
use stillframe_harness::running::Running;

use crate::alone;

const SCHEDULES: [&str; 3] = ["pre-copy", "stop-copy", "copy-on-write"];
const PAGE_BYTES: u64 = 4096;
/// The kernel decides when it collapses and moves pages: upper bound on the watches that wait for it.
const ROUNDS_MAX: usize = 6;

/// Checkpoints under one schedule, while `disturb` is called again and again: each is exact, and was taken
/// by that schedule.
fn exact(
    (stillframe, guest): (&Stillframe, &Guest),
    schedule: &str,
    (every, count): (&str, &str),
    mut disturb: impl FnMut() -> Result<()>,
) -> Result<()> {
    // On a host that merges pages, copy-on-write gives way to another schedule.
    let _unmerged = Setting::set("/sys/kernel/mm/ksm/run", "2")?;
    let pid = guest.pid_text();
    let line = [
        "watch",
        "--pid",
        &pid,
        "--every",
        every,
        "--count",
        count,
        "--verify",
        "--json",
        "--schedule",
        schedule,
    ];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    while !watch.has_ended()? {
        disturb()?;
    }
    let ended = watch.end()?;
    let reports = ended.results()?;
    let wrong = |report: &&serde_json::Value| report["verify"]["differing"] != 0;
    let differing = reports.iter().filter(wrong).count();
    ensure!(
        differing == 0,
        "{schedule}: {differing} of {} checkpoints differ: {}",
        reports.len(),
        ended.out
    );
    ensure!(reports.len().to_string() == count, "{}", ended.err);
    for report in &reports {
        ensure!(report["schedule"] == schedule, "{report}");
    }
    Ok(())
}

/// The guest's RAM in QEMU process `pid`, its largest private mapping that holds no code: numbers of pages.
fn ram(pid: i32) -> Result<Range<u64>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let ranges = maps.lines().filter_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let number = |hex| u64::from_str_radix(hex, 16).map(|address| address / PAGE_BYTES);
        rest.starts_with("rw-p").then_some(())?;
        Some(number(start).ok()?..number(end).ok()?)
    });
    let largest = ranges.max_by_key(|range| range.end - range.start);
    largest.context("QEMU has no memory")
}

/// KiB of the guest's RAM in huge pages, by `/proc/PID/smaps`.
fn ram_huge_kib(pid: i32) -> Result<u64> {
    let start = format!("{:x}-", ram(pid)?.start * PAGE_BYTES);
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
    let huge = lines.find_map(|line| line.strip_prefix("AnonHugePages:"));
    let huge = huge.and_then(|line| line.split_whitespace().next());
    Ok(huge.context("no AnonHugePages in smaps")?.parse()?)
}

/// The kernel's thread that collapses pages, of which it does next to nothing on a busy machine: with the
/// priority of all others until dropped.
struct Collapsing(String);

impl Collapsing {
    const USUAL: &str = "19";

    fn start() -> Result<Collapsing> {
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            if name.trim() == "khugepaged" {
                let collapsing = Collapsing(entry.file_name().to_string_lossy().into_owned());
                collapsing.renice("0")?;
                return Ok(collapsing);
            }
        }
        bail!("this kernel collapses no huge pages")
    }

    fn renice(&self, niceness: &str) -> Result<()> {
        let mut renice = Command::new("renice");
        let output = renice.args(["-n", niceness, "-p", &self.0]).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    }
}

impl Drop for Collapsing {
    fn drop(&mut self) {
        let _ = self.renice(Collapsing::USUAL);
    }
}

/// A guest that rewrites all of its memory in every tick.
fn rewriter(name: &str) -> Setup {
    let mut setup = Setup::small(Kind::Private, name);
    setup.workload.mib = 16;
    setup.workload.pattern = "sequential";
    setup.workload.writes_per_tick = 16 << 8;
    setup
}

/// Between two checkpoints the guest writes every page of some huge pages, which the kernel then collapses;
/// the next protection and the writes after it split them.
#[test]
fn pages_that_the_kernel_collapses_and_splits_are_saved() -> Result<()> {
    let _alone = alone();
    const THP: &str = "/sys/kernel/mm/transparent_hugepage";
    let _settings = [
        ("enabled", "always"),
        ("khugepaged/scan_sleep_millisecs", "1"),
        ("khugepaged/alloc_sleep_millisecs", "1"),
        ("khugepaged/pages_to_scan", "1000000"),
    ]
    .map(|(name, value)| Setting::set(&format!("{THP}/{name}"), value))
    .into_iter()
    .collect::<Result<Vec<_>>>()?;
    let _collapsing = Collapsing::start()?;
    let guest = rewriter("collapsed").boot()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    for schedule in SCHEDULES {
        let (mut collapsed, mut split) = (0, 0);
        for _ in 0..ROUNDS_MAX {
            let mut huge_kib = ram_huge_kib(guest.pid())?;
            exact((&stillframe, &guest), schedule, ("800ms", "6"), || {
                let now = ram_huge_kib(guest.pid())?;
                collapsed += now.saturating_sub(huge_kib);
                split += huge_kib.saturating_sub(now);
                huge_kib = now;
                thread::sleep(Duration::from_millis(5));
                Ok(())
            })?;
            if collapsed > 0 && split > 0 {
                break;
            }
        }
        eprintln!("{schedule}: {collapsed} KiB collapsed, {split} KiB split");
        ensure!(
            collapsed > 0 && split > 0,
            "{schedule}: {collapsed} KiB collapsed, {split} KiB split"
        );
    }
    let mut monitor = guest.second_monitor()?;
    expect_untouched(&guest, &mut monitor)
}

#[test]
fn pages_that_the_kernel_swaps_are_saved() -> Result<()> {
    let _alone = alone();
    const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";
    let folder = tempfile::tempdir()?;
    let _swap = Swap::on(folder.path())?;
    let mut setup = Setup::small(Kind::Private, "swapped");
    setup.workload.writes_per_tick = 2000;
    // Removed after the guest, which is in it.
    let squeeze;
    let guest = setup.start()?;
    squeeze = Squeeze::on(guest.pid())?;
    guest.serial.wait_ticks(3, BOOT_LIMIT)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    for zswap in ["N", "Y"] {
        let _zswap = Setting::set(ZSWAP, zswap)?;
        let compressed = kernel::count("zswpout")?;
        for schedule in SCHEDULES {
            let mut swapped_kib = 0;
            exact((&stillframe, &guest), schedule, ("100ms", "5"), || {
                squeeze.limit(squeeze.usage()? / 2);
                let now = memory_kib(guest.pid() as u32, "VmSwap");
                swapped_kib = swapped_kib.max(now.context("no VmSwap")?);
                squeeze.limit(-1);
                thread::sleep(Duration::from_millis(40));
                Ok(())
            })?;
            eprintln!("zswap {zswap}, {schedule}: up to {swapped_kib} KiB in swap");
            ensure!(swapped_kib > 0, "{schedule}: nothing was swapped");
        }
        let compressed = kernel::count("zswpout")? - compressed;
        ensure!(
            (compressed > 0) == (zswap == "Y"),
            "zswap {zswap}: {compressed} pages"
        );
    }
    let mut monitor = guest.second_monitor()?;
    expect_untouched(&guest, &mut monitor)
}

/// Where in the machine's memory the pages of a guest's RAM are: page number to frame number.
struct Frames {
    pagemap: File,
    pages: Range<u64>,
    last: HashMap<u64, u64>,
}

impl Frames {
    /// Of the guest's RAM in QEMU process `pid`.
    fn of(pid: i32) -> Result<Frames> {
        Ok(Frames {
            pagemap: File::open(format!("/proc/{pid}/pagemap"))?,
            pages: ram(pid)?,
            last: HashMap::new(),
        })
    }

    /// How many pages are in another frame than at the last call.
    fn moved(&mut self) -> Result<usize> {
        let mut entries = vec![0; ((self.pages.end - self.pages.start) * 8) as usize];
        self.pagemap
            .read_exact_at(&mut entries, self.pages.start * 8)?;
        let mut moved = 0;
        for (page, entry) in (0..).zip(entries.as_chunks().0) {
            let entry = u64::from_ne_bytes(*entry);
            // Bit 63: present; the lower 55: the frame.
            if entry >> 63 == 1 {
                let frame = entry & ((1 << 55) - 1);
                let before = self.last.insert(page, frame);
                moved += usize::from(before.is_some_and(|before| before != frame));
            }
        }
        Ok(moved)
    }
}

/// Pages of a file in memory, which lie above the guest's; as it is cut, the guest's are moved to their place.
struct InMemoryFile {
    file: File,
    mib: u64,
}

impl InMemoryFile {
    fn new(mib: u64) -> Result<InMemoryFile> {
        let mut file = tempfile::tempfile_in("/dev/shm")?;
        for _ in 0..mib {
            file.write_all(&[1; 1 << 20])?;
        }
        Ok(InMemoryFile { file, mib })
    }

    fn cut(&mut self, mib: u64) -> Result<()> {
        self.mib = self.mib.saturating_sub(mib);
        Ok(self.file.set_len(self.mib << 20)?)
    }
}

fn compact() -> Result<()> {
    fs::write("/proc/sys/vm/compact_memory", "1").context("this kernel has no compaction")
}

/// Watches a new guest, whose pages are moved once, while they are. Returns how many pages that were.
fn moved_under(schedule: &str) -> Result<usize> {
    let mut file = InMemoryFile::new(512)?;
    compact()?;
    let mut setup = Setup::small(Kind::Private, "moved");
    setup.workload.writes_per_tick = 2000;
    let guest = setup.boot()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let mut frames = Frames::of(guest.pid())?;
    frames.moved()?;
    let migrated = kernel::count("pgmigrate_success")?;
    let mut moved = 0;
    exact((&stillframe, &guest), schedule, ("100ms", "5"), || {
        file.cut(64)?;
        compact()?;
        moved += frames.moved()?;
        Ok(())
    })?;
    let migrated = kernel::count("pgmigrate_success")? - migrated;
    eprintln!("{schedule}: {moved} pages of the guest moved, {migrated} on the host");
    let mut monitor = guest.second_monitor()?;
    expect_untouched(&guest, &mut monitor)?;
    Ok(moved)
}

#[test]
fn pages_that_the_kernel_moves_are_saved() -> Result<()> {
    let _alone = alone();
    // Else most pages are moved as parts of huge pages.
    let _small = Setting::set("/sys/kernel/mm/transparent_hugepage/enabled", "never")?;
    for schedule in SCHEDULES {
        let mut moved = 0;
        for _ in 0..ROUNDS_MAX {
            moved += moved_under(schedule)?;
            if moved > 0 {
                break;
            }
        }
        ensure!(moved > 0, "{schedule}: no page of the guest was moved");
    }
    Ok(())
}
