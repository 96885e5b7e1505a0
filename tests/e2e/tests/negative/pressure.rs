//! Guests that write more than fits: more than is held in memory, more than the repository takes.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::health::{expect_untouched, memory_kib};
use stillframe_harness::running::Running;

/// A guest that writes to up to 20 000 pages of `mib` MiB a second.
fn eager_guest(kind: Kind, name: &str, mib: u32) -> Result<Guest> {
    let mut setup = Setup::small(kind, name);
    setup.ram_mib = 192;
    setup.workload = Workload {
        mib,
        pattern: "random",
        tick_ms: 20,
        writes_per_tick: 400,
        share: 64,
    };
    setup.boot()
}

/// What does not fit the copy buffer goes into the repository while the guest runs, and the
/// checkpoint is exact.
#[test]
fn a_guest_may_write_more_than_is_held_in_memory() -> Result<()> {
    for (kind, schedule) in [
        (Kind::Private, "auto"),
        (Kind::Memfd, "stop-copy"),
        (Kind::Private, "copy-on-write"),
    ] {
        let guest = eager_guest(kind, "eager", 64)?;
        let mut monitor = guest.second_monitor()?;
        let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
        let did_not_fit = |report: &Value| report["copied"]["full_pass"] != 0;
        let watch = |every: &str| {
            let line = ["watch", "--vm", "eager", "--every", every, "--count", "4"];
            let more = ["--copy-buffer", "16M", "--schedule", schedule, "--verify"];
            stillframe.json_lines(&[&line[..], &more].concat())
        };
        let mut reports = Vec::new();
        // On a busy machine the guest needs more time to write more than half of the buffer.
        for every in ["700ms", "3s", "12s"] {
            reports = watch(every)?;
            if reports.iter().skip(1).any(did_not_fit) {
                break;
            }
        }
        ensure!(reports.len() == 4);
        for (before, report) in reports.iter().zip(&reports[1..]) {
            ensure!(report["parent"] == before["checkpoint"], "{report}");
            // Counted once, however often they were read.
            let (captured, total) = (&report["pages"]["captured"], &report["pages"]["total"]);
            ensure!(captured.as_u64() < total.as_u64(), "{report}");
        }
        ensure!(reports[1..].iter().any(did_not_fit), "{reports:?}");
        let exact = |report: &Value| report["verify"]["differing"] == 0;
        ensure!(reports.iter().all(exact), "{reports:?}");
        expect_untouched(&guest, &mut monitor)?;
        stillframe.ok(&["check", "--read-data"])?;
    }
    Ok(())
}

/// A repository slower than the guest: the interval is lengthened and this is reported, memory stays
/// bounded, every checkpoint is exact.
#[test]
fn a_slow_repository_lengthens_the_interval() -> Result<()> {
    let guest = eager_guest(Kind::Private, "slow", 24)?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let line = [
        "watch",
        "--vm",
        "slow",
        "--every",
        "100ms",
        "--copy-buffer",
        "64M",
        "--delta-cache",
        "0",
        "--no-dedup",
        "--limit-write",
        "8M",
        "--verify",
        "--json",
    ];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    let results = watch.wait_results(4)?;
    let exact = |report: &Value| report["verify"]["differing"] == 0;
    ensure!(results.iter().all(exact), "{results:?}");
    let peak_kib = memory_kib(watch.pid(), "VmHWM").context("no peak")?;
    ensure!(peak_kib < 400 << 10, "{peak_kib} KiB");
    watch.signal("TERM")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(ended.err.contains("could not be kept"), "{}", ended.err);
    expect_untouched(&guest, &mut monitor)
}

#[test]
fn limits_below_what_is_of_use_are_refused() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    for (option, value, words) in [
        ("--copy-buffer", "0", "at least 16M"),
        ("--copy-buffer", "4095", "is not a size"),
        ("--limit-write", "0", "too small"),
        ("--delta-cache", "-1", "is not a size"),
        ("--every", "0s", ""),
    ] {
        let line = [
            "watch",
            "--vm",
            "none",
            "--every",
            "1s",
            &format!("{option}={value}"),
        ];
        let said = stillframe.fails(&line, 2)?;
        ensure!(said.contains(words), "{option} {value}: {said}");
    }
    Ok(())
}
