//! A VM that arrives: a new QEMU takes its memory, and then its devices.

use std::sync::Arc;
use std::time::Duration;

use stillframe_fault::{self as fault, Point};
use stillframe_link::Stream;
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::hash::ContentId;
use stillframe_qemu::device_state;
use stillframe_qemu::launch::{self, ArmedLoad, Launched};
use stillframe_qemu::monitor::RamBlock;
use stillframe_repo::PageMap;

use super::announced::{
    Greeting, Rest, State, complete, more_state, rest, said_meanwhile, same_machine, state,
};
use super::cut::Comes;
use super::disks::CONNECTIONS_A_DISK;
use super::disks::exports::Exports;
use super::error::ReceiveError;
use super::filling::{self, LateMemory, Missing};
use super::image_files::ImageFiles;
use super::incoming::Early;
use super::lacking::{Lacking, take_ids};
use super::new_qemu::{NewProcess, starting};
use super::receiver::{ReceiveEvent, ReceiveOptions, ReceiveSink};
use super::record::DestinationRecord;
use super::seed::{Seed, read as read_base};
use super::{DEMAND_LANES, Listen, Mode, ReceiveReport, Wire, cut, incoming};
use crate::connection::ConnectionError;
use crate::connection::message::{Control, Message, STATE_BYTES_MAX};
use crate::disks::images::NewImages;
use crate::guardian::Guardian;
use crate::memory::block::Block;
use crate::populate::eager;
use crate::populate::streamed::StreamedMemory;
use crate::restore::LOAD_LIMIT;
use crate::sink::connection::transfer_hasher;
use crate::source::TakeMany;
use crate::source::connection::FetchSession;
use crate::verify::Image;

/// A VM that is complete, and paused.
pub(super) struct Loaded {
    pub launched: Launched,
    pub guardian: Guardian,
    pub record: DestinationRecord,
    pub report: ReceiveReport,
    pub images: NewImages,
    /// Closed when the VM runs.
    pub lanes: Arc<FetchSession<Stream>>,
}

/// A QEMU whose memory is here, or known to be lacking.
pub(super) struct Arriving<'s> {
    pub greeting: Greeting,
    pub launched: Launched,
    armed: ArmedLoad,
    pub guardian: Guardian,
    record: DestinationRecord,
    blocks: Vec<Block>,
    ram: Vec<RamBlock>,
    /// What comes after the pages, if it has come.
    state: Option<State>,
    /// The pages that are here when the VM is stopped at the source, if others come later.
    present: Option<Vec<DirtyBitmap>>,
    /// Lanes are closed when the VM runs: it takes time.
    session: Arc<FetchSession<Stream>>,
    lacking: Option<(Lacking, Missing)>,
    /// A checkpoint whose pages are in memory, or will be when they are needed.
    seed: Option<&'s Seed<'s>>,
    /// The second of these.
    based: bool,
    /// Those of the checkpoint, when the pages that were sent are here.
    maps: Vec<PageMap<'s>>,
    /// Memory has content of which the source knows.
    is_seeded: bool,
    /// What is missing causes faults.
    armed_for_faults: bool,
    /// Why the VM cannot run here before all its memory is here, if it cannot.
    no_post_copy: Option<String>,
    /// Where disks are copied to, while they are.
    exports: Option<Exports>,
    report: ReceiveReport,
    /// Files that the source has, too.
    shared: ImageFiles,
    // Removed when QEMU has ended.
    images: NewImages,
}

