//! The source: the VM runs here until the destination has all of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stillframe_page::encoding::Compression;
use stillframe_qemu::monitor::{Disk, Monitor, MonitorError, image_of};
use stillframe_qemu::record::VmRecord;
use stillframe_repo::CheckpointId;

use super::commit::{CommitError, Undecided};
use super::cut;
use super::disks::mirrors::{self, Copied, Mirrors};
use super::disks::{self, CopyDisks};
use super::error::MigrateError;
use super::handover::Source;
use super::later;
use super::outgoing::Outgoing;
use super::page_sender::Common;
use super::pages::{SentPages, There};
use super::record::{Served, SourceRecord};
use super::rounds::Rounds;
use super::seed::Seeds;
use super::sending::{Sending, explained};
use super::serving::Serving;
use super::stopped::AllElse;
use super::{
    ANSWER_LIMIT, BEAT, CompressionChoice, END_LIMIT, MigrateEvent, MigrateOptions, MigrateReport,
    MigrateSink, MigratedPages, Mode, Reconnect, SkipFake, Wire,
};
use crate::attach::Vm;
use crate::capture::device_state::StateStream;
use crate::capture::downtime::us;
use crate::capture::paused_vm::PausedVm;
use crate::connection::message::Control;
use crate::connection::word::{Session, Word};
use crate::guardian::{Guardian, OnDisconnect};
use crate::inhibitor::{Prepared, Purpose};
use crate::memory::block::Guest;
use crate::placement;
use crate::streaming::Streaming;
use crate::tracking::rewritten::{Rewritten, THREAD_DELAY};
use crate::tracking::tracker::{Collected, Tracker};

/// Time for the destination to end its QEMU, and to close the connection.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// The least time that is waited.
const BRIEFLY: Duration = Duration::from_millis(1);

/// A VM that is stopped, and of which all was sent.
struct Complete<'v> {
    vm: PausedVm<'v>,
    record: SourceRecord,
    sent: MigratedPages,
    /// Over the connections for pages.
    bytes: u64,
    /// Over those for disks.
    disk_bytes: u64,
    compression: Option<Compression>,
    rounds: u32,
    mode: Mode,
    base: Option<CheckpointId>,
    serving: Option<Serving>,
    stopped: Instant,
    /// Freeing what it knows of the pages takes as long as the rest of the pause, and closing lanes takes time, too.
    _later: Channels,
}

/// The connections besides the first one.
#[derive(Default)]
struct Channels {
    /// For pages that are sent.
    outgoing: Option<Outgoing>,
    /// For pages that are fetched.
    serving: Option<Serving>,
    /// For disks.
    mirrors: Option<Mirrors>,
}

impl Vm {
    /// Migrates the VM over a connection on which nothing was sent yet, and ends this QEMU. `reconnect` makes a new
    /// connection where that one is lost after the VM was given up. After an error the reason is sent to the
    /// destination, where that is possible, and the destination ends the QEMU that it has started.
    ///
    /// # Errors
    /// The VM runs on here, unless the error says otherwise.
    pub fn migrate(
        &mut self,
        wire: Wire,
        reconnect: Reconnect<'_>,
        options: &MigrateOptions,
        events: MigrateSink<'_>,
    ) -> Result<MigrateReport, MigrateError> {
        let moved = self.hand_over(wire, reconnect, options, events);
        if moved.is_err() {
            self.end_copies(options, events);
        } else {
            // QEMU has answered `quit`. A new QEMU with the same sockets must not meet it.
            self.target.process.wait_exit(END_LIMIT);
        }
        moved
    }

    fn hand_over(
        &mut self,
        mut wire: Wire,
        reconnect: Reconnect<'_>,
        options: &MigrateOptions,
        events: MigrateSink<'_>,
    ) -> Result<MigrateReport, MigrateError> {
        let begin = Instant::now();
        self.tracker.forget_free();
        let session = Session::random().map_err(MigrateError::Random)?;
        let vm = self.record()?;
        let label = vm.label.clone();
        let run_state = self.monitor.run_state()?;
        let runs = run_state.running || run_state.is_suspended();
        let sending = || Sending::new(&session, options, runs);
        let sent = self.send(vm, &sending, &mut wire, reconnect, events);
        let complete = sent.inspect_err(|error| give_up(&mut wire, error))?;
        let named = (complete.record, session.clone());
        let before = wire.bytes_sent();
        let undecided = Undecided::ready(complete.vm, named, wire, reconnect, options.patience);
        let undecided = undecided.with_lanes(complete.serving);
        let moved = undecided.decide(Source::Keeping)?;
        let (fetched, of_them) = moved.fetched;
        let on_wire = moved.wire.map_or(before, |wire| wire.bytes_sent());
        let downtime = moved.runs_since.duration_since(complete.stopped);
        Ok(MigrateReport {
            vm: label,
            mode: complete.mode,
            rounds: complete.rounds,
            pages: complete.sent,
            fetched,
            base: complete.base,
            disk_bytes: complete.disk_bytes,
            compression: complete.compression.map(CompressionChoice::Always),
            bytes_sent: complete.bytes + complete.disk_bytes + of_them + on_wire,
            downtime_us: match runs {
                true => downtime.as_micros() as u64,
                false => 0,
            },
            total_us: us(begin),
        })
    }

