//! Memory that a guest does not need, given back to the host before a checkpoint of all memory (VM-ME, section IV).
//!
//! ```text
//!   guest's agent: how much it needs ---> balloon inflates to that, for a bounded time ---> deflates ---> checkpoint
//! ```
//!
//! What the balloon takes is a hole in QEMU's memory: zeros, which are not read and take nothing of a checkpoint. It stays a
//! hole when the balloon gives it back, until the guest writes it. So the balloon need not stay inflated: the guest has
//! its memory again before the checkpoint begins, and so have all VMs that are restored from it. The paper keeps it
//! inflated until the checkpoint is stored, and after a restore.
//!
//! A guest takes for its balloon first what it freed last, and never-used memory after that; then it drops page cache. So
//! a short time takes the most of what a checkpoint would store. Memory that was never used is a hole anyway: a balloon
//! that has come to it, and would not get beyond it in its time, stops.

use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_fault::{self as fault, Point};
use stillframe_qemu::guest_agent::{AgentChannels, GuestAgent, GuestMemory};
use stillframe_qemu::monitor::{Balloon, Monitor, MonitorError};
use stillframe_sys::process::Process;

use crate::guardian::{Guardian, GuardianError};

/// Memory that the guest keeps beside what it needs: it goes on allocating.
const RESERVE_BYTES: u64 = 64 << 20;
/// A checkpoint stores less than this sooner than the balloon takes it.
const WORTH_BYTES: u64 = 16 << 20;
/// Upper bound on the time that the guest may take.
const LIMIT_MAX: Duration = Duration::from_secs(3600);
/// Time for the agent to answer at all.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Time for each question.
const QUESTION_LIMIT: Duration = Duration::from_secs(2);
/// Interval at which QEMU is queried for what the balloon has.
const LOOK: Duration = Duration::from_millis(5);
/// Interval at which the guest is queried for what is left. The answer takes it a twentieth of a second under TCG.
const LOOK_AT_GUEST: Duration = Duration::from_millis(250);
/// The guest is not queried any more when less than this is left.
const ANSWER: Duration = Duration::from_millis(60);
/// A balloon that has not moved for this long has stopped: its driver tries again after a fifth of a second (Linux,
/// `drivers/virtio/virtio_balloon.c`).
const STANDS_AFTER: Duration = Duration::from_millis(500);
/// Upper bound on the time that statistics may take: QEMU polls once a second.
const STATISTICS_LIMIT: Duration = Duration::from_millis(2500);
/// How much the balloon takes before it is judged by what that was.
const JUDGED_BYTES: u64 = 32 << 20;
/// A balloon is worth its time if at least this part of what it took, one in eight, was in RAM.
const USED_ONE_IN: u64 = 8;
/// The guest gets this long to take its memory back before the engine says that it has not.
const GIVE_BACK_LIMIT: Duration = Duration::from_secs(10);

/// What the balloon did before one checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct BalloonReport {
    /// What the guest had before, in bytes, and has again.
    pub original_bytes: u64,
    /// The aim, in bytes: what the guest needs, and a reserve.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_bytes: Option<u64>,
    /// What was taken for a moment, in bytes.
    pub taken_bytes: u64,
    /// From the first question until the guest gets its memory back, in microseconds, the guest running.
    pub operation_us: u64,
    /// What it has not taken back by the end of the checkpoint, in bytes.
    pub missing_bytes: u64,
    /// Why nothing was taken, or not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_taken: Option<String>,
}

