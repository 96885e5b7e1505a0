//! Reports the events of a watch.

use std::time::{Duration, Instant};

use stillframe_engine::checkpoint::{CheckpointReport, ScheduleKind};
use stillframe_engine::pipeline::Event;

use crate::cmd::{Context, capture};
use crate::durations;
use crate::output;
use crate::progress::Status;
use crate::table;

/// Minimum time between two reports of an event that may happen at every checkpoint.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// Prints events, repeated ones at most every [`REPORT_EVERY`].
pub struct Reporter<'a> {
    context: &'a Context,
    every: Duration,
    /// The countdown to the next checkpoint.
    status: Option<Status>,
    /// Number of checkpoints taken.
    taken: u64,
    /// Number of late checkpoints since the last report of one.
    late: u64,
    late_reported: Option<Instant>,
    migration_reported: Option<Instant>,
    schedule_reported: Option<(ScheduleKind, Instant)>,
    /// Obstacles to a restore, as last reported.
    obstacles: Vec<String>,
}

impl<'a> Reporter<'a> {
    /// A reporter for a watch with this interval.
    pub fn new(context: &'a Context, every: Duration) -> Reporter<'a> {
        Reporter {
            context,
            every,
            status: None,
            taken: 0,
            late: 0,
            late_reported: None,
            migration_reported: None,
            schedule_reported: None,
            obstacles: Vec::new(),
        }
    }

    /// Prints one event.
    ///
    /// # Errors
    /// Standard output is closed; a comparison found differences.
    pub fn report(&mut self, event: Event<'_, CheckpointReport>) -> anyhow::Result<()> {
        let console = self.context.console;
        if let Event::Waiting { taken, left } = event {
            let status = self.status.get_or_insert_with(|| Status::new(console));
            let taken = table::count(taken, "checkpoint");
            status.show(format!("{taken}, next in {:.1} s", left.as_secs_f64()));
            return Ok(());
        }
        self.status = None;
        match event {
            Event::Taken(report) => self.taken(report)?,
            Event::Late { by } => self.late(by),
            Event::ParentGone(error) => console.note(&error.to_string()),
            Event::Migrating(error) => {
                let reported = self.migration_reported;
                // Not a failure: the migration ends, completed or cancelled.
                if reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                    console.note(&error.to_string());
                    self.migration_reported = Some(Instant::now());
                }
            }
            Event::AttachingAnew { schedule } => console.note(&format!(
                "attaching again for {schedule}: the next checkpoint reads all memory"
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
        capture::report_obstacles(self.context, report, &mut self.obstacles);
        capture::print(self.context, report)
    }

    /// Reports a change in the choice of `auto`.
    fn schedule(&mut self, report: &CheckpointReport) {
        let Some(plan) = &report.plan else { return };
        let known = self
            .schedule_reported
            .is_some_and(|(kind, at)| kind == report.schedule || at.elapsed() < REPORT_EVERY);
        if !known {
            let console = self.context.console;
            console.note(&format!("schedule: {}", report.schedule));
            console.detail(&capture::predictions(plan));
            self.schedule_reported = Some((report.schedule, Instant::now()));
        }
    }

    fn late(&mut self, by: Duration) {
        // The first checkpoint reads all memory and takes longer.
        if self.taken <= 1 {
            return;
        }
        self.late += 1;
        let reported = self.late_reported;
        if reported.is_some_and(|at| at.elapsed() < REPORT_EVERY) {
            return;
        }
        let every = durations::human(self.every);
        let took = durations::human(self.every + by);
        let times = match self.late {
            1 => String::new(),
            count => format!(" ({count} times since the last report)"),
        };
        self.context.console.note(&format!(
            "the interval of {every} could not be kept{times}: the last checkpoint took {took}; the next one starts now"
        ));
        self.late = 0;
        self.late_reported = Some(Instant::now());
    }
}

/// An error and its causes.
fn chain_of<'e>(
    error: &'e (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'e (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}
