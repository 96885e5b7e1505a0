//! `cargo xtask bench responsive`: the time until a restored VM works as one that was never saved. Redis runs in a
//! Debian guest; its client reads all values over and over, and reports each hundred of them.
//!
//! Each checkpoint is restored lazily before any working set is known. Further restores follow, each of which
//! records more of the set. Then the checkpoint is restored lazily again, and eagerly. Before and after these, the
//! VM that was never saved works on for a while, since this machine's speed drifts; in between it is paused. Times
//! are the host's and count from the command, QEMU's start included. All read data is in the page cache. Before
//! each timed run nothing else works on this machine, and free memory is touched ([`host_memory`]).

use std::cell::RefCell;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::host_memory;
use crate::chart::{self, Labels, Series, Shape};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::debian::{DebianSetup, DebianWorkload};
use stillframe_harness::filling::Filling;
use stillframe_harness::guest::Guest;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::results::{self, Claim, Goal, percentile};

const BENCH: &str = "responsive";
const COMMAND: &str = "cargo xtask bench responsive";
const RAM_MIB: u32 = 1024;
/// Values a MiB of RAM, and values a unit, as in `guest/debian/workloads/redis`.
const VALUES_A_MIB: f64 = 64.0;
const VALUES_A_UNIT: f64 = 100.0;
/// Restores that only record the guest's accesses.
const LESSONS: usize = 15;
/// Time for a VM that was paused to reach its steady rate again.
const WARM_UP: Duration = Duration::from_secs(2);
/// Share of RAM; the kernel keeps the rest for itself.
const RAM_SHARE: f64 = 0.97;
/// Rates are of windows of this.
const WINDOW_S: f64 = 0.25;
/// Share of the steady rate.
const RESPONSIVE: f64 = 0.9;
/// Watched of each VM that is timed.
const SWEEPS: usize = 4;
/// Time for all of them, on a busy machine.
const SWEEPS_LIMIT: Duration = Duration::from_secs(300);
/// How often the serial port is read.
const LOOK: Duration = Duration::from_millis(3);

/// How a VM came to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    NeverSaved,
    Lazy,
    WorkingSet,
    Eager,
}

impl Way {
    const ALL: [Way; 4] = [Way::NeverSaved, Way::Lazy, Way::WorkingSet, Way::Eager];

    fn words(self) -> &'static str {
        match self {
            Way::NeverSaved => "never saved",
            Way::Lazy => "lazy, nothing recorded",
            Way::WorkingSet => "lazy, recorded sixteen times",
            Way::Eager => "eager",
        }
    }
}

/// When units were done, in seconds since the command.
#[derive(Debug, Clone, Default)]
struct Curve(Vec<f64>);

impl Curve {
    /// From when on the rate is nearly the steady one: the end of the first window of which that is true.
    fn responsive_s(&self, steady: f64) -> f64 {
        let wanted = (RESPONSIVE * steady * WINDOW_S).ceil().max(1.0) as usize;
        let windows = self.0.windows(wanted);
        let mut ends = windows.filter_map(|units| {
            let end = units.last()?;
            (end - units.first()? <= WINDOW_S).then_some(*end)
        });
        ends.next().unwrap_or(f64::NAN)
    }

    /// Units a second in each window.
    fn rates(&self) -> Vec<(f64, f64)> {
        let end = self.0.last().copied().unwrap_or_default();
        let count = (end / WINDOW_S) as u32;
        let rate = |number: u32| {
            let from = f64::from(number) * WINDOW_S;
            let within = |time: &&f64| (from..from + WINDOW_S).contains(*time);
            let units = self.0.iter().filter(within).count();
            (from + WINDOW_S, units as f64 / WINDOW_S)
        };
        (0..count).map(rate).collect()
    }

    /// When all values had been read once.
    fn sweep_s(&self) -> f64 {
        let last = self.0.get(units_a_sweep() - 1);
        last.copied().unwrap_or(f64::NAN)
    }

    /// Units a second in the last sweep.
    fn steady(&self) -> f64 {
        let [begin, end] =
            [SWEEPS - 1, SWEEPS].map(|sweeps| self.0.get(sweeps * units_a_sweep() - 1));
        match (begin, end) {
            (Some(begin), Some(end)) => units_a_sweep() as f64 / (end - begin),
            _ => f64::NAN,
        }
    }
}

/// One VM, measured.
struct Run {
    way: Way,
    curve: Curve,
    report: Value,
}

impl Run {
    fn faults(&self) -> f64 {
        self.report["lazy"]["faults"].as_f64().unwrap_or(0.0)
    }

