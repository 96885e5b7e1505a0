//! Memory that the next VM finds quickly.
//!
//! If this machine is a VM itself, its host may have taken back memory that is free here. The host gives it again a
//! page at a time, at several microseconds each, which the first user of the memory pays for. Free memory is
//! therefore used once right before a measurement, so that no measured process pays.
//!
//! Freed memory is given back to the host two seconds later, which takes a processor for a while. So before that,
//! nothing should be running.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// More than the VM itself: data read from files needs some too.
const MORE_MIB: u32 = 512;

/// Leaves a machine that does nothing else, and free memory for a VM that fills `mib` MiB.
pub fn prepare(mib: u32) {
    settle();
    touch(mib);
}

/// Uses as much free memory as a VM that fills `mib` MiB, and gives it back.
fn touch(mib: u32) {
    let bytes = ((mib + MORE_MIB) as usize) << 20;
    // Not zero: zeros need no memory.
    black_box(vec![1u8; bytes]);
}

/// Time until the kernel begins to give back freed memory.
const REPORT_DELAY: Duration = Duration::from_millis(2500);
/// Interval in which no process must work, on any processor, but for a share of the time.
const IDLE_FOR: Duration = Duration::from_millis(500);
const BUSY_SHARE: f64 = 0.05;
/// A machine that is never idle is measured as it is.
const SETTLE_LIMIT: Duration = Duration::from_secs(20);

/// Waits until this machine has nothing to do any more.
pub fn settle() {
    let begin = Instant::now();
    std::thread::sleep(REPORT_DELAY);
    while begin.elapsed() < SETTLE_LIMIT {
        let before = times();
        std::thread::sleep(IDLE_FOR);
        let after = times();
        let [all, idle] = [0, 1].map(|place| (after[place] - before[place]).max(0.0));
        if all > 0.0 && 1.0 - idle / all < BUSY_SHARE {
            break;
        }
    }
}

/// The time that all processors have spent so far, and their idle time, in the kernel's steps (proc(5),
/// `/proc/stat`).
fn times() -> [f64; 2] {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let first = text.lines().next().unwrap_or_default();
    let times = first.split_whitespace().skip(1);
    let times: Vec<f64> = times.filter_map(|time| time.parse().ok()).collect();
    let idle = times.iter().skip(3).take(2).sum();
    // The last two, of guests, are in the first two as well.
    [times.iter().take(8).sum(), idle]
}
