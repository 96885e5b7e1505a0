//! The VM's balloon: what the guest has of its memory, and has to give back.
//!
//! Source: QEMU, `qapi/machine.json` (`balloon`, `query-balloon`) and `docs/interop/virtio-balloon-stats.rst`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json;

use super::{Monitor, MonitorError};
use crate::guest_agent::GuestMemory;

/// The start of the names of balloon drivers.
pub(crate) const BALLOON: &str = "virtio-balloon";
const STATISTICS: &str = "guest-stats";
const INTERVAL: &str = "guest-stats-polling-interval";
/// A statistic that the guest does not send.
const NOT_SENT: u64 = u64::MAX;

/// What a balloon's driver in the guest has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BalloonStatistics {
    /// When it was received, in seconds since 1970; 0: never.
    pub updated: u64,
    /// The guest's word, if it has sent all that is needed.
    pub memory: Option<GuestMemory>,
}

/// A device that has statistics, by its place in QEMU's tree of objects.
#[derive(Debug, Clone)]
pub struct Balloon(String);

impl Monitor {
    /// How much memory the balloon leaves the guest, in bytes. `None`: the VM has no balloon.
    pub fn guest_memory(&mut self) -> Result<Option<u64>, MonitorError> {
        #[derive(Deserialize)]
        struct Answer {
            actual: u64,
        }
        match self.query::<Answer>("query-balloon") {
            Ok(Answer { actual }) => Ok(Some(actual)),
            Err(error) if error.is_refusal() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets the target of the balloon: the memory, in bytes, that it is to leave the guest. The guest follows in its own time.
    pub fn set_guest_memory(&mut self, bytes: u64) -> Result<(), MonitorError> {
        self.client.execute("balloon", json!({ "value": bytes }))?;
        Ok(())
    }

    /// The VM's balloon, if it has one.
    pub fn balloon(&mut self) -> Result<Option<Balloon>, MonitorError> {
        let peripherals = self.peripherals()?;
        let found = peripherals
            .iter()
            .find(|one| one.driver.starts_with(BALLOON));
        Ok(found.map(|found| Balloon(found.path())))
    }

    /// What the guest has sent.
    pub fn balloon_statistics(
        &mut self,
        balloon: &Balloon,
    ) -> Result<BalloonStatistics, MonitorError> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(rename = "last-update")]
            updated: u64,
            stats: BTreeMap<String, u64>,
        }
        let arguments = json!({ "path": balloon.0, "property": STATISTICS });
        let Answer { updated, stats } = self.run("qom-get", arguments)?;
        Ok(BalloonStatistics {
            updated,
            memory: memory(&stats),
        })
    }

    /// Seconds between two queries for statistics; 0: none.
    pub fn balloon_interval(&mut self, balloon: &Balloon) -> Result<u64, MonitorError> {
        self.run(
            "qom-get",
            json!({ "path": balloon.0, "property": INTERVAL }),
        )
    }

    /// Sets that interval.
    pub fn set_balloon_interval(
        &mut self,
        balloon: &Balloon,
        seconds: u64,
    ) -> Result<(), MonitorError> {
        let arguments = json!({ "path": balloon.0, "property": INTERVAL, "value": seconds });
        self.client.execute("qom-set", arguments)?;
        Ok(())
    }
}

fn memory(stats: &BTreeMap<String, u64>) -> Option<GuestMemory> {
    let sent = |name: &str| stats.get(name).copied().filter(|value| *value != NOT_SENT);
    Some(GuestMemory {
        total: sent("stat-total-memory")?,
        available: sent("stat-available-memory")?,
        committed: None,
        swapped: sent("stat-swap-out")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_that_a_guest_does_not_send_are_not_known() {
        let sent = [
            ("stat-total-memory", 1 << 30),
            ("stat-available-memory", 1 << 29),
            ("stat-swap-out", 4096),
            ("stat-htlb-pgalloc", NOT_SENT),
        ];
        let mut stats: BTreeMap<String, u64> = sent.map(|(name, of)| (name.to_owned(), of)).into();
        let known = memory(&stats).expect("all that is needed");
        assert_eq!((known.total, known.available), (1 << 30, 1 << 29));
        assert_eq!((known.committed, known.swapped), (None, 4096));
        stats.insert("stat-available-memory".to_owned(), NOT_SENT);
        assert_eq!(memory(&stats), None);
        stats.remove("stat-available-memory");
        assert_eq!(memory(&stats), None);
    }
}
