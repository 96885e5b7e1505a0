//! Everything Stillframe knows about QEMU, seen from outside. It finds a VM and talks to its monitor. It reads and
//! changes its command line, its RAM blocks and disks, and its device state. It starts a second QEMU that takes the
//! state over.
//!
//! Rules of the crate:
//! 1. All data from a QEMU process (replies, tables, streams) is outside input: bounded, checked, answered with an
//!    error, never with a panic.
//! 2. A function changes a VM only if its name says so.
//! 3. A QEMU started here is either handed over running or killed and reaped.

pub mod arguments;
pub mod cpu_state;
pub mod credentials;
pub mod device_state;
pub mod devices;
pub mod elf_core;
pub mod executable;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod guest_agent;
pub mod launch;
pub mod migration_file;
pub mod monitor;
pub mod page_tables;
pub mod physical_memory;
pub mod qemu_img;
pub mod qmp;
pub mod record;
pub mod reload;
mod start_folder;
pub mod suitability;
pub mod target;
mod unix_sockets;
mod vmstate_image;
