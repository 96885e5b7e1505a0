//! Tables, pictures and promises of the outcomes.

use anyhow::{Context, Result};

use super::{COMMAND, Cell, OUR_POST_COPY, OUR_WATCHED, QEMU_POST_COPY};
use crate::chart::{self, Labels};
use crate::migration::guest::Work;
use crate::migration::run::Outcome;
use crate::page::{Figure, Page};
use stillframe_harness::results::{Claim, Goal, percentile};

const OURS: &str = "Stillframe";
/// Of the ways to leave out pages, that which leaves out none.
const LEAVES_OUT_NONE: &str = "off";

impl Cell {
    /// The median of a figure; none where a migration did not end.
    fn median(&self, of: impl Fn(&Outcome) -> Option<f64>) -> Option<f64> {
        let samples: Option<Vec<f64>> = self.outcomes.iter().map(of).collect();
        samples.map(|samples| percentile(&samples, 0.5))
    }

    fn total_ms(&self) -> Option<f64> {
        self.median(|outcome| outcome.total_ms)
    }

    fn downtime_ms(&self) -> Option<f64> {
        self.median(|outcome| outcome.downtime_ms)
    }

    fn mib(&self) -> Option<f64> {
        self.median(|outcome| {
            outcome.total_ms?;
            Some(outcome.bytes as f64 / f64::from(1 << 20))
        })
    }

    /// How often the guest waited for a page at the destination.
    fn faults(&self) -> Option<f64> {
        self.median(|outcome| {
            let ours = outcome.report["complete"]["faults"].as_f64();
            ours.or_else(|| outcome.report["ram"]["postcopy-requests"].as_f64())
        })
    }

    /// Bytes on the link for each byte of the pages written since the last checkpoint. A page that came in a round may have
    /// been fetched once more, so that the larger of both counts stands for the pages: they are no fewer.
    fn bytes_of_increment(&self) -> Option<f64> {
        self.median(|outcome| {
            let number = |name: &str| outcome.report[name].as_f64();
            let pages = number("arrived")?.max(number("fetched")?);
            Some(outcome.bytes as f64 / (pages * 4096.0))
        })
    }

    /// A number of Stillframe's report.
    fn pages(&self, name: &str) -> Option<f64> {
        self.median(|outcome| outcome.report["pages"][name].as_f64())
    }
}

fn words(value: Option<f64>, digits: usize) -> String {
    value.map_or("does not end".to_owned(), |value| {
        format!("{value:.digits$}")
    })
}

fn of(table: &[Cell], work: Work) -> impl Iterator<Item = &Cell> {
    table.iter().filter(move |cell| cell.work == work)
}

/// The guests that are in the table.
fn works(table: &[Cell]) -> Vec<Work> {
    let among = |work: &Work| table.iter().any(|cell| cell.work == *work);
    Work::ALL.into_iter().filter(among).collect()
}

/// Every guest by every way.
pub fn add_ways(page: &mut Page, table: &[Cell]) -> Result<()> {
    for work in works(table) {
        let rows: Vec<Vec<String>> = of(table, work)
            .map(|cell| {
                vec![
                    cell.way.to_owned(),
                    words(cell.total_ms(), 0),
                    words(cell.downtime_ms(), 1),
                    words(cell.mib(), 1),
                    cell.faults()
                        .map_or_else(String::new, |faults| format!("{faults:.0}")),
                ]
            })
            .collect();
        let picture = format!("{}.svg", work.name());
        let ended: Vec<&Cell> = of(table, work)
            .filter(|cell| cell.total_ms().is_some())
            .collect();
        let names: Vec<&str> = ended.iter().map(|cell| cell.way).collect();
        let times = ended.iter().filter_map(|cell| cell.total_ms()).collect();
        let labels = Labels {
            title: &format!("{}: total time of those that end", work.words()),
            x: "",
            y: "ms",
        };
        if !names.is_empty() {
            chart::bars(&page.picture(&picture), labels, &names, &[("total", times)])?;
        }
        page.add(&Figure {
            title: work.words(),
            paper: work.paper(),
            ours: "medians.",
            columns: &["way", "total ms", "pause ms", "MiB on the link", "faults"],
            rows: &rows,
            pictures: &[&picture],
            differs: work.differs(),
        });
    }
    Ok(())
}

