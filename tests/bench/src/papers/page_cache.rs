//! `papers page-cache`: what of a guest's memory is in an image that stays as it is, and what a first checkpoint takes then
//! (Park et al., tables 4 to 6), against QEMU's mapped-ram; and what it takes to index the image, against `b3sum`.

mod ended;
mod periodic;
mod restores;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::golden;
use stillframe_harness::guest::Guest;
use stillframe_harness::results::{self, Claim, Goal, percentile};
use stillframe_harness::running::Running;

use self::ended::Ended;
use self::periodic::Periodic;
use self::restores::Restores;
use crate::chart::{self, Labels};
use crate::host_memory;
use crate::page::{Figure, Page};
use crate::peers;

const BENCH: &str = "exclusion";
const COMMAND: &str = "cargo xtask bench papers page-cache";
const RAM_MIB: u32 = 1024;
/// MiB of files in the image.
const FILES_MIB: u64 = 700;
/// When the guest of the increments reads them, and the time from its first checkpoint to the second, in seconds.
const READ_AFTER_S: u32 = 20;
const INTERVAL_S: u32 = 45;
/// MiB of the guest's own memory.
const HEAP_MIB: u32 = 32;
/// QEMU's ways to save into a mapped-ram file.
const WAYS: [&[&str]; 2] = [&["mapped-ram"], &["mapped-ram", "multifd"]];

/// The promises are about memory.
const NO_DISKS: [&str; 2] = ["--disks", "none"];

/// What is added to increments: by content (the image is indexed), by the guest's word.
#[derive(Clone, Copy)]
struct With {
    name: &'static str,
    image: bool,
    free_pages: bool,
}

const WITH: [With; 4] = [
    With {
        name: "alone",
        image: false,
        free_pages: false,
    },
    With {
        name: "with free pages left out",
        image: false,
        free_pages: true,
    },
    With {
        name: "with the image indexed",
        image: true,
        free_pages: false,
    },
    With {
        name: "with both",
        image: true,
        free_pages: true,
    },
];

/// Medians are taken over the turns.
#[derive(Default)]
struct Measured {
    mapped_ram_ms: [Vec<f64>; WAYS.len()],
    mapped_ram_bytes: Vec<f64>,
    without_ms: Vec<f64>,
    without_bytes: Vec<f64>,
    with_ms: Vec<f64>,
    with_bytes: Vec<f64>,
    index_ms: Vec<f64>,
    b3sum_ms: Vec<f64>,
    /// Bytes of the image that the host has in its page cache after it was indexed, of none before.
    cached_bytes: Vec<f64>,
    /// Bytes of packs and index that the image takes in the repository.
    index_bytes: u64,
    image_bytes: u64,
    contents: Value,
    /// Increments with the files in them, of each of [`WITH`].
    increments: [Vec<Increment>; WITH.len()],
}

/// What an increment took.
#[derive(Clone, Copy)]
struct Increment {
    ms: f64,
    bytes: f64,
}

/// Runs it, and writes `docs/results/exclusion/` unless it is a quick one.
pub fn run(quick: bool) -> Result<()> {
    let turns = if quick { 1usize } else { 7 };
    let folder = tempfile::Builder::new()
        .prefix("stillframe-page-cache-")
        .tempdir()?;
    let ended = ended::measure(folder.path(), quick)?;
    let periodic = periodic::measure(folder.path(), quick)?;
    let image = folder.path().join("golden.img");
    golden::make_image(&image, FILES_MIB)?;
    let b3sum = b3sum()?;
    let mut measured = Measured {
        image_bytes: image.metadata()?.len(),
        ..Measured::default()
    };
    let guest = golden::boot(&image, RAM_MIB, HEAP_MIB, 0)?;
    golden::wait_read(&guest)?;
    for turn in 1..=turns {
        measure(&guest, (folder.path(), &image, &b3sum), &mut measured)?;
        eprintln!("turn {turn} of {turns}");
    }
    let restores = restores::measure(guest, folder.path(), &image, turns)?;
    for _ in 0..turns.div_ceil(2) {
        for (with, found) in WITH.into_iter().zip(&mut measured.increments) {
            found.push(increment((folder.path(), &image), with)?);
        }
        eprintln!("an increment each");
    }
    let more = (&ended[..], &periodic[..], &restores);
    record(&measured, more, turns, quick.then_some(folder.path()))
}

