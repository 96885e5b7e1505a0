//! Real QEMU, real guests, driven as a user would: through the command line of `stillframe` and QEMU's own sockets.
//! No code of Stillframe is linked, so that a test sees exactly what a user would see.
//!
//! The tests are in `tests/`; the demo, the benches and the stress runs are subcommands of the
//! binary, which `cargo xtask` starts.

pub mod agent;
pub mod bench;
pub mod booted;
pub mod chart;
pub mod cli;
pub mod debian;
pub mod demo;
pub mod fault;
pub mod filling;
pub mod guest;
pub mod health;
pub mod kernel;
pub mod memory;
pub mod qmp;
pub mod results;
pub mod running;
pub mod serial;
pub mod slow_disk;
pub mod stress;
