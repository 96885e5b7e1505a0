//! Memory that the next VM finds quickly.
//!
//! Where this machine is a VM itself, its host may have taken back what is free here, and gives it again a
//! page at a time, at several microseconds each: whoever needs memory first pays for it. So that it is
//! nobody who is measured, free memory is used once right before.
//!
//! What was freed is given back to the host two seconds later, which takes a processor for a while: so before that,
//! nothing should be under way.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// More than the VM itself: what is read from files needs some too.
const MORE_MIB: u32 = 512;

/// Leaves a machine that does nothing else, and free memory for a VM that fills so much.
pub fn prepare(mib: u32) {
    settle();
    touch(mib);
}

/// Uses as much free memory as a VM does that fills so much, and gives it back.
fn touch(mib: u32) {
    let bytes = ((mib + MORE_MIB) as usize) << 20;
    // Not zero: zeros need no memory.
    black_box(vec![1u8; bytes]);
}

/// Until the kernel begins to give back what was freed.
const REPORT_DELAY: Duration = Duration::from_millis(2500);
/// So long nothing must work, on any processor, but for a share of the time.
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

/// What all processors have spent so far, and what of it idle, in the kernel's steps (proc(5), `/proc/stat`).
fn times() -> [f64; 2] {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let first = text.lines().next().unwrap_or_default();
    let times = first.split_whitespace().skip(1);
    let times: Vec<f64> = times.filter_map(|time| time.parse().ok()).collect();
    let idle = times.iter().skip(3).take(2).sum();
    // The last two, of guests, are in the first two as well.
    [times.iter().take(8).sum(), idle]
}
