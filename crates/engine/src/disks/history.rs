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
//! was written between them, and nothing is lost. If a checkpoint is given up, its bitmap is merged into the next one. Where
//! disks are copied in rounds ([`super::rounds`]), bitmap 1 records until the checkpoint is durable, and bitmap 2 is that of the
//! last round.
//!
//! A checkpoint names the bitmaps that began with it. Where the user wants it, the last ones stay in QEMU when the engine
//! ends: an engine that comes back finds them, and the checkpoint, and goes on from there.

use serde_json::Value;
use stillframe_qemu::monitor::{
    DiskBitmap, DiskDevice, DiskSnapshot, EndCommands, Monitor, MonitorError, SnapshotNumber,
};
use stillframe_repo::{CheckpointId, DiskTable, Manifest};

use super::choice::Divided;
use super::rounds::{self, DiskRounds};
use super::{DiskChoice, DiskSchedule, DiskSnapshots, DisksError, LeftDisk, PreparedDisks};
use crate::guardian::{Guardian, OnDisconnect};

/// Bitmaps, one a disk, and whether a checkpoint names them.
#[derive(Debug)]
struct Recording {
    bitmaps: Vec<DiskBitmap>,
    is_named: bool,
}

impl Recording {
    fn is_of(&self, disks: &[DiskDevice]) -> bool {
        self.bitmaps.iter().map(|bitmap| &bitmap.disk).eq(disks)
    }

    /// One that was made shorter, and longer again, is as long as before, and what was cut off is in no bitmap.
    fn has_shortened(&self, monitor: &mut Monitor) -> Result<bool, MonitorError> {
        let disks = self.bitmaps.iter().map(|bitmap| &bitmap.disk);
        Ok(monitor.shortened(disks)?.is_some())
    }
}

/// Checkpoints with filters after rounds that were of no use, before they are tried again.
const AVOIDED: u32 = 16;

/// The bitmaps of one attachment.
#[derive(Debug, Default)]
pub struct DiskHistory {
    /// What was written since the last checkpoint that is durable.
    since: Option<Recording>,
    /// What was written since the pause of a checkpoint that is not.
    next: Option<Recording>,
    /// Those of `since` record on until `next` is that of a durable checkpoint: it is copied in rounds.
    in_rounds: bool,
    /// Checkpoints that are to be taken with filters, if the choice is ours.
    avoid_rounds: u32,
    /// Those that an earlier attachment has left.
    left: Vec<DiskBitmap>,
    /// The last ones stay in QEMU.
    keep: bool,
}

impl DiskHistory {
    /// `left`: the bitmaps that are there, which stay until a checkpoint is taken.
    pub fn with_left(left: Vec<DiskBitmap>) -> DiskHistory {
        DiskHistory {
            left,
            ..DiskHistory::default()
        }
    }

    /// Whether an earlier attachment has left bitmaps.
    pub fn has_left(&self) -> bool {
        !self.left.is_empty()
    }

    /// Goes on with the bitmaps that were left, if one of these checkpoints names them. Returns what that checkpoint, the last one
    /// of them, has of the disks.
    pub fn go_on(&mut self, manifests: &[(CheckpointId, Manifest)]) -> Vec<DiskTable> {
        let checkpoints = manifests.iter();
        let checkpoints = checkpoints.map(|(_, manifest)| (manifest.time, &manifest.disks[..]));
        let Some((tables, bitmaps)) = named(&self.left, checkpoints) else {
            return Vec::new();
        };
        self.since = Some(Recording {
            bitmaps,
            is_named: true,
        });
        tables
    }

