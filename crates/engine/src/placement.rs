//! CPU placement: hashing and compressing run on processors that the VM can spare.
//!
//! They keep several threads busy while the guest runs. A scheduler that shares out processors fairly takes them
//! from the vCPUs. Niceness does not help, because it counts only within a session's or a service's group
//! (sched(7), autogroup). On half of the processors the threads meet only the vCPUs that do not fit on the other
//! half.

use stillframe_sys::affinity::{self, AffinityGuard, Processors};
use stillframe_sys::process::Process;

/// Lowers the priority of a thread that only stores: the capturing thread and the fault handler
/// go first, because the guest may wait for them.
pub use stillframe_sys::affinity::lower_priority;

/// The processors to keep to while pages of this VM are stored.
pub fn processors(vm: &Process) -> Processors {
    spare(&affinity::of_this_thread(), &affinity::of_process(vm))
}

/// Keeps the calling thread to those of its `own` processors that QEMU's main thread is not on, while this lives.
/// Returns `None` if there is no other.
///
/// In the pause both have work, and the vCPUs none. But a thread is often woken on the processor of the thread that
/// wakes it, and there one of the two waits for the other.
pub fn confine_away_from(qemu: &Process, own: &Processors) -> Option<AffinityGuard> {
    let main = qemu.main_processor().ok()?;
    Some(AffinityGuard::to(&others(own, main)?))
}

/// All but one, where that leaves any.
fn others(own: &Processors, one: usize) -> Option<Processors> {
    let others: Processors = own.iter().copied().filter(|&other| other != one).collect();
    (!others.is_empty()).then_some(others)
}

/// Of our own processors, those that the VM is kept from, where there are any (a host whose
/// vCPUs are pinned); else the upper half.
fn spare(own: &Processors, vm: &Processors) -> Processors {
    let free: Processors = own.difference(vm).copied().collect();
    match free.is_empty() {
        false => free,
        true => own.iter().skip(own.len() / 2).copied().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(numbers: impl IntoIterator<Item = usize>) -> Processors {
        numbers.into_iter().collect()
    }

    #[test]
    fn the_vm_gets_one_half() {
        assert_eq!(spare(&set([0]), &set([0])), set([0]));
        assert_eq!(spare(&set([0, 1]), &set([0, 1])), set([1]));
        assert_eq!(spare(&set(0..5), &set(0..5)), set([2, 3, 4]));
        assert_eq!(spare(&set(2..6), &set(0..64)), set([4, 5]));
    }

    #[test]
    fn the_processor_of_qemu_is_left_out() {
        assert_eq!(others(&set([0, 1]), 0), Some(set([1])));
        assert_eq!(others(&set(2..6), 4), Some(set([2, 3, 5])));
        assert_eq!(others(&set([0, 1]), 7), Some(set([0, 1])));
        assert_eq!(others(&set([3]), 3), None);
    }

    #[test]
    fn what_the_vm_may_not_use_is_free() {
        assert_eq!(spare(&set([0, 1]), &set([1])), set([0]));
        assert_eq!(spare(&set(0..8), &set(2..8)), set([0, 1]));
        assert_eq!(spare(&set([0, 1]), &set([])), set([0, 1]));
    }
}
