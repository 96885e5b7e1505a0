//! Park's five workloads on a disk of their own, checkpointed once when they have ended (tables 3 to 5): what of their memory is
//! on a disk, without the guest's help (by content) and with it (free pages).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::debian::{self, DebianSetup, DebianWorkload, READY_LIMIT};
use stillframe_harness::guest::Guest;
use stillframe_harness::images;
use stillframe_harness::results::percentile;

use super::{WAYS, checkpoint, mib, stored};
use crate::chart::{self, Labels};
use crate::host_memory;
use crate::page::{Figure, Page};
use crate::peers;

const RAM_MIB: u32 = 1024;
const DISK_MIB: u32 = 3072;
/// Checkpoints of each kind; the medians count.
const TURNS: usize = 3;
/// Classes of pages as `show --contents` names them.
const CLASSES: [&str; 5] = ["free", "zero", "in_image", "duplicate", "other"];

/// A workload, and the paper's figures of it: space in percent of mapped RAM and speed-up, without the guest's help and with it.
type Of = (DebianWorkload, [f64; 2], [f64; 2]);

const WORKLOADS: [Of; 5] = [
    (DebianWorkload::Postmark, [35.3, 2.4], [26.4, 3.0]),
    (DebianWorkload::Heap, [78.7, 1.3], [27.0, 3.1]),
    (DebianWorkload::Install, [25.6, 2.8], [13.0, 4.0]),
    (DebianWorkload::Gzip, [15.3, 3.7], [11.8, 4.3]),
    (DebianWorkload::Make, [17.4, 3.6], [16.5, 4.5]),
];

/// What a way to save it took; medians.
#[derive(Debug, Clone, Copy)]
struct Taken {
    ms: f64,
    bytes: f64,
}

/// One workload that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    of: Of,
    mapped_ram: Taken,
    /// Nothing is left out.
    alone: Taken,
    /// What is on the disks is: "full".
    content: Taken,
    /// What the guest calls free is, too: "para".
    both: Taken,
    /// The pages of the last.
    contents: Value,
    /// Bytes of a checkpoint of memory and of the disk, where nothing was indexed.
    together: f64,
}

/// Runs each of them; the first alone if `quick`.
pub(super) fn measure(folder: &Path, quick: bool) -> Result<Vec<Ended>> {
    let count = if quick { 1 } else { WORKLOADS.len() };
    let each = WORKLOADS[..count].iter().map(|of| {
        let ended = one(folder, *of).with_context(|| of.0.name())?;
        eprintln!("{}", row(&ended).join(" | "));
        Ok(ended)
    });
    each.collect()
}

fn one(folder: &Path, of: Of) -> Result<Ended> {
    let disk = folder.join("disk.img");
    images::make_file_system(&disk, DISK_MIB)?;
    let drive = format!("file={},if=virtio,format=raw", disk.display());
    let guest = DebianSetup {
        workload: of.0,
        ram_mib: RAM_MIB,
        agent: true,
        extra: ["-drive", &drive].map(str::to_owned).into(),
    };
    let guest = guest.boot()?;
    guest.serial.wait_units(1, READY_LIMIT)?;
    // The guest has written all of it back and is idle: a copy is what the disk stays.
    let copy = folder.join("copy.img");
    let mut copying = Command::new("cp");
    let copied = copying.arg("--sparse=always").arg(&disk).arg(&copy);
    ensure!(copied.status()?.success(), "{disk:?} cannot be copied");
    let on_disk = [debian::image()?, copy.clone()];
    let mapped_ram = mapped_ram(&guest, folder)?;
    let (alone, _) = ours(&guest, folder, &[], &["--disks", "none"])?;
    let (content, _) = ours(&guest, folder, &on_disk, &["--disks", "none"])?;
    let with_free = ["--disks", "none", "--free-pages"];
    let (both, contents) = ours(&guest, folder, &on_disk, &with_free)?;
    let (together, _) = ours(&guest, folder, &[], &["--disks", "auto"])?;
    drop(guest);
    for file in [disk, copy] {
        fs::remove_file(file)?;
    }
    Ok(Ended {
        of,
        mapped_ram,
        alone,
        content,
        both,
        contents,
        together: together.bytes,
    })
}

/// By the faster of QEMU's ways.
fn mapped_ram(guest: &Guest, folder: &Path) -> Result<Taken> {
    let mut qmp = guest.second_monitor()?;
    let mut fastest: Option<Taken> = None;
    for way in WAYS {
        let mut turns = Vec::new();
        for _ in 0..TURNS {
            host_memory::settle();
            let saved = peers::migrate_to_file(&mut qmp, &folder.join("mapped"), way)?;
            turns.push((saved.total_ms, saved.bytes as f64));
        }
        let taken = medians(&turns);
        fastest = fastest.filter(|other| other.ms < taken.ms).or(Some(taken));
    }
    fastest.context("no way")
}

/// By first checkpoints into new repositories that know `images`.
fn ours(
    guest: &Guest,
    folder: &Path,
    images: &[PathBuf],
    options: &[&str],
) -> Result<(Taken, Value)> {
    let prepare = |stillframe: &Stillframe| {
        for image in images {
            stillframe.ok(&["index", &image.display().to_string()])?;
        }
        Ok(())
    };
    let mut turns = Vec::new();
    let mut shown = Value::Null;
    for _ in 0..TURNS {
        let repository = folder.join("ended");
        let (ms, report, contents) = checkpoint(guest, &repository, options, prepare)?;
        fs::remove_dir_all(&repository)?;
        if options.contains(&"--free-pages") {
            let known = report["free_pages"]["not_known"].is_null();
            ensure!(known, "the guest's free pages are not known: {report}");
        }
        let captures = options.contains(&"auto");
        ensure!(captures == report["disks"][0].is_object(), "{report}");
        turns.push((ms, stored(&report)?));
        shown = contents;
    }
    Ok((medians(&turns), shown))
}

