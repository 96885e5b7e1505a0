//! The rounds of pre-copy: pages leave while the guest runs, until what is left can be sent in the pause.

use std::ops::Range;
use std::time::Instant;

use super::convergence::{Convergence, Next, Round, Switch};
use super::error::MigrateError;
use super::look::Looking;
use super::outgoing::Outgoing;
use super::sending::Sending;
use super::{MigrateEvent, MigrateOptions, MigrateSink, SkipFake, Wire};
use crate::attach::Vm;
use crate::capture::device_state::StateStream;
use crate::memory::block::Guest;
use crate::memory::ranges::{PageRanges, count, runs, subtract_all};
use crate::streaming::{Iteration, Streaming};
use crate::tracking::tracker::{Collected, Tracker};

/// About as many pages show whether later versions are smaller than the first ones.
const TRIAL_PAGES: u64 = 1024;
/// Adjacent ones of these.
const PIECE_PAGES: u64 = 64;

/// How the rounds are gone through, and where they are reported.
pub(super) struct Rounds<'r> {
    options: &'r MigrateOptions,
    events: MigrateSink<'r>,
    convergence: Convergence,
}

impl<'r> Rounds<'r> {
    /// None yet.
    pub fn new(options: &'r MigrateOptions, events: MigrateSink<'r>) -> Rounds<'r> {
        Rounds {
            options,
            events,
            convergence: Convergence::new(options.downtime, Switch::Never),
        }
    }
}

/// Pages that were found written in each of the last two rounds keep changing.
#[derive(Default)]
struct Changing {
    last: PageRanges,
    both: PageRanges,
}

impl Changing {
    fn found(&mut self, written: &PageRanges) {
        // Of no block nothing was found before.
        self.last.resize(written.len(), Vec::new());
        let last = std::mem::replace(&mut self.last, written.clone());
        let not_before = subtract_all(written, &last);
        self.both = subtract_all(written, &not_before);
    }
}

/// Some of these pages, from all over them; `None` where that is hardly less than all.
fn sample(pages: &PageRanges) -> Option<PageRanges> {
    let pieces = count(pages) / TRIAL_PAGES;
    if pieces < 2 {
        return None;
    }
    let mut passed = 0;
    let mut chosen = |range: &Range<u64>| {
        let first = passed;
        passed += range.end - range.start;
        let pages = range.clone().zip(first..);
        let of_piece = pages.filter(|(_, at)| (at / PIECE_PAGES).is_multiple_of(pieces));
        of_piece.map(|(page, _)| page).collect::<Vec<u64>>()
    };
    let mut of_block =
        |ranges: &Vec<Range<u64>>| runs(&ranges.iter().flat_map(&mut chosen).collect::<Vec<u64>>());
    Some(pages.iter().map(&mut of_block).collect())
}

impl Rounds<'_> {
    /// Leaves changing pages for later, if the others are enough for a round. Returns how many.
    fn leave_out(&self, tracker: &mut Tracker, wanted: &mut Collected, changing: &Changing) -> u64 {
        let others = subtract_all(&wanted.written, &changing.both);
        if self.convergence.time_for(count(&others)) <= self.options.downtime {
            return 0;
        }
        let later = subtract_all(&wanted.written, &others);
        tracker.postpone(&later);
        wanted.written = others;
        count(&later)
    }

    /// Whether later versions of these pages seem to be smaller than the first ones.
    fn is_small(
        &self,
        outgoing: &mut Outgoing,
        wire: &mut Wire,
        pages: &Collected,
    ) -> Result<bool, MigrateError> {
        match sample(&pages.written) {
            Some(few) => outgoing.are_smaller(wire, few),
            None => Ok(true),
        }
    }

    fn ended(&mut self, number: u32, round: Round) -> Next {
        let next = self.convergence.after(round);
        let written = round.left as f64 / round.time.as_secs_f64().max(f64::EPSILON);
        (self.events)(MigrateEvent::Round(crate::Round {
            number,
            left: round.left,
            expected_us: self
                .convergence
                .known()
                .map(|expected| expected.as_micros() as u64),
            written_per_s: written as u64,
            streamed_per_s: self.convergence.pages_per_s(),
        }));
        next
    }

    /// Whether the VM may be stopped for as long as is expected.
    fn check(&self) -> Result<(), MigrateError> {
        let (expected, limit) = (self.convergence.expected(), self.options.pause_limit);
        match expected <= limit {
            true => Ok(()),
            false => Err(MigrateError::DoesNotConverge {
                expected_ms: expected.as_millis(),
                limit_ms: limit.as_millis(),
            }),
        }
    }
}

