//! Guests with everything that writes or takes memory behind an engine's back: a disk by DMA, a balloon with free
//! page reporting, merged pages (KSM), huge pages, swap, hot-plug and unplug, resets. Every checkpoint is compared
//! with the guest's memory in its pause. The guest checks its own.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{BOOT_LIMIT, Guest, Kind, Setup};
use stillframe_harness::kernel::{self, Setting, Squeeze, Swap};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_harness::slow_disk::SlowDisk;

/// MiB of the guest.
const RAM_MIB: u32 = 256;
/// Checkpoints in a turn of each schedule.
const TURN: u64 = 50;
/// How fast the disk is.
const MIB_PER_SECOND: u64 = 40;
/// A boot writes much at once, also by QEMU itself; between two boots the guest works.
const RESET_EVERY: Duration = Duration::from_secs(8);
/// Lines of the guest's console in the report of its end.
const LAST_LINES: usize = 80;
/// The output of a watch where a checkpoint was not taken.
const REFUSED: &str = "no checkpoint this time";
/// Upper bound on the engine's memory: its options of [`turn`], and the additions that SPECIFICATION grants.
const ENGINE_KIB_MAX: u64 = (128 + 64 + 256) << 10;
const MERGING: &str = "/sys/kernel/mm/ksm/run";
/// Copy-on-write is refused for shared memory with a balloon.
const GUESTS: [(Kind, &[&str]); 2] = [
    (
        Kind::Private,
        &["auto", "pre-copy", "stop-copy", "copy-on-write"],
    ),
    (Kind::Memfd, &["auto", "pre-copy", "stop-copy"]),
];

/// The disturbances of the guest.
#[derive(Default)]
struct Done {
    balloons: AtomicU64,
    plugs: AtomicU64,
    unplugs: AtomicU64,
    resets: AtomicU64,
    squeezes: AtomicU64,
}

/// Disturbs the guest until it is stopped.
fn torment(
    monitor: &mut Qmp,
    squeeze: &Squeeze,
    disk: &Path,
    (stop, done): (&AtomicBool, &Done),
    seed: u64,
) -> Result<()> {
    let mut random = Random::new(seed);
    let mut plugged = false;
    let mut next_reset = Instant::now() + RESET_EVERY;
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(50 + random.below(400)));
        if Instant::now() > next_reset {
            monitor.execute("system_reset", json!({}))?;
            done.resets.fetch_add(1, Ordering::Relaxed);
            next_reset = Instant::now() + RESET_EVERY;
        }
        match random.below(8) {
            0 | 1 => {
                let mib = u64::from(RAM_MIB) - random.below(80);
                monitor.execute("balloon", json!({ "value": mib << 20 }))?;
                done.balloons.fetch_add(1, Ordering::Relaxed);
            }
            2 => {
                squeeze.limit(200 << 20);
                thread::sleep(Duration::from_millis(100));
                squeeze.limit(-1);
                done.squeezes.fetch_add(1, Ordering::Relaxed);
            }
            3 if !plugged => {
                let node = json!({
                    "driver": "raw", "node-name": "hot-node", "read-only": true,
                    "file": { "driver": "file", "filename": disk },
                });
                monitor.execute("blockdev-add", node)?;
                let device = json!({
                    "driver": "virtio-blk-pci", "id": "hot", "drive": "hot-node", "bus": "rp",
                });
                plugged = monitor.execute("device_add", device).is_ok();
                if !plugged {
                    monitor.execute("blockdev-del", json!({ "node-name": "hot-node" }))?;
                }
                done.plugs.fetch_add(u64::from(plugged), Ordering::Relaxed);
            }
            4 if plugged => {
                // The guest releases it when it likes; where a reset did that, QEMU knows of no such device.
                if monitor
                    .execute("device_del", json!({ "id": "hot" }))
                    .is_ok()
                {
                    let _ = monitor.wait_event("DEVICE_DELETED", Duration::from_secs(15));
                }
                thread::sleep(Duration::from_millis(200));
                let node = json!({ "node-name": "hot-node" });
                plugged = monitor.execute("blockdev-del", node).is_err();
                done.unplugs
                    .fetch_add(u64::from(!plugged), Ordering::Relaxed);
            }
            5 => {
                // While pages are merged copy-on-write is not to be had; it is tortured too.
                fs::write(MERGING, if random.below(3) == 0 { "1" } else { "0" })?;
            }
            6 => fs::write("/proc/sys/vm/compact_memory", "1")?,
            _ => {}
        }
    }
    Ok(())
}

