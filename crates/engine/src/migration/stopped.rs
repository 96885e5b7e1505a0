//! What the source sends of a VM when it is stopped: the rest of its pages, or which they are, and the state of its devices.
//!
//! QEMU saves the devices while pages are looked for and sent, and their state is sent as it is saved: the destination loads
//! it meanwhile. QEMU reads commands a byte at a time (`monitor_can_read` in QEMU's monitor/monitor.c), some 6 us each. So
//! the questions whether the VM is still what was announced, 430 bytes, come while the destination is busy.

use std::time::Duration;

use stillframe_fault::{self as fault, Point};
use stillframe_link::Stream;
use stillframe_qemu::monitor::Monitor;
use stillframe_qemu::qmp::Ticket;

use super::error::MigrateError;
use super::outgoing::Outgoing;
use super::sending::Sending;
use super::{MigrateEvent, MigrateSink, MigratedPages, Wire, later};
use crate::capture::device_state::StateStream;
use crate::capture::devices::{Devices, Looking};
use crate::checkpoint::CheckpointError;
use crate::connection::ConnectionError;
use crate::connection::message::{Control, StateSender};
use crate::memory::block::Guest;
use crate::sink::connection::transfer_hasher;
use crate::streaming::Streaming;
use crate::tracking::tracker::Tracker;
use crate::verify::Image;

/// Time for QEMU to save its device state while it is stopped.
pub(super) const SAVE_LIMIT: Duration = Duration::from_secs(30);

/// What was sent, and is not yet known to be of the VM that was announced.
pub(super) struct AllElse {
    sent: MigratedPages,
    device_state: Vec<u8>,
}

impl AllElse {
    /// Sends it.
    ///
    /// # Errors
    /// A connection, QEMU or a read failed. QEMU waits for nothing.
    pub fn send(
        mut parts: Streaming<'_>,
        stream: &mut StateStream,
        sending: &Sending<'_>,
        (wire, outgoing): (&mut Wire, Option<&mut Outgoing>),
        events: MigrateSink<'_>,
    ) -> Result<AllElse, MigrateError> {
        // A QEMU whose state is longer than the pipe answers nothing until it is read: so not while all memory is sent.
        let at_once = sending.later || outgoing.is_some();
        let saving = at_once.then(|| stream.begin_save(parts.monitor));
        let saving = saving.transpose()?;
        let sent = send_rest(&mut parts, sending, (&mut *wire, outgoing), events);
        let (sent, saving) = match (sent, saving) {
            (Ok(sent), Some(saving)) => (sent, saving),
            (Ok(sent), None) => (sent, stream.begin_save(parts.monitor)?),
            (Err(error), saving) => {
                if let Some(saving) = saving {
                    stream.abandon(parts.monitor, saving, SAVE_LIMIT);
                }
                return Err(error);
            }
        };
        let verified = sending.options.verify.then_some(&*parts.tracker);
        let device_state = send_state(stream, (parts.monitor, saving), wire, verified)?;
        Ok(AllElse { sent, device_state })
    }

    /// Makes sure that it is all of the VM: no memory and no device came or went since the attach.
    ///
    /// # Errors
    /// It is not.
    pub fn check(
        self,
        monitor: &mut Monitor,
        tracker: &Tracker,
        devices: &mut Devices,
    ) -> Result<MigratedPages, MigrateError> {
        let ram = monitor.ask_ram_blocks()?;
        let looking = Looking::begin(monitor)?;
        if !tracker.tracks(&monitor.answered_ram_blocks(ram)?) {
            return Err(CheckpointError::RamChanged.into());
        }
        devices.check_later(monitor, looking, &self.device_state)?;
        Ok(self.sent)
    }
}

/// Sends the device state of a VM that is stopped as QEMU saves it; after the ids of all its pages, if they are to be
/// compared. Returns the state.
fn send_state(
    stream: &mut StateStream,
    (monitor, saving): (&mut Monitor, Ticket),
    wire: &mut Wire,
    compared: Option<&Tracker>,
) -> Result<Vec<u8>, MigrateError> {
    if let Some(tracker) = compared {
        let whole = &mut |_: &[u8]| Ok::<_, MigrateError>(());
        let state = stream.finish_save(monitor, saving, SAVE_LIMIT, whole)?;
        let blocks = tracker.blocks().iter().map(|tracked| &*tracked.block);
        let image = Image::take(blocks, &transfer_hasher())?;
        image.ids().try_for_each(|ids| wire.send_ids(ids))?;
        let mut sender = wire.device_state()?;
        send_piece(&mut sender, &state)?;
        sender.end()?;
        return Ok(state);
    }
    let mut sender = match wire.device_state() {
        Ok(sender) => sender,
        Err(error) => {
            stream.abandon(monitor, saving, SAVE_LIMIT);
            return Err(error.into());
        }
    };
    let take = &mut |piece: &[u8]| Ok::<_, MigrateError>(send_piece(&mut sender, piece)?);
    let state = stream.finish_save(monitor, saving, SAVE_LIMIT, take)?;
    sender.end()?;
    Ok(state)
}

fn send_piece(sender: &mut StateSender<'_, Stream>, piece: &[u8]) -> Result<(), ConnectionError> {
    sender.send(piece)?;
    fault::at(Point::StoppedSaving).map_err(ConnectionError::Socket)
}

/// Sends the remaining pages of a VM that is stopped, or which they are.
fn send_rest(
    parts: &mut Streaming<'_>,
    sending: &Sending<'_>,
    (wire, outgoing): (&mut Wire, Option<&mut Outgoing>),
    events: MigrateSink<'_>,
) -> Result<MigratedPages, MigrateError> {
    if sending.later {
        later::outdated(wire, &parts.rest()?)?;
        // The destination prepares for faults while the devices are saved.
        wire.send_control(&Control::Last)?;
        return Ok(outgoing.map_or_else(MigratedPages::default, |outgoing| outgoing.pages()));
    }
    let Some(outgoing) = outgoing else {
        let content = parts.tracker.populated()?.drained(parts.monitor)?;
        wire.send_content(&content.written)?;
        wire.expect(|control| matches!(control, Control::Fetched))?;
        return Ok(MigratedPages {
            sent: content.pages(),
            ..MigratedPages::default()
        });
    };
    let rest = parts.rest()?;
    let progress = &mut |progress| events(MigrateEvent::Progress(progress));
    outgoing.put(wire, &rest, Guest::Stopped, progress)?;
    outgoing.last(wire)?;
    Ok(outgoing.pages())
}
