//! A disk that only the source reaches moves with its VM.

use anyhow::{Result, ensure};
use stillframe_harness::health;
use stillframe_harness::journal::{WithJournal, committed, wait_more};
use stillframe_harness::running::signal;

#[test]
fn a_disk_is_copied_with_all_that_was_committed() -> Result<()> {
    for (format, mode) in [("raw", "pre-copy"), ("qcow2", "post-copy")] {
        let it = WithJournal::boot(&format!("copied-{format}"), format)?;
        let mut order = it.order("there");
        order.migrate.push(format!("--mode={mode}"));
        let there = order.perform(&it.stillframe, it.guest.pid())?;
        let (old, new) = (&it.guest.serial, &there.vm.serial);
        let disk_bytes = there.sent["disk_bytes"].as_u64().unwrap_or(0);
        ensure!(disk_bytes > 16 << 20, "{}", there.sent);
        ensure!(there.sent["bytes_sent"].as_u64() > Some(disk_bytes));
        let before = committed(old);
        ensure!(wait_more(new, 5)? > before, "{format}: it does not go on");
        // The disk here is what it was when the VM was given up.
        let left = it.expect_all(&it.disk, &[old])?;
        ensure!(left <= before + 1, "{left} of {before} records");
        // As a crash of the other host leaves its copy.
        signal(there.vm.pid as u32, "KILL")?;
        while health::is_alive(there.vm.pid) {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let found = it.expect_all(&it.copy, &[old, new])?;
        ensure!(found > before + 3, "{format}: {found} of {before} records");
    }
    Ok(())
}