    fn ms(&self, what: &Value) -> f64 {
        what.as_f64().map_or(f64::NAN, |us| us / 1e3)
    }

    /// When the guest ran.
    fn runs_ms(&self) -> f64 {
        let lazily = &self.report["lazy"]["runs_after_us"];
        match lazily.is_null() {
            true => self.ms(&self.report["total_us"]),
            false => self.ms(lazily),
        }
    }

    fn raw(&self) -> Value {
        json!({"way": self.way.words(), "units_s": self.curve.0, "report": self.report})
    }
}

/// Everything that was measured.
struct Measured {
    /// Units a second.
    steady: f64,
    runs: Vec<Run>,
}

impl Measured {
    fn of(&self, way: Way) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(move |run| run.way == way)
    }

    fn median(&self, way: Way, value: impl Fn(&Run) -> f64) -> f64 {
        let values: Vec<f64> = self.of(way).map(value).collect();
        percentile(&values, 0.5)
    }
}

/// Runs the bench with this many checkpoints, and writes `docs/results/responsive/`.
pub fn run(turns: usize) -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-responsive-")
        .tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let setup = DebianSetup {
        workload: DebianWorkload::Redis,
        ram_mib: RAM_MIB,
        agent: false,
        extra: Vec::new(),
    };
    let guest = setup.boot()?;
    let checkpoints = take(&stillframe, &guest, turns)?;
    let bench = Bench {
        stillframe,
        folder: folder.path(),
        guest: Standing::new(guest)?,
    };
    let mut runs = Vec::new();
    for (number, id) in checkpoints.iter().enumerate() {
        for run in bench.turn(id)? {
            eprintln!(
                "turn {} of {turns}, {}: {:.0} faults, a sweep in {:.2} s",
                number + 1,
                run.way.words(),
                run.faults(),
                run.curve.sweep_s()
            );
            runs.push(run);
        }
    }
    let alone = runs.iter().filter(|run| run.way == Way::NeverSaved);
    let rates: Vec<f64> = alone.map(|run| run.curve.steady()).collect();
    let steady = percentile(&rates, 0.5);
    record(&Measured { steady, runs })
}

fn units_a_sweep() -> usize {
    (f64::from(RAM_MIB) * RAM_SHARE * VALUES_A_MIB / VALUES_A_UNIT) as usize
}

/// Checkpoints of the working guest; each has an interval before it, as where a VM is watched.
fn take(stillframe: &Stillframe, guest: &Guest, count: usize) -> Result<Vec<String>> {
    let (pid, count) = (guest.pid_text(), (count + 1).to_string());
    let reports = stillframe.json_lines(&[
        "watch", "--pid", &pid, "--every", "2s", "--count", &count, "--quiet",
    ])?;
    let ids = reports.iter().skip(1);
    ids.map(|report| {
        let id = report["checkpoint"].as_str().context("checkpoint")?;
        Ok(id.to_owned())
    })
    .collect()
}

/// A guest that works only on command.
struct Standing {
    guest: Guest,
    monitor: RefCell<Qmp>,
}

impl Standing {
    fn new(guest: Guest) -> Result<Standing> {
        let mut monitor = guest.second_monitor()?;
        monitor.execute("stop", json!({}))?;
        Ok(Standing {
            guest,
            monitor: RefCell::new(monitor),
        })
    }

    fn works(&self) -> Result<Run> {
        host_memory::settle();
        self.monitor.borrow_mut().execute("cont", json!({}))?;
        std::thread::sleep(WARM_UP);
        let mut units = Units::open(self.guest.serial.path())?;
        units.read()?;
        let curve = units.curve(Instant::now(), SWEEPS, || Ok(()))?;
        self.monitor.borrow_mut().execute("stop", json!({}))?;
        Ok(Run {
            way: Way::NeverSaved,
            curve,
            report: Value::Null,
        })
    }
}

/// The inputs of each turn.
struct Bench<'b> {
    stillframe: Stillframe,
    folder: &'b Path,
    guest: Standing,
}