/// A guest is watched before it reads the files, and once more after: the second checkpoint has them.
fn increment((folder, image): (&Path, &Path), with: With) -> Result<Increment> {
    let repository = folder.join("increments");
    let stillframe = Stillframe::init(&repository)?;
    if with.image {
        stillframe.ok(&["index", &image.display().to_string()])?;
    }
    host_memory::settle();
    let guest = golden::boot(image, RAM_MIB, HEAP_MIB, READ_AFTER_S)?;
    let pid = guest.pid_text();
    let every = format!("{INTERVAL_S}s");
    let line = [
        "watch", "--pid", &pid, "--every", &every, "--count", "2", "--disks", "none", "--json",
    ];
    let mut line = line.to_vec();
    line.extend(with.free_pages.then_some("--free-pages"));
    let mut watch = Running::start(stillframe.command(&line)?)?;
    watch.wait_results(1)?;
    golden::wait_read(&guest)?;
    let reports = watch.end()?.results()?;
    let second = reports.get(1).context("no second checkpoint")?;
    ensure!(second["parent"].is_string(), "it is no increment: {second}");
    if with.free_pages {
        let known = second["free_pages"]["not_known"].is_null();
        ensure!(known, "the guest's free pages are not known: {second}");
    }
    let us = second["total_us"].as_f64().context("no time")?;
    let increment = Increment {
        ms: us / 1e3,
        bytes: stored(second)?,
    };
    drop(guest);
    fs::remove_dir_all(&repository)?;
    Ok(increment)
}

/// The program, which is installed where it is missing.
fn b3sum() -> Result<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools");
    let program = tools.join("bin/b3sum");
    if !program.exists() {
        let mut install = Command::new("cargo");
        install.args(["install", "--quiet", "--root"]).arg(&tools);
        let installed = install.arg("b3sum").status().context("no cargo")?;
        ensure!(installed.success(), "b3sum cannot be installed");
    }
    Ok(program)
}

/// Everything once.
fn measure(
    guest: &Guest,
    (folder, image, b3sum): (&Path, &Path, &Path),
    measured: &mut Measured,
) -> Result<()> {
    let mut qmp = guest.second_monitor()?;
    for (way, times) in WAYS.iter().zip(&mut measured.mapped_ram_ms) {
        host_memory::settle();
        let saved = peers::migrate_to_file(&mut qmp, &folder.join("mapped"), way)?;
        times.push(saved.total_ms);
        if way.len() == 1 {
            measured.mapped_ram_bytes.push(saved.bytes as f64);
        }
    }
    drop(qmp);
    let (ms, report, _) = checkpoint(guest, &folder.join("without"), &NO_DISKS, |_| Ok(()))?;
    fs::remove_dir_all(folder.join("without"))?;
    measured.without_ms.push(ms);
    measured.without_bytes.push(stored(&report)?);
    let mut indexed = Value::Null;
    let index = |stillframe: &Stillframe| {
        drop_from_cache(image)?;
        let begin = Instant::now();
        let sum = Command::new(b3sum).arg(image).output()?;
        measured.b3sum_ms.push(ms_since(begin));
        ensure!(sum.status.success(), "{sum:?}");
        drop_from_cache(image)?;
        let path = image.display().to_string();
        let begin = Instant::now();
        indexed = stillframe.json(&["index", &path])?;
        measured.index_ms.push(ms_since(begin));
        measured.cached_bytes.push(cached_bytes(image)?);
        Ok(())
    };
    let (ms, report, contents) = checkpoint(guest, &folder.join("with"), &NO_DISKS, index)?;
    fs::remove_dir_all(folder.join("with"))?;
    measured.with_ms.push(ms);
    measured.with_bytes.push(stored(&report)?);
    measured.index_bytes = indexed["bytes_stored"].as_u64().context("no bytes")?;
    measured.contents = contents;
    Ok(())
}

/// A first checkpoint into a new repository that was prepared. Its time in milliseconds, its report and its contents.
fn checkpoint(
    guest: &Guest,
    repository: &Path,
    options: &[&str],
    prepare: impl FnOnce(&Stillframe) -> Result<()>,
) -> Result<(f64, Value, Value)> {
    let stillframe = Stillframe::init(repository)?;
    prepare(&stillframe)?;
    host_memory::settle();
    let pid = guest.pid_text();
    let line = [&["checkpoint", "--pid", &pid], options].concat();
    let begin = Instant::now();
    let report = stillframe.json(&line)?;
    let ms = ms_since(begin);
    let mut shown = stillframe.json(&["show", "latest", "--contents"])?;
    Ok((ms, report, shown["contents"].take()))
}

fn stored(report: &Value) -> Result<f64> {
    report["bytes_stored"].as_f64().context("no bytes")
}

fn ms_since(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e3
}

/// The file is read from the disk again.
fn drop_from_cache(file: &Path) -> Result<()> {
    let mut command = Command::new("dd");
    command.arg(format!("if={}", file.display()));
    let ended = command.args(["iflag=nocache", "count=0"]).output()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}

