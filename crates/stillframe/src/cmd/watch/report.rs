//! What a watch says.

use std::time::{Duration, Instant};

use stillframe_engine::checkpoint::{CheckpointReport, ScheduleKind};
use stillframe_engine::pipeline::Event;

use crate::cmd::{Context, capture};
use crate::durations;
use crate::output;
use crate::progress::Status;
use crate::table;

/// What may happen at every checkpoint is reported this often.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// Prints events, none of them too often.
pub struct Reporter<'a> {
    context: &'a Context,
    every: Duration,
    /// The countdown.
    status: Option<Status>,
    /// Checkpoints so far.
    taken: u64,
    /// Intervals that were not kept since that was last reported, and when it was.
    late: (u64, Option<Instant>),
    migration_reported: Option<Instant>,
    schedule_reported: Option<(ScheduleKind, Instant)>,
    /// What stands in the way of a restore, as last reported.
    obstacles: Vec<String>,
}

impl<'a> Reporter<'a> {
    /// Of a watch with this interval.
    pub fn new(context: &'a Context, every: Duration) -> Reporter<'a> {
        Reporter {
            context,
            every,
            status: None,
            taken: 0,
            late: (0, None),
            migration_reported: None,
            schedule_reported: None,
            obstacles: Vec::new(),
        }
    }

    /// Prints one.
    ///
    /// # Errors
    /// Nothing can be printed any more; a comparison found differences.
    pub fn report(&mut self, event: Event<'_, CheckpointReport>) -> anyhow::Result<()> {
        let console = self.context.console;
        if let Event::Waiting { taken, left } = event {
            let status = self.status.get_or_insert_with(|| Status::new(console));
            let taken = table::count(taken, "checkpoint");
            status.show(format!("{taken}, the next in {:.1} s", left.as_secs_f64()));
            return Ok(());
        }
        self.status = None;
        match event {
            Event::Taken(report) => self.taken(report)?,
            Event::Late { by } => self.late(by),
            Event::BaseGone(error) => console.note(&error.to_string()),
            Event::Migrating(error) => {
                let reported = self.migration_reported;
                // No failure: the migration ends, one way or the other.
                if reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                    console.note(&error.to_string());
                    self.migration_reported = Some(Instant::now());
                }
            }
            Event::AttachingAnew { schedule } => console.note(&format!(
                "attaching anew for {schedule}: the next checkpoint looks at all of memory"
            )),
            Event::Failed(error) => {
                let chain = output::chain(chain_of(error));
                console.warn(&format!("no checkpoint this time: {chain}"));
            }
            Event::Waiting { .. } | Event::WaitOver => {}
        }
        Ok(())
    }

    fn taken(&mut self, report: &CheckpointReport) -> anyhow::Result<()> {
        self.taken += 1;
        self.schedule(report);
        capture::tell_obstacles(self.context, report, &mut self.obstacles);
        capture::tell(self.context, report)
    }

    /// What `auto` chose, when it is not what it chose before.
    fn schedule(&mut self, report: &CheckpointReport) {
        let Some(plan) = &report.plan else { return };
        let known = self
            .schedule_reported
            .is_some_and(|(kind, at)| kind == report.schedule || at.elapsed() < REPORT_EVERY);
        if !known {
            let console = self.context.console;
            console.note(&format!("{} suits this VM", report.schedule));
            console.detail(&capture::predictions(plan));
            self.schedule_reported = Some((report.schedule, Instant::now()));
        }
    }

    fn late(&mut self, by: Duration) {
        // The first checkpoint reads all of memory, which takes longer.
        if self.taken <= 1 {
            return;
        }
        let (count, reported) = &mut self.late;
        *count += 1;
        if reported.is_some_and(|at| at.elapsed() < REPORT_EVERY) {
            return;
        }
        let every = durations::human(self.every);
        let took = durations::human(self.every + by);
        let times = match count {
            1 => String::new(),
            count => format!(" ({count} times since this was last told)"),
        };
        self.context.console.note(&format!(
            "the interval of {every} could not be kept{times}: this one took {took}; the next starts now"
        ));
        self.late = (0, Some(Instant::now()));
    }
}

/// An error and its causes.
fn chain_of<'e>(
    error: &'e (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'e (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}