impl Bench<'_> {
    /// All that is done with one checkpoint.
    fn turn(&self, id: &str) -> Result<Vec<Run>> {
        let mut runs = vec![self.guest.works()?, self.timed(id, Way::Lazy)?];
        for _ in 0..LESSONS {
            self.restored(id, Way::WorkingSet, 1)?;
        }
        runs.push(self.timed(id, Way::WorkingSet)?);
        runs.push(self.timed(id, Way::Eager)?);
        runs.push(self.guest.works()?);
        Ok(runs)
    }

    fn timed(&self, id: &str, way: Way) -> Result<Run> {
        host_memory::prepare(RAM_MIB);
        self.restored(id, way, SWEEPS)
    }

    /// Restores a checkpoint, and watches some sweeps of its guest.
    fn restored(&self, id: &str, way: Way, sweeps: usize) -> Result<Run> {
        let options: &[&str] = match way {
            Way::Eager => &[],
            _ => &["--lazy"],
        };
        let begin = Instant::now();
        let mut filling = Filling::begin(&self.stillframe, id, self.folder, options)?;
        let mut units = Units::open_late(filling.serial.path())?;
        let mut done = false;
        let curve = units.curve(begin, sweeps, || {
            if !done {
                done = filling.running.has_ended()?;
                ensure!(
                    !done || !filling.running.results()?.is_empty(),
                    "the restore failed: {}",
                    filling.running.err()
                );
            }
            Ok(())
        })?;
        let (restored, report) = filling.complete()?;
        drop(restored);
        let recorded = !report["lazy"]["working_set"].is_null();
        ensure!(
            recorded == (way == Way::WorkingSet),
            "{}: working set {}",
            way.words(),
            report["lazy"]["working_set"]
        );
        Ok(Run { way, curve, report })
    }
}

/// The units that a guest reports, read as they are reported.
struct Units {
    file: File,
    /// A line that is not whole yet.
    rest: String,
}

impl Units {
    fn open(path: &Path) -> Result<Units> {
        Ok(Units {
            file: File::open(path).with_context(|| path.display().to_string())?,
            rest: String::new(),
        })
    }

    /// The units of a VM that is being started.
    fn open_late(path: &Path) -> Result<Units> {
        let begin = Instant::now();
        while !path.exists() {
            ensure!(begin.elapsed() < SWEEPS_LIMIT, "no QEMU was started");
            std::thread::sleep(LOOK);
        }
        Units::open(path)
    }

    /// How many units were reported since the last call.
    fn read(&mut self) -> Result<usize> {
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes)?;
        self.rest += &String::from_utf8_lossy(&bytes);
        let end = self.rest.rfind('\n').map_or(0, |end| end + 1);
        let rest = self.rest.split_off(end);
        let lines = std::mem::replace(&mut self.rest, rest);
        if let Some(line) = lines.lines().find(|line| line.starts_with("lab failed")) {
            bail!("the guest says: {line}");
        }
        Ok(lines.matches("lab unit").count())
    }

    /// The units of some sweeps; `look` is called meanwhile, and may end it.
    fn curve(
        &mut self,
        begin: Instant,
        sweeps: usize,
        mut look: impl FnMut() -> Result<()>,
    ) -> Result<Curve> {
        let mut curve = Curve::default();
        while curve.0.len() < sweeps * units_a_sweep() {
            ensure!(begin.elapsed() < SWEEPS_LIMIT, "{} units", curve.0.len());
            let more = self.read()?;
            let now = begin.elapsed().as_secs_f64();
            curve.0.extend(std::iter::repeat_n(now, more));
            look()?;
            std::thread::sleep(LOOK);
        }
        Ok(curve)
    }
}

fn record(measured: &Measured) -> Result<()> {
    let folder = results::folder(BENCH)?;
    draw_faults(&folder.join("faults.svg"), measured)?;
    draw_rates(&folder.join("rates.svg"), measured)?;
    let alone = measured.median(Way::NeverSaved, |run| run.curve.sweep_s());
    let second = measured.median(Way::WorkingSet, |run| run.curve.sweep_s());
    let faults = |way| measured.median(way, Run::faults);
    let fewer = (1.0 - faults(Way::WorkingSet) / faults(Way::Lazy)) * 100.0;
    let claims = [
        Claim::new(
            "responsive-time",
            Goal::AtMost(1.3),
            second / alone,
            "ratio",
            COMMAND,
        ),
        Claim::new(
            "working-set-faults",
            Goal::AtLeast(90.0),
            fewer,
            "percent",
            COMMAND,
        ),
    ];
    let page = page(measured, &claims);
    println!("{page}");
    std::fs::write(folder.join("README.md"), page)?;
    let raw: Vec<Value> = measured.runs.iter().map(Run::raw).collect();
    results::write_raw(BENCH, "raw.jsonl", &raw)?;
    results::write_summary(BENCH, &claims)
}

