//! Migrations: a VM into a new QEMU of another process, over a connection; every page compared.
//!
//! Two oracles, as for checkpoints:
//! - `migrate --verify`: Stillframe's own, for every migration of a working guest. Source and destination each hash all
//!   of their memory by a slow way, and compare.
//! - the byte comparison: the test pauses the VM itself and reads all memory through `/proc/PID/mem`. It has the paused
//!   VM migrated, and compares the new VM's memory byte by byte.
//!
//! After each, the guest must find its memory whole. [`strikes`] has what goes wrong on the way.

pub mod strikes;
pub mod victims;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::exactness::{Tally, wait_gone, writing_all_the_time};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::memory::{Difference, Image};
use stillframe_harness::migration::{Arrived, Order};
use stillframe_harness::results::{self, Claim, Goal};

/// Time for a guest to tick, on a busy machine.
const TICK_LIMIT: Duration = Duration::from_secs(120);

/// The ways in which pages move while the guest runs, in turn: as by default; as plainly as can be; and with each way to
/// find pages that need not be sent.
const PRE_COPY: [(&str, &[&str]); 5] = [
    ("pre-copy, auto", &["--mode=pre-copy"]),
    (
        "pre-copy, plain",
        &[
            "--mode=pre-copy",
            "--skip-fake=off",
            "--connections=1",
            "--delta-cache=0",
            "--page-ids=off",
        ],
    ),
    (
        "pre-copy, exact",
        &["--mode=pre-copy", "--skip-fake=exact", "--connections=4"],
    ),
    (
        "pre-copy, thread",
        &["--mode=pre-copy", "--skip-fake=thread", "--delta-cache=8M"],
    ),
    (
        "pre-copy, thread-delayed",
        &[
            "--mode=pre-copy",
            "--skip-fake=thread-delayed",
            "--page-ids=off",
        ],
    ),
];
/// The other modes: while it is stopped, and while it runs at the destination.
const OTHERS: [(&str, &[&str]); 3] = [
    ("stop-copy", &["--mode=stop-copy"]),
    ("hybrid", &["--mode=hybrid"]),
    ("post-copy", &["--mode=post-copy"]),
];
/// Migrations of each mode that the promise asks for.
const MIGRATIONS_MIN: u64 = 200;
/// How many modes there are.
const MODES: usize = 4;

/// Migrates a working guest. Both its memories are compared in the pause, and it finds its memory whole afterwards.
pub fn verified(
    stillframe: &Stillframe,
    pid: i32,
    mut order: Order,
    way: &[&str],
) -> Result<(Arrived, Tally)> {
    let words = way.iter().chain(&["--verify"]);
    order.migrate.extend(words.map(|&word| word.to_owned()));
    let arrived = order.perform(stillframe, pid)?;
    let verify = arrived
        .report
        .get("verify")
        .context("no verify in the report")?;
    let tally = Tally {
        checkpoints: 1,
        pages: verify["pages"].as_u64().context("pages")?,
        differing: verify["differing"].as_u64().context("differing")?,
    };
    arrived.vm.serial.wait_ticks(4, TICK_LIMIT)?;
    Ok((arrived, tally))
}

/// Pauses the guest, migrates it, and compares both memories byte by byte. The new VM runs then.
pub fn byte_by_byte(
    stillframe: &Stillframe,
    guest: &Guest,
    order: &Order,
) -> Result<(Arrived, Tally)> {
    let mut monitor = guest.second_monitor()?;
    monitor.execute("stop", json!({}))?;
    let original = Image::take(guest.pid(), &mut monitor)?;
    let arrived = order.perform(stillframe, guest.pid())?;
    let runs = arrived.report["running"].as_bool();
    ensure!(runs == Some(false), "a paused VM did not stay so");
    wait_gone(guest.pid())?;
    let mut copy = arrived.vm.monitor()?;
    let mut differing = original.differing(&Image::take(arrived.vm.pid, &mut copy)?)?;
    if guest.kind == Kind::KvmBootSector
        && let Some(clock) = differing.iter().position(Difference::may_be_kvm_clock)
    {
        // Its one vCPU has one clock, which the firmware requested.
        differing.remove(clock);
    }
    if !differing.is_empty() {
        eprintln!("differing: {:?}", &differing[..differing.len().min(8)]);
    }
    copy.execute("cont", json!({}))?;
    arrived.vm.serial.wait_ticks(4, TICK_LIMIT)?;
    let tally = Tally {
        checkpoints: 1,
        pages: original.pages(),
        differing: differing.len() as u64,
    };
    Ok((arrived, tally))
}