impl<'s> Arriving<'s> {
    /// Starts QEMU, and receives memory.
    pub fn begin(
        wire: &mut Wire,
        listen: Listen<'_>,
        options: &ReceiveOptions,
        (greeting, seed, shared): (Greeting, Option<&'s Seed<'s>>, ImageFiles),
        events: ReceiveSink<'_>,
    ) -> Result<Arriving<'s>, ReceiveError> {
        let guardian = Guardian::start()?;
        let Greeting { vm, copied, .. } = &greeting;
        let images = options
            .qemu
            .make_images(vm, copied, options.overwrite_disks)?;
        let starting = starting(&options.qemu, (vm, greeting.mode), copied, &guardian)?;
        // Pages come while QEMU starts.
        let wires = incoming::accept(listen, &greeting.session, 0..greeting.connections)?;
        let early = Early::start(wires)?;
        let here = (greeting, guardian, images, shared);
        let mut arriving = Arriving::started(wire, options, starting, here, seed, events)?;
        let early = arriving.say_accepted(wire).map(|()| early);
        arriving.copy_disks(wire, listen)?;
        match arriving.greeting.mode {
            Mode::StopCopy => {
                arriving.lanes(listen, 0)?;
                arriving.fetch(wire, events)?;
            }
            _ => arriving.take_all(wire, early, (listen, options.patience), events)?,
        }
        Ok(arriving)
    }

    /// Receives pages; after a cut, those that are not here yet, from a source that comes back in time.
    fn take_all(
        &mut self,
        wire: &mut Wire,
        mut early: Result<Early, ReceiveError>,
        (listen, patience): (Listen<'_>, Duration),
        events: ReceiveSink<'_>,
    ) -> Result<(), ReceiveError> {
        loop {
            let taken = early.and_then(|early| self.take(wire, early, listen));
            let error = match taken {
                Err(error) if error.is_cut() && self.may_be_sent_again() => error,
                other => return other,
            };
            events(ReceiveEvent::Cut(&error));
            (*wire, self.greeting) = match cut::await_again(listen, &self.greeting, patience) {
                Comes::Source(source) => *source,
                Comes::Over(said) => return Err(said.into()),
                Comes::Nothing => return Err(error),
            };
            early = self.begin_again(wire, listen);
        }
    }

    /// Takes the same VM once more, and says what is here.
    fn begin_again(&mut self, wire: &mut Wire, listen: Listen<'_>) -> Result<Early, ReceiveError> {
        let base = self.seed.filter(|seed| seed.base.is_some());
        let (seeded, based) = (base.is_none(), base.is_some());
        let images = self.shared.there();
        wire.send_control(&Control::Begun {
            seeded,
            based,
            images,
        })?;
        let numbers = 0..self.greeting.connections;
        let early = Early::start(incoming::accept(listen, &self.greeting.session, numbers)?)?;
        if seeded {
            cut::say_what_is_here(&self.launched.process, &self.blocks, wire)?;
        }
        if let Some(base) = base.filter(|_| !self.based) {
            // What is there may be newer than what the source sends changes of.
            let process = &self.launched.process;
            base.plant(process, &self.blocks, wire, &mut |_| ())?;
        }
        self.is_seeded = true;
        self.say_accepted(wire)?;
        Ok(early)
    }

    /// QEMU waits for memory.
    fn say_accepted(&self, wire: &mut Wire) -> Result<(), ReceiveError> {
        let no_post_copy = self.no_post_copy.clone();
        Ok(wire.send_control(&Control::Accepted { no_post_copy })?)
    }

    /// Whether memory is as it was sent, and may be written.
    fn may_be_sent_again(&self) -> bool {
        let Greeting { mode, copied, .. } = &self.greeting;
        let streamed = matches!(mode, Mode::PreCopy | Mode::Hybrid);
        streamed && copied.is_empty() && !self.armed_for_faults
    }

    /// Waits for QEMU, which waits for its state then, and says so.
    fn started(
        wire: &mut Wire,
        options: &ReceiveOptions,
        starting: NewProcess<'_>,
        (greeting, guardian, images, shared): (Greeting, Guardian, NewImages, ImageFiles),
        seed: Option<&'s Seed<'s>>,
        events: ReceiveSink<'_>,
    ) -> Result<Arriving<'s>, ReceiveError> {
        let Greeting { vm, copied, .. } = &greeting;
        let rehearsed = options.rehearsed.as_ref();
        let (mut launched, changes) = starting.wait((vm, greeting.mode), rehearsed, &guardian)?;
        let exports = match (greeting.mode, copied.is_empty()) {
            (Mode::Rehearsal, _) | (_, true) => None,
            (_, false) => Some(Exports::start(&mut launched.monitor, vm, copied)?),
        };
        let ram = launched.monitor.ram_blocks()?;
        let blocks = eager::open_blocks(&launched.process, &ram, &greeting.blocks)?;
        let (qmp, process) = (options.qemu.qmp(), &launched.process);
        let record = DestinationRecord::new(qmp, process, &greeting.session, &vm.label)?;
        let has_base = seed.is_some_and(|seed| seed.base.is_some());
        let no_post_copy = match greeting.mode {
            Mode::StopCopy => None,
            _ if greeting.lanes == 0 && !has_base => None,
            _ => filling::why_not(process, &guardian, (&blocks, &ram)),
        };
        let armed = launch::arm(&mut launched)?;
        let based = has_base && no_post_copy.is_none();
        if let Some(seed) = seed.filter(|_| !based) {
            let progress = &mut |progress| events(ReceiveEvent::Progress(progress));
            seed.plant(&launched.process, &blocks, wire, progress)?;
        }
        let report = ReceiveReport {
            vm: vm.label.clone(),
            pid: launched.process.pid(),
            qmp: options.qemu.qmp().to_owned(),
            running: false,
            pages: 0,
            changes,
            verify: None,
        };
        Ok(Arriving {
            session: Arc::new(FetchSession::new(&greeting.blocks)),
            greeting,
            launched,
            armed,
            guardian,
            record,
            blocks,
            ram,
            state: None,
            present: None,
            lacking: None,
            is_seeded: seed.is_some(),
            armed_for_faults: false,
            no_post_copy,
            seed,
            based,
            maps: Vec::new(),
            exports,
            report,
            shared,
            images,
        })
    }

    /// Has the disks copied, but for what the guest still writes.
    fn copy_disks(&mut self, wire: &mut Wire, listen: Listen<'_>) -> Result<(), ReceiveError> {
        let Some(exports) = &mut self.exports else {
            return Ok(());
        };
        let first = self.greeting.connections + self.greeting.lanes;
        let numbers = first..first + self.greeting.copied.len() * CONNECTIONS_A_DISK;
        let wires = incoming::accept(listen, &self.greeting.session, numbers)?;
        exports.connect(wires)?;
        loop {
            match wire.receive_message()? {
                Message::Control(Control::Alive) => {}
                Message::Control(Control::Copied) => return Ok(()),
                other => return Err(other.unexpected().into()),
            }
        }
    }

    /// Waits for the connections over which pages are fetched, the first `demand` of them for demand faults.
    fn lanes(&self, listen: Listen<'_>, demand: usize) -> Result<(), ReceiveError> {
        let first = self.greeting.connections;
        let numbers = first..first + self.greeting.lanes;
        let wires = incoming::accept(listen, &self.greeting.session, numbers)?;
        Ok(filling::add_lanes(&self.session, wires, demand)?)
    }

    /// Receives pages, and then hears which it lacks, if any are to come later.
    fn take(
        &mut self,
        wire: &mut Wire,
        early: Early,
        listen: Listen<'_>,
    ) -> Result<(), ReceiveError> {
        let (process, blocks) = (&self.launched.process, &self.blocks);
        let base = self.seed.filter(|seed| seed.base.is_some());
        let maps = base.map(|seed| seed.maps(blocks)).transpose()?;
        let maps = maps.unwrap_or_default();
        let read =
            |block: usize, pages, take: TakeMany<'_, _>| read_base(&maps[block], pages, take);
        let memory = match (base, self.is_seeded) {
            (Some(_), _) => StreamedMemory::seeded(blocks, &self.greeting.blocks).with_base(&read),
            (None, true) => StreamedMemory::seeded(blocks, &self.greeting.blocks),
            (None, false) => StreamedMemory::new(process, blocks, &self.greeting.blocks)?,
        };
        let into = (&memory, &self.shared);
        let sent = incoming::pages(early.stop(), into, || rest(wire, blocks))?;
        let received = memory.finish(sent.pages)?;
        self.report.pages = received.iter().map(DirtyBitmap::count).sum();
        let qemu = (&self.guardian, process);
        self.state = match sent.rest {
            Rest::State(state) if self.based => {
                let lacking = Lacking::except(received);
                self.armed_for_faults = true;
                let fill_bitmap = self.record.create_fill_bitmap()?;
                let missing = Missing::arm(qemu, blocks, &lacking, fill_bitmap)?;
                self.guardian
                    .watch(self.launched.monitor.client().socket())?;
                self.lacking = Some((lacking, missing));
                Some(state)
            }
            Rest::State(state) => Some(state),
            Rest::PagesLater { some_sent } => {
                self.lanes(listen, DEMAND_LANES)?;
                let mut lacking = match self.based {
                    true => Lacking::except(received),
                    false => Lacking::new(process, blocks)?,
                };
                if !some_sent {
                    lacking.discard_all(blocks, qemu)?;
                }
                self.armed_for_faults = true;
                let fill_bitmap = self.record.create_fill_bitmap()?;
                let missing = Missing::arm(qemu, blocks, &lacking, fill_bitmap)?;
                self.guardian
                    .watch(self.launched.monitor.client().socket())?;
                lacking.hear(wire, blocks, qemu)?;
                self.lacking = Some((lacking, missing));
                None
            }
        };
        self.maps = maps;
        Ok(())
    }

    /// Fetches all pages of a VM that is stopped at the source.
    fn fetch(&mut self, wire: &mut Wire, events: ReceiveSink<'_>) -> Result<(), ReceiveError> {
        let (process, blocks) = (&self.launched.process, &self.blocks);
        let mut content: Vec<DirtyBitmap> = Vec::new();
        content.extend(blocks.iter().map(|block| DirtyBitmap::new(block.pages())));
        loop {
            match wire.receive_message()? {
                Message::Control(Control::Content { block, ranges }) if block < blocks.len() => {
                    for (first, end) in ranges {
                        content[block].set_range(first..end);
                    }
                }
                Message::Control(Control::Content { .. }) => break,
                other => return Err(other.unexpected().into()),
            }
        }
        let numbered = content.into_iter().enumerate();
        let source = |(block, content)| self.session.source(block, content, Vec::new());
        let sources = numbered.map(source).collect();
        let every: Vec<&Block> = blocks.iter().collect();
        let progress = &mut |progress| events(ReceiveEvent::Progress(progress));
        self.report.pages = eager::populate(process, &every, sources, progress)?;
        wire.send_control(&Control::Fetched)?;
        let next = wire.receive_message()?;
        self.state = Some(state(wire, blocks, next)?);
        Ok(())
    }

    /// What is to be populated when the VM runs. From here on its pages are missing.
    pub fn late_memory(&mut self) -> Result<Option<LateMemory<'s>>, ReceiveError> {
        let Some((lacking, missing)) = self.lacking.take() else {
            return Ok(None);
        };
        self.present = Some(lacking.present.clone());
        let base = self.seed.filter(|_| self.based);
        let late = LateMemory::new(
            missing,
            &self.blocks,
            Arc::clone(&self.session),
            lacking,
            base.map(|seed| (seed, std::mem::take(&mut self.maps))),
        )?;
        let record = late.record(self.ram.clone(), self.greeting.blocks.clone());
        self.record.expect_to_lack(record);
        Ok(Some(late))
    }

    /// Compares memory with the source's, if it has sent ids: what of it is here; the rest when it comes.
    fn compare(&mut self, mut ids: Vec<Option<ContentId>>) -> Result<(), ReceiveError> {
        if ids.is_empty() {
            return Ok(());
        }
        let image = match &self.present {
            None => Image::take(self.blocks.iter(), &transfer_hasher())?,
            Some(present) => {
                let here = take_ids(present, &mut ids);
                self.session.expect(here.all);
                Image::of(self.blocks.iter().zip(here.present), &transfer_hasher())?
            }
        };
        let report = image.compare_ids(&ids);
        if report.differing > 0 {
            return Err(ReceiveError::Differs {
                differing: report.differing,
                first: report.first.join(", "),
            });
        }
        self.report.verify = Some(report);
        Ok(())
    }

    /// Loads the device state while it comes: QEMU here reads what QEMU there is still saving. The VM is complete then, but
    /// for what it lacks.
    pub fn load(mut self, wire: &mut Wire, paused: bool) -> Result<Loaded, ReceiveError> {
        let State { ids, first } = match self.state.take() {
            Some(state) => state,
            None => {
                let next = wire.receive_message()?;
                state(wire, &self.blocks, next)?
            }
        };
        self.compare(ids)?;
        let machine = &self.greeting.vm.identity.machine;
        let begin = device_state::begin(&first, machine)?;
        self.armed.write(&mut self.launched, &begin, LOAD_LIMIT)?;
        fault::at(Point::ArrivingLoading).map_err(ConnectionError::Socket)?;
        let mut bytes = first.len();
        while let Some(piece) = more_state(wire)? {
            bytes += piece.len();
            if bytes > STATE_BYTES_MAX {
                let what = "a device state that is too long".to_owned();
                return Err(ConnectionError::Malformed { what }.into());
            }
            self.armed.write(&mut self.launched, &piece, LOAD_LIMIT)?;
        }
        let end = device_state::DESCRIPTION;
        self.armed.write(&mut self.launched, end, LOAD_LIMIT)?;
        let loaded = self.armed.finish(&mut self.launched, LOAD_LIMIT);
        loaded.map_err(|error| said_meanwhile(wire).unwrap_or(error.into()))?;
        let vm = complete(wire)?;
        if !same_machine(&self.greeting.vm, &vm) {
            return Err(ReceiveError::Changed);
        }
        if let Some(exports) = self.exports {
            exports.stop(&mut self.launched.monitor)?;
        }
        let runs = !paused && (vm.was_running || vm.was_suspended);
        self.record.expect_to_run(runs);
        self.report.vm = vm.label;
        Ok(Loaded {
            launched: self.launched,
            guardian: self.guardian,
            record: self.record,
            report: self.report,
            images: self.images,
            lanes: self.session,
        })
    }
}