    /// Sends all of the VM, which is stopped then. While it runs, a connection that is lost is made anew.
    fn send<'s>(
        &mut self,
        vm: VmRecord,
        sending: &dyn Fn() -> Sending<'s>,
        wire: &mut Wire,
        reconnect: Reconnect<'_>,
        events: MigrateSink<'_>,
    ) -> Result<Complete<'_>, MigrateError> {
        if !vm.disks.is_empty() {
            self.monitor.expect_deactivation()?;
        }
        mirrors::remove_leftovers(&mut self.monitor)?;
        let (sending, channels) = loop {
            let mut sending = sending();
            let sent = self.send_while_it_runs(&vm, &mut sending, wire, reconnect, events);
            let error = match sent {
                Ok(channels) => break (sending, channels),
                Err(error) if error.is_cut() && sending.may_begin_again() => error,
                Err(error) => return Err(error),
            };
            // What has arrived is not known.
            self.tracker.rolled_back();
            events(MigrateEvent::Cut);
            let patience = sending.options.patience;
            if let Err(unreachable) = cut::connect_again(wire, reconnect, patience) {
                if unreachable.refused {
                    cut::say_over(sending.session, unreachable.why, reconnect);
                }
                return Err(error);
            }
        };
        self.send_stopped(vm, sending, wire, channels, events)
    }

    /// Sends what is sent while the VM runs.
    fn send_while_it_runs(
        &mut self,
        vm: &VmRecord,
        sending: &mut Sending<'_>,
        wire: &mut Wire,
        reconnect: Reconnect<'_>,
        events: MigrateSink<'_>,
    ) -> Result<Channels, MigrateError> {
        let copied = disks::chosen(&vm.disks, &sending.options.copy_disks)?;
        let first_of_disks = sending.connections() + sending.lanes();
        let images = sending.shared_images(events)?;
        wire.send_control(&Control::Hello {
            session: sending.session.clone(),
            mode: sending.mode,
            connections: sending.connections(),
            lanes: sending.lanes(),
            copied: copied.clone(),
            base: sending.base().cloned(),
            images: images.named(),
            vm: Box::new(vm.clone()),
            blocks: self.tracker.shape(),
        })?;
        let seeded = sending.begun(wire)?;
        if sending.based {
            events(MigrateEvent::Increment);
        }
        for image in images.lacking(&sending.images_there) {
            events(MigrateEvent::NoImage(image.to_owned()));
        }
        let mut channels = Channels::default();
        if sending.connections() > 0 {
            let opened = self.open(sending, reconnect);
            channels.outgoing = Some(opened.map_err(|error| explained(wire, error))?);
        }
        if seeded {
            let seeds = Seeds::receive(wire, &self.tracker.shape());
            let seeds = seeds.map_err(|error| explained(wire, error))?;
            sending.seeds.get_or_init(|| seeds);
        }
        let processors = placement::processors(&self.target.process);
        sending.read_images(&images, wire, &processors)?;
        let image = |device: &String| image_of(&vm.disks, device);
        let disks: Vec<&Disk> = copied.iter().filter_map(image).collect();
        if !disks.is_empty() {
            let disks = (&*disks, first_of_disks);
            let started = self.copy_disks(sending, disks, wire, reconnect, events);
            channels.mirrors = Some(started.map_err(|error| explained(wire, error))?);
        }
        let mut left = None;
        if let Some(outgoing) = &mut channels.outgoing {
            let sent = self.pre_copy(sending, (wire, outgoing), events);
            left = sent.map_err(|error| explained(wire, error))?;
        }
        sending.accepted(wire)?;
        if sending.later || sending.mode == Mode::StopCopy {
            let serving = self.serving(sending, left, wire, reconnect, events)?;
            channels.serving = Some(serving);
        }
        if let Some(mirrors) = &channels.mirrors {
            let fine = mirrors.check(&mut self.monitor);
            fine.map_err(|error| explained(wire, error.into()))?;
        }
        Ok(channels)
    }

    /// Has pages fetched: all of a VM that is stopped, or those that are left.
    fn serving(
        &mut self,
        sending: &Sending<'_>,
        left: Option<Collected>,
        wire: &mut Wire,
        reconnect: Reconnect<'_>,
        events: MigrateSink<'_>,
    ) -> Result<Serving, MigrateError> {
        if !sending.later {
            return self.lanes(sending, reconnect);
        }
        events(MigrateEvent::Later);
        let some_sent = left.is_some();
        wire.send_control(&Control::PagesLater { some_sent })?;
        let serving = self.lanes(sending, reconnect)?;
        later::announce(wire, self.pages(), left, sending.based)?;
        Ok(serving)
    }

    /// Starts to copy disks, and waits until only new writes of the guest are left.
    fn copy_disks(
        &mut self,
        sending: &mut Sending<'_>,
        (disks, first): (&[&Disk], usize),
        wire: &mut Wire,
        reconnect: Reconnect<'_>,
        events: MigrateSink<'_>,
    ) -> Result<Mirrors, MigrateError> {
        sending.accepted(wire)?;
        let qemu = (&mut self.monitor, &self.guardian);
        let named = (sending.session, first);
        let limiter = Arc::clone(&sending.limiter);
        let mut mirrors = Mirrors::start(qemu, disks, named, reconnect, &limiter)?;
        let mut beat = Instant::now();
        mirrors.catch_up(&mut self.monitor, |Copied { done, total }| {
            events(MigrateEvent::Disks { done, total });
            if beat.elapsed() >= BEAT {
                beat = Instant::now();
                wire.send_control(&Control::Alive)?;
            }
            Ok::<(), MigrateError>(())
        })?;
        wire.send_control(&Control::Copied)?;
        Ok(mirrors)
    }

    /// Removes what a migration that has failed has left of its copies of disks.
    fn end_copies(&mut self, options: &MigrateOptions, events: MigrateSink<'_>) {
        if options.copy_disks == CopyDisks::No {
            return;
        }
        // A QEMU that refuses it now may not do so when the next migration begins, which tries again.
        if let Err(error) = mirrors::remove_leftovers(&mut self.monitor) {
            events(MigrateEvent::CopyLeft(crate::in_words(&error)));
        }
        let _ = self.guardian.on_disconnect(OnDisconnect::Nothing);
    }

    /// Sends pages while the VM runs, to a destination whose QEMU is still starting at first. Returns what is left if it is
    /// to be fetched later.
    fn pre_copy(
        &mut self,
        sending: &mut Sending<'_>,
        (wire, outgoing): (&mut Wire, &mut Outgoing),
        events: MigrateSink<'_>,
    ) -> Result<Option<Collected>, MigrateError> {
        if sending.mode == Mode::Hybrid {
            // If it is not possible, the user learns it before pages are sent.
            sending.accepted(wire)?;
        }
        let rounds = &mut Rounds::new(sending.options, events);
        let ended = self.send_running((wire, outgoing), sending, rounds)?;
        (sending.rounds, sending.later) = (ended.rounds, ended.later);
        if !sending.later {
            return Ok(None);
        }
        outgoing.last(wire)?;
        sending.mode = Mode::Hybrid;
        Ok(Some(ended.left))
    }

    fn pages(&mut self) -> Streaming<'_> {
        Streaming {
            tracker: &mut self.tracker,
            monitor: &mut self.monitor,
            process: &self.target.process,
        }
    }

    /// Opens the lanes.
    fn lanes(
        &self,
        sending: &Sending<'_>,
        reconnect: Reconnect<'_>,
    ) -> Result<Serving, MigrateError> {
        let blocks = self.tracker.peek().blocks().to_vec();
        let mut serving = Serving::new(
            sending.session,
            blocks,
            sending.lanes(),
            sending.options.compression,
        );
        serving.open(sending.connections(), reconnect)?;
        Ok(serving)
    }

    /// Opens the connections for pages.
    fn open(
        &self,
        sending: &Sending<'_>,
        reconnect: Reconnect<'_>,
    ) -> Result<Outgoing, MigrateError> {
        let options = sending.options;
        let (shape, count) = (self.tracker.shape(), options.connections);
        let seed = getrandom::u64().map_err(MigrateError::Random)?;
        let cache_bytes = options.cache_bytes / count as u64;
        let base = sending.used_base().map(|last| &last.contents);
        let state = |_| {
            let there = There {
                seeds: Arc::clone(&sending.seeds),
                base: base.cloned().unwrap_or_default(),
                images: Arc::clone(&sending.images),
            };
            SentPages::new(&shape, cache_bytes, seed, options.page_ids, there)
        };
        let peek = self.tracker.peek();
        let common = Common {
            blocks: peek.blocks().to_vec(),
            rewritten: match options.skip_fake {
                SkipFake::Off => Ok(Rewritten::Unknown),
                SkipFake::Thread => Rewritten::by_thread(peek, Duration::ZERO),
                SkipFake::ThreadDelayed => Rewritten::by_thread(peek, THREAD_DELAY),
                SkipFake::Exact | SkipFake::Auto => Ok(Rewritten::Look(peek)),
            }
            .map_err(MigrateError::Thread)?,
            limiter: Arc::clone(&sending.limiter),
            processors: placement::processors(&self.target.process),
            compression: options.compression,
            round: Arc::default(),
        };
        let states = (0..count).map(state).collect();
        Outgoing::open(reconnect, sending.session, states, common)
    }

    /// Stops the VM, and sends the rest.
    fn send_stopped(
        &mut self,
        mut vm: VmRecord,
        mut sending: Sending<'_>,
        wire: &mut Wire,
        mut channels: Channels,
        events: MigrateSink<'_>,
    ) -> Result<Complete<'_>, MigrateError> {
        let record = SourceRecord::of(&self.target.process)?;
        let run_state = self.fit_for_a_pause()?;
        let runs = run_state.running || run_state.is_suspended();
        let options = sending.options;
        let Vm {
            monitor,
            guardian,
            tracker,
            state,
            target,
            devices,
            ..
        } = self;
        let stream = StateStream::lent(state, monitor, &target.process, guardian)?;
        let prepared =
            Prepared::new(monitor, Purpose::HandOver).map_err(CommitError::NotBlocked)?;
        let stopped = Instant::now();
        sending.limiter.lift();
        let limit = options.pause_limit;
        let mut paused = PausedVm::stop_prepared(monitor, guardian, limit, runs, Some(prepared))?;
        let earlier = paused.monitor().client().take_events();
        earlier.map_err(MonitorError::from)?;
        sending.rounds += 1;
        if let Some(serving) = &channels.serving {
            serving.begin(Guest::Stopped);
        }
        let parts = Streaming {
            tracker,
            monitor: paused.monitor(),
            process: &target.process,
        };
        let outgoing = channels.outgoing.as_mut();
        let all = AllElse::send(parts, stream, &sending, (&mut *wire, outgoing), events)?;
        let mirrors = channels.mirrors.take();
        let disk_bytes = give_up_disks(paused.monitor(), guardian, mirrors, &mut vm)?;
        (vm.was_running, vm.was_suspended) = (run_state.running, run_state.is_suspended());
        // The lanes of a VM that is complete are of no more use.
        let serving = channels.serving.take_if(|_| sending.later);
        let served = served(serving.as_ref(), tracker);
        record.prepare(sending.session, (&vm.label, runs), &vm.disks, served)?;
        wire.send_control(&Control::Complete { vm: Box::new(vm) })?;
        // The destination loads it meanwhile. It does not get the VM before this is found to be right.
        let sent = all.check(paused.monitor(), tracker, devices)?;
        if !options.verify {
            wire.limit_silence(ANSWER_LIMIT);
        }
        Ok(Complete {
            vm: paused,
            record,
            sent,
            bytes: channels.outgoing.as_ref().map_or(0, Outgoing::bytes),
            disk_bytes,
            compression: channels.outgoing.as_ref().and_then(Outgoing::compression),
            rounds: sending.rounds,
            mode: sending.mode,
            base: sending.used_base().map(|last| last.base.checkpoint),
            serving,
            stopped,
            _later: channels,
        })
    }
}