fn page(measured: &Measured, claims: &[Claim]) -> String {
    let turns = measured.of(Way::Eager).count();
    let mut page = format!(
        "# Bench: responsive\n\n`{COMMAND}`, commit {}. Raw data: `raw.jsonl.zst` (zstd).\n\n\
         Redis in a Debian guest of {RAM_MIB} MiB under TCG, one vCPU; its client reads a piece of every value \
         in turn ({} units of {VALUES_A_UNIT} values a sweep), and checks it. Medians of {turns} turns; times \
         count from the command, QEMU's start included; everything in the page cache, and free memory touched before. \
         Never saved, twice a turn: {:.1} units a second.\n\n\
         | VM | guest runs | {:.0} % of the steady rate | a whole sweep | over never saved | a sweep since it runs | waited for a page | memory complete |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        results::commit(),
        units_a_sweep(),
        measured.steady,
        RESPONSIVE * 100.0,
    );
    let alone = measured.median(Way::NeverSaved, |run| run.curve.sweep_s());
    for way in Way::ALL {
        let median = |value: &dyn Fn(&Run) -> f64| measured.median(way, value);
        let ms = |value: f64| match value.is_finite() {
            true => format!("{value:.0} ms"),
            false => "-".to_owned(),
        };
        let sweep = median(&|run| run.curve.sweep_s());
        // Writing to a String does not fail.
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {:.2} | {} | {:.0} times | {} |",
            way.words(),
            ms(median(&Run::runs_ms)),
            ms(1e3 * median(&|run| run.curve.responsive_s(measured.steady))),
            ms(1e3 * sweep),
            sweep / alone,
            ms(median(&|run| 1e3 * run.curve.sweep_s() - run.runs_ms())),
            median(&Run::faults),
            ms(median(&|run| run.ms(&run.report["total_us"]))),
        );
    }
    page += "\n| promise | goal | measured | holds |\n| --- | --- | --- | --- |\n";
    for claim in claims {
        let Claim {
            claim: id,
            goal,
            value,
            unit,
            holds,
            ..
        } = claim;
        let holds = if *holds { "yes" } else { "**NO**" };
        let _ = writeln!(page, "| {id} | {goal} | {value} {unit} | {holds} |");
    }
    page + "\n![Faults over time](faults.svg)\n\n![Work over time](rates.svg)\n\n\
            QEMU's translations of the guest's code are not in a checkpoint: under TCG each restored VM begins \
            without them, the eagerly restored one too.\n\n\
            The guest does the same after each restore of a checkpoint, so a working set that was recorded \
            fits better here than where a VM's work differs from time to time.\n"
}

fn draw_faults(path: &Path, measured: &Measured) -> Result<()> {
    let series: Vec<Series> = [Way::Lazy, Way::WorkingSet]
        .into_iter()
        .filter_map(|way| {
            let run = measured.of(way).next()?;
            let steps = run.report["lazy"]["faults_each_10_ms"].as_array()?;
            let counts = steps.iter().filter_map(Value::as_f64);
            let points = (0u32..).map(|step| f64::from(step) * 10.0).zip(counts);
            Some(Series {
                name: way.words().to_owned(),
                shape: Shape::Line,
                points: points.collect(),
            })
        })
        .collect();
    let labels = Labels {
        title: "How often the guest waits for a page",
        x: "since its memory is being filled, ms",
        y: "faults in 10 ms",
    };
    chart::points(path, labels, &series)
}

fn draw_rates(path: &Path, measured: &Measured) -> Result<()> {
    let series: Vec<Series> = Way::ALL
        .into_iter()
        .filter_map(|way| {
            Some(Series {
                name: way.words().to_owned(),
                shape: Shape::Line,
                points: measured.of(way).next()?.curve.rates(),
            })
        })
        .collect();
    let labels = Labels {
        title: "What the guest does",
        x: "since the command, s",
        y: "units a second",
    };
    chart::points(path, labels, &series)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_responsive_at_the_end_of_the_first_full_window() {
        // Ten a second for two seconds, then a hundred.
        let slow = (1..=20).map(|unit| f64::from(unit) / 10.0);
        let fast = (1..=100).map(|unit| 2.0 + f64::from(unit) / 100.0);
        let curve = Curve(slow.chain(fast).collect());
        let responsive = curve.responsive_s(100.0);
        assert!((2.2..2.25).contains(&responsive), "{responsive}");
        assert!(curve.responsive_s(1000.0).is_nan());
        assert_eq!(curve.rates()[0].1, 8.0);
        assert_eq!(curve.rates().len(), 12);
    }

    #[test]
    fn units_are_counted_once_and_in_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serial");
        std::fs::write(&path, "lab ready\nlab unit 1\nlab un").unwrap();
        let mut units = Units::open(&path).unwrap();
        assert_eq!(units.read().unwrap(), 1);
        assert_eq!(units.read().unwrap(), 0);
        let text = std::fs::read_to_string(&path).unwrap() + "it 2\nlab unit 3\n";
        std::fs::write(&path, text).unwrap();
        assert_eq!(units.read().unwrap(), 2);
    }
}
