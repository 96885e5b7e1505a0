//! Who runs the VM while it moves: the states of both sides, as two pure functions.
//!
//! ```text
//!   source                                             destination
//!     Keeping     (an error: the VM runs on)             Receiving   (an error: its QEMU is ended)
//!                                   <-- Ready --         Marking, Ready
//!     GivingUp    record, guardian
//!     GivenUp                       -- Commit -->        Releasing, Committing, Starting
//!     Serving                       <-- NeedsPages --    Filling     post-copy: it runs before its memory is here
//!                                   <-- Running --       Running
//!     Ending      this QEMU ends
//!     Ended                         -- Settled -->       Over
//! ```
//!
//! A side makes one step after the other: an [`Event`] leads to the next state and to one action, whose result is the
//! next event. (A word that cannot be sent is a connection that is [`Event::Lost`]; one that was sent is no event.) The
//! code that carries out actions decides nothing. `docs/protocol.md` explains the states; the tests
//! search all orders of messages, cuts, deaths and commands for a state with two running VMs, or for one that no
//! command solves.
//!
//! What must outlive an engine is on record, on a file system in memory: a QEMU does not outlive its host either. The
//! guardian of the source writes the record *given up* in the same step in which it ceases to resume the VM. So there
//! is no moment at which both, or neither, hold.

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::connection::word::Word;

/// What leads to the next state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// Destination: memory, devices and disks are here.
    Loaded,
    /// The other side said this.
    Heard(Word),
    /// There is no connection any more.
    Lost,
    /// There is a new connection.
    Connected,
    /// The action was carried out.
    Done,
    /// Destination: it was carried out, and the VM runs before all its memory is here (post-copy).
    Incomplete,
    /// Destination: all its memory is here by now.
    Filled,
    /// The action failed; while waiting: this QEMU, or what else the state needs, is gone.
    Failed,
    /// QEMU answered `cont` with an error: the guest did not run.
    Refused,
    /// Source: the user wants the VM here. Destination: the other side was waited for long enough.
    Cancelled,
    /// The user says that the VM will never run at the destination.
    Declared,
}

/// The source's states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Source {
    /// The VM is here: it runs, or is stopped while the guardian is on watch.
    Keeping,
    /// The guardian is asked to give it up.
    GivingUp,
    /// It may run there. It is paused here, and nothing resumes it.
    GivenUp,
    /// As given up, and it is wanted back.
    Retracting,
    /// It runs there, and gets the rest of its memory from here.
    Serving,
    /// It runs there. This QEMU ends.
    Ending,
    /// It was not given up, and is resumed here. If that fails, the guardian does it.
    Returning,
    /// It will never run there, and is resumed here.
    Resuming,
    /// It runs here.
    Kept,
    /// This QEMU has ended.
    Ended,
    /// It has ended of itself, and the destination lacks pages that only it had.
    Lost,
    /// Paused here, and without an answer whether it runs there.
    InDoubt,
}

/// What the source is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Wait for an event.
    Wait,
    /// Write the record, and have the guardian never resume the VM; both or neither.
    GiveUp,
    /// Say this.
    Send(Word),
    /// End this QEMU, then remove the record.
    End,
    /// Resume the VM, then remove the record.
    Resume,
}

impl Source {
    /// The state of an engine that finds the record of a VM that was given up.
    pub const RECORDED: Source = Source::InDoubt;

