//! A connection that is lost while pages move and the VM runs at the source. The source connects again and greets with the
//! same session; the destination, which has kept its QEMU, says what is in its memory.

use std::time::{Duration, Instant};

use stillframe_link::FrameError;
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::process::Process;

use super::announced::{Greeting, greeting_of, same_machine};
use super::error::{MigrateError, ReceiveError};
use super::incoming::turn_away;
use super::seed::say_ids;
use super::{ANSWER_LIMIT, Awaited, Listen, Reconnect, SILENCE_MAX, Wire};
use crate::connection::ConnectionError;
use crate::connection::message::{Control, Message};
use crate::connection::word::Session;
use crate::memory::block::Block;
use crate::populate::eager::{self, PopulateError};

/// Pause between two attempts to connect again.
const CONNECT_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// Whether this is an end of a connection that the other side did not want.
fn is_cut(error: &ConnectionError) -> bool {
    let ConnectionError::Frame(error) = error else {
        return false;
    };
    matches!(
        error,
        FrameError::Io { .. } | FrameError::Closed | FrameError::Silent
    )
}

impl MigrateError {
    /// Whether it is worth while to connect again.
    pub(super) fn is_cut(&self) -> bool {
        matches!(self, MigrateError::Connection(error) if is_cut(error))
    }
}

impl ReceiveError {
    /// Whether the source may come back.
    pub(super) fn is_cut(&self) -> bool {
        matches!(self, ReceiveError::Connection(error) if is_cut(error))
    }
}

/// The source: ends what is left of a connection, and makes a new one. Whether the destination was reached within
/// `patience`.
pub(super) fn connect_again(wire: &mut Wire, reconnect: Reconnect<'_>, patience: Duration) -> bool {
    if let Ok(closer) = wire.closer() {
        closer.close();
    }
    let begin = Instant::now();
    loop {
        let refused = match reconnect() {
            Ok(new) => {
                *wire = new;
                return true;
            }
            Err(unreachable) => unreachable.refused,
        };
        // A destination that waits for this source listens.
        if refused || begin.elapsed() + CONNECT_AGAIN_AFTER > patience {
            return false;
        }
        std::thread::sleep(CONNECT_AGAIN_AFTER);
    }
}

/// The destination: waits for the source of this VM to greet again. Others have to wait.
pub(super) fn await_again(
    listen: Listen<'_>,
    before: &Greeting,
    patience: Duration,
) -> Option<(Wire, Greeting)> {
    let begin = Instant::now();
    loop {
        let left = patience.checked_sub(begin.elapsed())?;
        let mut wire = listen(Awaited::Again, left)?;
        wire.limit_silence(ANSWER_LIMIT);
        match wire.receive_message() {
            Ok(message) if is_of(&before.session, &message) => {
                wire.limit_silence(SILENCE_MAX);
                let greeting = greeting_of(message).ok()?;
                return is_same(before, &greeting).then_some((wire, greeting));
            }
            message => turn_away(wire, message, &before.session),
        }
    }
}

/// Whether a source begins this migration.
fn is_of(ours: &Session, message: &Message) -> bool {
    matches!(message, Message::Control(Control::Hello { session, .. }) if session == ours)
}

/// Whether the QEMU that was started is one for this VM still.
fn is_same(before: &Greeting, now: &Greeting) -> bool {
    now.mode == before.mode
        && now.connections > 0
        && now.copied.is_empty()
        && now.base == before.base
        && now.blocks == before.blocks
        && same_machine(&before.vm, &now.vm)
}

/// The destination: says the ids of all that is in memory.
///
/// # Errors
/// Memory cannot be read, or the connection failed.
pub(super) fn say_what_is_here(
    process: &Process,
    blocks: &[Block],
    wire: &mut Wire,
) -> Result<(), ReceiveError> {
    let pagemap = Pagemap::open(process).map_err(PopulateError::from)?;
    let in_use = blocks.iter().map(|block| eager::in_use(&pagemap, block));
    let in_use = in_use.collect::<Result<Vec<_>, _>>()?;
    say_ids(wire, blocks, in_use)
}
