//! The thesis' tables and figures of downtime: 3.1, 6.2 to 6.4 and A.1, A.2, and QEMU's own ways.

use anyhow::Result;

use super::measure::{EIGHT_S, Every, Measured, TWO_S};
use super::{COPY_ON_WRITE, STOP_COPY, numbers_of};
use crate::chart::{self, Labels, Series};
use crate::page::{Figure, Page};
use crate::papers::numbers::{Spread, cell, mean};
use crate::peers::Saved;
use stillframe_harness::results::percentile;

const MIB: f64 = (1 << 20) as f64;
const TOTAL: &str = "/downtime_us/total";
/// Schedules that the thesis compares.
const COMPARED: [&str; 2] = [STOP_COPY, COPY_ON_WRITE];
const SPREAD: [&str; 4] = ["mean ms", "stdev ms", "median ms", "n"];

/// Milliseconds of increments: microseconds of a report, summed over the fields.
fn increments_ms(
    measured: &Measured,
    schedule: &str,
    every: Every,
    fields: &[&str],
) -> Result<Vec<f64>> {
    let reports = measured.increments(schedule, every);
    let mut sums = vec![0.0; reports.len()];
    for field in fields {
        for (sum, us) in sums.iter_mut().zip(numbers_of(&reports, field)?) {
            *sum += us / 1e3;
        }
    }
    Ok(sums)
}

/// The pauses of increments in milliseconds.
pub fn pauses_ms(measured: &Measured, schedule: &str, every: Every) -> Result<Vec<f64>> {
    increments_ms(measured, schedule, every, &[TOTAL])
}

fn row<const N: usize>(head: [String; N], samples: &[f64]) -> Vec<String> {
    head.into_iter()
        .chain(Spread::of(samples).cells(2))
        .collect()
}

/// Adds all of them.
pub fn add(page: &mut Page, measured: &Measured) -> Result<()> {
    stop_copy_composition(page, measured)?;
    downtimes(page, measured)?;
    over_number(page, measured)?;
    copy_on_write_composition(page, measured)?;
    firsts(page, measured)?;
    own_ways(page, measured)
}

fn stop_copy_composition(page: &mut Page, measured: &Measured) -> Result<()> {
    let mut rows = Vec::new();
    for every in measured
        .intervals(STOP_COPY)
        .into_iter()
        .filter(|every| [TWO_S, EIGHT_S].contains(every))
    {
        for component in ["stop", "scan", "copy", "device_state", "resume", "total"] {
            let field = format!("/downtime_us/{component}");
            let samples = increments_ms(measured, STOP_COPY, every, &[&field])?;
            rows.push(row([format!("{every}"), component.to_owned()], &samples));
        }
    }
    page.add(&Figure {
        title: "Table 3.1: what the downtime of stop-copy is made of, at 2 s and 8 s",
        paper: "2 s: RAM 76 ms (stdev 297, median 45), device states 7 ms, disk 1 ms. 8 s: RAM 187 ms \
                (818, 56), device states 7 ms, disk 4 ms.",
        ours: "`scan` and `copy` are what the thesis calls RAM. `device_state` runs beside them, so that the \
               total is less than the sum.",
        columns: &["interval", "component", SPREAD[0], SPREAD[1], SPREAD[2], SPREAD[3]],
        rows: &rows,
        pictures: &[],
        differs: "The disks are not copied: Stillframe records them only. The RAM is that of a smaller \
                  configuration's build under TCG, which writes less in a second than under KVM.",
    });
    Ok(())
}

