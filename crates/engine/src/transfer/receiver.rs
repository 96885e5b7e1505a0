//! The receiving side: a new QEMU that is ended if anything fails before the guest runs.

use std::io::{Read, Write};

use stillframe_page::bitmap::DirtyBitmap;
use stillframe_qemu::device_state::{self, DeviceStateError};
use stillframe_qemu::launch::{
    self, CloneOptions, LaunchError, LaunchOptions, LaunchPlan, Launched,
};
use stillframe_qemu::monitor::MonitorError;
use stillframe_qemu::record::VmRecord;
use thiserror::Error;

use super::{Mode, ReceiveReport};
use crate::ProgressSink;
use crate::connection::message::{Control, Message};
use crate::connection::{Connection, ConnectionError};
use crate::guardian::{Guardian, GuardianError, OnDisconnect};
use crate::memory::BlockShape;
use crate::memory::block::{Block, BlockError};
use crate::populate::eager::{self, PopulateError};
use crate::populate::streamed::StreamedMemory;
use crate::post_restore;
use crate::restore::{self, LOAD_LIMIT, RestoreError, START_LIMIT};
use crate::sink::connection::transfer_hasher;
use crate::source::connection::FetchSession;
use crate::verify::{Image, VerifyReport};

/// How to receive.
#[derive(Debug, Clone)]
pub struct ReceiveOptions {
    /// How the new QEMU is started.
    pub launch: LaunchOptions,
    /// Leave the guest paused, ready to run.
    pub paused: bool,
}

