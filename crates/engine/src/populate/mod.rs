//! The populate half: a checkpoint's pages into the memory of a new QEMU, before it runs or while it does.

pub mod eager;
pub mod lazy;
pub mod streamed;
