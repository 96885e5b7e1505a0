//! The destination: a new QEMU that is ended if anything fails before the guest runs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::hash::ContentId;
use stillframe_qemu::device_state;
use stillframe_qemu::launch::{self, LaunchOptions, Launched};
use stillframe_qemu::monitor::Monitor;
use stillframe_qemu::record::VmRecord;

use super::error::ReceiveError;
use super::handover::{Destination, Event};
use super::record::{DestinationRecord, RecordError};
use super::takeover::{NewVm, Takeover, Whereabouts};
use super::{CONNECTIONS_MAX, Listen, Mode, ReceiveReport, Wire, incoming};
use crate::ProgressSink;
use crate::connection::message::{Control, Message};
use crate::connection::word::{Session, Word};
use crate::guardian::{Guardian, OnDisconnect};
use crate::memory::BlockShape;
use crate::memory::block::Block;
use crate::populate::eager;
use crate::populate::streamed::StreamedMemory;
use crate::restore::{self, LOAD_LIMIT, START_LIMIT};
use crate::sink::connection::transfer_hasher;
use crate::source::connection::FetchSession;
use crate::verify::{Image, VerifyReport};

/// Time for the monitor of a VM that an earlier engine started.
const MONITOR_LIMIT: Duration = Duration::from_secs(10);

/// The QEMU that becomes the VM.
#[derive(Debug, Clone)]
pub enum NewQemu {
    /// It is started in this way.
    Start(Box<LaunchOptions>),
    /// Another program has started it, with this monitor and `-incoming defer`.
    Into(PathBuf),
}

impl NewQemu {
    /// Its monitor.
    pub fn qmp(&self) -> &Path {
        match self {
            NewQemu::Start(launch) => &launch.qmp,
            NewQemu::Into(qmp) => qmp,
        }
    }
}

/// How to receive.
#[derive(Debug, Clone)]
pub struct ReceiveOptions {
    /// The QEMU.
    pub qemu: NewQemu,
    /// Leave the guest paused, ready to run.
    pub paused: bool,
}

/// Receives a VM over a connection on which nothing was sent yet. `listen` waits for the source to connect again, after
/// the connection was lost. `arrived` is called when the VM runs, independently; this returns when the source knows,
/// or does not ask any more. After an error the reason is sent to the source, where that is possible.
///
/// # Errors
/// No QEMU is left behind.
pub fn receive(
    mut wire: Wire,
    listen: Listen<'_>,
    options: &ReceiveOptions,
    arrived: &mut dyn FnMut(&ReceiveReport),
    progress: ProgressSink<'_>,
) -> Result<(), ReceiveError> {
    let loaded = load(&mut wire, listen, options, progress).inspect_err(|error| {
        let why = Some(crate::in_words(error));
        let word = Word::Never;
        // If it cannot be informed any more, it sees that the connection ends.
        let _ = wire.send_control(&Control::Word { word, why });
    })?;
    let Loaded {
        launched,
        guardian,
        record,
        mut report,
    } = loaded;
    let mut takeover = Takeover {
        vm: NewVm::Launched(launched),
        guardian: Some(guardian),
        runs: record.content().runs,
        record,
        wire: Some(wire),
        listen,
        arrived: &mut |_, running| {
            report.running = running;
            arrived(&report);
        },
        why: None,
    };
    result(takeover.decide(Destination::Receiving.step(Event::Loaded)))
}

/// Goes on with the migration to this monitor, whose process was killed: answers the source, and runs the VM if the
/// source lets it.
///
/// # Errors
/// There is none on record, or the VM does not run here.
pub fn resume(
    qmp: &Path,
    listen: Listen<'_>,
    arrived: &mut dyn FnMut(&ReceiveReport),
) -> Result<(), ReceiveError> {
    let record = DestinationRecord::find(qmp)?;
    let content = record.content().clone();
    let process = content.process().map_err(RecordError::Process)?;
    let vm = match process {
        Some(process) => {
            let reached = Monitor::reach(qmp, process.pid(), MONITOR_LIMIT)?;
            NewVm::Kept(process, reached.negotiate(MONITOR_LIMIT)?)
        }
        None => NewVm::Gone,
    };
    let begin = Destination::recorded(content.mark, matches!(vm, NewVm::Kept(..)));
    let mut takeover = Takeover {
        vm,
        guardian: None,
        record,
        wire: None,
        listen,
        runs: content.runs,
        arrived: &mut |process, running| {
            arrived(&ReceiveReport {
                vm: content.vm.clone(),
                pid: process.pid(),
                qmp: qmp.to_owned(),
                running,
                pages: 0,
                changes: Vec::new(),
                verify: None,
            });
        },
        why: None,
    };
    result(takeover.decide(begin))
}

