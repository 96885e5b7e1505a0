//! The populate half: a checkpoint's pages into the memory of a QEMU that has not run yet.

pub mod eager;
