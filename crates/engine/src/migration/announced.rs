//! What the source says of a VM: at first, and when its pages are sent.

use std::time::Duration;

use stillframe_page::hash::ContentId;
use stillframe_qemu::record::VmRecord;

use super::disks::DISKS_MAX;
use super::error::ReceiveError;
use super::image_blocks::IMAGES_MAX;
use super::{CONNECTIONS_MAX, LANES_MAX, Mode, Wire};
use crate::connection::ConnectionError;
use crate::connection::message::{Base, Control, Message, SharedImage};
use crate::connection::word::Session;
use crate::memory::BlockShape;
use crate::memory::block::Block;

/// Time for a source to find out that its VM has changed.
const SAID_SOON: Duration = Duration::from_millis(200);

/// The source's first message.
pub(super) struct Greeting {
    pub session: Session,
    pub mode: Mode,
    pub connections: usize,
    pub lanes: usize,
    /// The devices whose disks are copied.
    pub copied: Vec<String>,
    /// The checkpoint that the source would send an increment of.
    pub base: Option<Base>,
    /// Files that the source would name places of.
    pub images: Vec<SharedImage>,
    pub vm: VmRecord,
    pub blocks: Vec<BlockShape>,
}

/// What comes after the pages.
pub(super) enum Rest {
    /// The ids of all of them, if the source wants them compared, and the begin of the device state.
    State(State),
    /// No more pages are sent: the others are fetched.
    PagesLater { some_sent: bool },
}

/// The messages after the pages, up to the first piece of the device state.
pub(super) struct State {
    pub ids: Vec<Option<ContentId>>,
    pub first: Vec<u8>,
}

/// What the source says in the first message.
pub(super) fn greeting_of(message: Message) -> Result<Greeting, ReceiveError> {
    match message {
        Message::Control(Control::Hello {
            session,
            mode,
            connections,
            lanes,
            copied,
            base,
            images,
            vm,
            blocks,
        }) if connections <= CONNECTIONS_MAX
            && lanes <= LANES_MAX
            && copied.len() <= DISKS_MAX
            && images.len() <= IMAGES_MAX =>
        {
            Ok(Greeting {
                session,
                mode,
                connections,
                lanes,
                copied,
                base,
                images,
                vm: *vm,
                blocks,
            })
        }
        other => Err(other.unexpected().into()),
    }
}

/// What comes after the pages that are sent.
pub(super) fn rest(wire: &mut Wire, blocks: &[Block]) -> Result<Rest, ReceiveError> {
    loop {
        match wire.receive_message()? {
            Message::Control(Control::Alive) => {}
            Message::Control(Control::PagesLater { some_sent }) => {
                return Ok(Rest::PagesLater { some_sent });
            }
            other => return state(wire, blocks, other).map(Rest::State),
        }
    }
}

/// The ids of all pages, if the source wants them compared, and the begin of the device state; `next` is the first
/// message.
pub(super) fn state(
    wire: &mut Wire,
    blocks: &[Block],
    mut next: Message,
) -> Result<State, ReceiveError> {
    let mut ids = Vec::new();
    let pages: u64 = blocks.iter().map(Block::pages).sum();
    loop {
        match next {
            Message::Control(Control::Alive) => {}
            Message::Ids(more) if (ids.len() + more.len()) as u64 <= pages => ids.extend(more),
            Message::DeviceState(first) => return Ok(State { ids, first }),
            other => return Err(other.unexpected().into()),
        }
        next = wire.receive_message()?;
    }
}

/// The next piece of the device state; none if it is whole.
pub(super) fn more_state(wire: &mut Wire) -> Result<Option<Vec<u8>>, ReceiveError> {
    match wire.receive_message()? {
        Message::DeviceState(piece) => Ok((!piece.is_empty()).then_some(piece)),
        other => Err(other.unexpected().into()),
    }
}

/// The VM, of which the source has sent everything.
pub(super) fn complete(wire: &mut Wire) -> Result<VmRecord, ReceiveError> {
    match wire.receive_message()? {
        Message::Control(Control::Complete { vm }) => Ok(*vm),
        other => Err(other.unexpected().into()),
    }
}

/// Why the source gave up, if it says so soon. What this QEMU does not load may be what the source finds wrong at the same
/// time, such as a device that was plugged in, and can name.
pub(super) fn said_meanwhile(wire: &mut Wire) -> Option<ReceiveError> {
    while wire.has_input(SAID_SOON) {
        match wire.receive_message() {
            Ok(Message::Control(Control::Complete { .. })) => {}
            Ok(other) => match other.unexpected() {
                gave_up @ ConnectionError::GaveUp { .. } => return Some(gave_up.into()),
                _ => return None,
            },
            Err(_) => return None,
        }
    }
    None
}

/// Whether a QEMU that was started by the first record can take the state of the second.
pub(super) fn same_machine(then: &VmRecord, now: &VmRecord) -> bool {
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