fn result(whereabouts: Whereabouts) -> Result<(), ReceiveError> {
    match whereabouts {
        Whereabouts::Here => Ok(()),
        Whereabouts::NotHere { why } => Err(ReceiveError::NotHere { why }),
        Whereabouts::Unclear { why } => Err(ReceiveError::Unclear { why }),
    }
}

/// The source's first message.
struct Greeting {
    session: Session,
    mode: Mode,
    connections: usize,
    vm: VmRecord,
    blocks: Vec<BlockShape>,
}

/// The messages after the pages.
struct State {
    ids: Vec<Option<ContentId>>,
    device_state: Vec<u8>,
}

/// A VM that is complete, and paused.
struct Loaded {
    launched: Launched,
    guardian: Guardian,
    record: DestinationRecord,
    report: ReceiveReport,
}

/// Starts QEMU, and receives memory and device state.
fn load(
    wire: &mut Wire,
    listen: Listen<'_>,
    options: &ReceiveOptions,
    progress: ProgressSink<'_>,
) -> Result<Loaded, ReceiveError> {
    let greeting = greeting(wire)?;
    let guardian = Guardian::start()?;
    let (mut launched, changes) = waiting(&options.qemu, &greeting.vm, &guardian)?;
    let ram = launched.monitor.ram_blocks()?;
    let blocks = eager::open_blocks(&launched.process, &ram, &greeting.blocks)?;
    let (qmp, process) = (options.qemu.qmp(), &launched.process);
    let mut record = DestinationRecord::new(qmp, process, &greeting.session, &greeting.vm.label)?;
    let armed = launch::arm(&mut launched)?;
    wire.send_control(&Control::Accepted)?;
    let (pages, State { ids, device_state }) = match greeting.mode {
        Mode::PreCopy => {
            let wires = incoming::accept(listen, &greeting.session, greeting.connections)?;
            let memory = StreamedMemory::new(&launched.process, &blocks, &greeting.blocks)?;
            let sent = incoming::pages(wires, &memory, || state(wire, &blocks))?;
            (memory.finish(sent.pages)?, sent.rest)
        }
        Mode::StopCopy => {
            let pages = fetch(wire, &launched, &greeting.blocks, &blocks, progress)?;
            (pages, state(wire, &blocks)?)
        }
    };
    let verify = compare(&ids, &blocks)?;
    let device_state = device_state::wrap(&device_state, &greeting.vm.identity.machine)?;
    armed.load(&mut launched, &device_state, LOAD_LIMIT)?;
    let vm = complete(wire)?;
    if !same_machine(&greeting.vm, &vm) {
        return Err(ReceiveError::Changed);
    }
    record.expect_to_run(!options.paused && (vm.was_running || vm.was_suspended));
    let report = ReceiveReport {
        vm: vm.label,
        pid: launched.process.pid(),
        qmp: options.qemu.qmp().to_owned(),
        running: false,
        pages,
        changes,
        verify,
    };
    Ok(Loaded {
        launched,
        guardian,
        record,
        report,
    })
}