/// Why no VM was received. The new QEMU was ended.
#[derive(Debug, Error)]
pub enum ReceiveError {
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// QEMU could not be started or did not take the device state.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// QEMU could not be started.
    #[error(transparent)]
    Start(#[from] RestoreError),
    /// Its memory could not be populated.
    #[error(transparent)]
    Populate(#[from] PopulateError),
    /// Its memory could not be read.
    #[error("cannot read the new VM's memory")]
    Block(#[from] BlockError),
    /// QEMU failed a command.
    #[error("the new QEMU failed a command")]
    Monitor(#[from] MonitorError),
    /// No guardian.
    #[error(transparent)]
    Guardian(#[from] GuardianError),
    /// The received data is no device state.
    #[error("the device state that was sent cannot be loaded")]
    DeviceState(#[from] DeviceStateError),
    /// A device came or went.
    #[error("the VM's devices, disks or memory changed while it was sent: send it again")]
    Changed,
    /// The comparison found differences.
    #[error("{differing} pages of the new VM's memory differ from the sender's (first: {first})")]
    Differs {
        /// How many.
        differing: u64,
        /// The first of them.
        first: String,
    },
}

/// Receives a VM over a connection on which nothing was sent yet. The VM runs independently when this returns. After
/// an error the reason is sent to the other side, where that is possible.
///
/// # Errors
/// No QEMU is left behind.
pub fn receive<S: Read + Write + Send>(
    connection: &mut Connection<S>,
    options: &ReceiveOptions,
    progress: ProgressSink<'_>,
) -> Result<ReceiveReport, ReceiveError> {
    let received = attempt(connection, options, progress);
    received.inspect_err(|error| {
        // If it cannot be informed any more, it sees that the connection ends.
        let why = crate::in_words(error);
        let _ = connection.send_control(&Control::Failed { why });
    })
}

/// The sender's first message.
struct Greeting {
    mode: Mode,
    vm: VmRecord,
    blocks: Vec<BlockShape>,
}

/// The message after the pages.
struct Rest {
    vm: VmRecord,
    device_state: Vec<u8>,
    verify: Option<VerifyReport>,
}

fn attempt<S: Read + Write + Send>(
    connection: &mut Connection<S>,
    options: &ReceiveOptions,
    progress: ProgressSink<'_>,
) -> Result<ReceiveReport, ReceiveError> {
    let greeting = greeting(connection)?;
    let launch = launch_options(greeting.mode, options);
    let plan = launch::plan(&greeting.vm, &launch)?;
    let guardian = Guardian::start()?;
    let starting = restore::start(&plan, &launch, &guardian)?;
    let mut launched = starting.wait(START_LIMIT)?;
    let ram = launched.monitor.ram_blocks()?;
    let blocks = eager::open_blocks(&launched.process, &ram, &greeting.blocks)?;
    connection.send_control(&Control::Accepted)?;
    let (pages, rest) = match greeting.mode {
        Mode::Copy => {
            let mut memory = StreamedMemory::new(&launched.process, &blocks, &greeting.blocks)?;
            let rest = rest(connection, &blocks, Some(&mut memory))?;
            (memory.pages(), rest)
        }
        Mode::HandOver => {
            let pages = fetch(connection, &launched, &greeting.blocks, &blocks, progress)?;
            (pages, rest(connection, &blocks, None)?)
        }
    };
    if !same_machine(&greeting.vm, &rest.vm) {
        return Err(ReceiveError::Changed);
    }
    let state = device_state::wrap(&rest.device_state, &rest.vm.identity.machine)?;
    launch::load_device_state(&mut launched, &state, LOAD_LIMIT)?;
    let started = run(connection, launched, &guardian, options.paused)?;
    Ok(report(greeting.mode, started, rest, pages, plan))
}

fn report(mode: Mode, started: Started, rest: Rest, pages: u64, plan: LaunchPlan) -> ReceiveReport {
    ReceiveReport {
        vm: rest.vm.label,
        mode,
        pid: started.pid,
        running: started.running,
        pages,
        changes: plan.changes,
        verify: rest.verify,
    }
}

fn greeting<S: Read>(connection: &mut Connection<S>) -> Result<Greeting, ReceiveError> {
    match connection.receive_message()? {
        Message::Control(Control::Hello { mode, vm, blocks }) => Ok(Greeting {
            mode,
            vm: *vm,
            blocks,
        }),
        other => Err(other.unexpected().into()),
    }
}

/// A copy is a clone: what there can be only one of on a host stays the original's.
fn launch_options(mode: Mode, options: &ReceiveOptions) -> LaunchOptions {
    let clone = match mode {
        Mode::Copy => Some(CloneOptions {
            number: 1,
            memory: Vec::new(),
        }),
        Mode::HandOver => None,
    };
    LaunchOptions {
        clone,
        ..options.launch.clone()
    }
}

/// Fetches all pages of a VM that is stopped at the sender. Returns how many had content.
fn fetch<S: Read + Write + Send>(
    connection: &mut Connection<S>,
    launched: &Launched,
    shapes: &[BlockShape],
    blocks: &[Block],
    progress: ProgressSink<'_>,
) -> Result<u64, ReceiveError> {
    let mut content: Vec<DirtyBitmap> = Vec::new();
    content.extend(shapes.iter().map(|shape| DirtyBitmap::new(shape.pages)));
    loop {
        match connection.receive_message()? {
            Message::Control(Control::Content { block, ranges }) if block < shapes.len() => {
                for (first, end) in ranges {
                    content[block].set_range(first..end);
                }
            }
            Message::Control(Control::Content { .. }) => break,
            other => return Err(other.unexpected().into()),
        }
    }
    let session = FetchSession::new(connection, shapes)?;
    let sources = session.sources(content);
    let blocks: Vec<&Block> = blocks.iter().collect();
    let pages = eager::populate(&launched.process, &blocks, sources, progress)?;
    drop(session);
    connection.send_control(&Control::Fetched)?;
    Ok(pages)
}

/// Receives what comes until the sender has sent everything; compares memory where the sender wants that.
fn rest<S: Read>(
    connection: &mut Connection<S>,
    blocks: &[Block],
    mut memory: Option<&mut StreamedMemory<'_>>,
) -> Result<Rest, ReceiveError> {
    let mut device_state = None;
    let mut ids = Vec::new();
    let pages: u64 = blocks.iter().map(Block::pages).sum();
    let vm = loop {
        match (connection.receive_message()?, &mut memory) {
            (Message::Pages(payload), Some(memory)) if device_state.is_none() => {
                memory.take(&payload)?;
            }
            (Message::DeviceState(bytes), _) if device_state.is_none() => {
                device_state = Some(bytes);
            }
            (Message::Ids(more), _) if (ids.len() + more.len()) as u64 <= pages => ids.extend(more),
            (Message::Control(Control::Complete { vm }), _) => break *vm,
            (other, _) => return Err(other.unexpected().into()),
        }
    };
    if let Some(memory) = memory {
        memory.finish()?;
    }
    let device_state = device_state.ok_or(ConnectionError::Malformed {
        what: "no device state".to_owned(),
    })?;
    let verify = match ids.is_empty() {
        true => None,
        false => Some(Image::take(blocks.iter(), &transfer_hasher())?.compare_ids(&ids)),
    };
    match &verify {
        Some(report) if report.differing > 0 => Err(ReceiveError::Differs {
            differing: report.differing,
            first: report.first.join(", "),
        }),
        _ => Ok(Rest {
            vm,
            device_state,
            verify,
        }),
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

/// A VM that is here.
struct Started {
    pid: i32,
    running: bool,
}

/// Waits until the VM may run here, and resumes it.
fn run<S: Read + Write>(
    connection: &mut Connection<S>,
    mut launched: Launched,
    guardian: &Guardian,
    paused: bool,
) -> Result<Started, ReceiveError> {
    connection.send_control(&Control::Ready)?;
    match connection.receive_message()? {
        Message::Control(Control::Commit) => {}
        other => return Err(other.unexpected().into()),
    }
    // Before it runs: from then on the guardian must not end the VM.
    guardian.on_disconnect(OnDisconnect::Nothing)?;
    if !paused {
        launched.monitor.cont()?;
    }
    let (process, mut monitor) = launched.keep();
    if !paused {
        post_restore::announce(&mut monitor);
    }
    // The VM is here, whether that can be said or not.
    let _ = connection.send_control(&Control::Running);
    Ok(Started {
        pid: process.pid(),
        running: !paused && !monitor.is_suspended(),
    })
}
