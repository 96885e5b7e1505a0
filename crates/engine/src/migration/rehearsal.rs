//! A migration that is tried out while the VM runs on: what would fail at the hand-over fails here.
//!
//! It is post-copy of a VM that is resumed. The destination starts its QEMU as it will later, loads an early device state,
//! fetches the few pages that loading touches, and ends the QEMU again. Until it has loaded, the VM stays stopped, because
//! devices compare their state with what lies in memory: a queue that has gone on since would look broken.

use std::time::Duration;

use stillframe_qemu::record::VmRecord;

use super::disks;
use super::error::MigrateError;
use super::serving::Serving;
use super::source::give_up;
use super::stopped::SAVE_LIMIT;
use super::{DEMAND_LANES, MigrateOptions, Mode, Reconnect, Wire, sending};
use crate::attach::Vm;
use crate::capture::device_state::StateStream;
use crate::capture::paused_vm::PausedVm;
use crate::connection::message::Control;
use crate::connection::word::Session;
use crate::memory::block::Guest;

/// The VM is stopped for the destination to load its device state for no longer than this. A destination that takes longer
/// would do so in the hand-over, too.
const HELD_MAX: Duration = Duration::from_secs(1);

impl Vm {
    /// Rehearses a migration over a connection on which nothing was sent yet. The VM is stopped for about as long
    /// as in the hand-over.
    ///
    /// # Errors
    /// The migration would fail, or cannot be rehearsed. The VM runs on here.
    pub fn rehearse(
        &mut self,
        mut wire: Wire,
        reconnect: Reconnect<'_>,
        options: &MigrateOptions,
    ) -> Result<(), MigrateError> {
        let rehearsed = self.try_out(&mut wire, reconnect, options);
        rehearsed.inspect_err(|error| give_up(&mut wire, error))
    }

    fn try_out(
        &mut self,
        wire: &mut Wire,
        reconnect: Reconnect<'_>,
        options: &MigrateOptions,
    ) -> Result<(), MigrateError> {
        let session = Session::random().map_err(MigrateError::Random)?;
        let vm = self.record()?;
        let copied = disks::chosen(&vm.disks, &options.copy_disks)?;
        wire.send_control(&Control::Hello {
            session: session.clone(),
            mode: Mode::Rehearsal,
            connections: 0,
            lanes: DEMAND_LANES,
            copied,
            base: None,
            images: Vec::new(),
            vm: Box::new(vm.clone()),
            blocks: self.tracker.shape(),
        })?;
        wire.expect(|control| matches!(control, Control::Begun { .. }))?;
        if let Some(why) = sending::answer(wire)? {
            return Err(MigrateError::NoRehearsal { why });
        }
        wire.send_control(&Control::PagesLater { some_sent: false })?;
        let blocks = self.tracker.peek().blocks().to_vec();
        let mut serving = Serving::new(&session, blocks, DEMAND_LANES, options.compression);
        serving.open(0, reconnect)?;
        // Any page may have content when the VM is stopped; one that is taken for zero would make a queue look broken.
        let shape = self.tracker.shape();
        let all = shape.iter().map(|block| vec![0..block.pages; 1]);
        wire.send_content(&all.collect())?;
        wire.send_control(&Control::Last)?;
        // They may be read after the VM is resumed.
        serving.begin(Guest::Running);
        let in_time = self.load_there(wire, vm, options.pause_limit)?;
        let fetched = wire.expect(|control| matches!(control, Control::Fetched));
        if let (Err(error), false) = (&fetched, in_time) {
            let why = crate::in_words(error);
            return Err(MigrateError::RehearsedLate { why });
        }
        fetched?;
        Ok(wire.expect(|control| matches!(control, Control::Rehearsed))?)
    }

    /// Has the destination load the device state, while the VM is stopped. Whether it took no longer than that.
    fn load_there(
        &mut self,
        wire: &mut Wire,
        vm: VmRecord,
        pause_limit: Duration,
    ) -> Result<bool, MigrateError> {
        let run_state = self.fit_for_a_pause()?;
        let runs = run_state.running || run_state.is_suspended();
        let stream = StateStream::lent(
            &mut self.state,
            &mut self.monitor,
            &self.target.process,
            &self.guardian,
        )?;
        let mut paused = PausedVm::stop(&mut self.monitor, &self.guardian, pause_limit, runs)?;
        let device_state = stream.save(paused.monitor(), SAVE_LIMIT)?;
        wire.send_device_state(&device_state)?;
        wire.send_control(&Control::Complete { vm: Box::new(vm) })?;
        let in_time = wire.has_input(HELD_MAX);
        match runs {
            true => paused.resume()?,
            false => paused.keep_paused()?,
        }
        Ok(in_time || !runs)
    }
}
