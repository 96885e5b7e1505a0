//! The source's half of the hand-over: carries out what [`Source`] says.

use std::time::{Duration, Instant};

use stillframe_fault::{self as fault, Point};
use stillframe_qemu::launch::{self, LaunchError};
use stillframe_qemu::monitor::{Disk, MonitorError};
use thiserror::Error;

use super::handover::{Event, Source, SourceAction};
use super::record::{RecordError, SourceRecord};
use super::serving::Serving;
use super::{ANSWER_LIMIT, Reconnect, Wire};
use crate::capture::paused_vm::{HandedOver, PausedError, PausedVm, UnblockError};
use crate::connection::message::{Control, Message};
use crate::connection::word::{Session, Word};
use crate::inhibitor::InhibitorError;

/// Pause between two attempts to connect again.
const CONNECT_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// Why the VM did not move, or may not have.
#[derive(Debug, Error)]
pub enum CommitError {
    /// The destination has none.
    #[error("the destination did not take the VM, which runs on here: {why}")]
    NotTaken {
        /// The destination's words.
        why: String,
    },
    /// There is no connection any more.
    #[error("the connection was lost before the VM was given up, and it runs on here: {why}")]
    Lost {
        /// What happened to it.
        why: String,
    },
    /// Its QEMU is gone, or does not answer.
    #[error("the VM has ended here, or its QEMU does not answer; it was not handed over")]
    Ended(#[source] MonitorError),
    /// It could not be given up.
    #[error("the VM cannot be given up, and runs on here")]
    NotGivenUp(#[source] PausedError),
    /// Another client sent `cont`.
    #[error("another client resumed the VM while it was handed over; it runs on here")]
    ResumedByOthers,
    /// It may run there.
    #[error(
        "the VM is paused here, and may run at the destination: {why}. Nothing resumes it by itself. When the other host can be reached, ask it with `migrate --resume`. If the VM will never run there, take it back with `migrate --take-back`"
    )]
    InDoubt {
        /// Why there is no answer.
        why: String,
    },
    /// Its memory is lost.
    #[error(
        "the VM runs at the destination and lacks pages, and its QEMU here, which had them, has ended ({why}). It cannot go on there: end it, and start the VM from a checkpoint"
    )]
    PagesLost {
        /// How that was seen.
        why: String,
    },
    /// It runs there, and is still here.
    #[error(
        "the VM runs at the destination, but this QEMU, which is paused, does not end: end it by hand, never resume it"
    )]
    NotEnded(#[source] MonitorError),
    /// It is here, and does not run.
    #[error(
        "the VM will not run at the destination, and cannot be resumed here either. It is paused; `migrate --take-back` tries again"
    )]
    NotResumed(#[source] PausedError),
    /// It is here, and `cont` is still refused, or there is no guardian.
    #[error(
        "the VM will not run at the destination, and is paused here; `migrate --take-back` tries again"
    )]
    NotUnblocked(#[source] UnblockError),
    /// Other clients could have resumed it.
    #[error("the VM was not handed over, and runs on here")]
    NotBlocked(#[source] InhibitorError),
    /// The disks say otherwise.
    #[error("the VM is not taken back, and stays paused: a disk is not as it was given up")]
    Disk(#[source] LaunchError),
    /// A fault that a test injected.
    #[error("a step of the hand-over failed")]
    Injected(#[source] std::io::Error),
    /// The record stays.
    #[error("the VM runs here, but the record that says otherwise cannot be removed")]
    Record(#[source] RecordError),
}

/// What the user wants of a VM that may run at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// That it runs there, if it can.
    There,
    /// That it runs here. If there is no answer, the user says that it will never run there.
    Here,
}

/// The fault point before an action.
fn point(state: Source, action: SourceAction) -> Option<Point> {
    Some(match (state, action) {
        (_, SourceAction::GiveUp) => Point::CommitGivingUp,
        (_, SourceAction::Send(Word::Commit)) => Point::CommitGivenUp,
        (Source::GivenUp, SourceAction::Wait) => Point::CommitSent,
        (Source::Serving, SourceAction::Wait) => Point::CommitServing,
        (_, SourceAction::End) => Point::CommitEnding,
        (Source::Ended, SourceAction::Send(_)) => Point::CommitEnded,
        (_, SourceAction::Resume) => Point::CommitResuming,
        _ => return None,
    })
}

/// The VM, by what may be done with it.
enum Held<'v> {
    Paused(PausedVm<'v>),
    GivenUp(HandedOver<'v>),
    /// It runs, has ended, or stays paused: there is nothing to be done.
    Gone,
}

/// A hand-over that is not decided.
pub(super) struct Undecided<'v, 'r> {
    held: Held<'v>,
    record: SourceRecord,
    session: Session,
    /// What the destination fetches pages over, if it lacks any.
    serving: Option<Serving>,
    wire: Option<Wire>,
    reconnect: Reconnect<'r>,
    /// How long it is tried to connect again.
    patience: Duration,
    wish: Wish,
    /// The disks as they were given up, and the process that may have them open.
    disks: (Vec<Disk>, i32),
    /// What the other side, or the connection, said last.
    why: Option<String>,
    /// When it said so of the VM.
    runs_since: Option<Instant>,
    error: Option<CommitError>,
}

/// A VM that runs at the destination.
pub(super) struct Moved {
    /// The connection, if there still is one.
    pub wire: Option<Wire>,
    /// When the destination said so.
    pub runs_since: Instant,
    /// Pages that it fetched since, and bytes that were sent for them.
    pub fetched: (u64, u64),
}

impl<'v, 'r> Undecided<'v, 'r> {
    /// A VM that is stopped, of which all was sent.
    pub fn ready(
        vm: PausedVm<'v>,
        (record, session): (SourceRecord, Session),
        wire: Wire,
        reconnect: Reconnect<'r>,
        patience: Duration,
    ) -> Undecided<'v, 'r> {
        Undecided {
            held: Held::Paused(vm),
            record,
            session,
            serving: None,
            wire: Some(wire),
            reconnect,
            patience,
            wish: Wish::There,
            disks: (Vec::new(), 0),
            why: None,
            runs_since: None,
            error: None,
        }
    }

    /// A VM that an earlier engine gave up.
    pub fn found(
        vm: HandedOver<'v>,
        (record, session): (SourceRecord, Session),
        disks: (Vec<Disk>, i32),
        reconnect: Reconnect<'r>,
        (wish, patience): (Wish, Duration),
    ) -> Undecided<'v, 'r> {
        Undecided {
            held: Held::GivenUp(vm),
            record,
            session,
            serving: None,
            wire: None,
            reconnect,
            patience,
            wish,
            disks,
            why: None,
            runs_since: None,
            error: None,
        }
    }

    /// The destination fetches pages over these.
    pub fn with_lanes(mut self, serving: Option<Serving>) -> Undecided<'v, 'r> {
        self.serving = serving;
        self
    }

    /// Goes on until it is decided, or cannot be.
    pub fn decide(mut self, mut state: Source) -> Result<Moved, CommitError> {
        let mut action = SourceAction::Wait;
        loop {
            if let Err(error) = point(state, action).map_or(Ok(()), fault::at) {
                (state, action) = state.step(self.injected(action, error));
                continue;
            }
            let event = match action {
                SourceAction::Wait => self.wait(state),
                SourceAction::GiveUp => Some(self.give_up()),
                SourceAction::Send(word) => match self.send(word) {
                    true => {
                        action = SourceAction::Wait;
                        continue;
                    }
                    false => Some(Event::Lost),
                },
                SourceAction::End => Some(self.end()),
                SourceAction::Resume => Some(self.resume()),
            };
            let Some(event) = event else {
                return self.outcome(state);
            };
            (state, action) = state.step(event);
        }
    }

    /// A test has the action fail.
    fn injected(&mut self, action: SourceAction, error: std::io::Error) -> Event {
        match action {
            SourceAction::Send(_) | SourceAction::Wait => self.lose(error.to_string()),
            SourceAction::GiveUp | SourceAction::End | SourceAction::Resume => {
                self.error = Some(CommitError::Injected(error));
                Event::Failed
            }
        }
    }

    fn outcome(self, state: Source) -> Result<Moved, CommitError> {
        let why = self.why.unwrap_or_else(|| "no reason is given".to_owned());
        match (state, self.error) {
            (Source::Ended, _) => Ok(Moved {
                wire: self.wire,
                runs_since: self.runs_since.unwrap_or_else(Instant::now),
                fetched: self
                    .serving
                    .as_ref()
                    .map_or((0, 0), |serving| (serving.pages(), serving.bytes())),
            }),
            (_, Some(error)) => Err(error),
            (Source::Kept, None) if self.wire.is_none() => Err(CommitError::Lost { why }),
            (Source::Kept, None) => Err(CommitError::NotTaken { why }),
            (_, None) => Err(CommitError::InDoubt { why }),
        }
    }

    /// The next event; none where there is nothing to wait for.
    fn wait(&mut self, state: Source) -> Option<Event> {
        match state {
            Source::Kept | Source::Ended | Source::Lost => None,
            // It was answered, and is still in doubt.
            Source::InDoubt if self.wire.is_some() => None,
            Source::InDoubt => self.connect_again(),
            _ => Some(self.hear(state)),
        }
    }

    fn hear(&mut self, state: Source) -> Event {
        loop {
            let failure = self.serving.as_ref().and_then(Serving::failure);
            if let Some(why) = failure.filter(|_| state == Source::Serving) {
                self.error = Some(CommitError::PagesLost { why });
                return Event::Failed;
            }
            let Some(wire) = &mut self.wire else {
                return Event::Lost;
            };
            let lost = match wire.receive_message() {
                Ok(Message::Control(Control::Alive)) => continue,
                Ok(Message::Control(Control::Word { word, why })) => {
                    self.why = why.or(self.why.take());
                    if matches!(word, Word::Running | Word::NeedsPages) {
                        self.runs_since.get_or_insert_with(Instant::now);
                    }
                    return Event::Heard(word);
                }
                Ok(other) => other.unexpected(),
                Err(error) => error,
            };
            return self.lose(crate::in_words(&lost));
        }
    }

    fn lose(&mut self, why: String) -> Event {
        self.wire = None;
        self.why = Some(why);
        Event::Lost
    }

    /// Whether it was sent, as far as can be known here.
    fn send(&mut self, word: Word) -> bool {
        if word == Word::Settled && self.wire.is_none() {
            // Else a destination that is ready would wait for nothing. One that is out of reach gives up by itself.
            self.wire = self.connect().ok();
        }
        let Some(wire) = &mut self.wire else {
            return false;
        };
        let why = match word {
            Word::Settled => self.error.as_ref().map(|error| crate::in_words(error)),
            _ => None,
        };
        match wire.send_control(&Control::Word { word, why }) {
            Ok(()) => true,
            Err(error) => {
                self.lose(crate::in_words(&error));
                false
            }
        }
    }

    fn give_up(&mut self) -> Event {
        let Held::Paused(mut vm) = std::mem::replace(&mut self.held, Held::Gone) else {
            return Event::Failed;
        };
        // A QEMU that hangs must show before: it would carry out later commands when it goes on.
        let error = match vm.monitor().run_state() {
            Ok(state) if !state.running => None,
            Ok(_) => Some(CommitError::ResumedByOthers),
            Err(error) => Some(CommitError::Ended(error)),
        };
        if error.is_some() {
            self.held = Held::Paused(vm);
            self.error = error;
            return Event::Failed;
        }
        let error = match vm.hand_over(&self.record) {
            Ok(vm) => return self.given_up(vm),
            Err(both) => {
                let (vm, error) = *both;
                self.held = Held::Paused(vm);
                CommitError::NotGivenUp(error)
            }
        };
        // The guardian may have died after it wrote it.
        let removed = self.record.remove();
        self.error = Some(removed.map_or_else(CommitError::Record, |()| error));
        Event::Failed
    }

    /// From here on only another client could resume it, and after this that cannot either.
    fn given_up(&mut self, mut vm: HandedOver<'v>) -> Event {
        if let Some(wire) = &self.wire {
            wire.limit_silence(ANSWER_LIMIT);
        }
        let blocked = fault::at(Point::CommitBlocking).map_err(CommitError::Injected);
        let blocked = blocked.and_then(|()| vm.block_cont().map_err(CommitError::NotBlocked));
        let events = vm.monitor().client().take_events();
        let resumed = events.is_ok_and(|events| events.iter().any(|event| event.name == "RESUME"));
        self.held = Held::GivenUp(vm);
        let error = match (blocked, resumed) {
            (Ok(()), false) => return Event::Done,
            (_, true) => CommitError::ResumedByOthers,
            (Err(error), false) => error,
        };
        self.error = Some(error);
        Event::Failed
    }

    fn end(&mut self) -> Event {
        let ended = match &mut self.held {
            Held::GivenUp(vm) => vm.end(),
            Held::Paused(_) | Held::Gone => Ok(()),
        };
        match ended {
            Ok(()) => {
                // It is about a process that has ended.
                let _ = self.record.remove();
                self.held = Held::Gone;
                Event::Done
            }
            Err(error) => {
                self.error = Some(CommitError::NotEnded(error));
                Event::Failed
            }
        }
    }

    fn resume(&mut self) -> Event {
        let paused = match std::mem::replace(&mut self.held, Held::Gone) {
            Held::Paused(vm) => Ok(vm),
            Held::GivenUp(vm) => vm.take_back().map_err(CommitError::NotUnblocked),
            Held::Gone => return Event::Failed,
        };
        let resumed = paused.and_then(|vm| vm.resume().map_err(CommitError::NotResumed));
        match resumed.and_then(|()| self.record.remove().map_err(CommitError::Record)) {
            Ok(()) => Event::Done,
            Err(error) => {
                self.error.get_or_insert(error);
                Event::Failed
            }
        }
    }

    fn connect(&mut self) -> Result<Wire, String> {
        let mut wire = (self.reconnect)().map_err(|unreachable| unreachable.why)?;
        wire.limit_silence(ANSWER_LIMIT);
        let session = self.session.clone();
        let lanes = self.serving.as_ref().map_or(0, Serving::lanes);
        let sent = wire.send_control(&Control::Again { session, lanes });
        sent.map_err(|error| crate::in_words(&error))?;
        if let Some(serving) = &mut self.serving {
            let opened = serving.open(0, self.reconnect);
            opened.map_err(|error| crate::in_words(&error))?;
        }
        Ok(wire)
    }

    /// A new connection, or what the user says instead.
    fn connect_again(&mut self) -> Option<Event> {
        let deadline = Instant::now() + self.patience;
        loop {
            match self.connect() {
                Ok(wire) => {
                    self.wire = Some(wire);
                    return Some(match self.wish {
                        Wish::There => Event::Connected,
                        Wish::Here => Event::Cancelled,
                    });
                }
                Err(why) => self.why = Some(why),
            }
            if Instant::now() >= deadline {
                return self.declare();
            }
            std::thread::sleep(CONNECT_AGAIN_AFTER);
        }
    }

    /// The user has said that the VM will never run there; its disks must not say otherwise.
    fn declare(&mut self) -> Option<Event> {
        let (disks, pid) = &self.disks;
        match (self.wish, launch::check_idle_disks(disks, *pid)) {
            (Wish::There, _) => None,
            (Wish::Here, Ok(())) => Some(Event::Declared),
            (Wish::Here, Err(error)) => {
                self.error = Some(CommitError::Disk(error));
                None
            }
        }
    }
}
