//! Fakes for the unit tests of the verbs: the monitor of a QEMU, guest memory, the guardian, a source of pages, and
//! checkpoints in a repository of the test's own.
//!
//! They have no rules of their own beyond those of what they stand for; the tests of real VMs are in `tests/e2e`.

pub(crate) mod checkpoints;
pub(crate) mod guest_memory;
pub(crate) mod qemu;
pub(crate) mod source;

pub(crate) use crate::guardian::fake::FakeGuardian;
pub(crate) use checkpoints::{FakeRepository, device_state, vm_record};
pub(crate) use guest_memory::{FakeMemory, this_process};
pub(crate) use qemu::FakeQemu;
pub(crate) use source::FakeSource;

use stillframe_page::PAGE;

/// The bytes of consecutive pages, each full of one byte.
pub(crate) fn pages(fillings: &[u8]) -> Vec<u8> {
    let of_page = |&filling: &u8| std::iter::repeat_n(filling, PAGE);
    fillings.iter().flat_map(of_page).collect()
}