/// Tells the destination why there will be no VM, and waits until it has closed the connection. If it had said something that
/// was not read, to close it here would reset it, and these words would be lost (RFC 2525, 2.17).
pub(super) fn give_up(wire: &mut Wire, error: &MigrateError) {
    let (word, why) = (Word::Settled, Some(crate::in_words(error)));
    if wire.send_control(&Control::Word { word, why }).is_err() {
        // It cannot be informed any more, and sees that the connection ends.
        return;
    }
    let begin = Instant::now();
    while let Some(left) = CLOSE_LIMIT.checked_sub(begin.elapsed())
        && wire.has_input(left.max(BRIEFLY))
        && wire.receive_message().is_ok()
    {}
}

/// What a successor of this engine would have to serve.
fn served(serving: Option<&Serving>, tracker: &Tracker) -> Served {
    let served = serving.map(|serving| Served {
        lanes: serving.lanes(),
        blocks: tracker.shape(),
    });
    served.unwrap_or_default()
}

/// The disks may be opened by the destination from here on, and their copies are complete. Returns how many bytes were sent
/// for these.
fn give_up_disks(
    monitor: &mut Monitor,
    guardian: &Guardian,
    mirrors: Option<Mirrors>,
    vm: &mut VmRecord,
) -> Result<u64, MigrateError> {
    let copied = mirrors.map(|mirrors| mirrors.finish(monitor, guardian));
    let copied = copied.transpose()?.unwrap_or(0);
    if !vm.disks.is_empty() {
        monitor.deactivate_disks()?;
    }
    vm.look_at_disks_again();
    Ok(copied)
}
