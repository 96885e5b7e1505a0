//! `papers vm-me`: what a first checkpoint takes of guests with much memory and little use for it, with the balloon and
//! without (Liu et al., figures 2 to 5), beside QEMU's mapped-ram.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::debian::{DebianSetup, DebianWorkload};
use stillframe_harness::guest::Guest;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal, percentile};

use crate::chart::{self, Labels, Series, Shape};
use crate::host_memory;
use crate::page::{Figure, Page};
use crate::peers;

const BENCH: &str = "papers-vm-me";
const COMMAND: &str = "cargo xtask bench papers vm-me";
/// RAM of the guests, in MiB.
const SIZES: [u32; 4] = [512, 1024, 2048, 4096];
/// The workloads of the paper, and how long each works before it is measured.
const WORKLOADS: [(DebianWorkload, Duration); 5] = [
    (DebianWorkload::Idle, Duration::from_secs(5)),
    (DebianWorkload::Compile, Duration::from_secs(20)),
    (DebianWorkload::Web, Duration::from_secs(10)),
    (DebianWorkload::Database, Duration::from_secs(10)),
    (DebianWorkload::Bzip2, Duration::from_secs(20)),
];
/// Time in which a guest gives back all that it does not need.
const WHOLE: &str = "--balloon=30s";
/// Turns of the idle guest, which the promise is about; the others have one.
const IDLE_TURNS: usize = 3;

/// One guest, measured in each way.
#[derive(Debug, Clone)]
struct Cell {
    workload: DebianWorkload,
    ram_mib: u32,
    mapped_ram: Taken,
    without: Taken,
    with: Taken,
    /// With all the time that it takes.
    whole: Taken,
    /// What the balloon did in the usual time, and in that.
    balloon: [Value; 2],
}

/// What a checkpoint took.
#[derive(Debug, Clone, Copy, Default)]
struct Taken {
    ms: f64,
    bytes: f64,
    /// MiB of pages that are not zeros; not known of QEMU.
    content_mib: f64,
    /// Until the VM runs again from it; zero if it was not restored.
    restore_ms: f64,
}

/// Runs it, and writes `docs/results/papers-vm-me/` unless it is a quick one.
pub fn run(quick: bool) -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-vm-me-")
        .tempdir()?;
    let (sizes, workloads) = match quick {
        true => (&SIZES[..1], &WORKLOADS[..1]),
        false => (&SIZES[..], &WORKLOADS[..]),
    };
    let mut cells = Vec::new();
    for &(workload, works) in workloads {
        let turns = match workload {
            DebianWorkload::Idle if !quick => IDLE_TURNS,
            _ => 1,
        };
        for _ in 0..turns {
            for &ram_mib in sizes {
                let cell = measure(workload, ram_mib, works, folder.path());
                let cell = cell.with_context(|| format!("{} {ram_mib} MiB", workload.name()))?;
                eprintln!("{}", line(&cell).join(" | "));
                cells.push(cell);
            }
        }
    }
    match quick {
        true => Ok(()),
        false => record(&cells),
    }
}

