//! Another client of the VM's monitor stops it, or migrates it away, while a watch pauses it every 10 ms. A `stop`
//! is never undone, and a VM that was migrated never runs twice.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use jiff::Timestamp;
use serde_json::{Value, json};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{expect_nothing_left, expect_untouched};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{PATIENCE, Running};

/// Longest time between two stops, and from a watch's second checkpoint to a migration, in microseconds.
const REST_US_MAX: u64 = 30_000;
/// How long a VM that was migrated is observed.
const LOOKS: u32 = 10;

/// Watches a VM every 10 ms.
pub fn watch(stillframe: &Stillframe, guest: &Guest) -> Result<Running> {
    let pid = guest.pid_text();
    let line = ["watch", "--pid", &pid, "--every", "10ms", "--json"];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    watch.wait_results(2)?;
    Ok(watch)
}

/// Sends `count` stops to one VM, and checks each two checkpoints later. QEMU emits no event for a `stop` of a
/// paused VM. Returns the number of undone stops.
pub fn stops(count: u64, seed: u64) -> Result<u64> {
    let mut random = Random::new(seed);
    let guest = Setup::small(Kind::Pc, "stopped").boot()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let mut watch = watch(&stillframe, &guest)?;
    let mut undone = 0;
    for _ in 0..count {
        thread::sleep(Duration::from_micros(random.below(REST_US_MAX)));
        monitor.execute("stop", json!({}))?;
        let taken = watch.results()?.len();
        // The watch continues with the VM stopped.
        watch.wait_results(taken + 2)?;
        undone += u64::from(monitor.status()? != "paused");
        monitor.execute("cont", json!({}))?;
    }
    watch.signal("TERM")?;
    ensure!(watch.end()?.code == Some(0));
    monitor.take_events();
    expect_untouched(&guest, &mut monitor)?;
    Ok(undone)
}

/// Migrates a watched VM after this delay. The watch ends by itself, and well; the source is never resumed. The
/// destination does not take a pause for the VM's own; no checkpoint is of the rest at the source.
pub fn migration(after: Duration) -> Result<()> {
    let source = Setup::small(Kind::Pc, "migrated").boot()?;
    let address = format!("unix:{}", source.folder().join("migration").display());
    let destination = waits_for(&address)?;
    let (mut from, mut to) = (source.second_monitor()?, destination.second_monitor()?);
    let stillframe = Stillframe::init(&source.folder().join("repo"))?;
    let watch = watch(&stillframe, &source)?;
    thread::sleep(after);
    from.execute("migrate", json!({ "uri": address }))?;
    wait_migrated(&mut from)?;
    let completed = Timestamp::now();
    for _ in 0..LOOKS {
        let (source, destination) = (from.status()?, to.status()?);
        ensure!(source == "postmigrate", "the source is {source}");
        ensure!(destination == "running", "the destination is {destination}");
        thread::sleep(Duration::from_millis(10));
    }
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(ended.err.contains("migrated away"), "{}", ended.err);
    // Checkpoints captured before may arrive later.
    for report in ended.results()? {
        let time: Timestamp = report["time"].as_str().context("no time")?.parse()?;
        ensure!(time <= completed, "{report} is of what is left");
    }
    let said = stillframe.fails(&["checkpoint", "--pid", &source.pid_text()], 5)?;
    ensure!(said.contains("postmigrate"), "{said}");
    ensure!(from.status()? == "postmigrate" && to.status()? == "running");
    expect_nothing_left(source.pid(), &mut from)
}

fn waits_for(address: &str) -> Result<Guest> {
    Setup::small(Kind::Pc, "destination")
        .with(&["-incoming", address])
        .start()
}

fn wait_migrated(source: &mut Qmp) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = source.execute("query-migrate", json!({}))?["status"].clone();
        match status.as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => bail!("the migration {status}"),
            _ => ensure!(Instant::now() < deadline, "the migration is {status}"),
        }
        thread::sleep(Duration::from_millis(3));
    }
}

/// Runs both this many times; writes `docs/results/others/`.
pub fn run(stop_count: u64, migration_count: u64, seed: u64) -> Result<()> {
    let undone = stops(stop_count, seed)?;
    println!("{undone} of {stop_count} stops undone");
    let mut random = Random::new(seed);
    let mut raw: Vec<Value> = Vec::new();
    for number in 0..migration_count {
        let after = Duration::from_micros(random.below(REST_US_MAX));
        let error = migration(after).err().map(|error| format!("{error:#}"));
        if let Some(error) = &error {
            eprintln!("migration {number}: {error}");
        }
        raw.push(
            json!({"migration": number, "after_us": after.as_micros() as u64, "error": error}),
        );
        if number % 10 == 9 {
            eprintln!("{} of {migration_count} migrated", number + 1);
        }
    }
    let wrong = raw.iter().filter(|line| !line["error"].is_null()).count();
    println!("{wrong} of {migration_count} migrations wrong");
    raw.push(json!({"stops": stop_count, "undone": undone}));
    results::write_raw("others", "runs.jsonl", &raw)?;
    let command = "cargo xtask bench others";
    let (undone_f, wrong_f) = (undone as f64, wrong as f64);
    results::write_summary(
        "others",
        &[
            Claim::new("stops-undone", Goal::Zero, undone_f, "stops", command)
                .if_enough(stop_count >= 500),
            Claim::new(
                "migrations-wrong",
                Goal::Zero,
                wrong_f,
                "migrations",
                command,
            )
            .if_enough(migration_count >= 100),
        ],
    )?;
    ensure!(undone + wrong as u64 == 0, "not every time");
    Ok(())
}
