//! Both hosts of a hand-over and what is between them, and all that can happen next.

use super::super::*;

/// Upper bound on words in flight in one direction: a side sends few before it receives one.
const WORDS_MAX: usize = 3;

/// A QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Qemu {
    Running,
    Paused,
    Gone,
}

/// An engine: what it does, and whether it has a connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Engine<State, Action> {
    state: State,
    action: Action,
    linked: bool,
}

type SourceEngine = Engine<Source, SourceAction>;
type DestinationEngine = Engine<Destination, DestinationAction>;

/// Both hosts, and what is between them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct World {
    source: Option<SourceEngine>,
    source_qemu: Qemu,
    /// The guardian resumes the VM.
    on_watch: bool,
    /// It has done so.
    fired: bool,
    given_up: bool,
    /// The VM was stopped, and all of it sent.
    sent: bool,
    destination: Option<DestinationEngine>,
    destination_qemu: Qemu,
    /// The guardian ends this QEMU with the engine.
    doomed: bool,
    mark: Option<Mark>,
    cable: bool,
    to_destination: Vec<Word>,
    to_source: Vec<Word>,
    /// Pages are at the source only.
    lacks: bool,
    /// It has run at the destination.
    ran: bool,
    /// A QEMU or a host has died of itself.
    hurt: bool,
    source_host: bool,
    destination_host: bool,
}

/// The rules under test.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    pub source: fn(Source, Event) -> (Source, SourceAction),
    pub destination: fn(Destination, Event) -> (Destination, DestinationAction),
    pub recorded: fn(Mark, bool) -> (Destination, DestinationAction),
    /// Whether the guardian goes off watch in the step that writes the record.
    pub one_step: bool,
}

pub(super) const OURS: Rules = Rules {
    source: Source::step,
    destination: Destination::step,
    recorded: Destination::recorded,
    one_step: true,
};

/// A successor, and whether it takes no further misfortune to get there.
pub(super) struct Move {
    pub name: &'static str,
    pub world: World,
    pub regular: bool,
}

impl World {
    pub fn beginning() -> World {
        World {
            source: Some(Engine {
                state: Source::Keeping,
                action: SourceAction::Wait,
                linked: true,
            }),
            source_qemu: Qemu::Running,
            on_watch: false,
            fired: false,
            given_up: false,
            sent: false,
            destination: Some(Engine {
                state: Destination::Receiving,
                action: DestinationAction::Wait,
                linked: true,
            }),
            destination_qemu: Qemu::Paused,
            doomed: true,
            mark: None,
            cable: true,
            to_destination: Vec::new(),
            to_source: Vec::new(),
            lacks: false,
            ran: false,
            hurt: false,
            source_host: true,
            destination_host: true,
        }
    }

    fn source_event(&mut self, rules: Rules, event: Event) {
        if let Some(engine) = &mut self.source {
            (engine.state, engine.action) = (rules.source)(engine.state, event);
        }
    }

    fn destination_event(&mut self, rules: Rules, event: Event) {
        if let Some(engine) = &mut self.destination {
            (engine.state, engine.action) = (rules.destination)(engine.state, event);
        }
    }

    fn source_waits(&self) -> Option<&SourceEngine> {
        let engine = self.source.as_ref();
        engine.filter(|engine| engine.action == SourceAction::Wait)
    }

    fn destination_waits(&self) -> Option<&DestinationEngine> {
        let engine = self.destination.as_ref();
        engine.filter(|engine| engine.action == DestinationAction::Wait)
    }

