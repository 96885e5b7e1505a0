//! Figures 7, 8 and 10: finding the dirty pages, the time of a checkpoint, and compression's share of it.

use std::fs;

use anyhow::{Context, Result};
use serde_json::Value;

use super::measure::Measured;
use super::{Figure, Page, each, mean, names, of_paper, paper, percent, reduction_percent};
use crate::chart::{self, Labels};
use stillframe_harness::results;

/// Figure 7.
pub fn add_scan(page: &mut Page, guests: &[Measured]) -> Result<()> {
    let scans = each(guests, Measured::scan_us)?;
    let picture = "figure-7.svg";
    chart::bars(
        &page.picture(picture),
        Labels {
            title: "Finding the written pages, in the pause",
            x: "guest",
            y: "microseconds",
        },
        &names(guests),
        &[("ours", scans.clone())],
    )?;
    let rows: Vec<Vec<String>> = guests
        .iter()
        .zip(&scans)
        .map(|(guest, scan)| {
            vec![
                guest.workload.name().to_owned(),
                percent(paper::of(&paper::SCAN_REDUCTION, guest.workload)),
                format!("{scan:.0}"),
            ]
        })
        .collect();
    let ratio = bitmap_ratio()?;
    page.add(&Figure {
        title: "Figure 7: finding the dirty pages",
        paper: "scanning the dirty bitmap with flags of two levels takes 91.13 % less time (mean) than bit by bit, which \
                takes several tens of milliseconds, with the guest stopped.",
        ours: &format!(
            "on the paper's distribution our bitmap of two levels is scanned {ratio:.1} times as fast as bit by bit: {:.2} \
             % less time (`docs/results/bitmap`, claim `bitmap-scan-ratio`). On these guests finding the written pages \
             in the pause takes {:.0} us (mean of medians).",
            reduction_percent(1.0, ratio),
            mean(&scans)
        ),
        columns: &["guest", "paper: less time", "ours: us in the pause (median)"],
        rows: &rows,
        pictures: &[picture],
        differs: "no hypervisor hands a bitmap over. The kernel keeps what was written in the page tables of QEMU, and one \
                  walk over them (`PAGEMAP_SCAN`) finds it and protects it again; the microseconds are those of that walk \
                  over all of the guest's memory, as the engine measured them (`downtime_us.scan`), and of filling our \
                  bitmap, so that a scan bit by bit has no counterpart here. What is left in a pause is also only what \
                  was written since the last round before it. The benches link none of the engine's code, so that the \
                  two ways to scan a bitmap are compared where the bitmap is, on the paper's distribution.",
    });
    Ok(())
}

/// The result of the micro bench, in the run that is on record.
fn bitmap_ratio() -> Result<f64> {
    let path = results::folder("bitmap")?.join("summary.json");
    let text = fs::read_to_string(&path)
        .with_context(|| format!("{}: run `cargo xtask bench bitmap`", path.display()))?;
    let claims: Vec<Value> = serde_json::from_str(&text)?;
    let claim = claims
        .iter()
        .find(|claim| claim["claim"] == "bitmap-scan-ratio");
    claim
        .and_then(|claim| claim["value"].as_f64())
        .context("the bitmap bench claims no ratio")
}

/// Percentage by which an increment is faster than the faster of QEMU's ways to save all.
pub fn time_reduction(guest: &Measured) -> Result<f64> {
    Ok(reduction_percent(guest.total_ms()?, guest.best_save_ms()))
}