    /// Makes the chosen disks ready for a pause: what was written since the last checkpoint, if that is known of all of them. What
    /// an earlier attempt has left is settled as given up. `limit_bytes`: what may be copied of them in rounds. Returns also the
    /// disks that are left out because they cannot be captured.
    ///
    /// # Errors
    /// QEMU refuses it, or a disk that must be captured cannot be.
    pub fn begin(
        &mut self,
        choice: &DiskChoice,
        limit_bytes: u64,
        monitor: &mut Monitor,
        guardian: &Guardian,
    ) -> Result<(PreparedDisks, Vec<LeftDisk>), DisksError> {
        self.settle(monitor, guardian, false)?;
        self.keep = choice.keep_bitmaps;
        if self.has_left() {
            self.left.clear();
            monitor.remove_bitmaps(self.since_bitmaps())?;
        }
        let Divided {
            captured,
            mut left,
            required,
        } = choice.divide(monitor)?;
        if captured.is_empty() {
            self.start_over();
            return Ok((PreparedDisks::None, left));
        }
        match self.begin_with(&captured, choice.schedule, limit_bytes, monitor, guardian) {
            Ok(prepared) => Ok((prepared, left)),
            Err(error) if required => Err(error),
            Err(error) => {
                // The next checkpoint has one before it without their content.
                self.start_over();
                left.extend(captured.iter().map(|disk| LeftDisk::new(disk, &error)));
                Ok((PreparedDisks::None, left))
            }
        }
    }

    fn begin_with(
        &mut self,
        disks: &[DiskDevice],
        schedule: Option<DiskSchedule>,
        limit_bytes: u64,
        monitor: &mut Monitor,
        guardian: &Guardian,
    ) -> Result<PreparedDisks, DisksError> {
        // A disk that was plugged in or resized is not known.
        self.since.take_if(|since| !since.is_of(disks));
        if let Some(since) = &self.since
            && since.has_shortened(monitor)?
        {
            self.since = None;
        }
        if self.since.is_none() {
            monitor.mark_ends(disks)?;
        }
        if self.suits_rounds(disks, schedule, monitor)? {
            match self.begin_rounds(disks, limit_bytes, monitor, guardian) {
                Ok(rounds) => return Ok(PreparedDisks::Rounds(rounds)),
                Err(error) if schedule.is_some() => return Err(error),
                Err(_) => self.avoid_rounds(),
            }
        }
        let snapshots = self.begin_filters(disks, monitor, guardian)?;
        Ok(PreparedDisks::Filters(snapshots))
    }

    /// Whether rounds are to be tried: what was written since a checkpoint is known, and is little.
    fn suits_rounds(
        &mut self,
        disks: &[DiskDevice],
        schedule: Option<DiskSchedule>,
        monitor: &mut Monitor,
    ) -> Result<bool, MonitorError> {
        if let Some(schedule) = schedule {
            return Ok(schedule == DiskSchedule::Rounds);
        }
        let avoided = self.avoid_rounds > 0;
        self.avoid_rounds = self.avoid_rounds.saturating_sub(1);
        let bytes = disks.iter().map(|disk| disk.bytes).sum::<u64>();
        match &self.since {
            Some(since) if !avoided && bytes <= rounds::DISKS_BYTES_MAX => {
                Ok(monitor.written_bytes(&since.bitmaps)? <= rounds::WRITTEN_BYTES_MAX)
            }
            _ => Ok(false),
        }
    }

    /// Rounds were of no use: the next checkpoints are taken with filters, if the choice is ours.
    pub fn avoid_rounds(&mut self) {
        self.avoid_rounds = AVOIDED;
    }

    fn begin_rounds(
        &mut self,
        disks: &[DiskDevice],
        limit_bytes: u64,
        monitor: &mut Monitor,
        guardian: &Guardian,
    ) -> Result<DiskRounds, DisksError> {
        let bitmaps = (0..rounds::ROUNDS_MAX).map(|_| {
            let number = getrandom::u64().map_err(DisksError::Random)?;
            Ok(DiskBitmap::since(disks, number))
        });
        let bitmaps = bitmaps.collect::<Result<Vec<_>, DisksError>>()?;
        let last = self.commands_to_end_rounds(&bitmaps);
        let announce = |mut commands: EndCommands| {
            commands.last.extend(last.iter().cloned());
            guardian.on_disconnect(OnDisconnect::EndSnapshots(commands))
        };
        self.next = Some(Recording {
            bitmaps: bitmaps[0].clone(),
            is_named: false,
        });
        self.in_rounds = true;
        let begun = DiskRounds::begin(bitmaps, disks, limit_bytes, monitor, &announce);
        let begun = begun.and_then(|mut rounds| {
            let since = self.since.as_ref().map(|since| &since.bitmaps[..]);
            rounds.first(since, monitor)?;
            Ok(rounds)
        });
        begun.inspect_err(|_| {
            // The error that led here is the one to report.
            let _ = self.settle(monitor, guardian, false);
        })
    }

