//! The destination's half of the hand-over: carries out what [`Destination`] says.

use std::time::Duration;

use stillframe_fault::{self as fault, Point};
use stillframe_qemu::launch::Launched;
use stillframe_qemu::monitor::Monitor;
use stillframe_sys::process::Process;

use super::handover::{Destination, DestinationAction, Event, Mark};
use super::record::DestinationRecord;
use super::{ANSWER_LIMIT, Awaited, Listen, Wire};
use crate::connection::message::{Control, Message};
use crate::connection::word::Word;
use crate::guardian::{Guardian, OnDisconnect};
use crate::post_restore;

/// How long a VM that is ready waits for a source that is out of reach.
const READY_LIMIT: Duration = Duration::from_secs(600);
/// How long a source that was out of reach may ask what became of the VM. Later an engine that is started to answer
/// does so, from the record.
const ASKED_LIMIT: Duration = Duration::from_secs(120);
/// Time for a QEMU that was killed to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// The fault point before an action.
fn point(state: Destination, action: DestinationAction) -> Option<Point> {
    Some(match (state, action) {
        (_, DestinationAction::Record(Mark::Ready)) => Point::TakeoverLoaded,
        (_, DestinationAction::Send(Word::Ready)) => Point::TakeoverMarked,
        (Destination::Ready, DestinationAction::Wait) => Point::TakeoverReady,
        (_, DestinationAction::Release) => Point::TakeoverReleasing,
        (_, DestinationAction::Record(Mark::Committed)) => Point::TakeoverReleased,
        (_, DestinationAction::Cont) => Point::TakeoverCommitted,
        (_, DestinationAction::Send(Word::Running)) => Point::TakeoverRunning,
        (Destination::Running, DestinationAction::Wait) => Point::TakeoverSaid,
        _ => return None,
    })
}

/// The VM, by what may be done with it.
pub(super) enum NewVm {
    /// Started by this engine, and ended with it.
    Launched(Launched),
    /// It lives on its own.
    Kept(Process, Monitor),
    Gone,
}

/// Where a VM is when the hand-over is over.
pub(super) enum Whereabouts {
    /// Here.
    Here,
    /// Not here.
    NotHere { why: String },
    /// It may have run here, or its QEMU does not end.
    Unclear { why: String },
}

/// A VM that has arrived, and may not run yet.
pub(super) struct Takeover<'t> {
    pub vm: NewVm,
    pub guardian: Option<Guardian>,
    pub record: DestinationRecord,
    pub wire: Option<Wire>,
    pub listen: Listen<'t>,
    /// Whether the guest is to run.
    pub runs: bool,
    /// Called when the VM runs, or is here, paused.
    pub arrived: &'t mut dyn FnMut(&Process, bool),
    /// The last reason, for the other side or the user of this one.
    pub why: Option<String>,
}

