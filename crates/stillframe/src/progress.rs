//! Progress of long work: a bar on a terminal, otherwise a line every few seconds.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use stillframe_engine::{PAGE_BYTES, Progress};
use stillframe_repo::Phase;

use crate::output::Console;
use crate::table;

/// Shorter work shows no bar, which would only flicker.
const BAR_AFTER: Duration = Duration::from_millis(400);
/// Time before the first line.
const FIRST_LINE_AFTER: Duration = Duration::from_secs(2);
/// Time between two lines.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The state of some work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The current activity, as the start of a line.
    pub what: &'static str,
    /// The amount done.
    pub done: u64,
    /// The whole amount; 0 if it is not known.
    pub total: u64,
    /// The unit of both.
    pub unit: Unit,
}

/// The unit of an amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Files, or other countable things.
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
            Progress::StoringDisks { done, total } => ("storing disks", done, total),
            Progress::FillingDisks { done, total } => ("writing disks", done, total),
            Progress::StreamingDisks { done, total } => {
                ("the guest runs; filling disks", done, total)
            }
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
            Phase::Checkpoints => ("reading checkpoints", Unit::Items),
            Phase::Packs => ("checking packs", Unit::Items),
            Phase::Data => ("reading packs", Unit::Bytes),
            Phase::Repack => ("repacking", Unit::Items),
            Phase::Remove => ("removing packs", Unit::Items),
            Phase::Image => ("reading the image", Unit::Bytes),
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

/// Shows the steps of one piece of work. Dropping it removes the bar from the terminal.
#[derive(Debug)]
pub struct Meter {
    display: Display,
}

#[derive(Debug)]
enum Display {
    None,
    Bar {
        bar: ProgressBar,
        begin: Instant,
    },
    Lines {
        console: Console,
        throttle: Throttle,
    },
}

impl Meter {
    /// A bar, lines or nothing, by the console and the terminal.
    pub fn new(console: Console) -> Meter {
        let display = match (console.quiet, io::stderr().is_terminal()) {
            (true, _) => Display::None,
            (false, true) => {
                let bar = styled("[{bar:20}] {eta:>4} left  {wide_msg}");
                Display::Bar {
                    bar,
                    begin: Instant::now(),
                }
            }
            (false, false) => Display::Lines {
                console,
                throttle: Throttle::new(Instant::now()),
            },
        };
        Meter { display }
    }

    /// Shows one step.
    pub fn show(&mut self, step: Step) {
        match &mut self.display {
            Display::None => {}
            Display::Bar { bar, begin } => {
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
            Display::Lines { console, throttle } => {
                if throttle.due(Instant::now()) {
                    console.note(&step.line());
                }
            }
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Display::Bar { bar, .. } = &self.display {
            bar.finish_and_clear();
        }
    }
}

fn styled(template: &str) -> ProgressBar {
    // At most ten draws per second, so that the terminal does not delay the work.
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
    // The templates are constants; with a wrong one the plain bar remains.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// One changing line between two pieces of work; only on a terminal.
#[derive(Debug)]
pub struct Status {
    line: Option<ProgressBar>,
}

impl Status {
    /// Shows nothing yet.
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

/// Limits the lines per time.
#[derive(Debug)]
struct Throttle {
    next: Instant,
}

impl Throttle {
    fn new(now: Instant) -> Throttle {
        Throttle {
            next: now + FIRST_LINE_AFTER,
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
    fn lines_are_throttled() {
        let begin = Instant::now();
        let mut throttle = Throttle::new(begin);
        let lines =
            (0..200u32).filter(|&tenth| throttle.due(begin + Duration::from_millis(100) * tenth));
        assert_eq!(lines.collect::<Vec<_>>(), [20, 70, 120, 170]);
    }

    #[test]
    fn steps_are_shown_in_bytes() {
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
        assert_eq!(Step::from(unknown).line(), "checking packs: 3");
    }
}
