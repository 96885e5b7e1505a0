//! All that can happen to a hand-over: every order of messages, cuts, deaths and commands.

mod world;

use std::collections::HashMap;

use self::world::{Move, OURS, Rules, World};
use super::*;

/// All worlds that can be reached, and how each was.
struct Explored {
    worlds: Vec<World>,
    from: Vec<Option<(usize, &'static str)>>,
    /// Predecessors by regular moves.
    regular: Vec<Vec<usize>>,
}

impl Explored {
    /// The way to a world, a move a line.
    fn way(&self, mut at: usize) -> String {
        let mut names = Vec::new();
        while let Some((before, name)) = self.from[at] {
            names.push(name);
            at = before;
        }
        names.reverse();
        names.join("\n  ")
    }
}

/// Searches breadth first. An error is the shortest way to a world that is wrong, or that nothing solves.
fn explore(rules: Rules) -> Result<usize, String> {
    let first = World::beginning();
    let mut numbers = HashMap::from([(first.clone(), 0)]);
    let mut explored = Explored {
        worlds: vec![first],
        from: vec![None],
        regular: vec![Vec::new()],
    };
    let mut at = 0;
    while at < explored.worlds.len() {
        let world = explored.worlds[at].clone();
        if let Some(what) = world.wrong() {
            return Err(format!("{what}:\n  {}\n{world:?}", explored.way(at)));
        }
        for Move {
            name,
            world,
            regular,
        } in world.moves(rules)
        {
            let next = *numbers.entry(world.clone()).or_insert_with(|| {
                explored.worlds.push(world);
                explored.from.push(Some((at, name)));
                explored.regular.push(Vec::new());
                explored.worlds.len() - 1
            });
            if regular {
                explored.regular[next].push(at);
            }
        }
        at += 1;
    }
    all_are_solved(&explored)?;
    Ok(explored.worlds.len())
}

/// From each world the two sides and their users come to an end that is right, if no more misfortune happens.
fn all_are_solved(explored: &Explored) -> Result<(), String> {
    let mut solved: Vec<bool> = explored.worlds.iter().map(World::is_solved).collect();
    let mut open: Vec<usize> = (0..solved.len()).filter(|&at| solved[at]).collect();
    while let Some(at) = open.pop() {
        for &before in &explored.regular[at] {
            if !solved[before] {
                solved[before] = true;
                open.push(before);
            }
        }
    }
    match solved.iter().position(|solved| !solved) {
        None => Ok(()),
        Some(at) => {
            let (way, world) = (explored.way(at), &explored.worlds[at]);
            Err(format!("nothing solves it:\n  {way}\n{world:?}"))
        }
    }
}

#[test]
fn never_two_and_never_stuck() {
    let states = explore(OURS).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("the hand-over has {states} states; none has two running VMs, and each has a way out");
    assert!(states > 1000, "{states} states are not all");
}

/// A rule that is broken on purpose is found, and for this reason.
#[track_caller]
fn is_found(rules: Rules, why: &str) {
    let wrong = explore(rules).expect_err("a broken rule");
    assert!(wrong.starts_with(why), "{wrong}");
}

#[test]
fn a_source_that_takes_silence_for_a_no_is_found() {
    let source = |state: Source, event| match (state, event) {
        (Source::GivenUp, Event::Lost) => (Source::Resuming, SourceAction::Resume),
        _ => state.step(event),
    };
    is_found(Rules { source, ..OURS }, "both run");
}

#[test]
fn a_source_that_commits_before_it_gives_up_is_found() {
    let source = |state: Source, event| match (state, event) {
        (Source::Keeping, Event::Heard(Word::Ready)) => {
            (Source::GivenUp, SourceAction::Send(Word::Commit))
        }
        _ => state.step(event),
    };
    is_found(Rules { source, ..OURS }, "both run");
}

#[test]
fn a_source_that_ends_when_it_has_committed_is_found() {
    let source = |state: Source, event| match (state, event) {
        (Source::GivingUp, Event::Done) => (Source::Ending, SourceAction::End),
        _ => state.step(event),
    };
    is_found(Rules { source, ..OURS }, "lost, though");
}

#[test]
fn a_source_that_asks_about_a_vm_that_it_kept_is_found() {
    let source = |state: Source, event| match (state, event) {
        (Source::Returning, Event::Failed) => (Source::InDoubt, SourceAction::Wait),
        _ => state.step(event),
    };
    is_found(Rules { source, ..OURS }, "both run");
}

#[test]
fn a_guardian_that_stays_on_watch_is_found() {
    let rules = Rules {
        one_step: false,
        ..OURS
    };
    is_found(rules, "both run");
}

#[test]
fn a_destination_that_runs_before_that_is_on_record_is_found() {
    let destination = |state: Destination, event| match (state, event) {
        (Destination::Releasing, Event::Done) => (Destination::Starting, DestinationAction::Cont),
        _ => state.step(event),
    };
    let rules = Rules {
        destination,
        ..OURS
    };
    is_found(rules, "lost, though");
}

#[test]
fn a_destination_that_gives_up_before_it_is_released_is_found() {
    let destination = |state: Destination, event| match (state, event) {
        (Destination::Ready, Event::Heard(Word::Commit)) => (
            Destination::Committing,
            DestinationAction::Record(Mark::Committed),
        ),
        _ => state.step(event),
    };
    let rules = Rules {
        destination,
        ..OURS
    };
    assert!(explore(rules).is_err());
}

#[test]
fn a_destination_that_says_never_and_keeps_its_qemu_is_found() {
    let destination = |state: Destination, event| match (state, event) {
        (Destination::Refusing, _) => (Destination::Gone, DestinationAction::Send(Word::Never)),
        (Destination::Gone, Event::Heard(Word::Commit)) => {
            (Destination::Starting, DestinationAction::Cont)
        }
        _ => state.step(event),
    };
    let rules = Rules {
        destination,
        ..OURS
    };
    assert!(explore(rules).is_err());
}

#[test]
fn a_record_that_is_taken_for_a_no_is_found() {
    let recorded = |mark, lives| match (mark, lives) {
        (Mark::Committed, false) => (
            Destination::Refusing,
            DestinationAction::Record(Mark::Never),
        ),
        _ => Destination::recorded(mark, lives),
    };
    is_found(Rules { recorded, ..OURS }, "it runs at the source after");
}

#[test]
fn a_destination_that_does_not_answer_is_found() {
    let destination = |state: Destination, event| match (state, event) {
        (Destination::Running, Event::Heard(Word::Ask | Word::Retract)) => {
            (state, DestinationAction::Wait)
        }
        _ => state.step(event),
    };
    let rules = Rules {
        destination,
        ..OURS
    };
    is_found(rules, "nothing solves it");
}

#[test]
fn a_source_that_ends_while_its_pages_are_needed_is_found() {
    let source = |state: Source, event| match (state, event) {
        (Source::GivenUp, Event::Heard(Word::NeedsPages)) => (Source::Ending, SourceAction::End),
        _ => state.step(event),
    };
    is_found(Rules { source, ..OURS }, "lost, though");
}

#[test]
fn a_destination_that_says_it_runs_before_it_has_all_pages_is_found() {
    let destination = |state: Destination, event| match (state, event) {
        (Destination::Starting, Event::Incomplete) => {
            (Destination::Filling, DestinationAction::Send(Word::Running))
        }
        _ => state.step(event),
    };
    let rules = Rules {
        destination,
        ..OURS
    };
    is_found(rules, "lost, though");
}

#[test]
fn a_source_that_takes_back_what_it_serves_is_found() {
    let source = |state: Source, event| match (state, event) {
        (Source::Serving, Event::Cancelled) => (Source::Resuming, SourceAction::Resume),
        _ => state.step(event),
    };
    assert!(explore(Rules { source, ..OURS }).is_err());
}

#[test]
fn a_destination_that_forgets_while_it_needs_pages_is_found() {
    let destination = |state: Destination, event| match (state, event) {
        (Destination::Filling, Event::Lost) => (Destination::Over, DestinationAction::Forget),
        _ => state.step(event),
    };
    let rules = Rules {
        destination,
        ..OURS
    };
    is_found(rules, "nothing solves it");
}