    /// The next state, and what to do in it.
    pub fn step(self, event: Event) -> (Source, SourceAction) {
        use SourceAction::{End, GiveUp, Resume, Send, Wait};
        match (self, event) {
            (Source::Keeping, Event::Heard(Word::Ready)) => (Source::GivingUp, GiveUp),
            (Source::Keeping, _) => (Source::Returning, Resume),

            (Source::GivingUp, Event::Done) => (Source::GivenUp, Send(Word::Commit)),
            (Source::GivingUp, _) => (Source::Returning, Resume),
            (Source::Returning, _) => (Source::Kept, Send(Word::Settled)),

            (Source::GivenUp, Event::Heard(Word::Ready)) => (Source::GivenUp, Send(Word::Commit)),
            (Source::Retracting, Event::Heard(Word::Ready)) => {
                (Source::Retracting, Send(Word::Retract))
            }
            (Source::GivenUp | Source::Retracting, Event::Heard(Word::Running)) => {
                (Source::Ending, End)
            }
            (
                Source::GivenUp | Source::Retracting | Source::Serving,
                Event::Heard(Word::NeedsPages),
            ) => (Source::Serving, Wait),
            (Source::Serving, Event::Heard(Word::Running)) => (Source::Ending, End),
            // Too late: it has run there.
            (Source::Serving, Event::Cancelled) => (self, Wait),
            // The pages are lost with this QEMU.
            (Source::Serving, Event::Failed) => (Source::Lost, Send(Word::Settled)),
            (Source::GivenUp | Source::Retracting, Event::Heard(Word::Never)) => {
                (Source::Resuming, Resume)
            }
            (Source::GivenUp, Event::Cancelled) => (Source::Retracting, Send(Word::Retract)),
            (Source::Retracting, Event::Cancelled) => (self, Wait),
            // The destination's answer counts, whatever became of this QEMU.
            (Source::GivenUp | Source::Retracting, Event::Failed) => (self, Wait),
            (Source::GivenUp | Source::Retracting | Source::Serving, _) => (Source::InDoubt, Wait),

            (Source::Ending, Event::Done) => (Source::Ended, Send(Word::Settled)),
            (Source::Resuming, Event::Done) => (Source::Kept, Send(Word::Settled)),
            // The record is there still.
            (Source::Ending | Source::Resuming, _) => (Source::InDoubt, Wait),

            (Source::InDoubt, Event::Connected) => (Source::GivenUp, Send(Word::Ask)),
            (Source::InDoubt, Event::Cancelled) => (Source::Retracting, Send(Word::Retract)),
            (Source::InDoubt, Event::Declared) => (Source::Resuming, Resume),
            (Source::InDoubt | Source::Kept | Source::Ended | Source::Lost, _) => (self, Wait),
        }
    }
}

/// The destination's states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Destination {
    /// Its QEMU takes memory and devices.
    Receiving,
    /// It is put on record that the VM is ready.
    Marking,
    /// The VM is paused, and may not run.
    Ready,
    /// The VM may run. The guardian must not end this QEMU any more.
    Releasing,
    /// It is put on record that the VM may have run.
    Committing,
    /// It is resumed.
    Starting,
    /// It runs, and not all its memory is here.
    Filling,
    /// It runs, or has run.
    Running,
    /// It is put on record that the VM never runs here.
    Refusing,
    /// This QEMU is ended, which has not run.
    Dropping,
    /// As dropping, and the source will not ask.
    Discarding,
    /// It never ran here, and never will.
    Gone,
    /// `cont` had no answer: it may have run.
    Unclear,
    /// It has not run, and its QEMU does not end.
    Undead,
    /// The engine is about to end: no answer is awaited.
    Over,
}

/// What is on record at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mark {
    /// The VM is complete, and has not run.
    Ready,
    /// It may have run.
    Committed,
    /// It never ran here, and never will.
    Never,
}

/// What the destination is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DestinationAction {
    /// Wait for an event.
    Wait,
    /// Put this on record.
    Record(Mark),
    /// Have the guardian leave this QEMU alone.
    Release,
    /// Resume the VM.
    Cont,
    /// End this QEMU.
    End,
    /// Say this.
    Send(Word),
    /// Remove the record.
    Forget,
}

impl Destination {
    /// The state of an engine that finds this record, and what it is to do. `lives`: the QEMU of the record is there.
    pub fn recorded(mark: Mark, lives: bool) -> (Destination, DestinationAction) {
        match (mark, lives) {
            (Mark::Ready, true) => (Destination::Ready, DestinationAction::Wait),
            (Mark::Ready, false) => (
                Destination::Refusing,
                DestinationAction::Record(Mark::Never),
            ),
            // A VM that runs already takes no harm from it.
            (Mark::Committed, true) => (Destination::Starting, DestinationAction::Cont),
            (Mark::Committed, false) => (Destination::Unclear, DestinationAction::Wait),
            (Mark::Never, _) => (Destination::Dropping, DestinationAction::End),
        }
    }

