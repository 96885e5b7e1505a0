//! Table I: how many pages change, and how much of each.

use anyhow::{Context, Result};
use serde_json::Value;

use super::measure::Measured;
use super::{Figure, Page, each, names, paper, percent};
use crate::chart::{self, Labels};

/// A row of the table: its name, the paper's numbers, and where ours is in what `stats` gave.
type Row = (&'static str, &'static [f64; 6], &'static str);

const ABOVE: [Row; 2] = [
    ("zero pages", &paper::ZERO_PAGES, "/statistics/zero_pages"),
    (
        "[0]",
        &paper::UNCHANGED_PAGES,
        "/statistics/unchanged_pages",
    ),
];
const BELOW: [Row; 3] = [
    (
        "dirty pages",
        &paper::DIRTY_PAGES,
        "/statistics/dirty_pages",
    ),
    (
        "dirty bytes",
        &paper::DIRTY_BYTES,
        "/statistics/dirty_bytes",
    ),
    (
        "8B dirty bytes",
        &paper::DIRTY_WORD_BYTES,
        "/statistics/dirty_word_bytes",
    ),
];
const RATES: [Row; 3] = [
    (
        "dirty page rate",
        &paper::DIRTY_PAGE_RATE,
        "/rates/dirty_pages",
    ),
    (
        "dirty bytes / bytes of dirty pages",
        &paper::DIRTY_BYTES_RATE,
        "/rates/dirty_bytes_of_dirty_pages",
    ),
    (
        "8B dirty bytes / dirty bytes",
        &paper::DIRTY_WORD_RATE,
        "/rates/word_bytes_of_dirty_bytes",
    ),
];

/// Adds it, and a picture of each guest's histogram.
pub fn add(page: &mut Page, guests: &[Measured]) -> Result<()> {
    let mut pictures = Vec::new();
    for guest in guests {
        let name = format!("table-1-{}.svg", guest.workload.name());
        draw(page, &name, guest)?;
        pictures.push(name);
    }
    let pictures: Vec<&str> = pictures.iter().map(String::as_str).collect();
    let mut columns = vec!["paper / ours"];
    columns.extend(names(guests));
    page.add(&Figure {
        title: "Table I: changed bytes, page by page",
        paper: "most pages do not change between two checkpoints, and many that do change little: dirty bytes are \
                3.43 to 84.13 % of the bytes of dirty pages. Of the idle guest's dirty bytes, 60.43 % lie in whole words \
                of eight.",
        ours: &words(guests)?,
        columns: &columns,
        rows: &rows(guests)?,
        pictures: &pictures,
        differs: "the interval (see above), and the software. Zero pages are those \
                  of the newer checkpoint; most of ours are memory that the guest has never used, which Linux leaves \
                  as it finds it. Total pages count all RAM blocks, video memory and firmware included. A whole word \
                  is one of eight aligned bytes all of which changed; the paper does not say whether its words are. A \
                  64-bit system's counters, addresses and times keep their upper bytes, which leaves few whole words \
                  where little else changes. The last two checkpoints of the watch were \
                  compared, by `stillframe stats`; the pictures show shares, because the numbers of pages depend on the \
                  interval.",
    });
    Ok(())
}

fn words(guests: &[Measured]) -> Result<String> {
    let shares = each(guests, |guest| {
        Ok(guest.statistic("/rates/dirty_bytes_of_dirty_pages")? * 100.0)
    })?;
    let (least, most) = ends(&shares);
    let mut words =
        format!("dirty bytes are {least:.2} to {most:.2} % of the bytes of dirty pages.");
    for guest in guests {
        if guest.workload == stillframe_harness::debian::DebianWorkload::Idle {
            let share = guest.statistic("/rates/word_bytes_of_dirty_bytes")? * 100.0;
            words += &format!(
                " Of the idle guest's dirty bytes, {share:.2} % lie in whole words of eight (paper: 60.43 %)."
            );
        }
    }
    Ok(words)
}

/// The least and the most.
fn ends(numbers: &[f64]) -> (f64, f64) {
    let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
    let most = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (least, most)
}

fn rows(guests: &[Measured]) -> Result<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    let count = |value: f64| format!("{value:.0}");
    for row in &ABOVE {
        rows.push(line(guests, row, count)?);
    }
    for (place, (_, pages)) in paper::HISTOGRAM.iter().enumerate() {
        let mut cells = vec![range_name(place)];
        for guest in guests {
            let ours = histogram(guest)?[place];
            cells.push(format!(
                "{:.0} / {ours:.0}",
                paper::of(pages, guest.workload)
            ));
        }
        rows.push(cells);
    }
    for row in &BELOW {
        rows.push(line(guests, row, count)?);
    }
    for row in &RATES {
        rows.push(rate_line(guests, row)?);
    }
    let mut totals = vec!["total pages (ours)".to_owned()];
    totals.extend(each(guests, Measured::total_pages)?.into_iter().map(count));
    rows.push(totals);
    Ok(rows)
}

fn line(guests: &[Measured], row: &Row, show: impl Fn(f64) -> String) -> Result<Vec<String>> {
    let (name, numbers, place) = row;
    let mut cells = vec![(*name).to_owned()];
    for guest in guests {
        let (paper, ours) = (paper::of(numbers, guest.workload), guest.statistic(place)?);
        cells.push(format!("{} / {}", show(paper), show(ours)));
    }
    Ok(cells)
}

/// `stats` gives shares, the paper percent.
fn rate_line(guests: &[Measured], row: &Row) -> Result<Vec<String>> {
    let (name, numbers, place) = row;
    let mut cells = vec![(*name).to_owned()];
    for guest in guests {
        let (paper, ours) = (paper::of(numbers, guest.workload), guest.statistic(place)?);
        cells.push(format!("{} / {}", percent(paper), percent(ours * 100.0)));
    }
    Ok(cells)
}

fn range_name(place: usize) -> String {
    let up_to = |place: usize| paper::HISTOGRAM[place].0;
    let above = match place {
        0 => 0,
        _ => up_to(place - 1),
    };
    format!("({above},{}]", up_to(place))
}

/// Pages of each range, which are the paper's.
fn histogram(guest: &Measured) -> Result<Vec<f64>> {
    let ranges = guest.statistics.pointer("/statistics/histogram");
    let ranges = ranges
        .and_then(Value::as_array)
        .context("stats gave no histogram")?;
    paper::HISTOGRAM
        .iter()
        .map(|&(up_to, _)| {
            let range = ranges.iter().find(|range| range["up_to"] == up_to);
            range
                .and_then(|range| range["pages"].as_f64())
                .with_context(|| format!("stats gave no range up to {up_to}"))
        })
        .collect()
}

fn draw(page: &Page, name: &str, guest: &Measured) -> Result<()> {
    let share = |pages: Vec<f64>| -> Vec<f64> {
        // At least one, so that nothing is divided by zero.
        let all = pages.iter().sum::<f64>().max(1.0);
        pages.iter().map(|pages| pages / all * 100.0).collect()
    };
    let theirs = paper::HISTOGRAM
        .iter()
        .map(|(_, pages)| paper::of(pages, guest.workload));
    let groups: Vec<String> = paper::HISTOGRAM
        .iter()
        .map(|(up_to, _)| up_to.to_string())
        .collect();
    let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
    chart::bars(
        &page.picture(name),
        Labels {
            title: &format!("{}: dirty pages by changed bytes", guest.workload.name()),
            x: "changed bytes, up to",
            y: "dirty pages, percent",
        },
        &groups,
        &[
            ("paper", share(theirs.collect())),
            ("ours", share(histogram(guest)?)),
        ],
    )
}
