//! The time that pauses take from the guest's clock, which stops with its vCPUs, and how the clock is set again.
//!
//! The guest's agent sets the clock once pauses have taken [`BOUND`], if the VM has the usual channel to an agent.
//! A thread of its own waits for the agent, which may take seconds to answer; the next checkpoint does not wait.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use stillframe_qemu::guest_agent::AgentChannels;

use crate::post_restore::{self, ClockReport};

/// Upper bound on the time that pauses take from the clock before it is set.
const BOUND: Duration = Duration::from_millis(500);
/// After an attempt that did not set the clock, the next one comes no sooner than this.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(600);

/// The clock of a guest that is paused again and again.
#[derive(Debug)]
pub(crate) struct GuestClock {
    /// The channels to its agents.
    agents: AgentChannels,
    /// The time that pauses have taken since it was set.
    taken: Duration,
    setting: Option<JoinHandle<Option<ClockReport>>>,
    /// Earliest time of the next attempt.
    not_before: Option<Instant>,
}

impl GuestClock {
    /// The clock of a guest with these channels to agents.
    pub(crate) fn new(agents: AgentChannels) -> GuestClock {
        GuestClock {
            agents,
            taken: Duration::ZERO,
            setting: None,
            not_before: None,
        }
    }

    /// Takes note of a pause; begins to set the clock where that is due, unless it is to be left alone.
    pub(crate) fn paused(&mut self, pause: Duration, leave_alone: bool) {
        self.taken += pause;
        if leave_alone {
            return;
        }
        let asked_lately = self.not_before.is_some_and(|at| Instant::now() < at);
        if self.taken < BOUND || self.setting.is_some() || asked_lately {
            return;
        }
        if !self.agents.is_empty() {
            let agents = self.agents.clone();
            let work = move || post_restore::set_clock(&agents);
            // Without a thread it is tried again after the next pause.
            self.setting = thread::Builder::new()
                .name("guest clock".to_owned())
                .spawn(work)
                .ok();
            // Pauses from here on may come before or after the agent has set it.
            self.taken = Duration::ZERO;
        }
    }

    /// The time that pauses have taken since the clock was last set.
    pub(crate) fn taken(&self) -> Duration {
        self.taken
    }

    /// The result of setting it, reported once.
    pub(crate) fn report(&mut self) -> Option<ClockReport> {
        let setting = self.setting.take_if(|setting| setting.is_finished())?;
        let report = setting.join().ok().flatten().unwrap_or_default();
        if report.not_set.is_some() {
            self.not_before = Instant::now().checked_add(ASK_AGAIN_AFTER);
        }
        Some(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// A channel in this folder, on which no QEMU listens.
    fn channel(folder: &Path) -> AgentChannels {
        let line = "qemu -chardev socket,id=c0,path=agent,server=on \
                    -device virtserialport,chardev=c0,name=org.qemu.guest_agent.0";
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        AgentChannels::of(&arguments, folder)
    }

    #[test]
    fn an_agent_that_does_not_set_it_is_not_asked_at_every_pause() {
        let folder = tempfile::tempdir().unwrap();
        let mut clock = GuestClock::new(channel(folder.path()));
        clock.paused(BOUND / 2, false);
        assert!(clock.setting.is_none());
        clock.paused(BOUND / 2, false);
        while clock
            .setting
            .as_ref()
            .is_some_and(|setting| !setting.is_finished())
        {
            thread::yield_now();
        }
        assert!(
            clock
                .report()
                .is_some_and(|report| report.not_set.is_some())
        );
        clock.paused(BOUND, false);
        assert!(clock.setting.is_none() && clock.report().is_none());
        assert_eq!(clock.taken(), BOUND);
    }

    #[test]
    fn without_an_agent_it_is_only_reported() {
        let channel = channel(Path::new("/nowhere"));
        for (agents, leave_alone) in [(AgentChannels::default(), false), (channel, true)] {
            let mut clock = GuestClock::new(agents);
            clock.paused(3 * BOUND, leave_alone);
            assert_eq!((clock.taken(), clock.report()), (3 * BOUND, None));
        }
    }
}