/// A QEMU that waits for its state, and ends with this process; and how it differs from the VM's, in words.
fn waiting(
    qemu: &NewQemu,
    vm: &VmRecord,
    guardian: &Guardian,
) -> Result<(Launched, Vec<String>), ReceiveError> {
    match qemu {
        NewQemu::Start(options) => {
            let launch = LaunchOptions {
                disks_handed_over: true,
                ..LaunchOptions::clone(options)
            };
            let plan = launch::plan(vm, &launch)?;
            let starting = restore::start(&plan, &launch, guardian)?;
            Ok((starting.wait(START_LIMIT)?, plan.changes))
        }
        NewQemu::Into(qmp) => {
            let launched = launch::adopt(qmp, vm, MONITOR_LIMIT)?;
            guardian.on_disconnect(OnDisconnect::End {
                pid: launched.process.pid(),
                start_time: launched.process.start_time(),
            })?;
            Ok((launched, Vec::new()))
        }
    }
}

fn greeting(wire: &mut Wire) -> Result<Greeting, ReceiveError> {
    match wire.receive_message()? {
        Message::Control(Control::Hello {
            session,
            mode,
            connections,
            vm,
            blocks,
        }) if connections <= CONNECTIONS_MAX => Ok(Greeting {
            session,
            mode,
            connections,
            vm: *vm,
            blocks,
        }),
        other => Err(other.unexpected().into()),
    }
}

/// Fetches all pages of a VM that is stopped at the source. Returns how many had content.
fn fetch(
    wire: &mut Wire,
    launched: &Launched,
    shapes: &[BlockShape],
    blocks: &[Block],
    progress: ProgressSink<'_>,
) -> Result<u64, ReceiveError> {
    let mut content: Vec<DirtyBitmap> = Vec::new();
    content.extend(shapes.iter().map(|shape| DirtyBitmap::new(shape.pages)));
    loop {
        match wire.receive_message()? {
            Message::Control(Control::Content { block, ranges }) if block < shapes.len() => {
                for (first, end) in ranges {
                    content[block].set_range(first..end);
                }
            }
            Message::Control(Control::Content { .. }) => break,
            other => return Err(other.unexpected().into()),
        }
    }
    let session = FetchSession::new(wire, shapes)?;
    let sources = session.sources(content);
    let blocks: Vec<&Block> = blocks.iter().collect();
    let pages = eager::populate(&launched.process, &blocks, sources, progress)?;
    drop(session);
    wire.send_control(&Control::Fetched)?;
    Ok(pages)
}

/// What comes after the pages: the ids of all of them, if the source wants them compared, and the device state.
fn state(wire: &mut Wire, blocks: &[Block]) -> Result<State, ReceiveError> {
    let mut ids = Vec::new();
    let pages: u64 = blocks.iter().map(Block::pages).sum();
    loop {
        match wire.receive_message()? {
            Message::Control(Control::Alive) => {}
            Message::Ids(more) if (ids.len() + more.len()) as u64 <= pages => ids.extend(more),
            Message::DeviceState(device_state) => return Ok(State { ids, device_state }),
            other => return Err(other.unexpected().into()),
        }
    }
}

/// Compares all memory with the source's, which has these ids; none where it need not be.
fn compare(
    ids: &[Option<ContentId>],
    blocks: &[Block],
) -> Result<Option<VerifyReport>, ReceiveError> {
    if ids.is_empty() {
        return Ok(None);
    }
    let report = Image::take(blocks.iter(), &transfer_hasher())?.compare_ids(ids);
    match report.differing {
        0 => Ok(Some(report)),
        differing => Err(ReceiveError::Differs {
            differing,
            first: report.first.join(", "),
        }),
    }
}

/// The VM, of which the source has sent everything.
fn complete(wire: &mut Wire) -> Result<VmRecord, ReceiveError> {
    match wire.receive_message()? {
        Message::Control(Control::Complete { vm }) => Ok(*vm),
        other => Err(other.unexpected().into()),
    }
}

/// Whether a QEMU that was started by the first record can take the state of the second.
fn same_machine(then: &VmRecord, now: &VmRecord) -> bool {
    let part = |vm: &VmRecord| {
        let disks = vm.disks.iter().map(|disk| disk.path.clone());
        (
            vm.arguments.clone(),
            vm.hot_plug.clone(),
            vm.ram_blocks.clone(),
            vm.identity.clone(),
            disks.collect::<Vec<_>>(),
        )
    };
    part(then) == part(now)
}
