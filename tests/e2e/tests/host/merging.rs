//! What takes write protection away behind copy-on-write: the kernel merges equal pages (KSM), and a
//! balloon discards pages. Every checkpoint is exact.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::running::PATIENCE;
use stillframe_harness::slow_disk::SlowDisk;

use crate::alone;

const CHECKPOINTS: &str = "12";
const KSM: &str = "/sys/kernel/mm/ksm";
/// What is set, and back.
const SETTINGS: [&str; 3] = ["run", "pages_to_scan", "sleep_millisecs"];

/// KSM as it was, put back when dropped.
struct Merging {
    before: Vec<(&'static str, String)>,
}

impl Merging {
    /// Has the kernel merge as fast as it can.
    fn start() -> Result<Merging> {
        let read = |name| {
            let value = fs::read_to_string(Path::new(KSM).join(name));
            Ok((name, value.context("this kernel has no KSM")?))
        };
        let before = SETTINGS.into_iter().map(read).collect::<Result<_>>()?;
        let merging = Merging { before };
        for (name, value) in [
            ("pages_to_scan", "20000"),
            ("sleep_millisecs", "2"),
            ("run", "1"),
        ] {
            fs::write(Path::new(KSM).join(name), value)?;
        }
        Ok(merging)
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        // 2: what was merged is made private again.
        let _ = fs::write(Path::new(KSM).join("run"), "2");
        for (name, value) in &self.before {
            let _ = fs::write(Path::new(KSM).join(name), value);
        }
    }
}

fn reader(kind: Kind, name: &str, disk: &SlowDisk, more: &[&str]) -> Result<Guest> {
    let mut setup = Setup::small(kind, name)
        .with_drivers("sf.disk=vda init_on_alloc=0")
        .with(&["-drive", &disk.drive("threads").replace("cache=none,", "")])
        .with(more);
    setup.ram_mib = 192;
    let guest = setup.boot()?;
    guest.serial.wait_line("disk read 1", PATIENCE)?;
    Ok(guest)
}

/// Checkpoints by copy-on-write, or by pre-copy after copy-on-write lost protection: each is exact. The
/// number of those that lost it.
fn all_exact(stillframe: &Stillframe, name: &str) -> Result<usize> {
    let line = [
        "watch",
        "--vm",
        name,
        "--every",
        "100ms",
        "--count",
        CHECKPOINTS,
        "--schedule",
        "copy-on-write",
        "--verify",
    ];
    let reports = stillframe.json_lines(&line)?;
    let mut lost = 0;
    for report in &reports {
        ensure!(report["verify"]["differing"] == 0, "{report}");
        match report["instead_of"] == "copy-on-write" {
            true => lost += 1,
            false => ensure!(report["schedule"] == "copy-on-write", "{report}"),
        }
    }
    Ok(lost)
}

#[test]
fn pages_that_the_kernel_merges_are_never_saved_wrong() -> Result<()> {
    let _alone = alone();
    let folder = tempfile::tempdir()?;
    let disk = SlowDisk::new(folder.path(), 48)?;
    let guest = reader(Kind::Pc, "merged", &disk, &[])?;
    let second = reader(Kind::Pc, "second", &disk, &[])?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let merging = Merging::start()?;
    let lost = all_exact(&stillframe, "merged")?;
    ensure!(lost > 0, "no page was merged behind copy-on-write");

    // `auto` keeps away from copy-on-write where pages are merged.
    let line = [
        "watch", "--vm", "merged", "--every", "100ms", "--count", "5", "--verify",
    ];
    for report in stillframe.json_lines(&line)? {
        ensure!(report["verify"]["differing"] == 0, "{report}");
        ensure!(report["schedule"] != "copy-on-write", "{report}");
    }
    drop(merging);
    drop(second);
    let mut monitor = guest.second_monitor()?;
    expect_untouched(&guest, &mut monitor)
}

/// Checkpoints while a balloon takes memory and gives it back.
fn beside_a_balloon(
    kind: Kind,
    name: &str,
    checkpoints: impl FnOnce(&Stillframe) -> Result<()>,
) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = SlowDisk::new(folder.path(), 48)?;
    let guest = reader(kind, name, &disk, &["-device", "virtio-balloon-pci"])?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut monitor = guest.second_monitor()?;
    let done = AtomicBool::new(false);
    let balloon = &mut monitor;
    thread::scope(|scope| {
        let moving = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                for mib in [110, 192] {
                    balloon.execute("balloon", json!({ "value": mib << 20 }))?;
                    thread::sleep(Duration::from_millis(150));
                }
            }
            Ok(())
        });
        let came_to = checkpoints(&stillframe);
        done.store(true, Ordering::Relaxed);
        moving
            .join()
            .map_err(|_| anyhow::anyhow!("the balloon panicked"))??;
        came_to
    })?;
    monitor.take_events();
    expect_untouched(&guest, &mut monitor)
}

#[test]
fn pages_that_a_balloon_takes_are_never_saved_as_zeros() -> Result<()> {
    let _alone = alone();
    beside_a_balloon(Kind::Pc, "balloon", |stillframe| {
        all_exact(stillframe, "balloon").map(drop)
    })
}

/// The first checkpoint reads all of memory while the guest runs: pages go between that and the pause. Nothing
/// reports it, and copy-on-write could not even look for it.
#[test]
fn shared_pages_that_a_balloon_takes_are_never_saved_as_they_were() -> Result<()> {
    let _alone = alone();
    beside_a_balloon(Kind::Memfd, "shared", |stillframe| {
        let watch = |count, schedule| {
            [
                "watch",
                "--vm",
                "shared",
                "--every",
                "50ms",
                "--count",
                count,
                "--verify",
                "--schedule",
                schedule,
            ]
        };
        for _ in 0..4 {
            for schedule in ["pre-copy", "stop-copy"] {
                for report in stillframe.json_lines(&watch("3", schedule))? {
                    ensure!(report["verify"]["differing"] == 0, "{report}");
                }
            }
        }
        for report in stillframe.json_lines(&watch("8", "auto"))? {
            ensure!(report["schedule"] != "copy-on-write", "{report}");
        }
        let said = stillframe.fails(&watch("3", "copy-on-write"), 5)?;
        ensure!(said.contains("virtio-balloon-pci"), "{said}");
        Ok(())
    })
}