/// The ways to leave out pages.
pub fn add_skips(page: &mut Page, skips: &[Cell]) {
    let names = ["sent", "fake", "doomed", "postponed", "known"];
    let rows: Vec<Vec<String>> = skips
        .iter()
        .map(|cell| {
            let own = vec![
                cell.work.name().to_owned(),
                cell.way.to_owned(),
                words(cell.total_ms(), 0),
                words(cell.downtime_ms(), 1),
                words(cell.mib(), 1),
            ];
            let pages = names.iter().map(|name| words(cell.pages(name), 0));
            let bytes = ["fake_bytes", "doomed_bytes"].map(|name| {
                let bytes = cell.pages(name);
                words(bytes.map(|bytes| bytes / f64::from(1 << 20)), 1)
            });
            own.into_iter().chain(pages).chain(bytes).collect()
        })
        .collect();
    let columns = [
        "guest",
        "pages left out",
        "total ms",
        "pause ms",
        "MiB on the link",
        "sent",
        "fake",
        "doomed",
        "postponed",
        "known",
        "fake MiB",
        "doomed MiB",
    ];
    page.add(&Figure {
        title: "Fake dirty pages (table 1, figures 14 to 17)",
        paper: "total time of a guest with memcached, against pre-copy without D-Track: 10.92 % less at 1 GiB, 9.74 % at \
                2 GiB, 16.16 % at 4 GiB; with hashes (SHA-1) 4.41 and 8.16 % less, and 5.41 % more. Sorts of a guest: 15 to \
                32 % fewer with version 1, -7.5 to +6 % with version 2.",
        ours: "the lower of two in each column; counts are pages.",
        columns: &columns,
        rows: &rows,
        pictures: &[],
        differs: "no deltas here (`--delta-cache 0`), as in the paper; in its own pages D-Track reads KVM's dirty log, and \
                  here PAGEMAP_SCAN. A migration that does not converge is stopped after a while, so that the total is \
                  bounded: what the ways differ in is what was sent for it, and the pause. *fake*: the destination had that \
                  content, as far as pages were sent at all; *doomed*: overwritten before the hand-over; *postponed*: \
                  left out of a round; *known*: not sent, because of its id.",
    });
}

/// The ways to compress pages.
pub fn add_packs(page: &mut Page, packs: &[Cell]) {
    let row = |cell: &Cell| {
        let used = cell.outcomes.iter().map(|outcome| {
            let used = outcome.report["compression"].as_str();
            used.unwrap_or("-").to_owned()
        });
        vec![
            cell.work.name().to_owned(),
            cell.way.to_owned(),
            words(cell.total_ms(), 0),
            words(cell.downtime_ms(), 1),
            words(cell.mib(), 1),
            used.collect::<Vec<_>>().join(", "),
        ]
    };
    page.add(&Figure {
        title: "How pages are compressed",
        paper: "total time of a guest with memcached, against pre-copy without D-Track: 31.62, 34.66 and 29.33 % less with \
                QEMU's compression (table 1).",
        ours: "the lower of two in each column; the last has what was used in the end, over one of the connections.",
        columns: &[
            "guest",
            "compression",
            "total ms",
            "pause ms",
            "MiB on the link",
            "used",
        ],
        rows: &packs.iter().map(row).collect::<Vec<_>>(),
        pictures: &[],
        differs: "QEMU's compression of that time (`compress`) is gone; multifd with zstd took its place.",
    });
}

