//! Everything against real QEMU processes, started here. They need no guest kernel: SeaBIOS, or a
//! boot sector that counts in guest memory, is guest enough. All of them run under TCG.

mod checkpoint_and_launch;
mod finding;
mod monitors;
mod refusals;
mod vm;