fn downtimes(page: &mut Page, measured: &Measured) -> Result<()> {
    let intervals = measured.intervals(COPY_ON_WRITE);
    let mut rows = Vec::new();
    let mut bars = Vec::new();
    for schedule in COMPARED {
        let mut means = Vec::new();
        for &every in &intervals {
            let samples = pauses_ms(measured, schedule, every)?;
            means.push(mean(&samples));
            let mut row = row([schedule.to_owned(), format!("{every}")], &samples);
            let pages = numbers_of(&measured.increments(schedule, every), "/pages/captured")?;
            row.push(cell(mean(&pages), 0));
            rows.push(row);
        }
        bars.push((schedule, means));
    }
    let groups: Vec<String> = intervals.iter().map(|every| format!("{every}")).collect();
    let labels = Labels {
        title: "Mean downtime (figure 6.2)",
        x: "interval",
        y: "ms",
    };
    chart::bars(&page.picture("downtime.svg"), labels, &groups, &bars)?;
    page.add(&Figure {
        title: "Tables 6.2 and 6.3, figure 6.2: downtime at 2, 4 and 8 s",
        paper: "copy-on-write 26, 27, 29 ms (stdev 5, 6, 10; median 26, 26, 27), after a remedy 13 ms at 2 s. \
                stop-and-copy 84, 117, 199 ms (stdev 299, 444, 825; median 54, 59, 66).",
        ours: "The same, first checkpoints left out here too; beside them the pages that were copied.",
        columns: &["schedule", "interval", SPREAD[0], SPREAD[1], SPREAD[2], SPREAD[3], "pages"],
        rows: &rows,
        pictures: &["downtime.svg"],
        differs: "Fewer pages change in an interval than in the thesis (13 to 35 thousand a checkpoint there). \
                  Disk sectors are not captured, so not counted.",
    });
    Ok(())
}

fn over_number(page: &mut Page, measured: &Measured) -> Result<()> {
    let mut series = Vec::new();
    for schedule in COMPARED {
        let pauses = pauses_ms(measured, schedule, TWO_S)?;
        series.push(Series::numbered(schedule, pauses));
    }
    let labels = Labels {
        title: "Downtime over the checkpoint's number, every 2 s (figure 6.3)",
        x: "checkpoint",
        y: "ms",
    };
    chart::points(&page.picture("downtime-number.svg"), labels, &series)?;
    page.add(&Figure {
        title: "Figure 6.3: downtime, checkpoint by checkpoint, every 2 s",
        paper: "copy-on-write is almost constant; stop-and-copy is not, and has spikes that the figure cuts off.",
        ours: "All increments at 2 s, the rounds one after the other. Nothing is cut off.",
        columns: &[],
        rows: &[],
        pictures: &["downtime-number.svg"],
        differs: "The same stretch of the build in every round, and what goes before it, not one whole build.",
    });
    Ok(())
}

fn copy_on_write_composition(page: &mut Page, measured: &Measured) -> Result<()> {
    let at = |fields: &[&str]| increments_ms(measured, COPY_ON_WRITE, TWO_S, fields);
    let (total, state) = (at(&[TOTAL])?, at(&["/downtime_us/device_state"])?);
    let rest: Vec<f64> = total
        .iter()
        .zip(&state)
        .map(|(total, state)| total - state)
        .collect();
    let parts = [
        ("device state", state),
        (
            "scan and arm (the thesis' ioctl), beside the device state",
            at(&["/downtime_us/scan", "/downtime_us/copy"])?,
        ),
        ("of the rest: `stop`", at(&["/downtime_us/stop"])?),
        ("of the rest: `cont`", at(&["/downtime_us/resume"])?),
        ("rest: total less device state", rest),
        ("total", total),
        (
            "QEMU's floor: stop, device state, cont; no engine attached",
            measured.floors_ms.clone(),
        ),
    ];
    let rows: Vec<Vec<String>> = parts
        .iter()
        .map(|(name, samples)| row([(*name).to_owned()], samples))
        .collect();
    page.add(&Figure {
        title: "Table 6.4: what the downtime of copy-on-write is made of, at 2 s",
        paper: "ioctl 18 ms (half of it an error in the code), device states 7 ms (a VGA adapter), disk 1 ms. \
                The thesis' conclusion: 6 ms without either.",
        ours: "Scanning and arming are done while QEMU saves its device state: the guest waits for the \
               longer of the two.",
        columns: &["component", SPREAD[0], SPREAD[1], SPREAD[2], SPREAD[3]],
        rows: &rows,
        pictures: &[],
        differs: "QEMU is stock and is spoken to over QMP: `stop`, device state and `cont` are QEMU's own, and \
                  together the floor of what any engine outside can reach. QEMU's usual VGA adapter.",
    });
    Ok(())
}

