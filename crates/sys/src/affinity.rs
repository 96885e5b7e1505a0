//! The processors that threads may run on (sched_setaffinity(2)), and the threads that have priority there
//! (nice(2)).

use std::collections::BTreeSet;
use std::fs;

use rustix::process::{Pid, nice};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::process::Process;

/// Numbers of processors, as the kernel counts them.
pub type Processors = BTreeSet<usize>;

/// The processors that the calling thread may run on. Empty where the kernel does not say.
pub fn of_this_thread() -> Processors {
    sched_getaffinity(None).map_or_else(|_| Processors::new(), |set| numbers(&set))
}

/// The processors that any thread of a process may run on. Threads that end meanwhile are left out.
pub fn of_process(process: &Process) -> Processors {
    let tasks = fs::read_dir(format!("/proc/{}/task", process.pid()));
    let names = tasks
        .into_iter()
        .flatten()
        .flatten()
        .map(|task| task.file_name());
    names
        .filter_map(|name| Pid::from_raw(name.to_str()?.parse().ok()?))
        .filter_map(|thread| sched_getaffinity(Some(thread)).ok())
        .flat_map(|set| numbers(&set))
        .collect()
}

/// While this lives, the thread that made it keeps to some processors, and so do the threads that
/// it starts meanwhile, to their end.
#[derive(Debug)]
pub struct AffinityGuard {
    before: Option<CpuSet>,
}

impl AffinityGuard {
    /// Confines the calling thread. Where the kernel refuses (none of the processors is this
    /// thread's to use, say), the thread continues as before: being confined is a courtesy.
    pub fn to(processors: &Processors) -> AffinityGuard {
        let mut set = CpuSet::new();
        for &number in processors {
            set.set(number);
        }
        let before = sched_getaffinity(None).ok();
        let confined = before.is_some() && sched_setaffinity(None, &set).is_ok();
        AffinityGuard {
            before: before.filter(|_| confined),
        }
    }
}

impl Drop for AffinityGuard {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // Refused only if those processors have been taken from this process meanwhile.
            let _ = sched_setaffinity(None, before);
        }
    }
}

/// Increase of the nice value of threads of lower priority: where both have work they get a tenth of the time.
const NICE_INCREMENT: i32 = 10;

/// The calling thread, and all that it starts from here on, let the other threads of this process go
/// first. For good: going back would take a privilege. Of threads of other sessions this says nothing
/// (sched(7), autogroup).
pub fn lower_priority() {
    // A higher nice value is never refused.
    let _ = nice(NICE_INCREMENT);
}

fn numbers(set: &CpuSet) -> Processors {
    (0..CpuSet::MAX_CPU)
        .filter(|&number| set.is_set(number))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confined_while_it_lives_children_too() {
        let before = of_this_thread();
        let one = Processors::from([*before.last().unwrap()]);
        let confined = AffinityGuard::to(&one);
        assert_eq!(of_this_thread(), one);
        let child = std::thread::spawn(of_this_thread);
        assert_eq!(child.join().unwrap(), one);
        drop(confined);
        assert_eq!(of_this_thread(), before);
    }

    #[test]
    fn lower_priority_is_inherited_by_children_and_by_no_other_thread() {
        let niceness = || rustix::process::getpriority_process(None).unwrap();
        let before = niceness();
        let lowered = std::thread::spawn(move || {
            lower_priority();
            [niceness(), std::thread::spawn(niceness).join().unwrap()]
        });
        // 19 is the most there is.
        let expected = (before + NICE_INCREMENT).min(19);
        assert_eq!(lowered.join().unwrap(), [expected; 2]);
        assert_eq!(niceness(), before);
    }

    #[test]
    fn what_the_kernel_refuses_changes_nothing() {
        let before = of_this_thread();
        let confined = AffinityGuard::to(&Processors::new());
        assert_eq!(of_this_thread(), before);
        drop(confined);
        assert_eq!(of_this_thread(), before);
    }

    #[test]
    fn a_process_may_run_where_one_of_its_threads_may() {
        let own = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let main = of_process(&own);
        let _confined = AffinityGuard::to(&Processors::from([*main.first().unwrap()]));
        assert_eq!(of_process(&own), main);
        assert!(main.contains(&own.main_processor().unwrap()));
    }
}