impl Takeover<'_> {
    /// Steps until the state is `Over`. Returns where the VM is.
    pub fn decide(
        &mut self,
        (mut state, mut action): (Destination, DestinationAction),
    ) -> Whereabouts {
        let (mut here, mut before) = (false, state);
        loop {
            if (state, action) == (Destination::Running, DestinationAction::Wait) && !here {
                here = true;
                self.announce();
            }
            if let Err(error) = point(state, action).map_or(Ok(()), fault::at) {
                (state, action) = state.step(self.injected(action, &error));
                continue;
            }
            let event = match action {
                DestinationAction::Wait if state == Destination::Over => break,
                DestinationAction::Wait => self.wait(state),
                DestinationAction::Record(mark) => self.mark(mark),
                DestinationAction::Release => self.release(),
                DestinationAction::Cont => self.cont(),
                DestinationAction::End => self.end(),
                DestinationAction::Forget => match self.record.remove() {
                    Ok(()) => Event::Done,
                    Err(error) => self.failed(&error),
                },
                DestinationAction::Send(word) => match self.send(word) {
                    true => {
                        action = DestinationAction::Wait;
                        continue;
                    }
                    false => Event::Lost,
                },
            };
            before = state;
            (state, action) = state.step(event);
        }
        let why = self.why.take();
        let why = why.unwrap_or_else(|| "no reason is given".to_owned());
        match before {
            _ if here => Whereabouts::Here,
            Destination::Unclear | Destination::Undead => Whereabouts::Unclear { why },
            _ => Whereabouts::NotHere { why },
        }
    }

    /// A test has the action fail.
    fn injected(&mut self, action: DestinationAction, error: &std::io::Error) -> Event {
        match action {
            DestinationAction::Send(_) | DestinationAction::Wait => self.lose(error),
            DestinationAction::Cont => {
                self.keep();
                self.failed(error)
            }
            _ => self.failed(error),
        }
    }

    fn failed(&mut self, error: &dyn std::error::Error) -> Event {
        self.why = Some(crate::in_words(error));
        Event::Failed
    }

    fn wait(&mut self, state: Destination) -> Event {
        let Some(wire) = &mut self.wire else {
            return self.await_source(state);
        };
        wire.limit_silence(ANSWER_LIMIT);
        let lost = match wire.receive_message() {
            Ok(Message::Control(Control::Word { word, why })) => {
                let why = why.map(|why| format!("the source says: {why}"));
                self.why = why.or(self.why.take());
                return self.heard(state, word);
            }
            Ok(other) => other.unexpected(),
            Err(error) => error,
        };
        self.lose(&lost)
    }

    fn heard(&mut self, state: Destination, word: Word) -> Event {
        let lives = match &self.vm {
            NewVm::Launched(launched) => launched.process.is_alive(),
            NewVm::Kept(process, _) => process.is_alive(),
            NewVm::Gone => false,
        };
        // It has not run, so that the source may be told at once.
        if state == Destination::Ready && word == Word::Commit && !lives {
            self.why = Some("its QEMU has ended".to_owned());
            return Event::Failed;
        }
        Event::Heard(word)
    }

    fn lose(&mut self, error: &dyn std::error::Error) -> Event {
        self.wire = None;
        self.why = Some(crate::in_words(error));
        Event::Lost
    }

    /// The source comes back, and means this VM; or it was waited for long enough.
    fn await_source(&mut self, state: Destination) -> Event {
        let limit = match state {
            Destination::Ready => READY_LIMIT,
            _ => ASKED_LIMIT,
        };
        while let Some(mut wire) = (self.listen)(Awaited::Again, limit) {
            wire.limit_silence(ANSWER_LIMIT);
            let again = wire.receive_message();
            let ours = &self.record.content().session;
            if let Ok(Message::Control(Control::Again { session })) = &again
                && session == ours
            {
                self.wire = Some(wire);
                return Event::Connected;
            }
            // Another migration has to wait, and nothing is known here of another VM.
            let why = Some("this destination is busy with another migration".to_owned());
            let word = match again {
                Ok(Message::Control(Control::Again { .. })) => Word::Unclear,
                _ => Word::Never,
            };
            let _ = wire.send_control(&Control::Word { word, why });
        }
        Event::Cancelled
    }

    /// Whether it was sent, as far as can be known here.
    fn send(&mut self, word: Word) -> bool {
        let Some(wire) = &mut self.wire else {
            return false;
        };
        let why = match word {
            Word::Never | Word::Unclear => self.why.clone(),
            _ => None,
        };
        let sent = wire.send_control(&Control::Word { word, why });
        sent.is_ok_and(|()| true) || {
            self.wire = None;
            false
        }
    }

    fn mark(&mut self, mark: Mark) -> Event {
        match self.record.mark(mark) {
            Ok(()) => Event::Done,
            Err(error) => self.failed(&error),
        }
    }

    fn release(&mut self) -> Event {
        let released = self.guardian.as_ref().map_or(Ok(()), |guardian| {
            guardian.on_disconnect(OnDisconnect::Nothing)
        });
        match released {
            Ok(()) => Event::Done,
            Err(error) => self.failed(&error),
        }
    }

    fn cont(&mut self) -> Event {
        let monitor = match &mut self.vm {
            NewVm::Launched(launched) => &mut launched.monitor,
            NewVm::Kept(_, monitor) => monitor,
            NewVm::Gone => return Event::Failed,
        };
        if !self.runs {
            return Event::Done;
        }
        match monitor.cont() {
            Ok(()) => Event::Done,
            Err(error) => {
                self.why = Some(crate::in_words(&error));
                if error.is_refusal() {
                    return Event::Refused;
                }
                // It may run.
                self.keep();
                Event::Failed
            }
        }
    }

    /// From here on the VM lives on its own.
    fn keep(&mut self) {
        self.vm = match std::mem::replace(&mut self.vm, NewVm::Gone) {
            NewVm::Launched(launched) => {
                let (process, monitor) = launched.keep();
                NewVm::Kept(process, monitor)
            }
            other => other,
        };
    }

    fn end(&mut self) -> Event {
        match std::mem::replace(&mut self.vm, NewVm::Gone) {
            // It is killed, and reaped.
            NewVm::Launched(launched) => drop(launched),
            NewVm::Kept(process, monitor) => {
                let signalled = process.signal(signal_hook::consts::SIGKILL);
                if process.is_alive() && !process.wait_exit(END_LIMIT) {
                    self.vm = NewVm::Kept(process, monitor);
                    let words = signalled.map_or_else(
                        |error| crate::in_words(&error),
                        |()| "its QEMU was killed, and does not end".to_owned(),
                    );
                    self.why = Some(words);
                    return Event::Failed;
                }
            }
            NewVm::Gone => {}
        }
        Event::Done
    }

    /// The VM is here for good.
    fn announce(&mut self) {
        self.keep();
        if let NewVm::Kept(process, monitor) = &mut self.vm {
            if self.runs {
                post_restore::announce(monitor);
            }
            (self.arrived)(process, self.runs && !monitor.is_suspended());
        }
    }
}