fn firsts(page: &mut Page, measured: &Measured) -> Result<()> {
    let mut rows = Vec::new();
    for schedule in COMPARED.into_iter().rev() {
        for every in measured.intervals(schedule) {
            let reports = measured.firsts(schedule, every);
            let ms = |field| {
                let us = numbers_of(&reports, field)?;
                anyhow::Ok(us.into_iter().map(|us| us / 1e3).collect::<Vec<f64>>())
            };
            let mut row = row([schedule.to_owned(), format!("{every}")], &ms(TOTAL)?);
            row.push(cell(mean(&ms("/phases_us/copy")?), 0));
            row.push(cell(mean(&ms("/total_us")?), 0));
            rows.push(row);
        }
    }
    let columns = [
        "schedule",
        "interval",
        SPREAD[0],
        SPREAD[1],
        SPREAD[2],
        SPREAD[3],
        "full pass, the guest running, ms",
        "until it is durable, ms",
    ];
    page.add(&Figure {
        title: "Tables A.1 and A.2: downtime of the first checkpoint",
        paper: "copy-on-write 11.5 to 11.7 s, stop-and-copy 17.3 to 17.4 s.",
        ours: "All of memory goes to the repository while the guest runs; the pause is for what was written \
               meanwhile. Every first checkpoint has an empty repository.",
        columns: &columns,
        rows: &rows,
        pictures: &[],
        differs: "The thesis copies all memory in the pause (stop-and-copy), or prepares for it. Pages that \
                  the guest never touched are not read; the thesis saves all 266 255.",
    });
    Ok(())
}

fn own_ways(page: &mut Page, measured: &Measured) -> Result<()> {
    let mut rows = vec![vec![
        "QEMU's floor: stop, device state, cont".to_owned(),
        cell(percentile(&measured.floors_ms, 0.5), 2),
        "-".to_owned(),
        "-".to_owned(),
        measured.floors_ms.len().to_string(),
    ]];
    for (name, saved) in &measured.saves {
        let median = |pick: fn(&Saved) -> f64| {
            let samples: Vec<f64> = saved.iter().map(pick).collect();
            percentile(&samples, 0.5)
        };
        rows.push(vec![
            format!("QEMU: {name}"),
            cell(median(|saved| saved.pause_ms), 2),
            cell(median(|saved| saved.total_ms), 0),
            cell(median(|saved| saved.bytes as f64) / MIB, 2),
            saved.len().to_string(),
        ]);
    }
    for schedule in super::SCHEDULES {
        let reports = measured.increments(schedule, TWO_S);
        let median = |field| anyhow::Ok(percentile(&numbers_of(&reports, field)?, 0.5));
        rows.push(vec![
            format!("stillframe, {schedule}, increment every 2 s"),
            cell(median(TOTAL)? / 1e3, 2),
            cell(median("/total_us")? / 1e3, 0),
            cell(median("/bytes_stored")? / MIB, 2),
            reports.len().to_string(),
        ]);
    }
    page.add(&Figure {
        title: "Beside it: QEMU's own ways to save the same guest",
        paper: "nothing; QEMU had no background snapshots then.",
        ours: "Medians. QEMU writes all that the guest has ever touched each time, Stillframe what changed.",
        columns: &["way", "pause ms", "until it is saved, ms", "MiB written", "n"],
        rows: &rows,
        pictures: &[],
        differs: "Pauses of QEMU's own ways by its STOP and RESUME events; they write a file of raw pages, \
                  neither compressed nor encrypted.",
    });
    Ok(())
}
