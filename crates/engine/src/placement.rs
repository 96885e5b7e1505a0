//! CPU placement: hashing and compressing run on processors that the VM can spare.
//!
//! They keep several threads busy while the guest runs. A scheduler that shares out processors fairly takes them
//! from the vCPUs. Niceness does not help, because it counts only within a session's or a service's group
//! (sched(7), autogroup). On half of the processors the threads meet only the vCPUs that do not fit on the other
//! half.
//!
//! A guest that is idle leaves its half idle, too: then the thread that reads and hashes memory may run anywhere, until the
//! guest has work again ([`WhereIdle`]). Those that compress stay where they were started.

use std::time::{Duration, Instant};

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

/// How long the VM's use of processors is looked at before the thread moves.
const LOOK: Duration = Duration::from_millis(10);
/// A VM that runs for less of the time than this is idle, all its threads counted. An idle Linux takes 0.01 under KVM, 0.15
/// under TCG.
const IDLE_MAX: f64 = 0.3;

/// The calling thread's placement while it stores pages: on the processors that the VM can spare, and on any while the
/// VM is idle.
#[derive(Debug)]
pub struct WhereIdle<'v> {
    vm: &'v Process,
    /// `None` while the thread may run anywhere.
    confined: Option<AffinityGuard>,
    looked: Instant,
    /// What the VM had run by then.
    ran: Option<Duration>,
}

impl<'v> WhereIdle<'v> {
    /// Confines the calling thread, for now.
    pub fn confined(vm: &'v Process) -> WhereIdle<'v> {
        WhereIdle {
            vm,
            confined: Some(AffinityGuard::to(&processors(vm))),
            looked: Instant::now(),
            ran: vm.processor_time(),
        }
    }

    /// Looks at what the VM does, and moves the thread that made this, which has to be the caller. Costs nothing if called
    /// often.
    pub fn look(&mut self) {
        let elapsed = self.looked.elapsed();
        if elapsed < LOOK {
            return;
        }
        let ran = self.vm.processor_time();
        let idle = is_idle(self.ran, ran, elapsed);
        (self.looked, self.ran) = (Instant::now(), ran);
        match idle {
            true => self.confined = None,
            false if self.confined.is_none() => {
                self.confined = Some(AffinityGuard::to(&processors(self.vm)));
            }
            false => {}
        }
    }
}

/// Whether a VM was idle that had run for `before`, and for `after` when `elapsed` was over. Not where that is not
/// known.
fn is_idle(before: Option<Duration>, after: Option<Duration>, elapsed: Duration) -> bool {
    let ran = before
        .zip(after)
        .map(|(before, after)| after.saturating_sub(before));
    ran.is_some_and(|ran| ran < elapsed.mul_f64(IDLE_MAX))
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
    fn a_vm_that_hardly_runs_is_idle() {
        let ms = Duration::from_millis;
        assert!(is_idle(Some(ms(70)), Some(ms(72)), ms(10)));
        assert!(!is_idle(Some(ms(70)), Some(ms(74)), ms(10)));
        assert!(!is_idle(Some(ms(70)), Some(ms(90)), ms(10)));
        assert!(!is_idle(None, Some(ms(70)), ms(10)));
        assert!(!is_idle(Some(ms(70)), None, ms(10)));
    }

    #[test]
    fn beside_an_idle_process_it_runs_anywhere_and_goes_back() {
        let before = affinity::of_this_thread();
        for (program, anywhere) in [("sleep 60", true), ("while :; do :; done", false)] {
            let mut child = std::process::Command::new("sh");
            let mut child = child.args(["-c", program]).spawn().unwrap();
            // It has started when it has run.
            std::thread::sleep(5 * LOOK);
            let vm = Process::open(i32::try_from(child.id()).unwrap()).unwrap();
            let mut placement = WhereIdle::confined(&vm);
            let confined = processors(&vm);
            assert_eq!(affinity::of_this_thread(), confined, "{program}");
            placement.look();
            assert_eq!(affinity::of_this_thread(), confined, "{program}");
            std::thread::sleep(LOOK);
            placement.look();
            let expected = if anywhere { &before } else { &confined };
            assert_eq!(affinity::of_this_thread(), *expected, "{program}");
            child.kill().unwrap();
            child.wait().unwrap();
            drop(placement);
            assert_eq!(affinity::of_this_thread(), before, "{program}");
        }
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
