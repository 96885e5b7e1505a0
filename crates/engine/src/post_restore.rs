//! Post-restore steps: the network cards of a restored guest announce themselves, and its agent, if there is one,
//! sets its clock.
//!
//! The guest runs already, on the right memory: a failure of a step is reported, and is no error.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use stillframe_qemu::guest_agent::{AgentChannels, AgentError, GuestAgent};
use stillframe_qemu::monitor::Monitor;

use crate::in_words;

/// Time for the agent to answer at all: the guest has just begun to run.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);
/// Time for each command; setting the clock starts a program in the guest, whose memory may still be incomplete.
const COMMAND_LIMIT: Duration = Duration::from_secs(10);
/// A clock that is no further off than this is set, whatever else the agent could not do. A query takes time
/// too, in a guest that has just begun to run.
const SET_WITHIN_MS: i64 = 2000;

/// The guest's clock.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ClockReport {
    /// By how many milliseconds it was behind this host's when the guest ran again; negative: ahead.
    pub was_behind_ms: Option<i64>,
    /// By how many it is now.
    pub behind_ms: Option<i64>,
    /// Why it was not set.
    pub not_set: Option<String>,
}

/// Has the guest's network cards announce themselves.
pub(crate) fn announce(monitor: &mut Monitor) {
    let _ = monitor.announce();
}

/// Sets the clock of a guest that runs to this host's, through the channel of its agent. `None` if it has no channel to one.
pub(crate) fn set_clock(agents: &AgentChannels) -> Option<ClockReport> {
    (!agents.is_empty()).then(|| match agents.connect(CONNECT_LIMIT) {
        Ok(agent) => set_by(agent),
        Err(error) => ClockReport {
            not_set: Some(why_not(&error)),
            ..ClockReport::default()
        },
    })
}

fn set_by(mut agent: GuestAgent) -> ClockReport {
    let mut report = ClockReport::default();
    match behind_ms(&mut agent) {
        Ok(behind) => report.was_behind_ms = Some(behind),
        Err(error) if error.is_final() => {
            report.not_set = Some(why_not(&error));
            return report;
        }
        Err(_) => {}
    }
    let set = agent.set_time_ns(now_ns(), COMMAND_LIMIT);
    if !set.as_ref().is_err_and(AgentError::is_final) {
        report.behind_ms = behind_ms(&mut agent).ok();
    }
    let is_right = report
        .behind_ms
        .is_some_and(|behind| behind.abs() < SET_WITHIN_MS);
    report.not_set = match set {
        _ if is_right => None,
        Err(error) => Some(why_not(&error)),
        // Where the clock cannot be queried, the agent's answer counts.
        Ok(()) => report
            .behind_ms
            .map(|behind| format!("its agent says it did, and it is {behind} ms behind")),
    };
    report
}

fn behind_ms(agent: &mut GuestAgent) -> Result<i64, AgentError> {
    let guest = agent.time_ns(COMMAND_LIMIT)?;
    Ok(now_ns().saturating_sub(guest) / 1_000_000)
}

/// Nanoseconds since 1970; until 2262.
fn now_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |time| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX))
}

fn why_not(error: &AgentError) -> String {
    match error {
        AgentError::Timeout { .. } => "its agent does not answer".to_owned(),
        AgentError::Refused { path, .. } => format!("no process listens on {}", path.display()),
        AgentError::TooMuch { limit_bytes, .. } => {
            format!("its agent sent {limit_bytes} bytes and no answer")
        }
        AgentError::Command { desc, .. } => format!("its agent says: {desc}"),
        _ => in_words(error),
    }
}