fn medians(turns: &[(f64, f64)]) -> Taken {
    let (ms, bytes): (Vec<f64>, Vec<f64>) = turns.iter().copied().unzip();
    Taken {
        ms: percentile(&ms, 0.5),
        bytes: percentile(&bytes, 0.5),
    }
}

const COLUMNS: [&str; 12] = [
    "workload",
    "mapped-ram, MiB",
    "alone",
    "full",
    "para",
    "mapped-ram, ms",
    "alone",
    "full",
    "para",
    "full: space, speed (paper)",
    "para: space, speed (paper)",
    "memory and disk, MiB",
];

fn row(ended: &Ended) -> Vec<String> {
    let ways = [ended.mapped_ram, ended.alone, ended.content, ended.both];
    let (workload, full, para) = ended.of;
    let against = |ours: Taken, [space, speed]: [f64; 2]| {
        let ratio = 100.0 * ours.bytes / ended.mapped_ram.bytes;
        let times = ended.mapped_ram.ms / ours.ms;
        format!("{ratio:.1} %, {times:.1} ({space} %, {speed})")
    };
    let mut row = vec![workload.name().to_owned()];
    row.extend(ways.map(|way| format!("{:.1}", mib(way.bytes))));
    row.extend(ways.map(|way| format!("{:.0}", way.ms)));
    row.extend([against(ended.content, full), against(ended.both, para)]);
    row.push(format!("{:.0}", mib(ended.together)));
    row
}

/// One of the ways to save them.
type Way = fn(&Ended) -> Taken;

/// Adds the tables of them.
pub(super) fn add(page: &mut Page, all: &[Ended]) -> Result<()> {
    let names: Vec<&str> = all.iter().map(|ended| ended.of.0.name()).collect();
    let of = |figure: &dyn Fn(&Ended) -> f64| all.iter().map(figure).collect::<Vec<_>>();
    let labels = |title, y| Labels { title, x: "", y };
    let ways: [(&str, Way); 4] = [
        ("mapped-ram", |ended| ended.mapped_ram),
        ("alone", |ended| ended.alone),
        ("full", |ended| ended.content),
        ("para", |ended| ended.both),
    ];
    let bytes = ways.map(|(name, way)| (name, of(&|ended| mib(way(ended).bytes))));
    let picture = page.picture("workloads-bytes.svg");
    chart::bars(
        &picture,
        labels("Memory's bytes of a checkpoint", "MiB"),
        &names,
        &bytes,
    )?;
    let times = ways.map(|(name, way)| (name, of(&|ended| way(ended).ms)));
    let picture = page.picture("workloads-time.svg");
    chart::bars(
        &picture,
        labels("Time of a checkpoint", "ms"),
        &names,
        &times,
    )?;
    page.add(&Figure {
        title: "Tables 4 and 5: five workloads that have ended",
        paper: "18.9 % of the space and a 3.8-fold speed with the guest's help (\"para\"), 36.3 % and 2.6-fold without (\"full\").",
        ours: "*alone*: nothing is left out; *full*: what is in the Debian's image or on the disk, both indexed, is not stored; *para*: nor is what \
               the guest's agent calls free. The last column: a checkpoint of memory and disk, nothing indexed.",
        columns: &COLUMNS,
        rows: &all.iter().map(row).collect::<Vec<_>>(),
        pictures: &["workloads-bytes.svg", "workloads-time.svg"],
        differs: "The programs are of this Debian: Postmark's transactions in Python; a heap of two thirds of RAM in place of a desktop; an archive of \
                  programs unpacked in place of OpenOffice's installation; a log of 200 MiB; three minutes of the kernel's smallest configuration. The paper's sizes are \
                  not compressed, and of 1025 MB; mapped-ram leaves out pages of zeros. Ours deduplicates, compresses and encrypts. Its files are those \
                  of the guest's disks as the paper's are, but the Debian's own writes are in RAM.",
    });
    let classes = CLASSES.map(|class| {
        let mib = |ended: &Ended| ended.contents[class].as_f64().unwrap_or(0.0) / 256.0;
        (class, of(&mib))
    });
    let picture = page.picture("workloads-contents.svg");
    chart::bars(&picture, labels("What memory is", "MiB"), &names, &classes)?;
    let row = |ended: &Ended| {
        let pages = |class: &str| ended.contents[class].as_f64().unwrap_or(0.0);
        let mut row = vec![ended.of.0.name().to_owned()];
        row.extend(CLASSES.map(|class| format!("{:.0}", pages(class) / 256.0)));
        row
    };
    page.add(&Figure {
        title: "Table 4: what the memory of these is, in MiB",
        paper: "free, page cache, dirty and others: Postmark 49, 705, 3 and 268 MB; Desktop 490, 257, 6 and 271; Software 151, 740, 17 and 117; Gzip 20, 884, 4 \
                and 117; Make 141, 714, 5 and 164.",
        ours: "`show --contents` of *para*.",
        columns: &["workload", "free", "zero", "in image", "duplicate", "other"],
        rows: &all.iter().map(row).collect::<Vec<_>>(),
        pictures: &["workloads-contents.svg"],
        differs: "Told by content: a free page whose content is in an image too is *free*.",
    });
    for ended in all {
        let taken = |taken: Taken| json!({ "ms": taken.ms, "bytes": taken.bytes });
        page.keep("ended", json!({
            "workload": ended.of.0.name(), "mapped_ram": taken(ended.mapped_ram), "alone": taken(ended.alone),
            "full": taken(ended.content), "para": taken(ended.both), "contents": ended.contents, "together_bytes": ended.together,
        }));
    }
    Ok(())
}