/// A new VM whose memory would be the file that the original writes to is refused; the original runs on.
fn refused_with_the_same_file(
    stillframe: &Stillframe,
    guest: &Guest,
    mut order: Order,
) -> Result<()> {
    order.receive.clear();
    let migration = order.start(stillframe, guest.pid())?;
    let (sent, received) = (migration.source.end()?, migration.destination.end()?);
    ensure!(sent.code != Some(0), "two VMs with one memory: {sent:?}");
    let why = format!("is in use by process {}", guest.pid());
    ensure!(received.err.contains(&why), "{received:?}");
    ensure!(
        sent.err.contains(&why),
        "the source does not say why: {sent:?}"
    );
    guest.serial.wait_more(2, TICK_LIMIT)?;
    Ok(())
}

/// Migrations of one guest: one that is compared byte by byte, and `count` in each mode. It has
/// ended afterwards.
pub fn one_guest(
    stillframe: &Stillframe,
    guest: &Guest,
    count: u64,
    mut note: impl FnMut(&str, &Arrived, Tally),
) -> Result<()> {
    let order = |name: String| Order::of(guest, name);
    if guest.kind == Kind::FileShared {
        refused_with_the_same_file(stillframe, guest, order("refused".into()))?;
    }
    let (mut arrived, tally) = byte_by_byte(stillframe, guest, &order("bytes".into()))?;
    note("byte by byte", &arrived, tally);
    for number in 0..count {
        let pre_copy = PRE_COPY[number as usize % PRE_COPY.len()];
        for (turn, (name, way)) in [pre_copy].into_iter().chain(OTHERS).enumerate() {
            let before = arrived.vm.pid;
            let order = order(format!("{number}-{turn}"));
            let (next, tally) = verified(stillframe, before, order, way)?;
            wait_gone(before)?;
            arrived = next;
            note(name, &arrived, tally);
        }
    }
    Ok(())
}

/// All kinds of guest, and one that writes all the time, or `only` one; all of them write `docs/results/migrate/`.
pub fn run(count: u64, kills: u64, only: Option<&str>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut total = Tally::default();
    let (mut raw, mut per_mode) = (Vec::new(), BTreeMap::new());
    let mut setups: Vec<(&str, Setup)> = Kind::ALL
        .into_iter()
        .map(|kind| (kind.name(), Setup::new(kind)))
        .collect();
    setups.push(("busy", writing_all_the_time()));
    setups.retain(|(name, _)| only.is_none_or(|only| only == *name));
    for (name, setup) in setups {
        if setup.kind == Kind::KvmBootSector && !Path::new("/dev/kvm").exists() {
            eprintln!("{name:16} left out: this machine has no /dev/kvm");
            continue;
        }
        let guest = setup.boot()?;
        let note = |what: &str, arrived: &Arrived, tally: Tally| {
            total.add(&format!("{name}: {what}"), tally);
            let mode = arrived.sent["mode"].to_string();
            *per_mode.entry(mode).or_insert(0) += 1;
            raw.push(json!({
                "guest": name, "what": what, "pages": tally.pages, "differing": tally.differing,
                "sent": arrived.sent, "received": arrived.report, "complete": arrived.filled,
            }));
        };
        one_guest(&stillframe, &guest, count, note).with_context(|| name.to_owned())?;
    }
    println!("{total}; migrations by mode: {per_mode:?}");
    if only.is_none() {
        let command = "cargo xtask bench migrate";
        // The strikes take as long again.
        results::write_raw("migrate", "migrations.jsonl", &raw)?;
        let struck = strikes::run(&stillframe, kills, 1)?;
        println!("{struck}");
        results::write_raw("migrate", "strikes.jsonl", &struck.raw)?;
        let pages = total.differing as f64;
        let pages = Claim::new("migrate-pages", Goal::Zero, pages, "pages", command);
        let wrong = struck.wrong as f64;
        let cases = Claim::new("migrate-strikes", Goal::Zero, wrong, "cases", command);
        let killed = struck.killed_wrong as f64;
        let killed = Claim::new("transfer-kills", Goal::Zero, killed, "cases", command);
        let claims = [
            pages.if_enough(
                per_mode.len() == MODES && per_mode.values().all(|&count| count >= MIGRATIONS_MIN),
            ),
            cases.if_enough(kills >= 200),
            killed.if_enough(struck.killed >= 60),
        ];
        results::write_summary("migrate", &claims)?;
        ensure!(struck.wrong == 0, "{} strikes ended wrong", struck.wrong);
    }
    match total.differing {
        0 => Ok(()),
        differing => bail!("{differing} pages differ"),
    }
}
