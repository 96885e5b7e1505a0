//! Real QEMU, real guests, driven as a user would: through the command line of `stillframe` and QEMU's own sockets.
//! No code of Stillframe is linked, so that a test sees exactly what a user would see.
//!
//! The end-to-end tests, the stress runs and the benches use it.

pub mod agent;
pub mod booted;
pub mod cli;
pub mod committing;
pub mod databases;
pub mod debian;
pub mod fault;
pub mod filling;
pub mod golden;
pub mod guest;
pub mod health;
pub mod images;
pub mod kernel;
pub mod memory;
pub mod migration;
pub mod network;
pub mod programs;
pub mod qmp;
pub mod random;
pub mod relay;
pub mod restored;
pub mod results;
pub mod running;
pub mod serial;
pub mod slow_disk;
pub mod unplugged;
