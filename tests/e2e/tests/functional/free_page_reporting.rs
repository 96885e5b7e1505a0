//! Free page reporting: a guest names free memory to QEMU by itself, all the time, and QEMU discards it. What was discarded is
//! zero, in every checkpoint, and takes nothing.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

const REPORTING: &str = "virtio-balloon-pci,free-page-reporting=on";
/// Files that the guest makes and removes once, of a megabyte each, and those that it makes and removes for ever.
const FILES: [u32; 2] = [150, 60];
/// Pages of the least that a guest reports (Linux, `mm/page_reporting.c`).
const LEAST: u64 = 512;
/// Less than these pages, as a bound from below on what is reported: the rest is free in smaller pieces.
const REPORTED: u64 = 8 * LEAST;

/// A guest whose balloon is this device, and that makes and removes files.
fn with_balloon(kind: Kind, name: &str, device: &str, words: &str) -> Result<Guest> {
    let mut setup = Setup::small(kind, name)
        .with(&["-device", device])
        .with_drivers(words);
    setup.ram_mib = 512;
    let guest = setup.boot()?;
    guest.serial.wait_line("churned 1", PATIENCE)?;
    Ok(guest)
}

fn pages(report: &Value, name: &str) -> Result<u64> {
    let count = report["pages"][name].as_u64();
    count.with_context(|| format!("no {name}: {report}"))
}

/// Takes a checkpoint of all memory, compared page by page. Returns its pages with content, and its id.
fn checkpoint(name: &str) -> Result<(u64, String, Stillframe, tempfile::TempDir)> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let report = stillframe.json(&["checkpoint", name, "--verify"])?;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    let content = pages(&report, "captured")? - pages(&report, "zero")?;
    let id = report["checkpoint"].as_str().context("no id")?.to_owned();
    Ok((content, id, stillframe, folder))
}

#[test]
fn memory_that_a_guest_has_reported_is_not_stored() -> Result<()> {
    let once = format!("sf.churn={} sf.rounds=1", FILES[0]);
    let silent = with_balloon(Kind::Private, "silent", "virtio-balloon-pci", &once)?;
    let (unreported, ..) = checkpoint("silent")?;
    drop(silent);
    for kind in [Kind::Private, Kind::Memfd] {
        let guest = with_balloon(kind, "reports", REPORTING, &once)?;
        let begin = Instant::now();
        // It reports every two seconds, and not all at once.
        let (id, stillframe, _folder) = loop {
            let (content, id, stillframe, folder) = checkpoint("reports")?;
            if content + REPORTED < unreported {
                break (id, stillframe, folder);
            }
            if begin.elapsed() > PATIENCE {
                bail!("{content} of {unreported} pages");
            }
            std::thread::sleep(Duration::from_millis(500));
        };
        let restored = Restored::start(&stillframe, &id, guest.folder(), &["--verify"])?;
        restored.serial.wait_more(3, PATIENCE)?;
        restored.crash()?;
        expect_untouched(&guest, &mut guest.second_monitor()?)?;
    }
    Ok(())
}

/// Pages are discarded before, during and after each pause; the guest checks each file before it removes it.
#[test]
fn a_watch_of_a_guest_that_reports_is_exact() -> Result<()> {
    for (kind, schedules) in [
        (Kind::Private, &["copy-on-write", "pre-copy"][..]),
        // Copy-on-write is refused for shared memory of which QEMU gives parts back.
        (Kind::Memfd, &["stop-copy"]),
    ] {
        let words = format!("sf.churn={}", FILES[1]);
        let guest = with_balloon(kind, "churns", REPORTING, &words)?;
        let pid = guest.pid_text();
        for schedule in schedules {
            let folder = tempfile::tempdir()?;
            let stillframe = Stillframe::init(&folder.path().join("repo"))?;
            let line = ["watch", "--pid", &pid, "--every", "500ms", "--count", "12"];
            let more = ["--verify", "--schedule", schedule];
            let (begin, mut discarded) = (Instant::now(), 0);
            // It reports when memory has been free for two seconds.
            while discarded < LEAST {
                ensure!(begin.elapsed() < PATIENCE, "{schedule}: {discarded} pages");
                for report in stillframe.json_lines(&[&line[..], &more].concat())? {
                    ensure!(report["verify"]["differing"] == 0, "{report}");
                    if report["parent"].is_string() {
                        discarded += pages(&report, "zero")?;
                    }
                }
            }
            let restored = Restored::start(&stillframe, "latest", guest.folder(), &["--verify"])?;
            restored.serial.wait_for("churned ", PATIENCE)?;
            ensure!(!restored.serial.text().contains("CORRUPT"), "{schedule}");
            restored.crash()?;
        }
        expect_untouched(&guest, &mut guest.second_monitor()?)?;
        ensure!(!guest.serial.text().contains("CORRUPT"), "{kind:?}");
    }
    Ok(())
}
