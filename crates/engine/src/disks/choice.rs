//! What a checkpoint has of each disk: what the user wants, or what is possible.

use serde::Serialize;
use stillframe_page::PAGE_BYTES;
use stillframe_qemu::monitor::{Disk, DiskDevice, Monitor};
use stillframe_repo::format::manifest::PAGES_MAX;

use super::DisksError;

/// The longest disk whose pages a page table can name, in bytes.
const BYTES_MAX: u64 = PAGES_MAX * PAGE_BYTES;

/// What a checkpoint has of a disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskMode {
    /// Its content if it can be captured, else a reference; the report says why.
    #[default]
    Auto,
    /// Its content, at the moment of the pause.
    Capture,
    /// The identity of its files, which are checked when the VM is restored.
    Reference,
    /// Nothing but its place in the VM: it is used as it is when the VM is restored.
    None,
}

/// How disks are captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskSchedule {
    /// Copied in rounds before the pause, and what is left in it ([`super::rounds`]).
    Rounds,
    /// Read after the pause, behind a filter that keeps what the guest overwrites.
    Filter,
}

/// What a checkpoint has of each disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskChoice {
    /// Of those without an entry of their own.
    pub others: DiskMode,
    /// Of these, by drive or device.
    pub each: Vec<(String, DiskMode)>,
    /// How they are captured; the engine chooses by what was written if this is `None`.
    pub schedule: Option<DiskSchedule>,
    /// QEMU goes on to record what is written when the engine ends, for the next one.
    pub keep_bitmaps: bool,
}

/// A disk that the guest can write to, and whose content is not in the checkpoint because it cannot be captured (`auto`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeftDisk {
    /// The drive or device.
    pub device: String,
    /// Why, in words.
    pub because: String,
}

/// The disks of a VM, as the choice divides them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Divided {
    /// To be captured.
    pub captured: Vec<DiskDevice>,
    /// Left out because they cannot be.
    pub left: Vec<LeftDisk>,
    /// One of those to be captured must be: `auto` is not enough.
    pub required: bool,
}

impl DiskChoice {
    /// What the checkpoint has of this disk.
    pub fn of(&self, device: &str) -> DiskMode {
        let mut each = self.each.iter();
        let own = each.find(|(name, _)| name == device);
        own.map_or(self.others, |&(_, mode)| mode)
    }

    /// Whether the content of a disk may be wanted.
    fn may_capture(&self) -> bool {
        let each = self.each.iter().map(|&(_, mode)| mode);
        let mut all = each.chain([self.others]);
        all.any(|mode| matches!(mode, DiskMode::Auto | DiskMode::Capture))
    }

    /// Marks those disks of a record of which nothing is to be known.
    ///
    /// # Errors
    /// The choice names a disk that the VM does not have.
    pub(crate) fn mark(&self, disks: &mut [Disk]) -> Result<(), DisksError> {
        let is_there = |name: &str| {
            let mut images = disks.iter().filter(|disk| disk.is_image());
            images.any(|disk| disk.device == name)
        };
        if let Some((name, _)) = self.each.iter().find(|(name, _)| !is_there(name)) {
            let images = disks.iter().filter(|disk| disk.is_image());
            let known: Vec<&str> = images.map(|disk| &*disk.device).collect();
            return Err(DisksError::Unknown {
                device: name.clone(),
                known: known.join(", "),
            });
        }
        for disk in disks {
            disk.unchecked = self.of(&disk.device) == DiskMode::None;
        }
        Ok(())
    }

    /// Asks QEMU for the disks, and divides them.
    ///
    /// # Errors
    /// One that must be captured cannot be.
    pub(super) fn divide(&self, monitor: &mut Monitor) -> Result<Divided, DisksError> {
        if !self.may_capture() {
            return Ok(Divided::default());
        }
        let disks = monitor.disk_devices()?;
        let has_io_threads = !disks.is_empty() && monitor.has_io_threads()?;
        self.division(disks, has_io_threads)
    }

    fn division(
        &self,
        disks: Vec<DiskDevice>,
        has_io_threads: bool,
    ) -> Result<Divided, DisksError> {
        let mut each = self.each.iter();
        let missing = |name: &str| !disks.iter().any(|disk| disk.device == name);
        if let Some((name, _)) =
            each.find(|(name, mode)| *mode == DiskMode::Capture && missing(name))
        {
            return Err(DisksError::NotWritable {
                device: name.clone(),
            });
        }
        if self.others == DiskMode::Capture && disks.is_empty() {
            return Err(DisksError::NoDisk);
        }
        let mut divided = Divided::default();
        for disk in disks {
            let mode = self.of(&disk.device);
            let obstacle = match mode {
                DiskMode::Reference | DiskMode::None => continue,
                _ if has_io_threads => Some(DisksError::IoThreads),
                _ if disk.is_incomplete => Some(DisksError::Incomplete {
                    device: disk.device.clone(),
                }),
                _ if disk.bytes > BYTES_MAX => Some(DisksError::TooLong {
                    device: disk.device.clone(),
                    limit_tib: BYTES_MAX >> 40,
                }),
                _ => None,
            };
            match (obstacle, mode) {
                (Some(error), DiskMode::Capture) => return Err(error),
                (Some(error), _) => divided.left.push(LeftDisk::new(&disk, &error)),
                (None, _) => divided.captured.push(disk),
            }
            divided.required |= mode == DiskMode::Capture;
        }
        Ok(divided)
    }
}

