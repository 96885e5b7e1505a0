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
use super::{ANSWER_LIMIT, Awaited, Listen, Reconnect, SILENCE_MAX, Unreachable, Wire};
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

/// The source: ends what is left of a connection, and makes a new one, if the destination is reached within `patience`.
///
/// # Errors
/// It is not, and why; also whether another attempt is of no use.
pub(super) fn connect_again(
    wire: &mut Wire,
    reconnect: Reconnect<'_>,
    patience: Duration,
) -> Result<(), Unreachable> {
    if let Ok(closer) = wire.closer() {
        closer.close();
    }
    let begin = Instant::now();
    loop {
        let unreachable = match reconnect() {
            Ok(new) => {
                *wire = new;
                return Ok(());
            }
            Err(unreachable) => unreachable,
        };
        // A destination that waits for this source listens.
        if unreachable.refused || begin.elapsed() + CONNECT_AGAIN_AFTER > patience {
            return Err(unreachable);
        }
        std::thread::sleep(CONNECT_AGAIN_AFTER);
    }
}

/// The source: has the destination wait no longer, if it can be reached. What it does not hear it will notice by itself.
pub(super) fn say_over(session: &Session, why: String, reconnect: Reconnect<'_>) {
    let session = session.clone();
    let _ = reconnect().map(|mut wire| wire.send_control(&Control::Over { session, why }));
}

/// What a destination waits for after a cut.
pub(super) enum Comes {
    /// The source, which greets again.
    Source(Box<(Wire, Greeting)>),
    /// Its word that it will not.
    Over(ConnectionError),
    /// Nothing, or a source that begins another migration.
    Nothing,
}

/// The destination: waits for the source of this VM to greet again. Others have to wait.
pub(super) fn await_again(listen: Listen<'_>, before: &Greeting, patience: Duration) -> Comes {
    let begin = Instant::now();
    loop {
        let left = patience.checked_sub(begin.elapsed());
        let Some(mut wire) = left.and_then(|left| listen(Awaited::Again, left)) else {
            return Comes::Nothing;
        };
        wire.limit_silence(ANSWER_LIMIT);
        match wire.receive_message() {
            Ok(message) if is_of(&before.session, &message) => {
                wire.limit_silence(SILENCE_MAX);
                return match greeting_of(message) {
                    Ok(greeting) if is_same(before, &greeting) => {
                        Comes::Source(Box::new((wire, greeting)))
                    }
                    _ => Comes::Nothing,
                };
            }
            Ok(Message::Control(Control::Over { session, why })) if session == before.session => {
                return Comes::Over(ConnectionError::GaveUp { why });
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
