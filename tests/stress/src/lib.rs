//! Long runs that look for what must never happen; shorter forms of them are tests.

pub mod databases;
pub mod disk_kills;
pub mod disk_returns;
pub mod disks;
pub mod exactness;
pub mod flips;
pub mod hotplug;
pub mod kill;
pub mod lazy_disks;
pub mod matrix;
pub mod migrate;
pub mod others;
pub mod restore_exact;
pub mod restore_kill;
pub mod soak;
pub mod to_and_fro;
pub mod torture;