impl LeftDisk {
    pub(super) fn new(disk: &DiskDevice, error: &DisksError) -> LeftDisk {
        let mut because = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(error) = source {
            because = format!("{because}: {error}");
            source = error.source();
        }
        LeftDisk {
            device: disk.device.clone(),
            because,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODES: [DiskMode; 4] = [
        DiskMode::Auto,
        DiskMode::Capture,
        DiskMode::Reference,
        DiskMode::None,
    ];

    fn disk(device: &str, bytes: u64) -> DiskDevice {
        DiskDevice {
            device: device.to_owned(),
            node: format!("{device}-node"),
            path: format!("/machine/peripheral/{device}"),
            bytes,
            is_incomplete: false,
        }
    }

    fn divided(
        others: DiskMode,
        own: DiskMode,
        (io_threads, bytes): (bool, u64),
    ) -> Result<[Vec<String>; 2], DisksError> {
        let choice = DiskChoice {
            others,
            each: vec![("b".to_owned(), own)],
            ..DiskChoice::default()
        };
        let all = vec![disk("a", 4096), disk("b", bytes)];
        let divided = choice.division(all, io_threads)?;
        let captured = divided.captured.into_iter().map(|disk| disk.device);
        let left = divided.left.into_iter().map(|disk| disk.device);
        Ok([captured.collect(), left.collect()])
    }

    #[test]
    fn each_disk_is_divided_by_its_own_mode() {
        for others in MODES {
            for own in MODES {
                let wants = |mode| matches!(mode, DiskMode::Auto | DiskMode::Capture);
                let expected = [("a", others), ("b", own)].into_iter();
                let expected = expected.filter(|&(_, mode)| wants(mode));
                let expected: Vec<&str> = expected.map(|(name, _)| name).collect();
                let [captured, left] = divided(others, own, (false, 4096)).unwrap();
                assert_eq!(captured, expected);
                assert!(left.is_empty());
                // With threads of its own none is captured: an error if one has to be.
                match divided(others, own, (true, 4096)) {
                    Ok([captured, left]) => {
                        assert!(captured.is_empty() && ![others, own].contains(&DiskMode::Capture));
                        assert_eq!(left, expected);
                    }
                    Err(DisksError::IoThreads) => {
                        assert!([others, own].contains(&DiskMode::Capture));
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    #[test]
    fn a_disk_that_is_too_long_is_left_unless_it_has_to_be_captured() {
        let long = (false, BYTES_MAX + 1);
        let [captured, left] = divided(DiskMode::Capture, DiskMode::Auto, long).unwrap();
        assert_eq!(
            (&*captured, &*left),
            (&["a".to_owned()][..], &["b".to_owned()][..])
        );
        let error = divided(DiskMode::Auto, DiskMode::Capture, long).unwrap_err();
        assert!(matches!(error, DisksError::TooLong { .. }), "{error}");
    }

    #[test]
    fn a_disk_that_is_being_restored_is_left() {
        let mut lazy = disk("a", 4096);
        lazy.is_incomplete = true;
        let of = |others| DiskChoice {
            others,
            each: Vec::new(),
            ..DiskChoice::default()
        };
        let left = of(DiskMode::Auto).division(vec![lazy.clone()], false);
        let left = left.unwrap();
        assert!(left.captured.is_empty() && left.left.len() == 1);
        let error = of(DiskMode::Capture).division(vec![lazy], false);
        assert!(matches!(error, Err(DisksError::Incomplete { device }) if device == "a"));
    }

    #[test]
    fn a_disk_that_has_to_be_captured_must_be_there() {
        let choice = |others, each: &[(&str, DiskMode)]| DiskChoice {
            others,
            each: each
                .iter()
                .map(|&(name, mode)| (name.to_owned(), mode))
                .collect(),
            ..DiskChoice::default()
        };
        let error = choice(DiskMode::Capture, &[]).division(Vec::new(), false);
        assert!(matches!(error, Err(DisksError::NoDisk)));
        let none = choice(DiskMode::Auto, &[]).division(Vec::new(), false);
        assert_eq!(none.unwrap(), Divided::default());
        let named = choice(DiskMode::Auto, &[("cd", DiskMode::Capture)]);
        let error = named.division(vec![disk("a", 4096)], false);
        assert!(matches!(error, Err(DisksError::NotWritable { device }) if device == "cd"));
    }
}
