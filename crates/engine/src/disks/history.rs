//! What is recorded of the writes to a VM's disks between its checkpoints.
//!
//! ```text
//!   bitmap 1  ├──────────────┤ frozen after the pause, read, removed when the checkpoint is durable
//!   bitmap 2             ├───────────────────┤
//!   bitmap 3                              ├──────────
//!                            ^               ^   pauses
//! ```
//!
//! A bitmap begins a little before the pause of one checkpoint and ends a little after that of the next. So it has more than
//! was written between them, and nothing is lost. If a checkpoint is given up, its bitmap is merged into the next one.

use stillframe_qemu::monitor::{
    DiskDevice, DiskSnapshot, EndCommands, Monitor, MonitorError, SnapshotNumber,
};

use super::choice::Divided;
use super::{DiskChoice, DiskSnapshots, DisksError, LeftDisk};
use crate::guardian::{Guardian, OnDisconnect};

/// One bitmap a disk, all of one name.
#[derive(Debug)]
struct Recording {
    bitmap: String,
    disks: Vec<DiskDevice>,
}

/// The bitmaps of one attachment.
#[derive(Debug, Default)]
pub struct DiskHistory {
    /// What was written since the last checkpoint that is durable.
    since: Option<Recording>,
    /// What was written since the pause of a checkpoint that is not.
    next: Option<Recording>,
    /// Bitmaps so far, for their names.
    number: u64,
}

impl DiskHistory {
    /// Makes snapshots of the chosen disks ready for a pause: of what was written since the last checkpoint, if that is known of
    /// all of them. What an earlier attempt has left is settled as given up. Returns also the disks that are left out because
    /// they cannot be captured.
    ///
    /// # Errors
    /// QEMU refuses it, or a disk that must be captured cannot be.
    pub fn begin(
        &mut self,
        choice: &DiskChoice,
        monitor: &mut Monitor,
        guardian: &Guardian,
    ) -> Result<(Option<DiskSnapshots>, Vec<LeftDisk>), DisksError> {
        self.settle(monitor, guardian, false)?;
        let Divided {
            captured,
            mut left,
            required,
        } = choice.divide(monitor)?;
        if captured.is_empty() {
            self.start_over();
            return Ok((None, left));
        }
        match self.begin_with(&captured, monitor, guardian) {
            Ok(snapshots) => Ok((Some(snapshots), left)),
            Err(error) if required => Err(error),
            Err(error) => {
                // The next checkpoint has one before it without their content.
                self.start_over();
                left.extend(captured.iter().map(|disk| LeftDisk::new(disk, &error)));
                Ok((None, left))
            }
        }
    }

    fn begin_with(
        &mut self,
        disks: &[DiskDevice],
        monitor: &mut Monitor,
        guardian: &Guardian,
    ) -> Result<DiskSnapshots, DisksError> {
        // A disk that was plugged in or resized is not known.
        self.since.take_if(|since| since.disks != disks);
        self.number += 1;
        let bitmap = format!("stillframe-{}-{}", std::process::id(), self.number);
        let since = self.since.as_ref().map(|since| since.bitmap.clone());
        let snapshots = disks.iter().enumerate().map(|(number, disk)| DiskSnapshot {
            number: SnapshotNumber(number),
            disk: disk.clone(),
            since: since.clone(),
        });
        let snapshots: Vec<DiskSnapshot> = snapshots.collect();
        let bitmaps = [Some(&*bitmap), since.as_deref()];
        let bitmaps: Vec<&str> = bitmaps.into_iter().flatten().collect();
        let announce = |snapshots: &[DiskSnapshot], serving| {
            let mut commands = EndCommands::of(snapshots, serving);
            let forget = Monitor::commands_to_forget(disks, &bitmaps);
            commands.last.extend(forget);
            guardian.on_disconnect(OnDisconnect::EndSnapshots(commands))
        };
        announce(&snapshots, false)?;
        monitor.add_bitmaps(disks, &bitmap)?;
        let begun = DiskSnapshots::begin(snapshots, monitor, &announce);
        self.next = Some(Recording {
            bitmap: bitmap.clone(),
            disks: disks.to_vec(),
        });
        begun.inspect_err(|_| {
            // The error that led here is the one to report.
            let _ = self.settle(monitor, guardian, false);
        })
    }

    /// Takes the snapshots away. `stored`: the checkpoint is durable, and the next one follows it.
    ///
    /// # Errors
    /// QEMU refuses it. The next checkpoint reads all of the disks.
    pub fn settle(
        &mut self,
        monitor: &mut Monitor,
        guardian: &Guardian,
        stored: bool,
    ) -> Result<(), MonitorError> {
        let Some(next) = self.next.take() else {
            return Ok(());
        };
        let since = self.since.take();
        monitor.end_snapshots(true)?;
        self.since = match (stored, since) {
            (true, _) => Some(next),
            (false, Some(since)) => {
                monitor.merge_bitmaps(&next.disks, &since.bitmap, &next.bitmap)?;
                Some(next)
            }
            (false, None) => None,
        };
        monitor.remove_bitmaps(self.bitmap())?;
        let commands = self.since.as_ref().map(|since| {
            let bitmaps = [&*since.bitmap];
            EndCommands {
                last: Monitor::commands_to_forget(&since.disks, &bitmaps),
                ..EndCommands::default()
            }
        });
        // That it does not answer shows before the next pause.
        let _ = guardian.on_disconnect(match commands {
            Some(commands) => OnDisconnect::EndSnapshots(commands),
            None => OnDisconnect::Nothing,
        });
        Ok(())
    }

    /// Whether QEMU has snapshots of the disks.
    pub fn has_snapshots(&self) -> bool {
        self.next.is_some()
    }

    /// The next checkpoint follows none.
    pub fn start_over(&mut self) {
        self.since = None;
    }

    /// Takes all away.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn end(&mut self, monitor: &mut Monitor, guardian: &Guardian) -> Result<(), MonitorError> {
        let settled = self.settle(monitor, guardian, false);
        match self.since.take() {
            Some(_) => settled.and(monitor.remove_bitmaps(None)),
            None => settled,
        }
    }

    fn bitmap(&self) -> Option<&str> {
        self.since.as_ref().map(|since| &*since.bitmap)
    }
}