/// Figure 8, at one size.
pub fn add_time(page: &mut Page, guests: &[Measured]) -> Result<()> {
    let picture = "figure-8.svg";
    let way = |way: usize| guests.iter().map(|guest| guest.save_ms()[way]).collect();
    let labels = Labels {
        title: "Time of a checkpoint, 1 GiB",
        x: "guest",
        y: "milliseconds",
    };
    let bars = [
        ("QEMU, stream", way(0)),
        ("QEMU, mapped-ram", way(1)),
        ("ours, increment", each(guests, Measured::total_ms)?),
    ];
    chart::bars(&page.picture(picture), labels, &names(guests), &bars)?;
    let reductions = each(guests, time_reduction)?;
    let mut rows = Vec::new();
    for (guest, reduction) in guests.iter().zip(&reductions) {
        let ([stream, mapped], pauses) = (guest.save_ms(), guest.save_pause_ms());
        rows.push(vec![
            guest.workload.name().to_owned(),
            format!("{stream:.0} ({:.0})", pauses[0]),
            format!("{mapped:.0} ({:.0})", pauses[1]),
            format!("{:.0}", guest.full_ms()?),
            format!("{:.0} ({:.1})", guest.total_ms()?, guest.pause_ms()?),
            percent(*reduction),
            percent(paper::of(&paper::TIME_REDUCTION, guest.workload)),
        ]);
    }
    page.add(&Figure {
        title: "Figure 8: time of a checkpoint",
        paper: "against Xen's save of all memory, 91.90, 84.52, 77.26, 45.52, 40.41 and 83.81 % less time at 1 GiB; mean \
                70.54 %.",
        ours: &format!(
            "an increment takes {:.2} % less time than the faster of QEMU's two ways to save all (mean; the paper's mean \
             for these guests is {:.2} %).",
            mean(&reductions),
            mean(&of_paper(guests, &paper::TIME_REDUCTION))
        ),
        columns: &[
            "guest",
            "QEMU stream: ms (pause)",
            "QEMU mapped-ram: ms (pause)",
            "ours, first: ms",
            "ours, increment: ms (pause)",
            "less time",
            "paper: less time",
        ],
        rows: &rows,
        pictures: &[picture],
        differs: "medians. QEMU saves to a file on the local disk (`migrate file:`), Xen saved over a gigabit network: the \
                  less a byte costs, the less is won by saving bytes, which makes this harder for us. QEMU also leaves \
                  pages of zeros out, which Xen writes. QEMU's time ends when it says so, with data still in the page \
                  cache; ours when the checkpoint is durable. The paper's guests stand still all that time; ours run, \
                  and stand still for the pause only, given beside it.",
    });
    Ok(())
}

/// Figure 8, by memory size.
pub fn add_sizes(page: &mut Page, guests: &[Measured], sized: &[Measured]) -> Result<()> {
    let has_sizes = |guest: &&Measured| sized.iter().any(|other| other.workload == guest.workload);
    let mut all: Vec<&Measured> = guests.iter().filter(has_sizes).chain(sized).collect();
    all.sort_by_key(|guest| (guest.workload.name(), guest.ram_mib));
    let (mut groups, mut rows) = (Vec::new(), Vec::new());
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for guest in &all {
        groups.push(format!("{} {}", guest.workload.name(), guest.ram_mib));
        ours.push(guest.total_ms()?);
        theirs.push(guest.best_save_ms());
        rows.push(vec![
            guest.workload.name().to_owned(),
            guest.ram_mib.to_string(),
            format!("{:.0}", guest.best_save_ms()),
            format!("{:.1}", guest.best_save_bytes() / f64::from(1 << 20)),
            format!("{:.0} ({:.1})", guest.total_ms()?, guest.pause_ms()?),
            percent(time_reduction(guest)?),
            guest.increments().to_string(),
        ]);
    }
    let picture = "figure-8-sizes.svg";
    let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
    let labels = Labels {
        title: "Time of a checkpoint, by memory size",
        x: "guest and MiB",
        y: "milliseconds",
    };
    let bars = [("QEMU, the faster way", theirs), ("ours, increment", ours)];
    chart::bars(&page.picture(picture), labels, &groups, &bars)?;
    page.add(&Figure {
        title: "Figure 8: time of a checkpoint, by memory size",
        paper: "the time grows by only a small amount with the memory size, because the number of dirty pages does not \
                change much; Xen's save grows linearly (figure 1).",
        ours: &growth(&all)?,
        columns: &[
            "guest",
            "MiB",
            "QEMU, the faster: ms",
            "QEMU: MiB written",
            "ours, increment: ms (pause)",
            "less time",
            "increments",
        ],
        rows: &rows,
        pictures: &[picture],
        differs: "two guests, whose work does not grow with their memory, instead of six, and fewer checkpoints. Memory \
                  that the guest has never used costs QEMU an inspection of each page and no byte, so that its time does not \
                  double with the size as Xen's does.",
    });
    Ok(())
}

/// How the times grow from the least memory to the most, of each guest; they are sorted by both.
fn growth(all: &[&Measured]) -> Result<String> {
    let mut words = Vec::new();
    for same in all.chunk_by(|one, other| one.workload == other.workload) {
        let [least, .., most] = same else {
            continue;
        };
        words.push(format!(
            "{}: from {} to {} MiB an increment's time grows to {:.2} of what it was, QEMU's to {:.2}.",
            least.workload.name(),
            least.ram_mib,
            most.ram_mib,
            most.total_ms()? / least.total_ms()?,
            most.best_save_ms() / least.best_save_ms()
        ));
    }
    Ok(words.join(" "))
}

