//! The thesis' tables and figures of copying: pages saved wrongly (6.1), the guest's loss (figure 6.1), the time
//! for copying (6.4, A.1), and the copying threads (6.5).

use anyhow::Result;
use serde_json::Value;

use super::measure::{Every, Measured, TWO_S, differing};
use super::{AUTO, COPY_ON_WRITE, SCHEDULES, STOP_COPY, numbers_of};
use crate::chart::{self, Labels, Series, Shape};
use crate::page::{Figure, Page};
use crate::papers::numbers::{Spread, cell, least_squares, mean};
use stillframe_harness::results::percentile;

/// Adds all of them.
pub fn add(page: &mut Page, measured: &Measured) -> Result<()> {
    wrong_pages(page, measured)?;
    lost_work(page, measured)?;
    copy_time(page, measured)?;
    who_copies(page, measured)
}

fn wrong_pages(page: &mut Page, measured: &Measured) -> Result<()> {
    let checkpoints = measured.verified.iter().map(Vec::len).max().unwrap_or(0);
    let mut rows = Vec::new();
    for number in 0..checkpoints {
        let reports: Vec<&Value> = measured
            .verified
            .iter()
            .filter_map(|reports| reports.get(number))
            .collect();
        let mut row = vec![
            (number + 1).to_string(),
            cell(mean(&numbers_of(&reports, "/pages/captured")?), 0),
        ];
        for report in reports {
            row.push(differing(std::slice::from_ref(report))?.to_string());
        }
        rows.push(row);
    }
    let iterations = (1..=measured.verified.len()).map(|number| format!("iteration {number}"));
    let columns: Vec<String> = ["checkpoint".to_owned(), "pages copied".to_owned()]
        .into_iter()
        .chain(iterations)
        .collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    page.add(&Figure {
        title: "Table 6.1: pages saved wrongly",
        paper: "ten iterations of ten checkpoints: 697 to 1151 pages of the first checkpoint, up to 15 of the \
                later ones.",
        ours: &format!(
            "{} pages in all. Each checkpoint is compared, in its pause, with every page of every RAM block.",
            measured.wrong_pages()?
        ),
        columns: &columns,
        rows: &rows,
        pictures: &[],
        differs: "An iteration is a new watch with an empty repository on the same guest, not a new guest: \
                  booting takes long under TCG, and the guest continues compiling between two iterations. \
                  Checkpoints every second. The image is taken in the checkpoint's own pause as in the thesis, \
                  and includes the memory of the video adapter, which was the thesis' error. The first \
                  checkpoints are of all pages because QEMU's own ways, tried before, read them all and so \
                  made them present.",
    });
    Ok(())
}

fn lost_work(page: &mut Page, measured: &Measured) -> Result<()> {
    let intervals = measured.intervals(AUTO);
    let alone = measured.alone_s();
    let mut rows = vec![work_row(["none", "-"], &alone, ["0", "-", "0"])];
    let mut bars = vec![("no checkpoints", vec![mean(&alone); intervals.len()])];
    for schedule in SCHEDULES {
        let mut means = Vec::new();
        for &every in &intervals {
            let took = measured.took_s(schedule, every);
            means.push(
                Some(mean(&took))
                    .filter(|mean| mean.is_finite())
                    .unwrap_or(0.0),
            );
            if took.is_empty() {
                continue;
            }
            let lost = measured.lost(schedule, every);
            let (percent, error) = (cell(lost.percent, 2), cell(lost.error_percent, 2));
            let paper = thesis_slowdown(schedule, every);
            let head = [schedule, &format!("{every}")];
            rows.push(work_row(head, &took, [&percent, &error, paper]));
        }
        bars.push((schedule, means));
    }
    let groups: Vec<String> = intervals.iter().map(|every| format!("{every}")).collect();
    let labels = Labels {
        title: "What the same objects take to compile (figure 6.1)",
        x: "interval",
        y: "s",
    };
    chart::bars(&page.picture("work.svg"), labels, &groups, &bars)?;
    page.add(&Figure {
        title: "Figure 6.1: how much longer the build takes",
        paper: "stop-and-copy 18, 13, 11 % longer at 2, 4, 8 s; copy-on-write 15, 10, 8 %.",
        ours: &format!(
            "The same {} objects compiled, from one and the same state: restored from one checkpoint for every \
             run. Lost work is 1 - mean alone / mean watched; what is less than \
             about twice its standard error says nothing, and negative figures are such noise.",
            measured.units
        ),
        columns: &["schedule", "interval", "mean s", "stdev s", "median s", "n", "lost work %",
            "standard error %", "thesis, longer by %"],
        rows: &rows,
        pictures: &["work.svg"],
        differs: "A stretch of the build instead of all of it (half an hour), and as many runs as n shows \
                  instead of ten. The first checkpoint, of all memory, is done before the stretch begins; the \
                  thesis counts it in. The host has two processors, one of which the guest needs.",
    });
    Ok(())
}

fn thesis_slowdown(schedule: &str, every: Every) -> &'static str {
    match (schedule, every.0) {
        (STOP_COPY, 2000) => "18",
        (STOP_COPY, 4000) => "13",
        (STOP_COPY, 8000) => "11",
        (COPY_ON_WRITE, 2000) => "15",
        (COPY_ON_WRITE, 4000) => "10",
        (COPY_ON_WRITE, 8000) => "8",
        _ => "-",
    }
}