    /// What is wrong with it; nothing, if the rules are right.
    pub fn wrong(&self) -> Option<&'static str> {
        let (source, destination) = (self.source_qemu, self.destination_qemu);
        if source == Qemu::Running && destination == Qemu::Running {
            return Some("both run");
        }
        if source == Qemu::Running && self.ran {
            return Some("it runs at the source after it ran at the destination");
        }
        let stuck = self.source.is_none() && !self.on_watch;
        if source == Qemu::Paused && !self.given_up && stuck {
            return Some("paused at the source, not given up, and no process resumes it");
        }
        if self.to_source.len().max(self.to_destination.len()) > WORDS_MAX {
            return Some("words without an answer");
        }
        let lacks = self.lacks && self.ran;
        if source == Qemu::Gone && (destination == Qemu::Gone || lacks) && !self.hurt {
            return Some("lost, though no QEMU and no host died");
        }
        None
    }

    /// One VM runs and the other is gone, or it died where it was.
    pub fn is_solved(&self) -> bool {
        match (self.source_qemu, self.destination_qemu) {
            (Qemu::Gone, Qemu::Running) => !self.lacks,
            (Qemu::Running | Qemu::Gone, Qemu::Gone) => true,
            (Qemu::Paused, Qemu::Gone) => self.ran,
            _ => false,
        }
    }

    pub fn moves(&self, rules: Rules) -> Vec<Move> {
        let mut moves = Vec::new();
        self.actions_of_source(rules, &mut moves);
        self.actions_of_destination(rules, &mut moves);
        self.messages(rules, &mut moves);
        self.commands(rules, &mut moves);
        self.ends(rules, &mut moves);
        self.guardians(&mut moves);
        self.misfortunes(&mut moves);
        moves
    }

    fn with(
        &self,
        moves: &mut Vec<Move>,
        regular: bool,
        name: &'static str,
        change: impl FnOnce(&mut World),
    ) {
        let mut world = self.clone();
        change(&mut world);
        if world != *self {
            moves.push(Move {
                name,
                world,
                regular,
            });
        }
    }

    fn actions_of_source(&self, rules: Rules, moves: &mut Vec<Move>) {
        let Some(engine) = &self.source else { return };
        // What cannot succeed fails without any further misfortune.
        let possible = match engine.action {
            SourceAction::GiveUp => self.on_watch && !self.fired,
            SourceAction::Resume => self.source_qemu != Qemu::Gone,
            _ => true,
        };
        let fails = |moves: &mut Vec<Move>, change: fn(&mut World)| {
            self.with(moves, !possible, "the source's action fails", |world| {
                change(world);
                world.source_event(rules, Event::Failed);
            });
        };
        match engine.action {
            SourceAction::Wait => self.source_stops(engine, rules, moves),
            SourceAction::GiveUp => {
                fails(moves, |_| ());
                if possible {
                    self.with(moves, true, "given up", |world| {
                        world.given_up = true;
                        world.on_watch = !rules.one_step;
                        world.source_event(rules, Event::Done);
                    });
                }
            }
            SourceAction::Send(word) => self.source_sends(rules, word, moves),
            SourceAction::End => {
                fails(moves, |_| ());
                fails(moves, |world| world.source_qemu = Qemu::Gone);
                self.with(moves, true, "the source's QEMU ends", |world| {
                    world.source_qemu = Qemu::Gone;
                    world.given_up = false;
                    world.source_event(rules, Event::Done);
                });
            }
            SourceAction::Resume => {
                fails(moves, |_| ());
                if !possible {
                    return;
                }
                fails(moves, |world| world.source_qemu = Qemu::Running);
                // The engine may die before it removes the record.
                self.with(moves, true, "the VM is resumed at the source", |world| {
                    world.source_qemu = Qemu::Running;
                });
                self.with(
                    moves,
                    true,
                    "resumed at the source, and recorded",
                    |world| {
                        world.source_qemu = Qemu::Running;
                        (world.given_up, world.on_watch) = (false, false);
                        world.source_event(rules, Event::Done);
                    },
                );
            }
        }
    }

    fn source_stops(&self, engine: &SourceEngine, rules: Rules, moves: &mut Vec<Move>) {
        if self.source_qemu == Qemu::Gone {
            self.with(moves, true, "the source's QEMU is missed", |world| {
                world.source_event(rules, Event::Failed);
            });
        }
        let may_stop = engine.state == Source::Keeping && engine.linked && !self.sent;
        if may_stop && self.source_qemu == Qemu::Running {
            self.with(moves, true, "the source stops the VM", |world| {
                world.on_watch = true;
                world.source_qemu = Qemu::Paused;
                world.sent = world.cable;
            });
        }
    }

    fn source_sends(&self, rules: Rules, word: Word, moves: &mut Vec<Move>) {
        self.with(moves, true, "the source sends", |world| {
            let engine = world.source.as_mut().unwrap();
            match engine.linked && world.cable {
                true => {
                    engine.action = SourceAction::Wait;
                    world.to_destination.push(word);
                }
                false => {
                    engine.linked = false;
                    world.to_source.clear();
                    world.source_event(rules, Event::Lost);
                }
            }
        });
    }

    fn actions_of_destination(&self, rules: Rules, moves: &mut Vec<Move>) {
        let Some(engine) = &self.destination else {
            return;
        };
        let cannot = self.destination_qemu == Qemu::Gone;
        let fails = |moves: &mut Vec<Move>, change: &dyn Fn(&mut World)| {
            let regular = cannot && engine.action == DestinationAction::Cont;
            self.with(moves, regular, "the destination's action fails", |world| {
                change(world);
                world.destination_event(rules, Event::Failed);
            });
        };
        let done = |moves: &mut Vec<Move>, name, change: &dyn Fn(&mut World)| {
            self.with(moves, true, name, |world| {
                change(world);
                world.destination_event(rules, Event::Done);
            });
        };
        match engine.action {
            DestinationAction::Wait => self.destination_comes_by(engine, rules, moves),
            DestinationAction::Record(mark) => {
                fails(moves, &|_| ());
                fails(moves, &|world| world.mark = Some(mark));
                done(moves, "put on record", &|world| world.mark = Some(mark));
            }
            DestinationAction::Release => {
                fails(moves, &|_| ());
                done(moves, "released", &|world| world.doomed = false);
            }
            DestinationAction::Cont => {
                let runs = |world: &mut World| {
                    world.destination_qemu = Qemu::Running;
                    world.ran = true;
                };
                fails(moves, &|_| ());
                if !cannot {
                    fails(moves, &runs);
                    self.with(moves, true, "resumed at the destination", |world| {
                        runs(world);
                        let event = match world.lacks {
                            true => Event::Incomplete,
                            false => Event::Done,
                        };
                        world.destination_event(rules, event);
                    });
                }
                if self.destination_qemu == Qemu::Paused {
                    self.with(moves, false, "cont is refused", |world| {
                        world.destination_event(rules, Event::Refused);
                    });
                }
            }
            DestinationAction::End => {
                fails(moves, &|_| ());
                done(moves, "the destination's QEMU ends", &|world| {
                    world.destination_qemu = Qemu::Gone;
                });
            }
            DestinationAction::Forget => done(moves, "forgotten", &|world| world.mark = None),
            DestinationAction::Send(word) => self.destination_sends(rules, word, moves),
        }
    }

    /// What happens to a destination that waits, but for what it hears.
    fn destination_comes_by(
        &self,
        engine: &DestinationEngine,
        rules: Rules,
        moves: &mut Vec<Move>,
    ) {
        let cannot = self.destination_qemu == Qemu::Gone;
        let receives = engine.state == Destination::Receiving && engine.linked;
        if receives && self.sent && !cannot {
            self.with(moves, true, "all is loaded", |world| {
                world.destination_event(rules, Event::Loaded);
            });
            self.with(moves, true, "all but pages is loaded", |world| {
                world.lacks = true;
                world.destination_event(rules, Event::Loaded);
            });
        }
        if engine.state == Destination::Filling && self.pages_come(engine) {
            self.with(moves, true, "all pages have come", |world| {
                world.lacks = false;
                world.destination_event(rules, Event::Filled);
            });
        }
        if receives || cannot {
            self.with(moves, cannot, "the destination fails", |world| {
                world.destination_event(rules, Event::Failed);
            });
        }
    }

    /// Both engines are there, and the source's serves the pages of its QEMU.
    fn pages_come(&self, destination: &DestinationEngine) -> bool {
        let serves = |engine: &SourceEngine| {
            let serves = [Source::GivenUp, Source::Retracting, Source::Serving];
            engine.linked && serves.contains(&engine.state)
        };
        let both = self.source_qemu != Qemu::Gone && self.destination_qemu != Qemu::Gone;
        both && destination.linked && self.cable && self.source.as_ref().is_some_and(serves)
    }

    fn destination_sends(&self, rules: Rules, word: Word, moves: &mut Vec<Move>) {
        self.with(moves, true, "the destination sends", |world| {
            let engine = world.destination.as_mut().unwrap();
            match engine.linked && world.cable {
                true => {
                    engine.action = DestinationAction::Wait;
                    world.to_source.push(word);
                }
                false => {
                    engine.linked = false;
                    world.to_destination.clear();
                    world.destination_event(rules, Event::Lost);
                }
            }
        });
    }

    /// What was sent arrives, also after a cut, until the cut is noticed.
    fn messages(&self, rules: Rules, moves: &mut Vec<Move>) {
        if self.source_waits().is_some_and(|engine| engine.linked) {
            if !self.to_source.is_empty() {
                self.with(moves, true, "the source hears", |world| {
                    let word = world.to_source.remove(0);
                    world.source_event(rules, Event::Heard(word));
                });
            }
            if !self.cable {
                self.with(moves, true, "the source notices the cut", |world| {
                    world.to_source.clear();
                    world.source.as_mut().unwrap().linked = false;
                    world.source_event(rules, Event::Lost);
                });
            }
        }
        if self.destination_waits().is_some_and(|engine| engine.linked) {
            if !self.to_destination.is_empty() {
                self.with(moves, true, "the destination hears", |world| {
                    let word = world.to_destination.remove(0);
                    world.destination_event(rules, Event::Heard(word));
                });
            }
            if !self.cable {
                self.with(moves, true, "the destination notices the cut", |world| {
                    world.to_destination.clear();
                    world.destination.as_mut().unwrap().linked = false;
                    world.destination_event(rules, Event::Lost);
                });
            }
        }
    }

    /// What the users of both hosts may say, and what engines do that wait for each other.
    fn commands(&self, rules: Rules, moves: &mut Vec<Move>) {
        if self.source.is_none() && self.given_up && self.source_qemu != Qemu::Gone {
            self.with(moves, true, "migrate --resume, or --take-back", |world| {
                world.source = Some(Engine {
                    state: Source::RECORDED,
                    action: SourceAction::Wait,
                    linked: false,
                });
            });
        }
        if self.destination.is_none() && self.mark.is_some() {
            self.with(moves, true, "receive --resume", |world| {
                let lives = world.destination_qemu != Qemu::Gone;
                let (state, action) = (rules.recorded)(world.mark.unwrap(), lives);
                world.destination = Some(Engine {
                    state,
                    action,
                    linked: false,
                });
            });
        }
        if let Some(engine) = self.source_waits() {
            self.with(moves, true, "the user wants it at the source", |world| {
                world.source_event(rules, Event::Cancelled);
            });
            let listens = self.destination_waits().is_some_and(|other| !other.linked);
            if engine.state == Source::InDoubt && !engine.linked && listens {
                self.with(moves, true, "they connect", |world| {
                    (world.cable, world.sent) = (true, false);
                    world.to_source.clear();
                    world.to_destination.clear();
                    world.source.as_mut().unwrap().linked = true;
                    world.destination.as_mut().unwrap().linked = true;
                    world.source_event(rules, Event::Connected);
                    world.destination_event(rules, Event::Connected);
                });
            }
            // Only a user who is right says so; disks that were written to are found.
            let is_true = self.destination_qemu == Qemu::Gone && !self.ran;
            if engine.state == Source::InDoubt && is_true {
                self.with(moves, true, "migrate --take-back, declared", |world| {
                    world.source_event(rules, Event::Declared);
                });
            }
        }
    }

    /// Processes that have nothing to do any more, or are ended by hand.
    fn ends(&self, rules: Rules, moves: &mut Vec<Move>) {
        let may_end = |engine: &DestinationEngine| {
            matches!(
                engine.state,
                Destination::Unclear | Destination::Undead | Destination::Over
            )
        };
        let left = self.destination.as_ref().is_none_or(may_end) && !self.doomed;
        // Its pages are lost.
        let torn = self.lacks && self.ran && self.source_qemu == Qemu::Gone;
        if torn || left && self.destination_qemu == Qemu::Paused && !self.ran {
            self.with(
                moves,
                true,
                "the user ends the destination's QEMU",
                |world| {
                    world.destination_qemu = Qemu::Gone;
                },
            );
        }
        if self.destination_waits().is_some_and(|other| !other.linked) {
            self.with(moves, true, "the destination waited long enough", |world| {
                world.destination_event(rules, Event::Cancelled);
            });
        }
        let reports = |engine: &SourceEngine| {
            let over = [Source::Kept, Source::Ended, Source::Lost, Source::InDoubt];
            over.contains(&engine.state)
        };
        if self.source_waits().is_some_and(reports) {
            self.with(moves, true, "the source's engine ends", |world| {
                (world.source, world.cable) = (None, false);
            });
        }
        if self
            .destination_waits()
            .is_some_and(|other| other.state == Destination::Over)
        {
            self.with(moves, true, "the destination's engine ends", |world| {
                world.destination_engine_ends();
            });
        }
    }

    fn destination_engine_ends(&mut self) {
        (self.destination, self.cable) = (None, false);
        if self.doomed {
            (self.destination_qemu, self.doomed) = (Qemu::Gone, false);
        }
    }

    fn guardians(&self, moves: &mut Vec<Move>) {
        if self.on_watch && self.source_qemu == Qemu::Paused {
            // After a death, or because the limit has passed.
            self.with(moves, true, "the guardian resumes", |world| {
                world.source_qemu = Qemu::Running;
                world.fired = true;
            });
        }
    }

    fn misfortunes(&self, moves: &mut Vec<Move>) {
        self.with(moves, false, "the connection is cut", |world| {
            world.cable = false
        });
        self.with(moves, false, "the source's engine dies", |world| {
            (world.source, world.cable) = (None, false);
        });
        self.with(moves, false, "the destination's engine dies", |world| {
            world.destination_engine_ends();
        });
        self.with(moves, false, "the source's QEMU dies", |world| {
            (world.source_qemu, world.hurt) = (Qemu::Gone, true);
        });
        self.with(moves, false, "the destination's QEMU dies", |world| {
            (world.destination_qemu, world.hurt) = (Qemu::Gone, true);
        });
        self.with(moves, false, "the source's host dies", |world| {
            (world.source, world.cable) = (None, false);
            (world.source_qemu, world.hurt) = (Qemu::Gone, true);
            (world.given_up, world.on_watch, world.source_host) = (false, false, false);
        });
        self.with(moves, false, "the destination's host dies", |world| {
            (world.destination, world.cable) = (None, false);
            (world.destination_qemu, world.hurt) = (Qemu::Gone, true);
            (world.mark, world.doomed, world.destination_host) = (None, false, false);
        });
    }
}