/// What the rounds have come to.
pub(super) struct Ended {
    /// How many there were.
    pub rounds: u32,
    /// The pages that are left; they are pending.
    pub left: Collected,
    /// Whether these are fetched when the VM runs at the destination.
    pub later: bool,
}

impl Vm {
    /// Sends pages while the guest runs.
    pub(super) fn send_running(
        &mut self,
        (wire, outgoing): (&mut Wire, &mut Outgoing),
        sending: &mut Sending<'_>,
        rounds: &mut Rounds<'_>,
    ) -> Result<Ended, MigrateError> {
        let mut streaming = Streaming {
            tracker: &mut self.tracker,
            monitor: &mut self.monitor,
            process: &self.target.process,
        };
        let mut wanted = streaming.wanted(match sending.based {
            true => Iteration::Written,
            false => Iteration::Bulk,
        })?;
        if let Some(seeds) = sending.seeds.get() {
            // The destination has content where there is none here.
            wanted.discarded = subtract_all(&seeds.pages(), &wanted.written);
        }
        let (mut changing, mut number) = (Changing::default(), 0);
        loop {
            number += 1;
            outgoing.begin_round();
            let (begin, in_image) = (Instant::now(), outgoing.pages().in_image);
            streaming.tracker.streamed(&wanted);
            if number > 2 && rounds.options.skip_fake == SkipFake::Auto {
                outgoing.postponed(rounds.leave_out(streaming.tracker, &mut wanted, &changing));
            }
            let looking = (number == 1 && sending.may_cut_short()).then(|| {
                let pages = (wanted.pages(), sending.based);
                Looking::begin(streaming.tracker.peek(), pages, outgoing.round())
            });
            let _looking = looking.transpose().map_err(MigrateError::Thread)?;
            let progress = &mut |progress| (rounds.events)(MigrateEvent::Progress(progress));
            outgoing.put(wire, &wanted, Guest::Running, progress)?;
            // Before the VM is stopped, and while pages leave.
            let Streaming {
                monitor, process, ..
            } = &mut streaming;
            StateStream::lent(&mut self.state, monitor, process, &self.guardian)?;
            rounds.convergence.may_switch(sending.accepted(wire)?);
            outgoing.sync(wire)?;
            let unsent = outgoing.take_unsent();
            streaming.tracker.postpone(&unsent);
            let others = count(&unsent) + outgoing.pages().in_image - in_image;
            let pages = wanted.pages().saturating_sub(others);
            let found = streaming.found()?;
            changing.found(&found.written);
            wanted = streaming.pending(found);
            let (time, left) = (begin.elapsed(), wanted.pages());
            let mut next = rounds.ended(number, Round { pages, time, left });
            if number == 1
                && next == Next::Round
                && rounds.convergence.wants_trial()
                && (count(&unsent) > 0 || !rounds.is_small(outgoing, wire, &wanted)?)
            {
                next = Next::Switch;
            }
            match next {
                Next::Round => continue,
                Next::Stop => rounds.check()?,
                Next::Switch => {}
            }
            return Ok(Ended {
                rounds: number,
                left: wanted,
                later: next == Next::Switch,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_written_in_two_rounds_running_keeps_changing() {
        let mut changing = Changing::default();
        changing.found(&vec![vec![0..4, 8..9], vec![7..8, 9..10]]);
        assert_eq!(count(&changing.both), 0);
        changing.found(&vec![vec![2..6, 8..10], Vec::new()]);
        assert_eq!(changing.both, [vec![2..4, 8..9], Vec::new()]);
        changing.found(&vec![vec![3..4, 9..10], vec![7..8, 9..10]]);
        assert_eq!(changing.both, [vec![3..4, 9..10], Vec::new()]);
    }

    #[test]
    fn a_sample_is_small_and_comes_from_all_over() {
        let few = vec![vec![0..TRIAL_PAGES], vec![5..TRIAL_PAGES - 9]];
        assert_eq!(sample(&few), None);
        let pages = vec![vec![10..20_000, 30_000..30_001], vec![0..10_000]];
        let some = sample(&pages).unwrap();
        let size = count(&some);
        assert!((TRIAL_PAGES / 2..TRIAL_PAGES * 2).contains(&size), "{size}");
        assert_eq!(count(&subtract_all(&some, &pages)), 0);
        assert!(some[0][0].start < 1000 && some[1].last().unwrap().end > 8000);
        assert!(
            some[0]
                .iter()
                .all(|range| range.end - range.start <= PIECE_PAGES)
        );
    }
}