    /// The next state, and what to do in it.
    pub fn step(self, event: Event) -> (Destination, DestinationAction) {
        use DestinationAction::{Cont, End, Forget, Record, Release, Send, Wait};
        match (self, event) {
            (Destination::Receiving, Event::Loaded) => (Destination::Marking, Record(Mark::Ready)),
            // Without *ready* the VM is not given up.
            (Destination::Receiving, Event::Lost | Event::Heard(_)) => {
                (Destination::Discarding, End)
            }
            (Destination::Receiving, _) => (Destination::Dropping, End),

            (Destination::Marking, Event::Done) => (Destination::Ready, Send(Word::Ready)),
            (Destination::Marking, _) => (Destination::Refusing, Record(Mark::Never)),

            (Destination::Ready, Event::Heard(Word::Commit)) => (Destination::Releasing, Release),
            (Destination::Ready, Event::Heard(Word::Ask)) => {
                (Destination::Ready, Send(Word::Ready))
            }
            (Destination::Ready, Event::Heard(Word::Settled)) => (Destination::Discarding, End),
            (Destination::Ready, Event::Heard(_) | Event::Cancelled | Event::Failed) => {
                (Destination::Refusing, Record(Mark::Never))
            }
            (Destination::Ready, _) => (Destination::Ready, Wait),

            (Destination::Releasing, Event::Done) => {
                (Destination::Committing, Record(Mark::Committed))
            }
            (Destination::Committing, Event::Done) => (Destination::Starting, Cont),
            (Destination::Starting, Event::Done) => (Destination::Running, Send(Word::Running)),
            (Destination::Starting, Event::Incomplete) => {
                (Destination::Filling, Send(Word::NeedsPages))
            }
            (Destination::Filling, event) => Destination::filling(event),
            (Destination::Releasing | Destination::Committing, _)
            | (Destination::Starting, Event::Refused) => {
                (Destination::Refusing, Record(Mark::Never))
            }
            (Destination::Starting, _) => (Destination::Unclear, Send(Word::Unclear)),

            // Whether that could be written or not: this QEMU has not run.
            (Destination::Refusing, _) => (Destination::Dropping, End),
            (Destination::Dropping, Event::Done) => (Destination::Gone, Send(Word::Never)),
            (Destination::Dropping, _) => (Destination::Undead, Send(Word::Unclear)),
            (Destination::Undead, Event::Heard(Word::Ask | Word::Retract | Word::Commit)) => {
                (Destination::Dropping, End)
            }
            (Destination::Discarding, _) => (Destination::Over, Forget),

            (Destination::Over, _) => (self, Wait),
            (_, Event::Heard(Word::Settled)) => (Destination::Over, Forget),
            // The record stays, for an engine that is started to answer.
            (_, Event::Cancelled) => (Destination::Over, Wait),
            (Destination::Running, Event::Heard(_)) => (self, Send(Word::Running)),
            (Destination::Gone, Event::Heard(_)) => (self, Send(Word::Never)),
            // A VM that runs already takes no harm from it.
            (Destination::Unclear, Event::Heard(Word::Ask | Word::Commit)) => {
                (Destination::Starting, Cont)
            }
            (Destination::Unclear | Destination::Undead, Event::Heard(_)) => {
                (self, Send(Word::Unclear))
            }
            (
                Destination::Running
                | Destination::Gone
                | Destination::Unclear
                | Destination::Undead,
                _,
            ) => (self, Wait),
        }
    }

    /// The state after [`Destination::Filling`].
    fn filling(event: Event) -> (Destination, DestinationAction) {
        use DestinationAction::{Send, Wait};
        match event {
            Event::Filled | Event::Failed => (Destination::Running, Send(Word::Running)),
            // The source has lost the pages. Or it was waited for long enough: the record stays, for an engine that is
            // started to go on.
            Event::Heard(Word::Settled) | Event::Cancelled => (Destination::Over, Wait),
            Event::Heard(_) => (Destination::Filling, Send(Word::NeedsPages)),
            _ => (Destination::Filling, Wait),
        }
    }
}
