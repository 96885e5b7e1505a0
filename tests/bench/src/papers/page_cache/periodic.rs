//! Park's table 6 and figure 5: four of the workloads, each with ten checkpoints over its course, in two ways: increments of memory
//! and disk alone, and increments that leave out what is on a disk and what the guest's agent calls free. The first checkpoint is
//! not counted, as in the paper.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::debian::{self, DebianSetup, DebianWorkload, READY_LIMIT};
use stillframe_harness::guest::Guest;
use stillframe_harness::images;
use stillframe_harness::running::Running;

use super::mib;
use crate::chart::{self, Labels};
use crate::host_memory;
use crate::page::{Figure, Page};
use crate::peers;

const RAM_MIB: u32 = 1024;
const DISK_MIB: u32 = 3072;
/// Those that count; the first comes before them.
const CHECKPOINTS: u32 = 10;
/// No shorter interval: a checkpoint is to be complete before the next.
const INTERVAL_MIN: Duration = Duration::from_secs(2);

/// A workload, and the paper's averages of it: seconds and MB, unmodified, incremental, and with all that is left out.
type Of = (DebianWorkload, &'static str);

const WORKLOADS: [Of; 4] = [
    (DebianWorkload::Postmark, "38.5, 1025; 17.6, 461; 8.4, 151"),
    (DebianWorkload::Install, "38.5, 1025; 5.3, 103; 6.3, 71"),
    (DebianWorkload::Gzip, "38.5, 1025; 8.1, 183; 5.2, 24"),
    (DebianWorkload::Make, "38.5, 1025; 7.9, 191; 5.9, 65"),
];

/// A way to take increments.
struct Way {
    name: &'static str,
    options: &'static [&'static str],
    /// The Debian's image is indexed.
    indexed: bool,
}

const WAYS: [Way; 2] = [
    Way {
        name: "incremental",
        options: &["--no-dedup", "--no-images"],
        indexed: false,
    },
    Way {
        name: "with content and free pages",
        options: &["--free-pages"],
        indexed: true,
    },
];

/// Classes of pages as `show --contents` names them.
const CLASSES: [&str; 7] = [
    "free",
    "zero",
    "in_image",
    "on_disk",
    "duplicate",
    "changed",
    "other",
];

/// The checkpoints of one workload in one way, the first left out.
struct Taken {
    ms: Vec<f64>,
    bytes: Vec<f64>,
    /// Of these, the disk's.
    disk_bytes: Vec<f64>,
    /// What memory is, each time.
    contents: Vec<Value>,
}

impl Taken {
    fn means(&self) -> [f64; 3] {
        [&self.ms, &self.bytes, &self.disk_bytes].map(|values| mean(values))
    }
}

