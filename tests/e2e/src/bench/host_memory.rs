//! Memory that the next VM finds quickly.
//!
//! Where this machine is a VM itself, its host may have taken back what is free here, and gives it again a
//! page at a time, at several microseconds each: whoever needs memory first pays for it. So that it is
//! nobody who is measured, free memory is used once right before.

use std::hint::black_box;

/// More than the VM itself: what is read from files needs some too.
const MORE_MIB: u32 = 512;

/// Uses as much free memory as a VM does that fills so much, and gives it back.
pub fn touch(mib: u32) {
    let bytes = ((mib + MORE_MIB) as usize) << 20;
    // Not zero: zeros need no memory.
    black_box(vec![1u8; bytes]);
}