fn work_row(head: [&str; 2], took: &[f64], tail: [&str; 3]) -> Vec<String> {
    let mut row: Vec<String> = head.map(str::to_owned).into();
    row.extend(Spread::of(took).cells(2));
    row.extend(tail.map(str::to_owned));
    row
}

fn copy_time(page: &mut Page, measured: &Measured) -> Result<()> {
    let ways = [
        (STOP_COPY, "/downtime_us/copy"),
        (COPY_ON_WRITE, "/phases_us/copy"),
    ];
    let (mut series, mut rows) = (Vec::new(), Vec::new());
    for (schedule, field) in ways {
        let reports = measured.increments(schedule, TWO_S);
        let pages = numbers_of(&reports, "/pages/captured")?;
        let us = numbers_of(&reports, field)?;
        let points: Vec<(f64, f64)> = pages
            .into_iter()
            .zip(us.iter().map(|us| us / 1e3))
            .collect();
        let most = points.iter().map(|point| point.0).fold(0.0, f64::max);
        let mut row = vec![schedule.to_owned(), points.len().to_string()];
        let fit = least_squares(&points);
        series.push(Series {
            name: schedule.to_owned(),
            shape: Shape::Dots,
            points,
        });
        if let Some(fit) = fit {
            row.extend([cell(fit.slope * 1e3, 2), cell(fit.offset, 2)]);
            series.push(Series {
                name: format!("{schedule}, fit"),
                shape: Shape::Line,
                points: vec![(0.0, fit.at(0.0).max(0.0)), (most, fit.at(most))],
            });
        } else {
            row.extend(["-".to_owned(), "-".to_owned()]);
        }
        rows.push(row);
    }
    let labels = Labels {
        title: "What copying takes (figures 6.4 and A.1)",
        x: "pages copied",
        y: "ms",
    };
    chart::points(&page.picture("copying.svg"), labels, &series)?;
    page.add(&Figure {
        title: "Figures 6.4 and A.1: copy time over pages copied, every 2 s",
        paper: "a line fits both; copy-on-write's offset is 86 ms, 16 ms after a remedy; stop-and-copy's 3 ms. \
                Copy-on-write copies a page faster.",
        ours: "Least squares over all increments at 2 s. Copy-on-write: `phases_us.copy`, all that is done \
               outside the pause, the guest running: protecting what was written, before the pause, and \
               copying it, after (the report does not part the two, so the slope is that of both). Stop-copy: \
               `downtime_us.copy`, copying in the pause.",
        columns: &["schedule", "n", "us a page", "offset ms"],
        rows: &rows,
        pictures: &["copying.svg"],
        differs: "Axes exchanged. The offset is what bounds the interval from below.",
    });
    Ok(())
}

/// The share of pages that no write of the guest waited for, in percent: of all pages of these reports,
/// and of each report.
fn concurrent_percent(reports: &[&Value]) -> Result<(f64, Vec<f64>)> {
    let after = numbers_of(reports, "/copied/after")?;
    let on_fault = numbers_of(reports, "/copied/on_fault")?;
    let share = |after: f64, on_fault: f64| after / (after + on_fault) * 100.0;
    let each = after
        .iter()
        .zip(&on_fault)
        .map(|(&after, &on_fault)| share(after, on_fault));
    let each = each.filter(|share| share.is_finite()).collect();
    Ok((share(after.iter().sum(), on_fault.iter().sum()), each))
}

/// Of all increments with copy-on-write.
pub fn concurrent_share(measured: &Measured) -> Result<f64> {
    let intervals = measured.intervals(COPY_ON_WRITE).into_iter();
    let reports: Vec<&Value> = intervals
        .flat_map(|every| measured.increments(COPY_ON_WRITE, every))
        .collect();
    Ok(concurrent_percent(&reports)?.0)
}

fn who_copies(page: &mut Page, measured: &Measured) -> Result<()> {
    let (mut rows, mut series) = (Vec::new(), Vec::new());
    for every in measured.intervals(COPY_ON_WRITE) {
        let reports = measured.increments(COPY_ON_WRITE, every);
        let (all, each) = concurrent_percent(&reports)?;
        rows.push(vec![
            format!("{every}"),
            cell(all, 2),
            cell(percentile(&each, 0.5), 2),
            cell(percentile(&each, 0.0), 2),
            each.len().to_string(),
            cell(mean(&numbers_of(&reports, "/copied/faults")?), 0),
        ]);
        let on_fault = each.iter().map(|share| 100.0 - share);
        series.push(Series::numbered(format!("every {every}"), on_fault));
    }
    let labels = Labels {
        title: "Pages copied on fault (figure 6.5, upside down)",
        x: "checkpoint",
        y: "% of the checkpoint's pages",
    };
    chart::points(&page.picture("on-fault.svg"), labels, &series)?;
    page.add(&Figure {
        title: "Figure 6.5: pages copied concurrently, and on fault",
        paper: "80 to 95 % of a checkpoint's pages are copied concurrently, never more than 95 %, never less \
                than half.",
        ours: "Copied by the copier, of all that is copied after the pause; the others are those that the guest \
               was about to write first. `faults` also counts writes to pages that are copied already, or \
               are not to be: such a write waits for its page to be opened only.",
        columns: &["interval", "of all pages %", "median checkpoint %", "lowest checkpoint %", "n", "faults a checkpoint"],
        rows: &rows,
        pictures: &["on-fault.svg"],
        differs: "Every checkpoint by itself; the thesis averages over ten. The picture shows those on fault, the \
                  thesis' the others: what is missing to 100 %.",
    });
    Ok(())
}