fn measure(workload: DebianWorkload, ram_mib: u32, works: Duration, folder: &Path) -> Result<Cell> {
    let guest = DebianSetup {
        workload,
        ram_mib,
        agent: true,
        extra: ["-device", "virtio-balloon-pci"].map(str::to_owned).into(),
    };
    let guest = guest.boot()?;
    thread::sleep(works);
    host_memory::settle();
    let mut qmp = guest.second_monitor()?;
    let saved = peers::migrate_to_file(&mut qmp, &folder.join("mapped"), &["mapped-ram"])?;
    drop(qmp);
    let (without, _) = checkpoint(&guest, folder, &[], Restore::Too)?;
    let (with, report) = checkpoint(&guest, folder, &["--balloon"], Restore::Not)?;
    let (whole, all) = checkpoint(&guest, folder, &[WHOLE], Restore::Too)?;
    let balloon = [report, all].map(|report| report["balloon"].clone());
    for balloon in &balloon {
        ensure!(balloon["missing_bytes"] == 0, "{balloon}");
    }
    Ok(Cell {
        workload,
        ram_mib,
        mapped_ram: Taken {
            ms: saved.total_ms,
            bytes: saved.bytes as f64,
            ..Taken::default()
        },
        without,
        with,
        whole,
        balloon,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Restore {
    Too,
    Not,
}

/// A first checkpoint into a new repository, and a restore of it where that is wanted.
fn checkpoint(
    guest: &Guest,
    folder: &Path,
    more: &[&str],
    restore: Restore,
) -> Result<(Taken, Value)> {
    let repository = folder.join("repository");
    let stillframe = Stillframe::init(&repository)?;
    host_memory::settle();
    let pid = guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--disks", "none"];
    let begin = Instant::now();
    let report = stillframe.json(&[&line, more].concat())?;
    let ms = ms_since(begin);
    let id = report["checkpoint"].as_str().context("no id")?;
    let mut restore_ms = 0.0;
    if restore == Restore::Too {
        let begin = Instant::now();
        let restored = Restored::start(&stillframe, id, guest.folder(), &["--disks=as-they-are"])?;
        restore_ms = ms_since(begin);
        restored.crash()?;
    }
    fs::remove_dir_all(&repository)?;
    let pages = |name: &str| report["pages"][name].as_f64().context("no count");
    let taken = Taken {
        ms,
        bytes: report["bytes_stored"].as_f64().context("no bytes")?,
        content_mib: (pages("captured")? - pages("zero")?) / 256.0,
        restore_ms,
    };
    Ok((taken, report))
}

fn ms_since(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e3
}

/// How long the whole operation took, in seconds.
fn operation_s(cell: &Cell) -> f64 {
    cell.balloon[0]["operation_us"].as_f64().unwrap_or(f64::MAX) / 1e6
}

fn mib(bytes: f64) -> String {
    format!("{:.0}", bytes / f64::from(1 << 20))
}

const COLUMNS: [&str; 17] = [
    "guest",
    "RAM, MiB",
    "mapped-ram, MiB",
    "content without, MiB",
    "350 ms, MiB",
    "30 s, MiB",
    "stored without, MiB",
    "350 ms, MiB",
    "30 s, MiB",
    "mapped-ram, ms",
    "time without, ms",
    "350 ms, ms",
    "30 s, ms",
    "restore without, ms",
    "30 s, ms",
    "taken in 350 ms, MiB",
    "taken in 30 s, MiB",
];

fn line(cell: &Cell) -> Vec<String> {
    let ms = |value: f64| format!("{value:.0}");
    let [usual, all] = cell.balloon.each_ref().map(taken);
    vec![
        cell.workload.name().to_owned(),
        cell.ram_mib.to_string(),
        mib(cell.mapped_ram.bytes),
        ms(cell.without.content_mib),
        ms(cell.with.content_mib),
        ms(cell.whole.content_mib),
        mib(cell.without.bytes),
        mib(cell.with.bytes),
        mib(cell.whole.bytes),
        ms(cell.mapped_ram.ms),
        ms(cell.without.ms),
        ms(cell.with.ms),
        ms(cell.whole.ms),
        ms(cell.without.restore_ms),
        ms(cell.whole.restore_ms),
        usual,
        all,
    ]
}

/// What a balloon took and in which time, and why no more.
fn taken(balloon: &Value) -> String {
    let taken = balloon["taken_bytes"].as_f64().unwrap_or(0.0);
    let ms = balloon["operation_us"].as_f64().unwrap_or(0.0) / 1e3;
    let why = balloon["not_taken"].as_str();
    let why = why.map(|why| format!(": {}", why.split(" (").next().unwrap_or_default()));
    format!("{} in {ms:.0} ms{}", mib(taken), why.unwrap_or_default())
}

/// Medians of a figure over the turns of a workload, by RAM in MiB.
fn medians(
    cells: &[Cell],
    workload: DebianWorkload,
    figure: impl Fn(&Cell) -> f64,
) -> Vec<(f64, f64)> {
    let mut by_size: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for cell in cells.iter().filter(|cell| cell.workload == workload) {
        by_size.entry(cell.ram_mib).or_default().push(figure(cell));
    }
    let median = |(ram, values): (u32, Vec<f64>)| (f64::from(ram), percentile(&values, 0.5));
    by_size.into_iter().map(median).collect()
}

/// Draws a figure of all workloads with the balloon, for as long as it takes, and without.
fn draw(
    page: &Page,
    (name, title, y): (&str, &str, &str),
    cells: &[Cell],
    figure: impl Fn(&Taken) -> f64,
) -> Result<()> {
    let with = WORKLOADS.iter().map(|&(workload, _)| Series {
        name: format!("{}, balloon", workload.name()),
        shape: Shape::Line,
        points: medians(cells, workload, |cell| figure(&cell.whole)),
    });
    let without = WORKLOADS.iter().map(|&(workload, _)| Series {
        name: workload.name().to_owned(),
        shape: Shape::Dots,
        points: medians(cells, workload, |cell| figure(&cell.without)),
    });
    let labels = Labels {
        title,
        x: "RAM, MiB",
        y,
    };
    let series: Vec<Series> = with.chain(without).collect();
    chart::points(&page.picture(name), labels, &series)
}

fn record(cells: &[Cell]) -> Result<()> {
    let setting = format!(
        "Debian guests of one vCPU under TCG, with a guest agent and a virtio balloon. Each cell is a VM of its own: saved by QEMU's \
         mapped-ram, then by a first checkpoint without the balloon, with `--balloon` (350 ms), and with `{WHOLE}`, in this order, each into a new \
         repository. The first and the last are restored. The idle guest has {IDLE_TURNS} turns, the others one. *Content*: pages that are not zeros; *stored*: what they take, \
         deduplicated, compressed and encrypted."
    );
    let title = "VM-ME: memory exclusion by ballooning";
    let mut page = Page::new(BENCH, None, title, COMMAND, &setting)?;
    draw(
        &page,
        ("size.svg", "Content of a checkpoint", "MiB"),
        cells,
        |taken| taken.content_mib,
    )?;
    draw(
        &page,
        ("time.svg", "Time of a checkpoint", "ms"),
        cells,
        |taken| taken.ms,
    )?;
    draw(
        &page,
        ("restore.svg", "Time of a restore", "ms"),
        cells,
        |taken| taken.restore_ms,
    )?;
    let rows: Vec<Vec<String>> = cells.iter().map(line).collect();
    page.add(&Figure {
        title: "Figures 2 to 5: size, time, restart, and what the balloon takes",
        paper: "Without it a checkpoint is as large as RAM. With it that of an idle guest is about 100 MB at any size, of a compilation \
                310, a web server 285, SQL 264, bzip2 740. Times fall with the size. The operation takes less than 0.4 s.",
        ours: "Pages that a guest has never written are holes without a balloon, too, so less is left to gain.",
        columns: &COLUMNS,
        rows: &rows,
        pictures: &["size.svg", "time.svg", "restore.svg"],
        differs: "The guest has its memory again before the first page is read. By itself the balloon stops after 350 ms: under TCG it takes 1 GiB a \
                  second at most, and beside work of the guest a tenth of that. 128 and 256 MB are left out: a Debian with its writes in RAM needs 512.",
    });
    let claims = claims(cells)?;
    page.add_claims(
        &claims,
        "an idle guest's checkpoint is about as large at any size of RAM; the operation takes less than 0.4 s.",
        "The longest operation of all cells; the medians of the idle guest's turns.",
    );
    for cell in cells {
        page.keep("cell", raw(cell));
    }
    page.write()?;
    results::write_summary(BENCH, &claims)
}

fn claims(cells: &[Cell]) -> Result<[Claim; 2]> {
    let idle = medians(cells, DebianWorkload::Idle, |cell| cell.with.ms);
    let at = |ram: f64| {
        let found = idle.iter().find(|(size, _)| *size == ram);
        found.map(|(_, ms)| *ms).context("not measured")
    };
    let operations = cells.iter().map(operation_s);
    Ok([
        Claim::new(
            "vm-me-operation",
            Goal::AtMost(0.4),
            operations.fold(0.0, f64::max),
            "s",
            COMMAND,
        ),
        Claim::new(
            "vm-me-idle",
            Goal::AtMost(1.2),
            at(4096.0)? / at(512.0)?,
            "ratio",
            COMMAND,
        ),
    ])
}

fn raw(cell: &Cell) -> Value {
    let taken = |taken: &Taken| {
        json!({
            "ms": taken.ms, "bytes": taken.bytes, "content_mib": taken.content_mib, "restore_ms": taken.restore_ms,
        })
    };
    json!({
        "workload": cell.workload.name(), "ram_mib": cell.ram_mib, "mapped_ram": taken(&cell.mapped_ram),
        "without": taken(&cell.without), "with": taken(&cell.with), "whole": taken(&cell.whole),
        "balloon": cell.balloon,
    })
}