/// The kernel's changes to the guest's memory; a torture without them would show nothing.
#[derive(Default)]
struct Kernel {
    swapped_before: u64,
    merged_most: u64,
    huge_kib_most: u64,
}

impl Kernel {
    fn new() -> Result<Kernel> {
        Ok(Kernel {
            swapped_before: kernel::count("pswpout")?,
            ..Kernel::default()
        })
    }

    /// Reads which memory is merged and huge now.
    fn look(&mut self, qemu: i32) -> Result<()> {
        let merged = fs::read_to_string("/sys/kernel/mm/ksm/pages_sharing")?;
        self.merged_most = self.merged_most.max(merged.trim().parse()?);
        self.huge_kib_most = self.huge_kib_most.max(kernel::huge_kib(qemu)?);
        Ok(())
    }
}

/// The outcome of all checkpoints.
#[derive(Default)]
struct Tally {
    checkpoints: u64,
    refused: u64,
    differing: u64,
    restored: u64,
    wrong_guests: u64,
    engine_kib: u64,
    kernel: Kernel,
    lines: Vec<Value>,
}

fn turn(
    (stillframe, guest, kind): (&Stillframe, &Guest, Kind),
    schedule: &str,
    tally: &mut Tally,
) -> Result<()> {
    let pid = guest.pid_text();
    let count = TURN.to_string();
    let line = [
        "watch",
        "--pid",
        &pid,
        "--every",
        "20ms",
        "--count",
        &count,
        "--verify",
        "--json",
        "--copy-buffer",
        "128M",
        "--delta-cache",
        "64M",
        "--schedule",
        schedule,
    ];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    let deadline = Instant::now() + 5 * PATIENCE;
    while !watch.has_ended()? {
        // Guest memory that is mapped is not the engine's own.
        let kib = stillframe_harness::health::memory_kib(watch.pid(), "RssAnon").unwrap_or(0);
        tally.engine_kib = tally.engine_kib.max(kib);
        tally.kernel.look(guest.pid())?;
        ensure!(
            Instant::now() < deadline,
            "the watch does not end: {}",
            watch.err()
        );
        thread::sleep(Duration::from_millis(50));
    }
    let ended = watch.end()?;
    for refusal in ended.err.lines().filter(|line| line.contains(REFUSED)) {
        tally.refused += 1;
        eprintln!("{schedule}: {refusal}");
    }
    for result in ended.results()? {
        tally.checkpoints += 1;
        let differing = result["verify"]["differing"].as_u64();
        tally.differing += differing.unwrap_or(1);
        tally.lines.push(json!({
            "guest": kind.name(), "asked": schedule, "schedule": result["schedule"], "differing": differing,
            "pause_us": result["downtime_us"]["total"], "captured": result["pages"]["captured"],
        }));
    }
    Ok(())
}

/// Restores the last checkpoint; the guest checks its memory.
fn restore(stillframe: &Stillframe, tally: &mut Tally) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let more = ["--verify", "--disks-as-they-are"];
    let restored = Restored::start(stillframe, "latest", folder.path(), &more)?;
    tally.restored += 1;
    let ticks = restored.serial.wait_ticks(3, BOOT_LIMIT);
    let text = restored.serial.text();
    // One that was resetting has nothing to report yet.
    if text.contains("CORRUPT") || (ticks.is_err() && !text.is_empty()) {
        tally.wrong_guests += 1;
        eprintln!("a restored guest is wrong: {text}");
    }
    Ok(())
}

/// `count` checkpoints of two guests, some of them restored; writes `docs/results/torture/`.
pub fn run(count: u64, seed: u64) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let _merging = [
        Setting::set("/sys/kernel/mm/ksm/pages_to_scan", "2000")?,
        Setting::set(MERGING, "1")?,
        Setting::set("/sys/kernel/mm/transparent_hugepage/enabled", "always")?,
    ];
    let _swap = Swap::on(folder.path())?;
    let done = Done::default();
    let mut tally = Tally {
        kernel: Kernel::new()?,
        ..Tally::default()
    };
    for (number, (kind, schedules)) in (1..).zip(GUESTS) {
        let upto = count * number / GUESTS.len() as u64;
        one_guest(
            (kind, schedules),
            upto,
            folder.path(),
            (&mut tally, &done),
            seed + number,
        )
        .with_context(|| format!("the torture of the {} guest ended early", kind.name()))?;
    }
    record(&tally, &done)?;
    ensure!(
        tally.engine_kib <= ENGINE_KIB_MAX,
        "the engine took {} KiB",
        tally.engine_kib
    );
    ensure!(
        tally.differing + tally.wrong_guests == 0,
        "the torture was survived wrongly"
    );
    Ok(())
}

