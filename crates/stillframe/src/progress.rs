//! How far long work is: a bar on a terminal, else a line now and then.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use stillframe_engine::Progress;
use stillframe_repo::Phase;

use crate::output::Console;
use crate::table;

/// Work shorter than this needs no bar: it would only flicker.
const BAR_AFTER: Duration = Duration::from_millis(400);
/// Work shorter than this needs no words.
const QUIET_AT_FIRST: Duration = Duration::from_secs(2);
/// Between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);
const PAGE_BYTES: u64 = 4096;

/// One state of some work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// What is being done, as the start of a line.
    pub what: &'static str,
    /// How much is done.
    pub done: u64,
    /// How much there is; 0 while that is not known.
    pub total: u64,
    /// What is counted.
    pub unit: Unit,
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Files, or other single things.
    Items,
}

impl Step {
    fn amount(&self) -> String {
        let number = |number| match self.unit {
            Unit::Bytes => table::bytes(number),
            Unit::Items => number.to_string(),
        };
        match self.total {
            0 => number(self.done),
            total => format!("{} of {}", number(self.done), number(total)),
        }
    }

    /// `reading: 1.0 MiB of 4.0 MiB (25 %)`
    fn line(&self) -> String {
        match u128::from(self.total) {
            0 => format!("{}: {}", self.what, self.amount()),
            total => {
                let percent = u128::from(self.done.min(self.total)) * 100 / total;
                format!("{}: {} ({percent} %)", self.what, self.amount())
            }
        }
    }
}

impl From<Progress> for Step {
    fn from(progress: Progress) -> Step {
        let (what, done, total) = match progress {
            Progress::FullPass { done, total } => ("reading all memory", done, total),
            Progress::Storing { done, total } => ("storing", done, total),
            Progress::Populating { done, total } => ("filling memory", done, total),
            Progress::Rewinding { done, total } => ("comparing with the checkpoint", done, total),
            Progress::Filling { done, total } => ("the guest runs; filling memory", done, total),
            Progress::Comparing { done, total } => ("comparing", done, total),
            Progress::Exporting { done, total } => ("exporting", done, total),
            Progress::Importing { done, total } => ("importing", done, total),
            Progress::Verifying { done, total } => ("verifying", done, total),
        };
        let bytes = |pages: u64| pages.saturating_mul(PAGE_BYTES);
        Step {
            what,
            done: bytes(done),
            total: bytes(total),
            unit: Unit::Bytes,
        }
    }
}

impl From<stillframe_repo::Progress> for Step {
    fn from(progress: stillframe_repo::Progress) -> Step {
        let (what, unit) = match progress.phase {
            Phase::Checkpoints => ("walking checkpoints", Unit::Items),
            Phase::Packs => ("looking at packs", Unit::Items),
            Phase::Data => ("reading packs", Unit::Bytes),
            Phase::Repack => ("repacking", Unit::Items),
            Phase::Remove => ("removing packs", Unit::Items),
            Phase::Copy => ("copying pages", Unit::Items),
        };
        Step {
            what,
            done: progress.done,
            total: progress.total,
            unit,
        }
    }
}

/// Shows the steps of one piece of work. Dropping it takes a bar off the terminal.
#[derive(Debug)]
pub struct Meter {
    way: Way,
}

#[derive(Debug)]
enum Way {
    Nothing,
    Bar { bar: ProgressBar, begin: Instant },
    Lines { console: Console, pace: Pace },
}

impl Meter {
    /// Chooses the way.
    pub fn new(console: Console) -> Meter {
        let way = match (console.quiet, io::stderr().is_terminal()) {
            (true, _) => Way::Nothing,
            (false, true) => {
                let bar = styled("[{bar:20}] {eta:>4} left  {wide_msg}");
                Way::Bar {
                    bar,
                    begin: Instant::now(),
                }
            }
            (false, false) => Way::Lines {
                console,
                pace: Pace::new(Instant::now()),
            },
        };
        Meter { way }
    }

    /// Shows one step.
    pub fn show(&mut self, step: Step) {
        match &mut self.way {
            Way::Nothing => {}
            Way::Bar { bar, begin } => {
                if begin.elapsed() < BAR_AFTER {
                    return;
                }
                match step.total {
                    0 => bar.unset_length(),
                    total => bar.set_length(total),
                }
                bar.set_message(step.line());
                bar.set_position(step.done.min(step.total));
            }
            Way::Lines { console, pace } => {
                if pace.due(Instant::now()) {
                    console.note(&step.line());
                }
            }
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Way::Bar { bar, .. } = &self.way {
            bar.finish_and_clear();
        }
    }
}

fn styled(template: &str) -> ProgressBar {
    // At most ten draws a second, so that the terminal never holds the work up.
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
    // The templates are constants; were one wrong, the plain bar would do.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// One changing line while nothing is worked on; only on a terminal.
#[derive(Debug)]
pub struct Status {
    line: Option<ProgressBar>,
}

impl Status {
    /// Nothing is shown yet.
    pub fn new(console: Console) -> Status {
        let wanted = !console.quiet && io::stderr().is_terminal();
        Status {
            line: wanted.then(|| styled("{wide_msg}")),
        }
    }

    /// Replaces the line.
    pub fn show(&mut self, text: String) {
        if let Some(line) = &self.line {
            line.set_message(text);
        }
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        if let Some(line) = &self.line {
            line.finish_and_clear();
        }
    }
}

/// When the next line may be written.
#[derive(Debug)]
struct Pace {
    next: Instant,
}

impl Pace {
    fn new(now: Instant) -> Pace {
        Pace {
            next: now + QUIET_AT_FIRST,
        }
    }

    fn due(&mut self, now: Instant) -> bool {
        let due = now >= self.next;
        if due {
            self.next = now + LINE_EVERY;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_late_and_seldom() {
        let begin = Instant::now();
        let mut pace = Pace::new(begin);
        let lines =
            (0..200u32).filter(|&tenth| pace.due(begin + Duration::from_millis(100) * tenth));
        assert_eq!(lines.collect::<Vec<_>>(), [20, 70, 120, 170]);
    }

    #[test]
    fn steps_are_told_in_bytes() {
        let step = Step::from(Progress::FullPass {
            done: 256,
            total: 1024,
        });
        assert_eq!(step.line(), "reading all memory: 1.0 MiB of 4.0 MiB (25 %)");
        let huge = Step::from(Progress::Storing {
            done: u64::MAX,
            total: u64::MAX,
        });
        assert!(huge.line().ends_with("(100 %)"));
        let unknown = stillframe_repo::Progress {
            phase: Phase::Packs,
            done: 3,
            total: 0,
        };
        assert_eq!(Step::from(unknown).line(), "looking at packs: 3");
    }
}
