//! The destination's half of the hand-over: carries out what [`Destination`] says.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use stillframe_fault::{self as fault, Point};
use stillframe_qemu::launch::Launched;
use stillframe_qemu::monitor::Monitor;
use stillframe_sys::process::Process;

use super::error::ReceiveError;
use super::filling::{FilledReport, MEANWHILE, RunningLate};
use super::handover::{Destination, DestinationAction, Event, Mark};
use super::record::DestinationRecord;
use super::{ANSWER_LIMIT, Awaited, END_LIMIT, Listen, Wire, incoming};
use crate::Progress;
use crate::connection::message::{Control, Message};
use crate::connection::word::Word;
use crate::guardian::{Guardian, OnDisconnect};
use crate::populate::lazy::supervision::Supervised;
use crate::post_restore;

/// How long a VM that is ready waits for a source that is out of reach.
pub(super) const READY_LIMIT: Duration = Duration::from_secs(600);
/// How long a source that was out of reach may ask what became of the VM. Later an engine that is started to answer
/// does so, from the record.
const ASKED_LIMIT: Duration = Duration::from_secs(120);
/// How long a VM that lacks pages is not looked at while the source is listened to.
const LISTEN: Duration = Duration::from_millis(1);

/// The fault point before an action.
fn point(state: Destination, action: DestinationAction) -> Option<Point> {
    Some(match (state, action) {
        (_, DestinationAction::Record(Mark::Ready)) => Point::TakeoverLoaded,
        (_, DestinationAction::Send(Word::Ready)) => Point::TakeoverMarked,
        (Destination::Ready, DestinationAction::Wait) => Point::TakeoverReady,
        (_, DestinationAction::Release) => Point::TakeoverReleasing,
        (_, DestinationAction::Record(Mark::Committed)) => Point::TakeoverReleased,
        (_, DestinationAction::Cont) => Point::TakeoverCommitted,
        (Destination::Filling, DestinationAction::Wait) => Point::TakeoverFilling,
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
    /// Here, and it lacks pages.
    Lacks { why: String },
}

/// What happens to a VM that arrives.
pub(super) enum TakeoverEvent<'e> {
    /// It is here, and runs or not.
    Arrived(&'e Process, bool),
    /// All its memory is here.
    Filled(FilledReport),
    /// How it fares until then.
    Supervised(Supervised),
    /// How much of it is here.
    Progress(Progress),
}

/// Where that is reported.
pub(super) type TakeoverSink<'s> = &'s mut dyn FnMut(TakeoverEvent<'_>);

/// A VM that has arrived, and may not run yet.
pub(super) struct Takeover<'t> {
    pub vm: NewVm,
    pub guardian: Option<Guardian>,
    record: DestinationRecord,
    wire: Option<Wire>,
    listen: Listen<'t>,
    /// Whether the guest is to run.
    runs: bool,
    /// What happens to the VM from when it runs, or is here, paused.
    events: TakeoverSink<'t>,
    /// What it lacks when it runs, if it lacks anything.
    late: Option<RunningLate<'t>>,
    /// Since when the source has been out of reach of a VM that runs.
    alone: Option<Instant>,
    /// The source is not listened to any more.
    over: bool,
    /// Why what the VM lacks cannot be populated.
    broken: Option<String>,
    /// The last reason, for the other side or the user of this one.
    why: Option<String>,
}

impl<'t> Takeover<'t> {
    /// A VM, and its guardian; the connection to the source, if there is one.
    pub fn new(
        (vm, guardian): (NewVm, Option<Guardian>),
        record: DestinationRecord,
        (wire, listen): (Option<Wire>, Listen<'t>),
        late: Option<RunningLate<'t>>,
        events: TakeoverSink<'t>,
    ) -> Takeover<'t> {
        Takeover {
            vm,
            guardian,
            runs: record.content().runs,
            record,
            wire,
            listen,
            events,
            late,
            alone: None,
            over: false,
            broken: None,
            why: None,
        }
    }

    /// Steps until the state is `Over`. Returns where the VM is.
    pub fn decide(
        &mut self,
        (mut state, mut action): (Destination, DestinationAction),
    ) -> Whereabouts {
        let (mut here, mut before) = (false, state);
        loop {
            let runs = matches!(state, Destination::Running | Destination::Filling);
            if runs && action == DestinationAction::Wait && !here {
                here = true;
                self.announce();
                if self.record.content().settled {
                    break;
                }
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
                DestinationAction::Forget => self.forget(),
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
            Destination::Filling => Whereabouts::Lacks { why },
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
        match (state, &self.wire) {
            (Destination::Filling, _) => self.fill(),
            (Destination::Running, _) if self.late.is_some() => self.fill(),
            (_, None) => self.await_source(state),
            (_, Some(_)) => self.hear(state),
        }
    }

    fn hear(&mut self, state: Destination) -> Event {
        let Some(wire) = &mut self.wire else {
            return Event::Lost;
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
        match self.connected((Awaited::Again, limit)) {
            true => Event::Connected,
            false => Event::Cancelled,
        }
    }

    /// Waits for the source. Whether it came back.
    pub fn connected(&mut self, awaited: (Awaited, Duration)) -> bool {
        let session = self.record.content().session.clone();
        let Some(back) = incoming::await_source(self.listen, &session, awaited) else {
            return false;
        };
        // Lanes that cannot be used show when pages are fetched.
        let _ = match &mut self.late {
            Some(late) => late.connected(back.lanes),
            None => Ok(()),
        };
        self.wire = Some(back.wire);
        true
    }

    /// Once the hand-over is over: populates what the VM lacks still, from the checkpoint that has it.
    ///
    /// # Errors
    /// It cannot be read, or what this engine knows of it not be removed.
    pub fn finish(&mut self) -> Result<(), ReceiveError> {
        self.over = true;
        while self.late.is_some() && self.broken.is_none() {
            self.fill();
        }
        if let Some(why) = self.broken.take() {
            return Err(ReceiveError::LacksStored { why });
        }
        if self.record.content().settled {
            self.record.remove()?;
        }
        Ok(())
    }

    /// Fetches what the VM lacks, until it has all, or hears something.
    fn fill(&mut self) -> Event {
        loop {
            let (Some(late), NewVm::Kept(process, monitor)) = (&mut self.late, &mut self.vm) else {
                return Event::Filled;
            };
            if !process.is_alive() {
                self.late = None;
                self.why = Some("its QEMU has ended".to_owned());
                return Event::Failed;
            }
            let events = RefCell::new(&mut *self.events);
            let looked = late.look(
                monitor,
                &mut |supervised| events.borrow_mut()(TakeoverEvent::Supervised(supervised)),
                &mut |progress| events.borrow_mut()(TakeoverEvent::Progress(progress)),
            );
            let released = looked.and_then(|complete| match &self.guardian {
                Some(guardian) if complete => late.release(guardian, process).map(|()| true),
                _ => Ok(complete),
            });
            match released {
                Ok(false) => {}
                Ok(true) => {
                    (self.events)(TakeoverEvent::Filled(late.report()));
                    self.late = None;
                    return Event::Filled;
                }
                // QEMU ends, or this engine cannot go on: another may.
                Err(error) if process.is_alive() => {
                    self.broken = Some(crate::in_words(&error));
                    self.failed(&error);
                    return Event::Cancelled;
                }
                Err(_) => continue,
            }
            if late.needs_source()
                && let Some(base) = late.only_lacks()
                && self.record.only_lacks(base).is_ok()
            {
                late.release_source();
                return Event::Filled;
            }
            if let Some(event) = self.hear_meanwhile() {
                return event;
            }
        }
    }

    /// What the source says, or that it cannot be reached.
    fn hear_meanwhile(&mut self) -> Option<Event> {
        let late = self.late.as_mut()?;
        if self.over {
            return None;
        }
        let Some(wire) = &mut self.wire else {
            let alone = *self.alone.get_or_insert_with(Instant::now);
            if alone.elapsed() > READY_LIMIT {
                return Some(Event::Cancelled);
            }
            let connected = self.connected((Awaited::Meanwhile, MEANWHILE));
            if connected {
                self.alone = None;
            }
            return connected.then_some(Event::Connected);
        };
        if late.needs_source()
            && late.is_beat_due()
            && let Err(error) = wire.send_control(&Control::Alive)
        {
            return Some(self.lose(&error));
        }
        if wire.has_input(LISTEN) {
            return Some(self.hear(Destination::Filling));
        }
        let cut_off = late.is_cut_off();
        cut_off.then(|| {
            self.wire = None;
            Event::Lost
        })
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

    /// The source knows where the VM is.
    fn forget(&mut self) -> Event {
        let forgotten = match (&self.late, &self.vm) {
            (Some(_), NewVm::Launched(_) | NewVm::Kept(..)) => self.record.settle(),
            _ => self.record.remove(),
        };
        match forgotten {
            Ok(()) => Event::Done,
            Err(error) => self.failed(&error),
        }
    }

    fn mark(&mut self, mark: Mark) -> Event {
        match self.record.mark(mark) {
            Ok(()) => Event::Done,
            Err(error) => self.failed(&error),
        }
    }

    fn release(&mut self) -> Event {
        let then = match self.late {
            Some(_) => OnDisconnect::Pause,
            None => OnDisconnect::Nothing,
        };
        let guardian = self.guardian.as_ref();
        let released = guardian.map_or(Ok(()), |guardian| guardian.on_disconnect(then));
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
        let done = match &self.late {
            Some(late) if late.needs_source() => Event::Incomplete,
            _ => Event::Done,
        };
        if !self.runs {
            return done;
        }
        match monitor.cont() {
            Ok(()) => done,
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
            let runs = self.runs && !monitor.is_suspended();
            (self.events)(TakeoverEvent::Arrived(process, runs));
        }
    }
}
