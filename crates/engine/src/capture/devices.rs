//! Notices that devices came or went while a VM is tracked.
//!
//! ```text
//!   before the capture   inspect the tree of devices, now and then   changed -> describe the VM anew
//!   after the pause      inspect the tree, always                    changed -> begin anew
//!                        compare the sections of the device state    changed -> refuse
//! ```
//!
//! A checkpoint is good under two conditions. The devices after the pause are the ones that its record describes.
//! QEMU reported no device that went away in between: a device that came back could be at another address. The
//! backend of a device (its image, its network) cannot be exchanged while the device is there.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use stillframe_qemu::device_state::DeviceStateError;
use stillframe_qemu::devices::{Asked, Glance, Sections};
use stillframe_qemu::monitor::{Monitor, MonitorError};
use stillframe_qemu::record::VmRecord;
use stillframe_qemu::suitability::{self, Unsuitable};
use stillframe_qemu::target::Target;
use thiserror::Error;

/// Time between two inspections of the tree, where nothing hints at a change.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longest device state that is kept to be compared with later ones, in bytes.
const KEPT_BYTES_MAX: usize = 16 << 20;

/// Why a checkpoint would not be one of the VM as it is.
#[derive(Debug, Error)]
pub enum DevicesError {
    /// Something was plugged in or unplugged in the middle.
    #[error(
        "the VM's devices changed while it was captured, and what was captured is discarded: try again (a watch does)"
    )]
    Changed,
    /// Plugged in and unplugged unseen.
    #[error(
        "device {device} was plugged in and unplugged between two checkpoints; it may have written guest memory unseen, so all of it is compared again"
    )]
    CameAndWent {
        /// Its id.
        device: String,
    },
    /// The device state is of other devices.
    #[error(
        "QEMU saved other devices than the VM has by its own account (section {section:?} came or went); this checkpoint is discarded, because it could not be restored"
    )]
    Unexplained {
        /// A section that only one of the two device states has.
        section: String,
    },
    /// The VM can no longer be checkpointed right.
    #[error(transparent)]
    Unsuitable(#[from] Unsuitable),
    /// The device state is none.
    #[error("QEMU saved a device state that cannot be restored")]
    State(#[from] DeviceStateError),
    /// QEMU does not answer.
    #[error("cannot find out which devices the VM has")]
    Monitor(#[from] MonitorError),
}

impl DevicesError {
    /// Whether tracking is of no more use after this: memory may have been written unseen, or the engine does not
    /// understand the VM's configuration.
    pub fn ends_tracking(&self) -> bool {
        match self {
            DevicesError::Changed | DevicesError::Unsuitable(Unsuitable::Devices(_)) => false,
            DevicesError::CameAndWent { .. }
            | DevicesError::Unexplained { .. }
            | DevicesError::Unsuitable(_)
            | DevicesError::State(_)
            | DevicesError::Monitor(_) => true,
        }
    }
}

/// The known state of the devices of a VM.
#[derive(Debug, Default)]
pub struct Devices {
    /// The tree that the record describes.
    glance: Option<Glance>,
    looked_at: Option<Instant>,
    /// Devices of that tree whose end QEMU has reported.
    deleted: BTreeSet<String>,
    /// Devices that left the tree and whose end is not reported yet. That takes QEMU up to a second.
    leaving: BTreeSet<String>,
    /// Whether the record may describe other devices than there are.
    outdated: bool,
    /// The first device state of these devices.
    first: Option<(Sections, Vec<u8>)>,
    /// Whether none of them may discard memory.
    without_discards: bool,
}

/// A look at the tree, which QEMU takes when it has done what it was told before.
#[derive(Debug)]
#[must_use]
pub struct Looking {
    begin: Instant,
    asked: Asked,
}

impl Looking {
    /// Asks QEMU.
    pub fn begin(monitor: &mut Monitor) -> Result<Looking, MonitorError> {
        Ok(Looking {
            begin: Instant::now(),
            asked: Glance::ask(monitor)?,
        })
    }
}

impl Devices {
    /// The state for a VM whose devices may or may not discard memory.
    pub fn of(without_discards: bool) -> Devices {
        Devices {
            without_discards,
            ..Devices::default()
        }
    }

    /// Brings a record up to date; makes the first one. To be called before a capture.
    pub fn update(
        &mut self,
        target: &Target,
        monitor: &mut Monitor,
        record: Option<VmRecord>,
    ) -> Result<VmRecord, DevicesError> {
        let mut record = match record {
            Some(mut record) => {
                record.refresh(monitor)?;
                record
            }
            None => {
                self.outdated = true;
                VmRecord::take(target, monitor)?
            }
        };
        self.notice(monitor)?;
        if !self.outdated && self.looked_lately() {
            return Ok(record);
        }
        // Before the description: a change while it is made shows at the next inspection.
        let glance = self.look(monitor)?;
        if self.outdated || self.glance.as_ref() != Some(&glance) {
            self.outdated = true;
            record.hot_plug = suitability::check(target, monitor)?;
            if self.without_discards {
                suitability::check_shared_copy_on_write(monitor)?;
            }
            record.refresh(monitor)?;
            self.replace(glance);
        }
        Ok(record)
    }

    /// The record describes this tree from now on.
    fn replace(&mut self, glance: Glance) {
        let gone = self.glance.iter().flat_map(|old| old.without(&glance));
        let leaving = gone.filter(|id| !self.deleted.contains(*id));
        self.leaving.extend(leaving.map(str::to_owned));
        self.deleted.clear();
        (self.glance, self.first) = (Some(glance), None);
        self.outdated = false;
    }

    /// Takes note of the devices whose end QEMU reports.
    fn notice(&mut self, monitor: &mut Monitor) -> Result<(), DevicesError> {
        let deleted = monitor
            .client()
            .take_deleted()
            .map_err(MonitorError::from)?;
        if deleted.paths.is_empty() && !deleted.more {
            return Ok(());
        }
        let ids = deleted.paths.iter().filter_map(|path| device(path));
        let unknown = self.ended(ids);
        let unknown = unknown.or(deleted.more.then(|| "one of very many".to_owned()));
        match unknown {
            Some(device) => Err(DevicesError::CameAndWent { device }),
            None => Ok(()),
        }
    }

    /// Takes note of the end of devices. One of them that was neither in the tree nor on its way out, if any.
    fn ended(&mut self, ids: impl Iterator<Item = String>) -> Option<String> {
        let mut unknown = None;
        for id in ids {
            // It has left a tree that the record does not describe any more.
            if self.leaving.remove(&id) {
                continue;
            }
            self.outdated = true;
            match &self.glance {
                Some(glance) if !glance.has(&id) => unknown = Some(id),
                _ => {
                    self.deleted.insert(id);
                }
            }
        }
        unknown
    }

    /// Makes sure that a device state is of the devices that the record describes. To be called after the
    /// pause that it was saved in.
    pub fn check(&mut self, monitor: &mut Monitor, raw: &[u8]) -> Result<(), DevicesError> {
        let looking = Looking::begin(monitor)?;
        self.check_later(monitor, looking, raw)
    }

    /// The same with a look that began when QEMU was told to save that state, or later.
    pub fn check_later(
        &mut self,
        monitor: &mut Monitor,
        looking: Looking,
        raw: &[u8],
    ) -> Result<(), DevicesError> {
        let glance = self.looked(monitor, looking)?;
        // After the look: a device that left and returned before it has sent its event by now.
        self.notice(monitor)?;
        if self.outdated || self.glance.as_ref() != Some(&glance) {
            self.outdated = true;
            return Err(DevicesError::Changed);
        }
        let sections = Sections::of(raw)?;
        match &self.first {
            None => {
                let kept = if raw.len() <= KEPT_BYTES_MAX {
                    raw
                } else {
                    &[]
                };
                self.first = Some((sections, kept.to_vec()));
            }
            Some((first, first_raw)) => {
                // A guest can have a device state read wrongly, but not so that no other reading is left.
                let differs = first.difference(&sections);
                let differs = differs.filter(|_| !first.could_be_of(raw));
                if let Some(section) = differs.filter(|_| !sections.could_be_of(first_raw)) {
                    return Err(DevicesError::Unexplained {
                        section: section.to_owned(),
                    });
                }
            }
        }
        Ok(())
    }

    fn look(&mut self, monitor: &mut Monitor) -> Result<Glance, MonitorError> {
        let looking = Looking::begin(monitor)?;
        self.looked(monitor, looking)
    }

    fn looked(&mut self, monitor: &mut Monitor, looking: Looking) -> Result<Glance, MonitorError> {
        let glance = Glance::answered(monitor, looking.asked)?;
        self.looked_at = Some(looking.begin);
        Ok(glance)
    }

    fn looked_lately(&self) -> bool {
        self.looked_at.is_some_and(|at| at.elapsed() < LOOK_EVERY)
    }
}

/// The id in the path of a `DEVICE_DELETED` event, of which there are others for the parts of a device.
fn device(path: &str) -> Option<String> {
    let id = ["/machine/peripheral/", "/machine/peripheral-anon/"]
        .iter()
        .find_map(|root| path.strip_prefix(root))?;
    (!id.contains('/')).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::qemu::FakeQemu;

    /// The devices of a VM that has these.
    fn with(ids: &[&'static str]) -> Devices {
        let mut devices = Devices::default();
        now_with(&mut devices, ids);
        devices
    }

    fn now_with(devices: &mut Devices, ids: &[&'static str]) {
        let (qemu, mut monitor) = FakeQemu::start();
        ids.clone_into(&mut qemu.state().devices);
        let glance = devices.look(&mut monitor).unwrap();
        devices.replace(glance);
    }

    fn unknown(devices: &mut Devices, id: &str) -> bool {
        devices.ended([id.to_owned()].into_iter()).is_some()
    }

    #[test]
    fn the_end_of_a_device_may_be_reported_after_it_has_left() {
        let mut devices = with(&["a", "b"]);
        now_with(&mut devices, &["b"]);
        assert!(!unknown(&mut devices, "a") && !devices.outdated);
        // A second end is that of a device that came and went.
        assert!(unknown(&mut devices, "a") && devices.outdated);
    }

    #[test]
    fn the_end_of_a_device_may_be_reported_before_the_tree_is_inspected() {
        let mut devices = with(&["a"]);
        assert!(!unknown(&mut devices, "a") && devices.outdated);
        now_with(&mut devices, &[]);
        assert!(unknown(&mut devices, "a"));
    }

    #[test]
    fn a_device_that_is_back_before_its_end_is_reported_is_another_one() {
        let mut devices = with(&["a"]);
        now_with(&mut devices, &[]);
        now_with(&mut devices, &["a"]);
        assert!(!unknown(&mut devices, "a") && !devices.outdated);
        assert!(!unknown(&mut devices, "a") && devices.outdated);
        now_with(&mut devices, &[]);
        assert!(unknown(&mut devices, "a"));
    }

    #[test]
    fn a_device_that_was_never_seen_came_and_went() {
        let mut devices = with(&["b"]);
        assert!(unknown(&mut devices, "a") && devices.outdated);
    }

    #[test]
    fn parts_of_a_device_are_no_devices() {
        assert_eq!(device("/machine/peripheral/hot").as_deref(), Some("hot"));
        let anonymous = device("/machine/peripheral-anon/device[3]");
        assert_eq!(anonymous.as_deref(), Some("device[3]"));
        assert_eq!(device("/machine/peripheral/hot/virtio-backend"), None);
    }
}
