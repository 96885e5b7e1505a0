//! Figure 9: the size of a checkpoint.

use anyhow::Result;

use super::measure::Measured;
use super::{Figure, Page, each, mean, mib, names, of_paper, paper, percent, reduction_percent};
use crate::chart::{self, Labels};

/// Stored bytes over the bytes of all written pages.
pub fn bytes_ratio(guest: &Measured) -> Result<f64> {
    Ok(guest.stored_bytes()? / guest.captured_bytes()?)
}

/// Percentage by which an increment is smaller than the smaller of QEMU's saves.
pub fn full_reduction(guest: &Measured) -> Result<f64> {
    Ok(reduction_percent(
        guest.stored_bytes()?,
        guest.best_save_bytes(),
    ))
}

/// Percentage by which an increment is smaller than all written pages.
pub fn remus_reduction(guest: &Measured) -> Result<f64> {
    Ok(reduction_percent(
        guest.stored_bytes()?,
        guest.captured_bytes()?,
    ))
}

/// The same against those written pages only that changed.
fn changed_reduction(guest: &Measured) -> Result<f64> {
    Ok(reduction_percent(
        guest.stored_bytes()?,
        guest.changed_bytes()?,
    ))
}

/// The bytes that the second watch stores, over the bytes of all pages written in it.
fn whole_pages_ratio(guest: &Measured) -> Result<f64> {
    let (stored, captured) = guest.whole_pages_bytes()?;
    Ok(stored / captured)
}

/// Adds the sizes and both reductions.
pub fn add(page: &mut Page, guests: &[Measured]) -> Result<()> {
    let pictures = ["figure-9-full.svg", "figure-9-remus.svg", "figure-9.svg"];
    let full = each(guests, full_reduction)?;
    let remus = each(guests, remus_reduction)?;
    for (picture, title, theirs, ours) in [
        (
            pictures[0],
            "Fewer bytes than a full save",
            &paper::FULL_REDUCTION,
            &full,
        ),
        (
            pictures[1],
            "Fewer bytes than page by page",
            &paper::REMUS_REDUCTION,
            &remus,
        ),
    ] {
        let labels = Labels {
            title,
            x: "guest",
            y: "percent",
        };
        let bars = [("paper", of_paper(guests, theirs)), ("ours", ours.clone())];
        chart::bars(&page.picture(picture), labels, &names(guests), &bars)?;
    }
    draw_sizes(page, pictures[2], guests)?;
    page.add(&Figure {
        title: "Figure 9: size of a checkpoint",
        paper: "against Xen's save 99.99, 98.93, 92.63, 58.00, 49.74 and 98.84 % fewer bytes, mean 83.02 %; against Remus, \
                which stores dirty pages whole, 96.57, 87.62, 26.80, 15.87, 20.92 and 69.52 %, mean 52.88 %.",
        ours: &words(guests, &full, &remus)?,
        columns: &[
            "guest",
            "QEMU's save: MiB",
            "page by page: MiB",
            "ours: MiB",
            "less than full",
            "paper",
            "less than page by page",
            "paper",
            "less than changed pages",
            "whole pages, compressed: of page by page",
        ],
        rows: &rows(guests)?,
        pictures: &pictures,
        differs: "ours is all that an increment takes in the repository: encrypted pages and deltas with their positions, \
                  page tables, device state and metadata. The paper's are its dirty bytes alone: but for one of six, its \
                  reductions are one minus the shares in its table I, with no position and no device state. Page by page \
                  is every page that counts as written, as Remus would have it, also where the same was written (and \
                  hot pages, which are left open to writes); the paper counts pages whose content changed, and \
                  against those ours is in the column `less than changed pages`. QEMU's save is the smaller of its two and has no pages of zeros; Xen's has them. The last \
                  column is the second watch, with `--delta-cache 0 --no-dedup`, against the pages written in it: what \
                  compression alone does. Means over the increments.",
    });
    Ok(())
}

fn words(guests: &[Measured], full: &[f64], remus: &[f64]) -> Result<String> {
    Ok(format!(
        "{:.2} % fewer bytes than QEMU's save (mean; the paper's mean for these guests is {:.2} %), and {:.2} % fewer than \
         page by page (paper: {:.2} %): {:.3} of it. Against changed pages only: {:.2} % fewer. Whole pages, compressed, take \
         {:.3} of page by page.",
        mean(full),
        mean(&of_paper(guests, &paper::FULL_REDUCTION)),
        mean(remus),
        mean(&of_paper(guests, &paper::REMUS_REDUCTION)),
        mean(&each(guests, bytes_ratio)?),
        mean(&each(guests, changed_reduction)?),
        mean(&each(guests, whole_pages_ratio)?),
    ))
}

fn rows(guests: &[Measured]) -> Result<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    for guest in guests {
        rows.push(vec![
            guest.workload.name().to_owned(),
            format!("{:.1}", mib(guest.best_save_bytes())),
            format!("{:.3}", mib(guest.captured_bytes()?)),
            format!("{:.3}", mib(guest.stored_bytes()?)),
            percent(full_reduction(guest)?),
            percent(paper::of(&paper::FULL_REDUCTION, guest.workload)),
            percent(remus_reduction(guest)?),
            percent(paper::of(&paper::REMUS_REDUCTION, guest.workload)),
            percent(changed_reduction(guest)?),
            format!("{:.3}", whole_pages_ratio(guest)?),
        ]);
    }
    Ok(rows)
}

fn draw_sizes(page: &Page, picture: &str, guests: &[Measured]) -> Result<()> {
    let labels = Labels {
        title: "Size of an increment",
        x: "guest",
        y: "MiB",
    };
    let bars = [
        (
            "page by page",
            each(guests, |guest| Ok(mib(guest.captured_bytes()?)))?,
        ),
        (
            "ours",
            each(guests, |guest| Ok(mib(guest.stored_bytes()?)))?,
        ),
    ];
    chart::bars(&page.picture(picture), labels, &names(guests), &bars)
}