/// The same with both held to the pace of the paper's network, against QEMU's stream.
pub fn gigabit_reduction(guest: &Measured) -> Result<f64> {
    let (save_ms, increment_ms) = guest.gigabit_ms()?;
    Ok(reduction_percent(increment_ms, save_ms))
}

/// Figure 8 once more, at the paper's price of a byte.
pub fn add_gigabit(page: &mut Page, guests: &[Measured]) -> Result<()> {
    let (mut rows, mut reductions) = (Vec::new(), Vec::new());
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for guest in guests {
        let (save_ms, increment_ms) = guest.gigabit_ms()?;
        let reduction = gigabit_reduction(guest)?;
        rows.push(vec![
            guest.workload.name().to_owned(),
            format!("{save_ms:.0}"),
            format!("{increment_ms:.0}"),
            percent(reduction),
            percent(paper::of(&paper::TIME_REDUCTION, guest.workload)),
        ]);
        reductions.push(reduction);
        theirs.push(save_ms);
        ours.push(increment_ms);
    }
    let picture = "figure-8-gigabit.svg";
    let labels = Labels {
        title: "Time of a checkpoint, 1 GiB, at a gigabit a second",
        x: "guest",
        y: "milliseconds",
    };
    let bars = [("QEMU, stream", theirs), ("ours, increment", ours)];
    chart::bars(&page.picture(picture), labels, &names(guests), &bars)?;
    page.add(&Figure {
        title: "Figure 8: time of a checkpoint, at a gigabit a second",
        paper: "as above; the paper's checkpoints go through a gigabit network.",
        ours: &format!(
            "with both held to 119 MiB a second an increment takes {:.2} % less time than QEMU's save (mean; the paper's \
             mean for these guests is {:.2} %). The promise is on this figure.",
            mean(&reductions),
            mean(&of_paper(guests, &paper::TIME_REDUCTION))
        ),
        columns: &[
            "guest",
            "QEMU stream: ms",
            "ours, increment: ms",
            "less time",
            "paper: less time",
        ],
        rows: &rows,
        pictures: &[picture],
        differs: "a limit instead of a network: `max-bandwidth` of QEMU's migration, `--limit-write` of ours. The guest \
                  is paused while QEMU saves it, as under Xen, so that no page is saved twice. One save, and a short \
                  watch of its own. QEMU still leaves pages of zeros out; Xen's save of 1 GiB would take 8.6 s of such a \
                  network.",
    });
    Ok(())
}

/// Figure 10.
pub fn add_share(page: &mut Page, guests: &[Measured]) -> Result<()> {
    let shares = each(guests, Measured::compression_percent)?;
    let theirs = of_paper(guests, &paper::COMPRESSION_SHARE);
    let picture = "figure-10.svg";
    let labels = Labels {
        title: "Compression's share of a checkpoint's time",
        x: "guest",
        y: "percent",
    };
    let bars = [("paper", theirs.clone()), ("ours", shares.clone())];
    chart::bars(&page.picture(picture), labels, &names(guests), &bars)?;
    let rows: Vec<Vec<String>> = guests
        .iter()
        .zip(theirs.iter().zip(&shares))
        .map(|(guest, (&theirs, &ours))| {
            vec![
                guest.workload.name().to_owned(),
                percent(theirs),
                percent(ours),
            ]
        })
        .collect();
    page.add(&Figure {
        title: "Figure 10: compression's share of the time",
        paper: "34.71, 32.19, 33.40, 38.23, 35.66 and 31.18 % of a checkpoint's time, mean 34.23 %, on two threads that \
                compress and one that sends.",
        ours: &format!("{:.2} % (mean).", mean(&shares)),
        columns: &["guest", "paper", "ours"],
        rows: &rows,
        pictures: &[picture],
        differs: "ours is `encode` and `write` of the increments' `phases_us` over their `total_us`, sums over all of them: \
                  comparing with the delta cache, hashing, making deltas, compressing, encrypting and handing over, on \
                  half of the processors (the other half is the guest's). The paper's is making deltas, with no general \
                  compression and no encryption, and its whole is longer by a network. Ours falls in time in which the \
                  guest runs, the paper's in time in which it is paused.",
    });
    Ok(())
}
