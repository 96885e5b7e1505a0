//! The evaluation of the copy-on-write checkpointing thesis once more: its chapter 6, table 3.1 and
//! appendix A, on a guest that compiles the Linux kernel.

mod copying;
mod downtime;
mod measure;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use self::measure::{EIGHT_S, Every, Lost, Measured, Plan, RAM_MIB, TENTH_S, TWO_S};
use crate::page::Page;
use stillframe_harness::results::{self, Claim, Goal, percentile};

const BENCH: &str = "papers-cow";
const COMMAND: &str = "cargo xtask bench papers cow";
const TITLE: &str = "Copy-on-write checkpointing, evaluated once more";
const STOP_COPY: &str = "stop-copy";
const COPY_ON_WRITE: &str = "copy-on-write";
const AUTO: &str = "auto";
const SCHEDULES: [&str; 4] = [STOP_COPY, COPY_ON_WRITE, "pre-copy", AUTO];

/// About 25 minutes. More rounds at 2 s, which most figures are about; the last is for the claim.
const WHOLE: Plan = Plan {
    stretch: Duration::from_secs(40),
    rounds: &[
        (TWO_S, &SCHEDULES),
        (Every(4000), &SCHEDULES),
        (EIGHT_S, &SCHEDULES),
        (TENTH_S, &[AUTO]),
        (TWO_S, &SCHEDULES),
        (TENTH_S, &[AUTO]),
        (TWO_S, &[AUTO]),
    ],
    iterations: 10,
    verified: 10,
    floors: 5,
    saves: 3,
};
const QUICK: Plan = Plan {
    stretch: Duration::from_secs(9),
    rounds: &[(TWO_S, &SCHEDULES), (TENTH_S, &[AUTO])],
    iterations: 2,
    verified: 3,
    floors: 2,
    saves: 1,
};

/// Runs it, and writes `docs/results/papers-cow/`; with `quick` only prints them.
pub fn run(quick: bool) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (plan, elsewhere) = match quick {
        true => (QUICK, Some(folder.path())),
        false => (WHOLE, None),
    };
    let measured = measure::measure(&plan)?;
    let mut page = Page::new(BENCH, elsewhere, TITLE, COMMAND, &setting())?;
    let claims = claims(&measured)?;
    let floor_ms = percentile(&measured.floors_ms, 0.5);
    let differs = format!(
        "cow-wrong-pages is table 6.1, cow-concurrent-share figure 6.5 (all intervals), \
         cow-downtime-ratio table 6.4 (median over the floor's median, at 2 s), auto-slowdown-2s \
         and auto-slowdown-100ms figure 6.1; these two do not hold either where their standard errors are \
         above 1 and 2.5 %. Stopping QEMU, saving its device state and letting it continue, with no engine \
         attached, takes {floor_ms:.2} ms: {floor_ms:.1} % of an interval of 100 ms."
    );
    page.add_claims(&claims, "-", &differs);
    copying::add(&mut page, &measured)?;
    downtime::add(&mut page, &measured)?;
    keep(&mut page, &measured);
    page.write()?;
    if !quick {
        results::write_summary(BENCH, &claims)?;
    }
    match measured.wrong_pages()? {
        0 => Ok(()),
        wrong => bail!("{wrong} PAGES WERE SAVED WRONGLY: see table 6.1 of the page"),
    }
}

fn setting() -> String {
    format!(
        "Guest: Debian that compiles Linux' smallest configuration again and again, {RAM_MIB} MiB, one vCPU, \
         TCG, stock QEMU. The thesis: Linux 4.0 on Debian 8, 1 GiB, one vCPU, KVM and QEMU patched, on 16 \
         cores. Under TCG the guest is much slower, so that fewer pages change in an interval, while pauses \
         and copying are those of the host. Every run restores one and the same checkpoint of the guest and has \
         an empty repository; first checkpoints, of all memory, stand by themselves (tables A.1 and A.2)."
    )
}

/// A number of each report; microseconds stay such.
fn numbers_of(reports: &[&Value], field: &str) -> Result<Vec<f64>> {
    let numbers = reports
        .iter()
        .map(|report| report.pointer(field).and_then(Value::as_f64));
    numbers
        .collect::<Option<Vec<f64>>>()
        .with_context(|| format!("a report lacks {field}"))
}

fn claims(measured: &Measured) -> Result<Vec<Claim>> {
    let wrong = measured.wrong_pages()? as f64;
    let share = copying::concurrent_share(measured)?;
    let pauses = downtime::pauses_ms(measured, COPY_ON_WRITE, TWO_S)?;
    let ratio = percentile(&pauses, 0.5) / percentile(&measured.floors_ms, 0.5);
    let lost = measured.lost(AUTO, TWO_S);
    let often = measured.lost(AUTO, TENTH_S);
    let claim = |claim, goal, value, unit| Claim::new(claim, goal, value, unit, COMMAND);
    // A loss that the runs are too few or too unlike to tell does not hold.
    let slowdown = |name, most, lost: Lost, error_most| {
        let enough = lost.error_percent <= error_most;
        claim(name, Goal::AtMost(most), lost.percent, "percent").if_enough(enough)
    };
    Ok(vec![
        claim("cow-wrong-pages", Goal::Zero, wrong, "pages"),
        claim("cow-concurrent-share", Goal::Above(95.0), share, "percent"),
        claim("cow-downtime-ratio", Goal::AtMost(1.3), ratio, "ratio"),
        slowdown("auto-slowdown-2s", 1.0, lost, 1.0),
        slowdown("auto-slowdown-100ms", 5.0, often, 2.5),
    ])
}

fn keep(page: &mut Page, measured: &Measured) {
    for run in &measured.runs {
        page.keep("run", run.raw());
    }
    page.keep("floors_ms", json!(measured.floors_ms));
    for reports in &measured.verified {
        page.keep("verified", json!(reports));
    }
    for (way, saved) in &measured.saves {
        for save in saved {
            let value = json!({
                "way": way, "pause_ms": save.pause_ms, "total_ms": save.total_ms, "bytes": save.bytes,
            });
            page.keep("save", value);
        }
    }
}