/// The promises that these tables answer. `writer_bytes`: what the memory of the guest that writes at random places
/// consists of, compressed.
pub fn claims(table: &[Cell], skips: &[Cell], writer_bytes: Option<u64>) -> Result<Vec<Claim>> {
    let ours = |work: Work| of(table, work).find(|cell| cell.way == OURS);
    let ratio = |work: Work, value: fn(&Cell) -> Option<f64>| {
        let own = ours(work).and_then(value);
        let own = own.with_context(|| format!("no migration of {}", work.name()))?;
        let best = best(table, work, value);
        let best = best.with_context(|| format!("QEMU moved no {}", work.name()))?;
        anyhow::Ok(own / best)
    };
    let worst = works(table)
        .into_iter()
        .map(|work| ratio(work, Cell::total_ms));
    let worst = worst.collect::<Result<Vec<f64>>>()?;
    let post_copy = |value: fn(&Cell) -> Option<f64>| {
        let worst = works(table).into_iter().map(|work| {
            let by = |way: &str| of(table, work).find(|cell| cell.way == way).and_then(value);
            let own = by(OUR_POST_COPY).context("no post-copy")?;
            let qemu = by(QEMU_POST_COPY).context("no post-copy of QEMU's")?;
            anyhow::Ok(own / qemu.max(1.0))
        });
        anyhow::Ok(percentile(&worst.collect::<Result<Vec<f64>>>()?, 1.0))
    };
    let fakes = skips.iter().filter(|cell| cell.way.contains("ids"));
    let fakes: Option<Vec<f64>> = fakes.map(|cell| cell.pages("fake")).collect();
    let fakes: f64 = fakes.context("no count of fake pages")?.iter().sum();
    let claim = |id, goal, value| Claim::new(id, goal, value, "ratio", COMMAND);
    let mut claims = vec![
        claim(
            "migrate-time",
            Goal::AtMost(0.6),
            ratio(Work::Writer, Cell::total_ms)?,
        ),
        claim(
            "migrate-bytes",
            Goal::AtMost(0.5),
            ratio(Work::Writer, Cell::mib)?,
        ),
        claim(
            "migrate-downtime",
            Goal::AtMost(1.0),
            ratio(Work::Writer, Cell::downtime_ms)?,
        ),
        claim(
            "migrate-any-guest",
            Goal::AtMost(1.05),
            percentile(&worst, 1.0),
        ),
        claim(
            "migrate-post-copy-time",
            Goal::AtMost(1.0),
            post_copy(Cell::total_ms)?,
        ),
        claim(
            "migrate-post-copy-faults",
            Goal::AtMost(0.3),
            post_copy(Cell::faults)?,
        ),
        Claim::new("migrate-fake", Goal::Zero, fakes, "pages", COMMAND),
    ];
    claims.push(bound_claim(ours(Work::Writer), writer_bytes)?);
    claims.extend(skip_claims(skips)?);
    claims.extend(watched_claims(table)?);
    Ok(claims)
}

/// What crossed the link over what the guest's memory consists of.
fn bound_claim(cell: Option<&Cell>, bytes: Option<u64>) -> Result<Claim> {
    let sent = cell.and_then(Cell::mib).context("it was not migrated")? * f64::from(1 << 20);
    let bound = bytes.context("its memory was not looked at")? as f64;
    let goal = Goal::AtMost(1.1);
    Ok(Claim::new(
        "migrate-bound",
        goal,
        sent / bound,
        "ratio",
        COMMAND,
    ))
}

/// Those about the ways to leave out pages, each against the way that leaves out none.
fn skip_claims(skips: &[Cell]) -> Result<Vec<Claim>> {
    let worst = |way: &str, value: &dyn Fn(&Cell) -> Option<f64>| {
        let ratios = works(skips).into_iter().map(|work| {
            let by = |way: &str| of(skips, work).find(|cell| cell.way == way).and_then(value);
            let (own, off) = (by(way), by(LEAVES_OUT_NONE));
            let both = own.zip(off).with_context(|| format!("{way} is missing"));
            both.map(|(own, off)| own / off)
        });
        anyhow::Ok(percentile(&ratios.collect::<Result<Vec<f64>>>()?, 1.0))
    };
    let doomed = worst("auto, with ids", &|cell| cell.pages("doomed_bytes"))?;
    let hash = worst("ids by XXH3", &Cell::total_ms)?;
    let claim = |id, goal, value| Claim::new(id, Goal::AtMost(goal), value, "ratio", COMMAND);
    Ok(vec![
        claim("migrate-doomed", 0.5, doomed),
        claim("migrate-fast-hash", 1.0, hash),
    ])
}

/// Those about VMs of which checkpoints are taken.
fn watched_claims(table: &[Cell]) -> Result<Vec<Claim>> {
    let worst = |value: fn(&[Cell], &Cell) -> Option<f64>| {
        let cells = table.iter().filter(|cell| cell.way == OUR_WATCHED);
        let all = cells.map(|cell| value(table, cell).context("a watched VM was not migrated"));
        anyhow::Ok(percentile(&all.collect::<Result<Vec<f64>>>()?, 1.0))
    };
    let bytes = worst(|_, cell| cell.bytes_of_increment())?;
    let time =
        worst(|table, cell| Some(cell.total_ms()? / best(table, cell.work, Cell::total_ms)?))?;
    let claim = |id, goal, value| Claim::new(id, Goal::AtMost(goal), value, "ratio", COMMAND);
    Ok(vec![
        claim("migrate-watched-bytes", 1.2, bytes),
        claim("migrate-watched-time", 0.3, time),
    ])
}

/// The least of a figure that QEMU has.
fn best(table: &[Cell], work: Work, value: fn(&Cell) -> Option<f64>) -> Option<f64> {
    let qemu = of(table, work).filter(|cell| !cell.way.starts_with(OURS));
    qemu.filter_map(value).min_by(f64::total_cmp)
}