/// Checkpoints of one guest, until there are `upto` in all.
fn one_guest(
    (kind, schedules): (Kind, &[&str]),
    upto: u64,
    folder: &Path,
    (tally, done): (&mut Tally, &Done),
    seed: u64,
) -> Result<()> {
    let mut disk = SlowDisk::new(folder, 64)?;
    let mut setup = Setup::small(kind, "torture")
        .with_drivers("sf.disk=vda init_on_alloc=0")
        .with(&["-drive", &disk.drive("native")])
        .with(&["-device", "virtio-balloon-pci,free-page-reporting=on"])
        .with(&["-device", "pcie-root-port,id=rp,chassis=7"]);
    setup.ram_mib = RAM_MIB;
    setup.workload.mib = 48;
    setup.workload.writes_per_tick = 2000;
    // Removed after the guest, which is in it.
    let squeeze;
    let guest = setup.boot()?;
    disk.hold_back(guest.pid(), MIB_PER_SECOND)?;
    squeeze = Squeeze::on(guest.pid())?;
    let plugged = folder.join("plugged");
    fs::write(&plugged, vec![1; 1 << 20])?;
    let stillframe = Stillframe::init(&folder.join(kind.name()))?;
    let stop = AtomicBool::new(false);
    let mut monitor = guest.second_monitor()?;
    thread::scope(|scope| {
        let tormenting =
            scope.spawn(|| torment(&mut monitor, &squeeze, &plugged, (&stop, done), seed));
        let tormented = || !tormenting.is_finished();
        let vm = (&stillframe, &guest, kind);
        let came_to = checkpoints(vm, schedules, (upto, &tormented), tally);
        stop.store(true, Ordering::Relaxed);
        match tormenting.join() {
            Ok(tormented) => came_to.and(tormented),
            Err(_) => bail!("the torment panicked"),
        }
    })
    .and_then(|()| guest.serial.ticks().map(drop))
    .inspect_err(|_| {
        let text = guest.serial.text();
        let lines: Vec<&str> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
        eprintln!("the guest's console, at its end:\n{}", last.join("\n"));
    })
}

fn checkpoints(
    (stillframe, guest, kind): (&Stillframe, &Guest, Kind),
    schedules: &[&str],
    (upto, tormented): (u64, &dyn Fn() -> bool),
    tally: &mut Tally,
) -> Result<()> {
    for schedule in schedules.iter().cycle() {
        // Checkpoints of a guest that nothing happens to would show nothing.
        if tally.checkpoints >= upto || !tormented() {
            break;
        }
        turn((stillframe, guest, kind), schedule, tally)?;
        guest.serial.ticks()?;
        for _ in 0..2 {
            restore(stillframe, tally)?;
        }
        stillframe.ok(&["forget", "--keep-last", "3", "--prune"])?;
        eprintln!(
            "{} of {upto} checkpoints, {} differing pages, {} refused, {} restored, {} wrong guests",
            tally.checkpoints, tally.differing, tally.refused, tally.restored, tally.wrong_guests
        );
    }
    Ok(())
}

fn record(tally: &Tally, done: &Done) -> Result<()> {
    let all = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let line = json!({
        "checkpoints": tally.checkpoints, "refused": tally.refused, "differing": tally.differing,
        "restored": tally.restored, "wrong_guests": tally.wrong_guests, "engine_kib": tally.engine_kib,
        "balloons": all(&done.balloons), "plugs": all(&done.plugs), "unplugs": all(&done.unplugs), "resets": all(&done.resets),
        "squeezes": all(&done.squeezes), "swapped_pages": kernel::count("pswpout")? - tally.kernel.swapped_before,
        "merged_pages_most": tally.kernel.merged_most, "huge_kib_most": tally.kernel.huge_kib_most,
    });
    println!("{line}");
    results::write_raw("torture", "checkpoints.jsonl", &tally.lines)?;
    results::write_raw("torture", "run.jsonl", &[line])?;
    let command = "cargo xtask bench torture";
    let enough = tally.checkpoints >= 5000 && tally.restored >= 200;
    let (pages, guests) = (tally.differing as f64, tally.wrong_guests as f64);
    results::write_summary(
        "torture",
        &[
            Claim::new("torture-pages", Goal::Zero, pages, "pages", command).if_enough(enough),
            Claim::new("torture-guests", Goal::Zero, guests, "guests", command).if_enough(enough),
        ],
    )
}