    /// Further rounds, until little is left for the pause. To be called right before it.
    ///
    /// # Errors
    /// The guest writes too fast for rounds, or QEMU refuses one.
    pub fn approach(
        &mut self,
        prepared: &mut PreparedDisks,
        monitor: &mut Monitor,
    ) -> Result<(), DisksError> {
        let PreparedDisks::Rounds(rounds) = prepared else {
            return Ok(());
        };
        rounds.approach(monitor)?;
        if let Some(next) = &mut self.next {
            next.bitmaps = rounds.next().to_vec();
        }
        Ok(())
    }

    fn begin_filters(
        &mut self,
        disks: &[DiskDevice],
        monitor: &mut Monitor,
        guardian: &Guardian,
    ) -> Result<DiskSnapshots, DisksError> {
        let next = DiskBitmap::since(disks, getrandom::u64().map_err(DisksError::Random)?);
        let mut since = self.since_bitmaps().iter();
        let snapshots = next.iter().enumerate().map(|(number, next)| DiskSnapshot {
            number: SnapshotNumber(number),
            disk: next.disk.clone(),
            since: since.next().map(|since| since.name.clone()),
            next: next.name.clone(),
        });
        let snapshots: Vec<DiskSnapshot> = snapshots.collect();
        let announce = |snapshots: &[DiskSnapshot], serving| {
            let mut commands = EndCommands::of(snapshots, serving);
            commands.last.extend(self.commands_to_end(&next));
            guardian.on_disconnect(OnDisconnect::EndSnapshots(commands))
        };
        announce(&snapshots, false)?;
        monitor.add_bitmaps(&next)?;
        let begun = DiskSnapshots::begin(snapshots, monitor, &announce);
        self.next = Some(Recording {
            bitmaps: next,
            is_named: false,
        });
        self.in_rounds = false;
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
        let Some(mut next) = self.next.take() else {
            return Ok(());
        };
        let since = self.since.take();
        monitor.end_snapshots(true)?;
        next.is_named = stored;
        self.since = match (stored, since) {
            (true, _) => Some(next),
            (false, since) if self.in_rounds => since,
            (false, Some(since)) => {
                monitor.merge_bitmaps(&since.bitmaps, &next.bitmaps)?;
                Some(next)
            }
            (false, None) => None,
        };
        monitor.remove_bitmaps(self.since_bitmaps())?;
        let commands = match (self.keep, &self.since) {
            (false, Some(since)) => Monitor::commands_to_forget_disks(&since.bitmaps, &[]),
            (true, _) | (false, None) => Vec::new(),
        };
        // That it does not answer shows before the next pause.
        let _ = guardian.on_disconnect(match commands.is_empty() {
            true => OnDisconnect::Nothing,
            false => OnDisconnect::EndSnapshots(EndCommands {
                last: commands,
                ..EndCommands::default()
            }),
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

    /// Takes all away, but for what the user wants to stay: the bitmaps of a durable checkpoint, or those that were there
    /// before if none was taken.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn end(&mut self, monitor: &mut Monitor, guardian: &Guardian) -> Result<(), MonitorError> {
        let settled = self.settle(monitor, guardian, false);
        match self.since.take() {
            Some(since) if self.keep && since.is_named => settled,
            Some(_) => settled.and(monitor.remove_bitmaps(&self.left)),
            None => settled,
        }
    }

    /// The commands for the bitmaps if the engine dies before the checkpoint is settled that `next` begins with.
    fn commands_to_end(&self, next: &[DiskBitmap]) -> Vec<(String, Value)> {
        let since = self.since_bitmaps();
        match &self.since {
            Some(Recording { is_named: true, .. }) if self.keep => {
                vec![Monitor::command_to_take_back(since, next)]
            }
            _ => Monitor::commands_to_forget_disks(next, since),
        }
    }

    /// The same where it is copied in rounds, with these bitmaps: those of `since` have recorded all along.
    fn commands_to_end_rounds(&self, rounds: &[Vec<DiskBitmap>]) -> Vec<(String, Value)> {
        match &self.since {
            Some(Recording { is_named: true, .. }) if self.keep => {
                Monitor::commands_to_forget(rounds.iter().flatten())
            }
            _ => {
                let all: Vec<DiskBitmap> = rounds.iter().flatten().cloned().collect();
                Monitor::commands_to_forget_disks(&all, self.since_bitmaps())
            }
        }
    }

    fn since_bitmaps(&self) -> &[DiskBitmap] {
        self.since.as_ref().map_or(&[], |since| &since.bitmaps)
    }
}

/// The last of these checkpoints that names some of the bitmaps: what it has of their disks, and the bitmaps.
fn named<'m, T: Ord>(
    left: &[DiskBitmap],
    checkpoints: impl Iterator<Item = (T, &'m [DiskTable])>,
) -> Option<(Vec<DiskTable>, Vec<DiskBitmap>)> {
    let found = checkpoints.filter_map(|(time, tables)| {
        let both = left.iter().filter_map(|bitmap| {
            let mut tables = tables.iter();
            let table = tables.find(|table| {
                table.bitmap.as_ref() == Some(&bitmap.name)
                    && table.table.name == bitmap.disk.device
                    && table.bytes == bitmap.disk.bytes
            })?;
            Some((table.clone(), bitmap.clone()))
        });
        let both: (Vec<DiskTable>, Vec<DiskBitmap>) = both.unzip();
        (!both.0.is_empty()).then_some((time, both))
    });
    let last = found.max_by(|(one, _), (other, _)| one.cmp(other));
    last.map(|(_, both)| both)
}

#[cfg(test)]
mod tests {
    use stillframe_page::hash::ContentId;
    use stillframe_repo::BlockTable;

    use super::*;

    fn bitmap(device: &str, name: &str) -> DiskBitmap {
        DiskBitmap {
            disk: DiskDevice {
                device: device.to_owned(),
                node: "n".to_owned(),
                path: "/d".to_owned(),
                bytes: 8192,
                is_incomplete: false,
            },
            name: name.to_owned(),
        }
    }

    fn table(device: &str, bitmap: &str, bytes: u64) -> DiskTable {
        DiskTable {
            bytes,
            bitmap: (!bitmap.is_empty()).then(|| bitmap.to_owned()),
            table: BlockTable {
                name: device.to_owned(),
                page_bytes: 4096,
                pages: bytes / 4096,
                root: ContentId([0; 32]),
                layers: Vec::new(),
            },
        }
    }

    #[test]
    fn the_last_checkpoint_that_names_a_bitmap_is_gone_on_from() {
        let left = [bitmap("a", "s-1"), bitmap("b", "s-2")];
        let of = |checkpoints: &[(u8, Vec<DiskTable>)]| {
            let checkpoints = checkpoints.iter();
            let found = named(
                &left,
                checkpoints.map(|(time, tables)| (*time, &tables[..])),
            );
            found.map(|(tables, bitmaps)| {
                let names = bitmaps.into_iter().map(|bitmap| bitmap.name);
                let bytes = tables.iter().map(|table| table.bytes).sum::<u64>();
                (names.collect::<Vec<_>>(), bytes)
            })
        };
        let both = vec![table("a", "s-1", 8192), table("b", "s-2", 8192)];
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(
            of(&[(1, both.clone()), (2, vec![table("a", "", 8192)])]),
            Some((names(&["s-1", "s-2"]), 16384))
        );
        // Later ones first, whatever their order.
        let one = vec![table("b", "s-2", 8192)];
        assert_eq!(
            of(&[(9, one.clone()), (8, both.clone())]),
            Some((names(&["s-2"]), 8192))
        );
        // Of another disk, of another length, by another name.
        for other in [
            vec![table("a", "s-2", 8192), table("b", "s-1", 8192)],
            vec![table("a", "s-1", 4096)],
            vec![table("a", "s-3", 8192)],
            Vec::new(),
        ] {
            assert_eq!(of(&[(1, other)]), None);
        }
        assert!(named(&[], [(1, &both[..])].into_iter()).is_none());
    }
}