/// Why the balloon failed for a reason that is not the guest's.
#[derive(Debug, thiserror::Error)]
pub enum BalloonError {
    /// QEMU does not answer.
    #[error("QEMU failed a command")]
    Monitor(#[from] MonitorError),
    /// The guardian does not answer.
    #[error(transparent)]
    Guardian(#[from] GuardianError),
    /// A fault that a test injected.
    #[error("a step of the balloon failed")]
    Injected(#[from] std::io::Error),
}

/// The balloon of one guest.
#[derive(Debug)]
pub(crate) struct MemoryBalloon {
    /// The channels to the guest's agents.
    agents: AgentChannels,
}

/// Where the guest's word comes from.
enum Source {
    Agent(GuestAgent),
    Statistics(Balloon),
}

impl MemoryBalloon {
    /// Of a guest with these channels to agents.
    pub(crate) fn new(agents: AgentChannels) -> MemoryBalloon {
        MemoryBalloon { agents }
    }

    /// Has the guest of `vm` give back what it does not need, for up to `limit`, and then have it again. `stored_bytes`:
    /// what a checkpoint would store now.
    ///
    /// # Errors
    /// QEMU or the guardian does not answer. What the guest does, or does not, is in the report.
    pub(crate) fn squeeze(
        &self,
        monitor: &mut Monitor,
        guardian: &Guardian,
        vm: &Process,
        stored_bytes: u64,
        limit: Duration,
    ) -> Result<BalloonReport, BalloonError> {
        let begin = Instant::now();
        let mut report = BalloonReport::default();
        let limit = limit.min(LIMIT_MAX);
        let deadline = begin + limit;
        report.not_taken = match self.begin(monitor, deadline, &mut report)? {
            Err(why) => Some(why),
            Ok((source, before)) => {
                let deadline = match &source {
                    Source::Agent(_) => deadline,
                    // They come no sooner than QEMU polls for them.
                    Source::Statistics(_) => Instant::now() + limit,
                };
                let target = target(report.original_bytes, before);
                report.target_bytes = Some(target);
                match target.saturating_add(WORTH_BYTES) {
                    least if least > report.original_bytes => {
                        Some("the guest needs all of its memory".to_owned())
                    }
                    // Nothing is to be gained.
                    least if least > stored_bytes => None,
                    _ => {
                        // Before the first command: whatever becomes of this process, the guest gets its memory back.
                        guardian.taking_memory(report.original_bytes, limit)?;
                        let aim = Aim {
                            target,
                            before,
                            deadline,
                            never_used: report.original_bytes.saturating_sub(stored_bytes),
                        };
                        let inflated = inflate(monitor, source, vm, &aim, &mut report);
                        let reached = fault::at(Point::BalloonInflated);
                        monitor.set_guest_memory(report.original_bytes)?;
                        guardian.memory_given_back()?;
                        reached?;
                        inflated?
                    }
                }
            }
        };
        report.operation_us = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        Ok(report)
    }

    /// What the guest has, and its word on what it needs; or why there is none, in words.
    fn begin(
        &self,
        monitor: &mut Monitor,
        deadline: Instant,
        report: &mut BalloonReport,
    ) -> Result<Result<(Source, GuestMemory), String>, BalloonError> {
        let Some(original) = monitor.guest_memory()? else {
            return Ok(Err("the VM has no balloon (virtio-balloon)".to_owned()));
        };
        report.original_bytes = original;
        if !monitor.run_state()?.running {
            return Ok(Err("the guest does not run".to_owned()));
        }
        let silent = match self.query_agent(deadline) {
            Ok((agent, memory)) => return Ok(Ok((Source::Agent(agent), memory))),
            Err(_) if Instant::now() >= deadline => {
                return Ok(Err(
                    "the guest's agent did not answer in time (--balloon=TIME sets it)".to_owned(),
                ));
            }
            Err(why) => why,
        };
        let Some(balloon) = monitor.balloon()? else {
            return Ok(Err(silent));
        };
        let found = statistics(monitor, &balloon)?;
        let none = || format!("{silent}, and the balloon's driver sends no statistics");
        Ok(found
            .map(|memory| (Source::Statistics(balloon), memory))
            .ok_or_else(none))
    }

    fn query_agent(&self, deadline: Instant) -> Result<(GuestAgent, GuestMemory), String> {
        if self.agents.is_empty() {
            return Err("the VM has no guest agent".to_owned());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let agent = self.agents.connect(left.min(CONNECT_LIMIT));
        let mut agent = agent.map_err(|error| error.in_words())?;
        let memory = agent.memory(deadline.min(Instant::now() + QUESTION_LIMIT));
        memory
            .map(|memory| (agent, memory))
            .map_err(|error| error.in_words())
    }
}

impl BalloonReport {
    /// Waits until the guest has taken its memory back, as long as it goes on doing so.
    pub(crate) fn await_memory(&mut self, monitor: &mut Monitor) -> Result<(), MonitorError> {
        if self.taken_bytes == 0 {
            return Ok(());
        }
        let mut progress = Progress::new();
        let deadline = Instant::now() + GIVE_BACK_LIMIT;
        loop {
            let has = monitor.guest_memory()?.unwrap_or(self.original_bytes);
            self.missing_bytes = self.original_bytes.saturating_sub(has);
            if self.missing_bytes == 0 || Instant::now() >= deadline || progress.stands(has) {
                return Ok(());
            }
            thread::sleep(LOOK);
        }
    }
}

/// What the guest is to have left: the memory that its kernel does not manage, what its programs were promised or use,
/// whichever is more, and a reserve. Never more than it has.
fn target(original: u64, memory: GuestMemory) -> u64 {
    let unmanaged = original.saturating_sub(memory.total);
    let used = memory.total.saturating_sub(memory.available);
    let needed = memory.committed.map_or(used, |promised| promised.max(used));
    let target = unmanaged
        .saturating_add(needed)
        .saturating_add(RESERVE_BYTES);
    target.min(original)
}

/// Why a guest with this memory left is under pressure, which it was not `before`.
fn pressure(before: GuestMemory, now: GuestMemory) -> Option<String> {
    let low = now.available < RESERVE_BYTES / 2;
    let swaps = now.swapped > before.swapped;
    match (low, swaps) {
        (_, true) => Some("the guest began to swap".to_owned()),
        (true, _) => Some("the guest ran out of memory".to_owned()),
        _ => None,
    }
}

/// What the balloon inflates to, and what bounds it.
struct Aim {
    /// What the guest is to have left, in bytes.
    target: u64,
    before: GuestMemory,
    deadline: Instant,
    /// Bytes of the guest's memory that are holes.
    never_used: u64,
}

/// Inflates the balloon up to the deadline. Returns why no further.
fn inflate(
    monitor: &mut Monitor,
    mut source: Source,
    vm: &Process,
    aim: &Aim,
    report: &mut BalloonReport,
) -> Result<Option<String>, MonitorError> {
    let (begin, resident) = (Instant::now(), vm.resident_bytes().ok());
    monitor.set_guest_memory(aim.target)?;
    let mut progress = Progress::new();
    let mut look_at_guest = Instant::now() + LOOK_AT_GUEST;
    loop {
        thread::sleep(LOOK);
        let has = monitor.guest_memory()?.unwrap_or(report.original_bytes);
        let taken = report.original_bytes.saturating_sub(has);
        report.taken_bytes = report.taken_bytes.max(taken);
        let now = Instant::now();
        if has <= aim.target {
            return Ok(None);
        }
        let freed = resident.zip(vm.resident_bytes().ok());
        let freed = freed.map(|(before, now)| before.saturating_sub(now));
        if is_in_vain(aim, taken, freed, begin, now) {
            return Ok(Some(
                "the guest gives memory that it never used, and has more of that than there is time for".to_owned(),
            ));
        }
        if progress.stands(has) {
            return Ok(Some("the guest gives no more".to_owned()));
        }
        if now >= aim.deadline {
            return Ok(Some("the time was up (--balloon=TIME sets it)".to_owned()));
        }
        // An answer takes time, too.
        if now >= look_at_guest && now + ANSWER < aim.deadline {
            look_at_guest = now + LOOK_AT_GUEST;
            let left = match &mut source {
                Source::Agent(agent) => agent.memory(aim.deadline).ok(),
                Source::Statistics(balloon) => monitor.balloon_statistics(balloon)?.memory,
            };
            let why = match left {
                Some(left) => pressure(aim.before, left),
                None if Instant::now() >= aim.deadline => None,
                None => Some("the guest stopped answering".to_owned()),
            };
            if why.is_some() {
                return Ok(why);
            }
        }
    }
}

/// Whether a balloon that has `taken` bytes since `begin`, of which `freed` were in RAM, will not come to what is before
/// its deadline. Not where what was freed is not known.
fn is_in_vain(aim: &Aim, taken: u64, freed: Option<u64>, begin: Instant, now: Instant) -> bool {
    let Some(freed) = freed.filter(|_| taken >= JUDGED_BYTES) else {
        return false;
    };
    let left = aim.deadline.saturating_duration_since(now).as_secs_f64();
    let bytes_per_s = taken as f64 / now.saturating_duration_since(begin).as_secs_f64();
    let still_never_used = aim.never_used.saturating_sub(taken - freed.min(taken));
    freed < taken / USED_ONE_IN && still_never_used as f64 > bytes_per_s * left
}

/// The guest's word by the balloon's driver, which QEMU queries once a second, if at all.
fn statistics(
    monitor: &mut Monitor,
    balloon: &Balloon,
) -> Result<Option<GuestMemory>, MonitorError> {
    let interval = monitor.balloon_interval(balloon)?;
    // QEMU polls already, for another client: its last answer is recent enough.
    if interval > 0 {
        let found = monitor.balloon_statistics(balloon)?;
        return Ok(found.memory.filter(|_| found.updated > 0));
    }
    let earlier = monitor.balloon_statistics(balloon)?.updated;
    monitor.set_balloon_interval(balloon, 1)?;
    let found = await_statistics(monitor, balloon, earlier);
    monitor.set_balloon_interval(balloon, 0)?;
    found
}

fn await_statistics(
    monitor: &mut Monitor,
    balloon: &Balloon,
    earlier: u64,
) -> Result<Option<GuestMemory>, MonitorError> {
    let deadline = Instant::now() + STATISTICS_LIMIT;
    while Instant::now() < deadline {
        let found = monitor.balloon_statistics(balloon)?;
        if found.updated > earlier {
            return Ok(found.memory);
        }
        thread::sleep(LOOK);
    }
    Ok(None)
}

/// Whether a balloon moves.
struct Progress {
    last: Option<u64>,
    at: Instant,
}

impl Progress {
    fn new() -> Progress {
        Progress {
            last: None,
            at: Instant::now(),
        }
    }

    /// Whether what the guest has, in bytes, has not changed for too long.
    fn stands(&mut self, has: u64) -> bool {
        if self.last != Some(has) {
            self.last = Some(has);
            self.at = Instant::now();
        }
        self.at.elapsed() >= STANDS_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn memory(total: u64, available: u64, committed: Option<u64>) -> GuestMemory {
        GuestMemory {
            total: total * MIB,
            available: available * MIB,
            committed: committed.map(|bytes| bytes * MIB),
            swapped: 0,
        }
    }

    #[test]
    fn a_guest_keeps_what_it_needs() {
        let target = |memory| super::target(1024 * MIB, memory) / MIB;
        // An idle one: kernel, what is in use, reserve.
        assert_eq!(target(memory(973, 834, Some(36))), 51 + 139 + 64);
        // Programs were promised more than they use.
        assert_eq!(target(memory(973, 834, Some(500))), 51 + 500 + 64);
        assert_eq!(target(memory(973, 834, Some(4000))), 1024);
        assert_eq!(target(memory(973, 834, None)), 51 + 139 + 64);
        // A guest may say anything.
        for total in [0, u64::MAX >> 20] {
            for available in [0, u64::MAX >> 20] {
                for committed in [None, Some(0), Some(u64::MAX >> 20)] {
                    assert!(target(memory(total, available, committed)) <= 1024);
                }
            }
        }
    }

    #[test]
    fn a_balloon_stops_at_memory_that_was_never_used_if_that_is_more_than_it_can_take() {
        let begin = Instant::now();
        let ms = |ms| begin + Duration::from_millis(ms);
        let aim = |never_used: u64, deadline| Aim {
            target: 0,
            before: memory(4000, 3900, None),
            deadline: ms(deadline),
            never_used: never_used * MIB,
        };
        // 32 MiB in 100 ms: 80 MiB more in the time that is left.
        let in_vain = |aim: &Aim, taken, freed| is_in_vain(aim, taken * MIB, freed, begin, ms(100));
        let much = aim(4000, 350);
        assert!(in_vain(&much, 32, Some(0)));
        assert!(in_vain(&much, 32, Some(3 * MIB)));
        assert!(!in_vain(&much, 32, Some(4 * MIB)));
        assert!(!in_vain(&much, 31, Some(0)));
        assert!(!in_vain(&much, 32, None));
        for (never_used, deadline, expected) in
            [(111, 350, false), (113, 350, true), (4000, 30_000, false)]
        {
            assert_eq!(in_vain(&aim(never_used, deadline), 32, Some(0)), expected);
        }
    }

    #[test]
    fn a_guest_is_under_pressure_when_it_swaps_or_has_little_left() {
        let before = memory(973, 834, None);
        assert_eq!(pressure(before, memory(173, 40, None)), None);
        assert!(pressure(before, memory(173, 31, None)).is_some());
        let swaps = GuestMemory {
            swapped: 4096,
            ..before
        };
        assert!(pressure(before, swaps).is_some());
        assert_eq!(pressure(swaps, before), None);
    }
}
