//! What a migration takes on its hosts: the time of processors, and memory of the engines.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};

/// Steps a second of the times in `/proc` (proc(5), `USER_HZ`).
const STEPS: f64 = 100.0;
/// Places in `/proc/PID/stat`, counted from the field after the name: times of the process, and of its children that have
/// ended and were waited for; each of programs and of the kernel.
const OWN: [usize; 2] = [11, 12];
const CHILDREN: [usize; 2] = [13, 14];
/// How often memory is looked at.
const INTERVAL: Duration = Duration::from_millis(5);

/// Seconds of all processors that this process has taken so far. A process that has ended counts until it is waited for.
pub fn processor_s(pid: i32) -> Result<f64> {
    times(&pid.to_string(), OWN)
}

/// The same of all children of this process that have ended.
pub fn children_s() -> Result<f64> {
    times("self", CHILDREN)
}

fn times(process: &str, places: [usize; 2]) -> Result<f64> {
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    // The name is in parentheses, and may hold anything.
    let after = text.rfind(')').map_or("", |end| &text[end + 1..]);
    let fields: Vec<&str> = after.split_whitespace().collect();
    let field = |place: usize| {
        fields
            .get(place)
            .and_then(|field| field.parse::<f64>().ok())
    };
    let sum = places.into_iter().map(field).sum::<Option<f64>>();
    Ok(sum.with_context(|| path)? / STEPS)
}

/// Watches the memory of a process until it has ended.
#[derive(Debug)]
pub struct Peak {
    done: Arc<AtomicBool>,
    watcher: JoinHandle<u64>,
}

impl Peak {
    /// Of this process.
    pub fn of(pid: u32) -> Peak {
        let done = Arc::new(AtomicBool::new(false));
        let seen = done.clone();
        let watcher = thread::spawn(move || {
            let mut peak = 0;
            while !seen.load(Relaxed) {
                peak = own_kib(pid).unwrap_or(0).max(peak);
                thread::sleep(INTERVAL);
            }
            peak
        });
        Peak { done, watcher }
    }

    /// The most that it had in memory, in MiB.
    pub fn mib(self) -> f64 {
        self.done.store(true, Relaxed);
        self.watcher.join().unwrap_or(0) as f64 / 1024.0
    }
}

/// `RssAnon` of `/proc/PID/status`: what is the process's own. Memory of a VM that is shared with its QEMU is not.
fn own_kib(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find(|line| line.starts_with("RssAnon:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