/// What of a file is in the host's page cache.
fn cached_bytes(file: &Path) -> Result<f64> {
    let mut command = Command::new("fincore");
    let said = command
        .args(["--noheadings", "--bytes", "--output", "RES"])
        .arg(file)
        .output()?;
    let text = String::from_utf8(said.stdout)?;
    text.trim()
        .parse()
        .with_context(|| format!("fincore: {text}"))
}

fn median(values: &[f64]) -> f64 {
    percentile(values, 0.5)
}

/// Time in milliseconds and bytes of each.
fn pairs(increments: &[Increment]) -> Vec<[f64; 2]> {
    increments.iter().map(|one| [one.ms, one.bytes]).collect()
}

/// The medians of both.
fn medians(increments: &[Increment]) -> [f64; 2] {
    let ms: Vec<f64> = increments.iter().map(|one| one.ms).collect();
    let bytes: Vec<f64> = increments.iter().map(|one| one.bytes).collect();
    [median(&ms), median(&bytes)]
}

/// Of QEMU's ways the faster one.
fn mapped_ram_ms(measured: &Measured) -> f64 {
    let times = measured.mapped_ram_ms.each_ref();
    times
        .map(|times| median(times))
        .into_iter()
        .fold(f64::INFINITY, f64::min)
}

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

/// A name, a time and a number of bytes, as cells.
fn row(name: &str, ms: f64, bytes: f64) -> Vec<String> {
    vec![
        name.into(),
        format!("{ms:.0}"),
        format!("{:.1}", mib(bytes)),
    ]
}

/// One checkpoint of a guest whose memory is page cache.
fn add_first(page: &mut Page, measured: &Measured) -> Result<()> {
    let ways = [
        (
            "mapped-ram",
            mapped_ram_ms(measured),
            median(&measured.mapped_ram_bytes),
        ),
        (
            "ours, no image",
            median(&measured.without_ms),
            median(&measured.without_bytes),
        ),
        (
            "ours, image indexed",
            median(&measured.with_ms),
            median(&measured.with_bytes),
        ),
    ];
    let labels = Labels {
        title: "Memory's bytes of a first checkpoint",
        x: "",
        y: "MiB",
    };
    let series = [("bytes", ways.map(|(_, _, bytes)| mib(bytes)).to_vec())];
    chart::bars(
        &page.picture("first.svg"),
        labels,
        &ways.map(|(name, ..)| name),
        &series,
    )?;
    page.add(&Figure {
        title: "Tables 4 and 5: one checkpoint of a page cache",
        paper: "18.9 % of the space and a 3.8-fold speed with the guest's help (\"para\"), 36.3 % and 2.6-fold without (\"full\"); averages of \
                five workloads.",
        ours: "Without the guest's help: its pages are found in the image by content.",
        columns: &["first checkpoint", "ms", "memory's MiB"],
        rows: &ways.map(|(name, ms, bytes)| row(name, ms, bytes)),
        pictures: &["first.svg"],
        differs: "One guest, most of whose memory is page cache; the paper's five are below. Restores are below.",
    });
    Ok(())
}

/// What its memory is.
fn add_contents(page: &mut Page, measured: &Measured) -> Result<()> {
    let classes = ["zero", "in_image", "duplicate", "other"];
    let pages = classes.map(|class| measured.contents[class].as_f64().unwrap_or(0.0));
    let labels = Labels {
        title: "Pages of a first checkpoint",
        x: "",
        y: "MiB",
    };
    let series = [("pages", pages.map(|pages| pages / 256.0).to_vec())];
    let names = ["zero", "in image", "duplicate", "other"];
    chart::bars(&page.picture("contents.svg"), labels, &names, &series)?;
    page.add(&Figure {
        title: "Table 4, figure 5: what memory is",
        paper: "free, page cache, dirty pages of it, and others: of 1 GiB 171, 660, 7 and 187 MB in the average of five workloads.",
        ours: "`show --contents`, of the checkpoint with the image.",
        columns: &names,
        rows: &[pages.map(|pages| pages.to_string()).to_vec()],
        pictures: &["contents.svg"],
        differs: "Told by content, not by the guest: *zero* has what is free and was never used.",
    });
    Ok(())
}

/// Increments of the same guest, in four ways.
fn add_increments(page: &mut Page, measured: &Measured) -> Result<()> {
    let found = measured.increments.each_ref().map(|all| medians(all));
    let labels = Labels {
        title: "An increment with the files in it",
        x: "",
        y: "MiB; tens of ms",
    };
    let series = [
        ("memory's MiB", found.map(|[_, bytes]| mib(bytes)).to_vec()),
        ("tens of ms", found.map(|[ms, _]| ms / 10.0).to_vec()),
    ];
    let names = WITH.each_ref().map(|with| with.name);
    chart::bars(&page.picture("increments.svg"), labels, &names, &series)?;
    let rows: Vec<_> = names
        .iter()
        .zip(found)
        .map(|(name, [ms, bytes])| row(name, ms, bytes))
        .collect();
    page.add(&Figure {
        title: "Table 6, each part alone: incremental, with free pages, with content",
        paper: "incremental + page cache + free takes 33 % of the bytes of incremental alone, and 67 % of its time.",
        ours: "The image is indexed, or free pages are named by the guest's agent, or both.",
        columns: &["increment", "ms", "memory's MiB"],
        rows: &rows,
        pictures: &["increments.svg"],
        differs: "One increment, in which the guest reads the files, in place of ten of four workloads, which are below.",
    });
    Ok(())
}

