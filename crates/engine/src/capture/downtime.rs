//! Downtime: how long a guest was stopped, and what for.

use std::time::Instant;

use serde::Serialize;

/// Each phase of one pause, in microseconds. `device_state` runs in parallel with `scan` and `copy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DowntimeRecord {
    /// Time from sending the command that stops the VM to its answer, with the VM running again; 0 for a
    /// VM that was already paused.
    pub total: u64,
    /// QEMU halts the vCPUs, drains and flushes its disks.
    pub stop: u64,
    /// Reading what was left of disks that are copied in rounds.
    pub disks: u64,
    /// Reading which pages were written since the last pre-copy round, and protecting them again.
    pub scan: u64,
    /// Copying them, or making ready for copying them after the pause.
    pub copy: u64,
    /// Time from the first byte of the device state until QEMU has saved nearly all of it, if that was awaited
    /// separately; else until the state is whole and the VM runs.
    pub device_state: u64,
    /// Waiting for the device state with nothing else to do: after scan and copy, mostly.
    pub wait: u64,
    /// Comparing all of memory, with `--verify`.
    pub verify: u64,
    /// Resuming, where it is a command of its own (a suspended guest).
    pub resume: u64,
}

/// Time since an instant, in microseconds.
pub fn us(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
