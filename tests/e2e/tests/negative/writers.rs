//! Who else writes guest memory: devices by DMA, and a QEMU whose faults may not be served. See
//! docs/memory-writers.md.

use std::fs::File;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_untouched, expect_whole};
use stillframe_harness::running::PATIENCE;
use stillframe_harness::slow_disk::SlowDisk;

/// How fast the disk is: its requests, of up to 2 MiB, take a tenth of a second.
const MIB_PER_SECOND: u64 = 20;

fn exact(reports: &[Value]) -> bool {
    let exact = |report: &Value| report["verify"]["differing"] == 0;
    reports.iter().all(exact)
}

/// A guest that reads a disk for ever, past the host's page cache.
fn reader(name: &str, aio: &str, disk: &SlowDisk) -> Result<Guest> {
    let setup = Setup::small(Kind::Pc, name)
        .with_drivers("sf.disk=vda")
        .with(&["-drive", &disk.drive(aio)]);
    let guest = setup.boot()?;
    guest.serial.wait_line("disk read 1", PATIENCE)?;
    Ok(guest)
}

/// What the disk sends arrives long after the fault that the request began with: a page that was
/// protected in between is not reported once more.
#[test]
fn what_a_disk_writes_by_native_aio_is_in_the_checkpoint() -> Result<()> {
    exact_beside("native")
}

#[test]
fn what_a_disk_writes_by_io_uring_is_in_the_checkpoint() -> Result<()> {
    exact_beside("io_uring")
}

#[test]
fn what_a_disk_writes_by_threads_is_in_the_checkpoint() -> Result<()> {
    exact_beside("threads")
}

fn exact_beside(aio: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut disk = SlowDisk::new(folder.path(), 64)?;
    let name = format!("dma-{aio}");
    let guest = reader(&name, aio, &disk)?;
    disk.hold_back(guest.pid(), MIB_PER_SECOND)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    // The first ones read all of memory while the guest runs; so does a buffer that is too small.
    for _ in 0..3 {
        let report = stillframe.json(&["checkpoint", "--vm", &name, "--verify"])?;
        ensure!(exact(std::slice::from_ref(&report)), "{report}");
    }
    for (schedule, buffer) in [
        ("pre-copy", "1G"),
        ("stop-copy", "16M"),
        ("copy-on-write", "16M"),
    ] {
        let line = [
            "watch",
            "--vm",
            &name,
            "--every",
            "200ms",
            "--count",
            "4",
            "--verify",
            "--schedule",
            schedule,
            "--copy-buffer",
            buffer,
        ];
        let reports = stillframe.json_lines(&line)?;
        ensure!(exact(&reports), "{schedule}: {reports:?}");
    }
    let mut monitor = guest.second_monitor()?;
    expect_untouched(&guest, &mut monitor)
}

/// A page that is gone, as after a memory error (hwpoison): QEMU gets SIGBUS there, and no read comes to an end.
/// The file behind the guest's private memory is cut by its last page, which the guest used to boot only.
#[test]
fn a_page_that_is_gone_fails_the_checkpoint_and_not_the_guest() -> Result<()> {
    let folder = tempfile::tempdir_in("/dev/shm")?;
    let path = folder.path().join("ram");
    let setup = Setup::small(Kind::Private, "gone");
    let bytes = u64::from(setup.ram_mib) << 20;
    let (mib, file) = (setup.ram_mib, path.display());
    let backend = format!("memory-backend-file,id=mem,size={mib}M,mem-path={file},share=off");
    let guest = setup
        .with(&["-object", &backend, "-machine", "memory-backend=mem"])
        .boot()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let verified = ["checkpoint", "--vm", "gone", "--verify"];
    let first = stillframe.json(&verified)?;
    ensure!(exact(std::slice::from_ref(&first)), "{first}");

    let ram = File::options().write(true).open(&path)?;
    ram.set_len(bytes - 4096)?;
    let mut monitor = guest.second_monitor()?;
    for schedule in ["pre-copy", "stop-copy", "copy-on-write"] {
        let line = ["checkpoint", "--vm", "gone", "--schedule", schedule];
        let said = stillframe.fails(&line, 1)?;
        ensure!(said.contains("no readable memory at"), "{said}");
        expect_untouched(&guest, &mut monitor)?;
    }
    ensure!(
        checkpoints(&stillframe)?.len() == 1,
        "a checkpoint without the page"
    );

    ram.set_len(bytes)?;
    let after = stillframe.json(&verified)?;
    ensure!(exact(std::slice::from_ref(&after)), "{after}");
    expect_whole(&stillframe, &checkpoints(&stillframe)?)?;
    expect_untouched(&guest, &mut monitor)
}

/// The kernel's own writes into protected pages fail there, and the guest would get I/O errors.
#[test]
fn copy_on_write_is_refused_where_the_kernels_faults_are_not_served() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = SlowDisk::new(folder.path(), 16)?;
    let setup = Setup::small(Kind::Pc, "user-mode")
        .with_drivers("sf.disk=vda")
        .with(&["-drive", &disk.drive("threads").replace("cache=none,", "")])
        .with(&["-run-with", "user=nobody"]);
    let guest = setup.boot()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let watch = |schedule| {
        [
            "watch",
            "--vm",
            "user-mode",
            "--every",
            "100ms",
            "--count",
            "6",
            "--schedule",
            schedule,
        ]
    };
    let said = stillframe.fails(&watch("copy-on-write"), 5)?;
    ensure!(said.contains("unprivileged_userfaultfd"), "{said}");
    stillframe.ok(&watch("auto"))?;
    let rounds = guest.serial.text().matches("disk read").count();
    guest
        .serial
        .wait_line(&format!("disk read {}", rounds + 2), PATIENCE)?;
    monitor.execute("query-status", json!({}))?;
    let events = monitor.take_events();
    ensure!(
        events
            .iter()
            .all(|event| event["event"] != "BLOCK_IO_ERROR"),
        "{events:?}"
    );
    expect_untouched(&guest, &mut monitor)
}