fn add_indexing(page: &mut Page, measured: &Measured) {
    let number = |value: f64| format!("{value:.0}");
    page.add(&Figure {
        title: "Indexing the image",
        paper: "nothing like it: reads and writes of the guest are intercepted.",
        ours: "`index`, against reading and hashing by `b3sum`.",
        columns: &[
            "image, MiB",
            "index, ms",
            "b3sum, ms",
            "written, MiB",
            "left in the page cache, MiB",
        ],
        rows: &[vec![
            number(mib(measured.image_bytes as f64)),
            number(median(&measured.index_ms)),
            number(median(&measured.b3sum_ms)),
            format!("{:.1}", mib(measured.index_bytes as f64)),
            number(mib(median(&measured.cached_bytes))),
        ]],
        pictures: &[],
        differs: "Once for an image, before the first checkpoint.",
    });
}

fn claims(measured: &Measured, restores: &Restores) -> Vec<Claim> {
    let claim = |id, goal, value| Claim::new(id, goal, value, "ratio", COMMAND);
    let bytes = median(&measured.with_bytes) / median(&measured.mapped_ram_bytes);
    let time = median(&measured.with_ms) / mapped_ram_ms(measured);
    let index = median(&measured.b3sum_ms) / median(&measured.index_ms);
    let cached = median(&measured.cached_bytes) / measured.image_bytes as f64;
    let [alone, _, _, both] = measured.increments.each_ref().map(|all| medians(all));
    vec![
        claim("image-bytes", Goal::AtMost(0.15), bytes),
        claim("image-time", Goal::AtMost(0.6), time),
        claim("index-speed", Goal::AtLeast(0.8), index),
        claim("index-cache", Goal::Zero, cached),
        claim("content-time", Goal::AtMost(0.67), both[0] / alone[0]),
        claim("content-bytes", Goal::AtMost(0.33), both[1] / alone[1]),
        claim("image-restore", Goal::AtMost(1.0), restores.ratio()),
    ]
}

/// Writes the page; a quick one elsewhere, and without what is promised.
fn record(
    measured: &Measured,
    (ended, periodic, restores): (&[Ended], &[Periodic], &Restores),
    turns: usize,
    elsewhere: Option<&Path>,
) -> Result<()> {
    let setting = format!(
        "A guest of {RAM_MIB} MiB, with a guest agent, that has read {FILES_MIB} MiB of files, the programs and libraries of a Debian, \
         from an image of its own; {HEAP_MIB} MiB of heap. The image is read from the disk for `b3sum` and for `index`. Medians of \
         {turns} turns, in turns, and of {} increments; TCG.",
        turns.div_ceil(2)
    );
    let title = "Exclusion of the page cache from checkpoints";
    let mut page = Page::new(BENCH, elsewhere, title, COMMAND, &setting)?;
    add_first(&mut page, measured)?;
    add_contents(&mut page, measured)?;
    add_increments(&mut page, measured)?;
    ended::add(&mut page, ended)?;
    periodic::add(&mut page, periodic)?;
    restores::add(&mut page, restores);
    add_indexing(&mut page, measured);
    if elsewhere.is_some() {
        return page.write();
    }
    let claims = claims(measured, restores);
    page.add_claims(
        &claims,
        "*content-bytes* and *content-time* are those of table 6, each part alone.",
        "The faster of QEMU's plain and multifd mapped-ram counts.",
    );
    page.keep("all", json!({
        "mapped_ram_ms": measured.mapped_ram_ms, "mapped_ram_bytes": measured.mapped_ram_bytes,
        "without_ms": measured.without_ms, "without_bytes": measured.without_bytes,
        "with_ms": measured.with_ms, "with_bytes": measured.with_bytes, "index_ms": measured.index_ms,
        "b3sum_ms": measured.b3sum_ms, "cached_bytes": measured.cached_bytes, "index_bytes": measured.index_bytes,
        "image_bytes": measured.image_bytes, "contents": measured.contents,
        "restore_without_ms": restores.without_ms, "restore_with_ms": restores.with_ms,
        "increments": measured.increments.each_ref().map(|all| pairs(all)),
    }));
    page.write()?;
    results::write_summary(BENCH, &claims)
}
