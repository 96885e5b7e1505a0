//! `cargo xtask bench papers fitdoc`: the evaluation of FITDOC (Fast Incremental Checkpointing with Delta
//! Memory Compression) once more, on six guests with real software.
//!
//! Each guest is booted once and watched, saved by QEMU itself, and watched again with deltas and deduplication
//! off. `paper` has the paper's values, and `measure` the values of a guest. The figures, which compare both, are
//! in `table`, `time` and `size`.

mod goals;
mod measure;
mod paper;
mod size;
mod table;
mod time;

use anyhow::{Context, Result};

use crate::page::{Figure, Page};
use measure::{Depth, Measured, measure};
use stillframe_harness::debian::DebianWorkload;
use stillframe_harness::results;

const BENCH: &str = "papers-fitdoc";
const COMMAND: &str = "cargo xtask bench papers fitdoc";
/// The paper's memory size, at which all guests are measured.
const RAM_MIB: u32 = 1024;

/// The guests to measure, and the length of the measurement.
struct Plan {
    workloads: Vec<DebianWorkload>,
    depth: Depth,
    /// More memory sizes, in MiB, of some guests.
    sizes: Vec<(DebianWorkload, u32)>,
    /// Of those.
    sizes_depth: Depth,
}

impl Plan {
    fn whole() -> Plan {
        Plan {
            workloads: DebianWorkload::OF_PAPERS.to_vec(),
            depth: Depth {
                every_s: 10,
                // Increments enough that their layers are merged once.
                checkpoints: 18,
                whole_pages: 4,
                saves: 3,
                gigabit: 4,
            },
            sizes: [DebianWorkload::Idle, DebianWorkload::Compile]
                .into_iter()
                .flat_map(|workload| [(workload, 512), (workload, 2048)])
                .collect(),
            sizes_depth: Depth {
                every_s: 10,
                checkpoints: 4,
                whole_pages: 0,
                saves: 2,
                gigabit: 0,
            },
        }
    }

    fn quick() -> Plan {
        let depth = Depth {
            every_s: 3,
            checkpoints: 3,
            whole_pages: 2,
            saves: 1,
            gigabit: 2,
        };
        Plan {
            workloads: vec![DebianWorkload::Idle, DebianWorkload::Compile],
            depth,
            sizes: vec![(DebianWorkload::Idle, 512)],
            sizes_depth: Depth {
                whole_pages: 0,
                gigabit: 0,
                ..depth
            },
        }
    }

    /// The settings that all figures share.
    fn setting(&self) -> String {
        let processors = std::thread::available_parallelism().map_or(0, usize::from);
        let Depth {
            every_s,
            checkpoints,
            whole_pages,
            saves,
            ..
        } = self.depth;
        format!(
            "Guests: Debian with real software, {RAM_MIB} MiB where nothing else is said, one vCPU, TCG; each was \
             booted once. The host has {processors} processors and no hardware virtualization; repository and QEMU's \
             files are on one local disk.\n\n\
             Each guest was watched with `stillframe watch --every {every_s}s --count {checkpoints}`: one checkpoint of \
             all memory, which is left out unless said, and {} increments: enough that the layers of 16 of them are \
             merged once, and means count that in. The paper took 5 checkpoints, 3 minutes \
             apart. Time is bounded here, and a guest under TCG runs some ten times slower than on a processor of its own, \
             so that an interval of ours holds about one two-hundredth of the paper's work: fewer pages change in it. Then \
             QEMU saved the guest by itself, {saves} times each way, and at last it was watched once more, {whole_pages} checkpoints with \
             `--delta-cache 0 --no-dedup`.\n\n\
             The paper's guests, under Xen 4.0.1 with two vCPUs on Xeon E5620 processors, saving over NFS and a \
             gigabit network, stand for ours thus: underload for idle, dbench, kernel compile, NPB LU.B for numeric \
             (SSOR sweeps over arrays in half of RAM), Hadoop for wordcount (map and reduce over texts in RAM), TPC-W \
             for database (PostgreSQL under pgbench).",
            checkpoints - 1
        )
    }
}

/// Runs it, and writes `docs/results/papers-fitdoc/` unless `quick`.
pub fn run(quick: bool) -> Result<()> {
    let plan = match quick {
        true => Plan::quick(),
        false => Plan::whole(),
    };
    let elsewhere = tempfile::Builder::new()
        .prefix("stillframe-fitdoc-")
        .tempdir()?;
    let mut page = Page::new(
        BENCH,
        quick.then_some(elsewhere.path()),
        "FITDOC once more",
        COMMAND,
        &plan.setting(),
    )?;
    let mut guests = Vec::new();
    for &workload in &plan.workloads {
        let measured = measure(workload, RAM_MIB, &plan.depth).with_context(|| workload.name())?;
        page.keep(workload.name(), measured.raw());
        guests.push(measured);
    }
    let mut sized = Vec::new();
    for &(workload, ram_mib) in &plan.sizes {
        let what = format!("{} {ram_mib} MiB", workload.name());
        let measured =
            measure(workload, ram_mib, &plan.sizes_depth).with_context(|| what.clone())?;
        page.keep(&what, measured.raw());
        sized.push(measured);
    }
    table::add(&mut page, &guests)?;
    time::add_scan(&mut page, &guests)?;
    time::add_time(&mut page, &guests)?;
    time::add_gigabit(&mut page, &guests)?;
    time::add_sizes(&mut page, &guests, &sized)?;
    size::add(&mut page, &guests)?;
    time::add_share(&mut page, &guests)?;
    let claims = goals::claims(&guests)?;
    page.add_claims(
        &claims,
        "mean reductions of 70.54 % (time), 83.02 % (size, against a full save) and 52.88 % (size, against Remus).",
        "the goals for the three reductions are the paper's own means; each of ours is the mean over the guests \
         of the tables above.",
    );
    page.write()?;
    if !quick {
        results::write_summary(BENCH, &claims)?;
    }
    Ok(())
}

/// Names of the guests, for charts.
fn names(guests: &[Measured]) -> Vec<&'static str> {
    guests.iter().map(|guest| guest.workload.name()).collect()
}

/// One number of each guest.
fn each(guests: &[Measured], number: impl Fn(&Measured) -> Result<f64>) -> Result<Vec<f64>> {
    guests
        .iter()
        .map(|guest| number(guest).with_context(|| guest.workload.name()))
        .collect()
}

/// The paper's numbers for these guests.
fn of_paper(guests: &[Measured], numbers: &[f64; 6]) -> Vec<f64> {
    guests
        .iter()
        .map(|guest| paper::of(numbers, guest.workload))
        .collect()
}

fn mean(samples: &[f64]) -> f64 {
    samples.iter().sum::<f64>() / samples.len() as f64
}

/// Percentage by which `part` is less than `whole`; negative where it is more.
fn reduction_percent(part: f64, whole: f64) -> f64 {
    (1.0 - part / whole) * 100.0
}

fn percent(value: f64) -> String {
    format!("{value:.2} %")
}

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}