/// One workload.
pub(super) struct Periodic {
    of: Of,
    interval: Duration,
    /// One of all memory by the faster of QEMU's ways, after the workload.
    mapped_ram: [f64; 2],
    ways: [Taken; WAYS.len()],
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Runs each of them; the first alone if `quick`.
pub(super) fn measure(folder: &Path, quick: bool) -> Result<Vec<Periodic>> {
    let count = if quick { 1 } else { WORKLOADS.len() };
    let each = WORKLOADS[..count].iter().map(|of| {
        let periodic = one(folder, *of).with_context(|| of.0.name())?;
        eprintln!("{}", row(&periodic).join(" | "));
        Ok(periodic)
    });
    each.collect()
}

fn boot(folder: &Path, workload: DebianWorkload) -> Result<(Guest, PathBuf)> {
    let disk = folder.join("periodic.img");
    images::make_file_system(&disk, DISK_MIB)?;
    let drive = format!("file={},if=virtio,format=raw", disk.display());
    let setup = DebianSetup {
        workload,
        ram_mib: RAM_MIB,
        agent: true,
        extra: ["-drive", &drive].map(str::to_owned).into(),
    };
    Ok((setup.boot()?, disk))
}

fn one(folder: &Path, of: Of) -> Result<Periodic> {
    let (guest, disk) = boot(folder, of.0)?;
    let begin = Instant::now();
    guest.serial.wait_units(1, READY_LIMIT)?;
    let interval = (begin.elapsed() / CHECKPOINTS).max(INTERVAL_MIN);
    let mut qmp = guest.second_monitor()?;
    let mut mapped_ram = [f64::INFINITY; 2];
    for way in super::WAYS {
        host_memory::settle();
        let saved = peers::migrate_to_file(&mut qmp, &folder.join("mapped"), way)?;
        if saved.total_ms < mapped_ram[0] {
            mapped_ram = [saved.total_ms, saved.bytes as f64];
        }
    }
    drop((qmp, guest));
    fs::remove_file(disk)?;
    let [alone, both] = WAYS
        .each_ref()
        .map(|way| taken(folder, of.0, way, interval));
    Ok(Periodic {
        of,
        interval,
        mapped_ram,
        ways: [alone?, both?],
    })
}

/// The workload once more, watched in this way.
fn taken(folder: &Path, workload: DebianWorkload, way: &Way, interval: Duration) -> Result<Taken> {
    let repository = folder.join("periodic");
    let stillframe = Stillframe::init(&repository)?;
    if way.indexed {
        stillframe.ok(&["index", &debian::image()?.display().to_string()])?;
    }
    let (guest, disk) = boot(folder, workload)?;
    let (pid, every) = (guest.pid_text(), format!("{}ms", interval.as_millis()));
    let count = (CHECKPOINTS + 1).to_string();
    let line = ["watch", "--pid", &pid, "--every", &every, "--count", &count];
    let more = ["--disks", "capture", "--json", "--quiet"];
    let line = [&line[..], &more, way.options].concat();
    let watch = Running::start(stillframe.command(&line)?)?;
    let reports = watch.end_within(READY_LIMIT)?.results()?;
    ensure!(reports.len() == CHECKPOINTS as usize + 1, "{reports:?}");
    drop(guest);
    fs::remove_file(disk)?;
    let mut taken = Taken {
        ms: Vec::new(),
        bytes: Vec::new(),
        disk_bytes: Vec::new(),
        contents: Vec::new(),
    };
    for report in &reports[1..] {
        let number = |of: &Value| of.as_f64().with_context(|| report.to_string());
        taken.ms.push(number(&report["total_us"])? / 1e3);
        taken.bytes.push(number(&report["bytes_stored"])?);
        taken
            .disk_bytes
            .push(number(&report["disks"][0]["bytes_stored"])?);
        let id = report["checkpoint"].as_str().context("no id")?;
        let mut shown = stillframe.json(&["show", id, "--contents"])?;
        taken.contents.push(shown["contents"].take());
    }
    fs::remove_dir_all(&repository)?;
    Ok(taken)
}

const COLUMNS: [&str; 7] = [
    "workload",
    "interval, s",
    "unmodified (mapped-ram): ms, MiB",
    "incremental: ms, MiB (of the disk)",
    "with content and free pages: ms, MiB (of the disk)",
    "time, bytes",
    "paper: s, MB of the three",
];

fn row(periodic: &Periodic) -> Vec<String> {
    let ways = periodic.ways.each_ref().map(Taken::means);
    let cell =
        |[ms, bytes, disk]: [f64; 3]| format!("{ms:.0}, {:.1} ({:.1})", mib(bytes), mib(disk));
    let [alone, both] = ways;
    let [ms, bytes] = periodic.mapped_ram;
    vec![
        periodic.of.0.name().to_owned(),
        format!("{:.1}", periodic.interval.as_secs_f64()),
        format!("{ms:.0}, {:.1}", mib(bytes)),
        cell(alone),
        cell(both),
        format!("{:.2}, {:.2}", both[0] / alone[0], both[1] / alone[1]),
        periodic.of.1.to_owned(),
    ]
}

/// Adds table 6, and figure 5.
pub(super) fn add(page: &mut Page, all: &[Periodic]) -> Result<()> {
    let names: Vec<&str> = all.iter().map(|periodic| periodic.of.0.name()).collect();
    let bytes = WAYS.each_ref().map(|way| way.name);
    let bytes = (0..).zip(bytes).map(|(number, name): (usize, &str)| {
        let of = |periodic: &Periodic| mib(periodic.ways[number].means()[1]);
        (name, all.iter().map(of).collect::<Vec<f64>>())
    });
    let labels = Labels {
        title: "Bytes of an increment, of memory and disk",
        x: "",
        y: "MiB",
    };
    let picture = page.picture("periodic.svg");
    chart::bars(&picture, labels, &names, &bytes.collect::<Vec<_>>())?;
    page.add(&Figure {
        title: "Table 6: ten checkpoints of each of four workloads",
        paper: "incremental + page cache + free takes 33 % of the bytes of incremental alone, and 67 % of its time; 8 % and 17 % of unmodified.",
        ours: "*incremental*: what was written, of memory and of the disk, with nothing shared (`--no-dedup --no-images`). The other: `--free-pages`, the \
               Debian's image indexed, and what memory and disk have in common stored once.",
        columns: &COLUMNS,
        rows: &all.iter().map(row).collect::<Vec<_>>(),
        pictures: &["periodic.svg"],
        differs: "The paper's checkpoints have no disk, which the guest's own disk is in place of; ours have both. Means of the ten after the first. \
                  mapped-ram saved all memory once, after the workload. Both of ours make deltas.",
    });
    add_contents(page, all)?;
    for periodic in all {
        let ways = periodic.ways.each_ref().map(|taken| {
            json!({ "ms": taken.ms, "bytes": taken.bytes, "disk_bytes": taken.disk_bytes, "contents": taken.contents })
        });
        page.keep("periodic", json!({
            "workload": periodic.of.0.name(), "interval_ms": periodic.interval.as_millis() as u64,
            "mapped_ram": periodic.mapped_ram, "ways": ways,
        }));
    }
    Ok(())
}

/// Adds figure 5.
fn add_contents(page: &mut Page, all: &[Periodic]) -> Result<()> {
    let mut pictures = Vec::new();
    for periodic in all {
        let name = format!("periodic-{}.svg", periodic.of.0.name());
        let contents = &periodic.ways[1].contents;
        let of = |class| {
            let pages = contents
                .iter()
                .map(|one| one[class].as_f64().unwrap_or(0.0));
            pages.map(|pages| pages / 256.0).collect::<Vec<f64>>()
        };
        let labels = Labels {
            title: "What memory is",
            x: "checkpoint",
            y: "MiB",
        };
        let numbers: Vec<String> = (2..contents.len() + 2).map(|at| at.to_string()).collect();
        let series = CLASSES.map(|class| (class, of(class)));
        chart::bars(&page.picture(&name), labels, &numbers, &series)?;
        pictures.push(name);
    }
    let classes = |periodic: &Periodic| {
        let of = |class: &str| {
            let pages = periodic.ways[1].contents.iter();
            let pages: Vec<f64> = pages.filter_map(|one| one[class].as_f64()).collect();
            format!("{:.0}", mean(&pages) / 256.0)
        };
        let mut row = vec![periodic.of.0.name().to_owned()];
        row.extend(CLASSES.map(of));
        row
    };
    page.add(&Figure {
        title: "Figure 5: what memory is at these checkpoints, in MiB",
        paper: "free, page cache, unchanged and changed at each of ten checkpoints, in a picture.",
        ours: "`show --contents`: means, and each checkpoint in the pictures.",
        columns: &[
            "workload",
            "free",
            "zero",
            "in image",
            "on disk",
            "duplicate",
            "changed",
            "other",
        ],
        rows: &all.iter().map(classes).collect::<Vec<_>>(),
        pictures: &pictures.iter().map(String::as_str).collect::<Vec<_>>(),
        differs: "By content: *on disk* has what is equal to a block of this checkpoint's disk.",
    });
    Ok(())
}
