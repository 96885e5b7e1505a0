//! `stats`: what it counts is what two images of the memory show, byte by byte.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{expect_nothing_left, expect_untouched};
use stillframe_harness::memory::Image;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::running::PATIENCE;

/// A checkpoint of the paused guest, and an image of what it holds.
fn look(stillframe: &Stillframe, guest: &Guest, monitor: &mut Qmp) -> Result<Image> {
    monitor.execute("stop", json!({}))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    let image = Image::take(guest.pid(), monitor)?;
    monitor.execute("cont", json!({}))?;
    Ok(image)
}

fn count(statistics: &Value, field: &str) -> Result<u64> {
    statistics[field]
        .as_u64()
        .with_context(|| format!("{field}: {statistics}"))
}

#[test]
fn stats_count_what_two_images_show() -> Result<()> {
    let mut setup = Setup::small(Kind::Private, "summed");
    // Some words of some pages, and pages that come and go.
    setup.workload.pattern = "mixed";
    let guest = setup.boot()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let older = look(&stillframe, &guest, &mut monitor)?;
    guest.serial.wait_more(6, PATIENCE)?;
    let newer = look(&stillframe, &guest, &mut monitor)?;
    let svg = guest.folder().join("changes.svg");
    let line = [
        "stats",
        "latest~1",
        "latest",
        "--svg",
        &svg.display().to_string(),
    ];
    let found = stillframe.json(&line)?;
    let statistics = &found["statistics"];

    let differing = older.differing(&newer)?;
    ensure!(differing.len() > 100, "too few pages changed: {found}");
    ensure!(count(statistics, "pages")? == newer.pages(), "{found}");
    ensure!(
        count(statistics, "zero_pages")? == newer.zero_pages(),
        "{found}"
    );
    ensure!(
        count(statistics, "dirty_pages")? == differing.len() as u64,
        "{found}"
    );
    let bytes: usize = differing.iter().map(|page| page.count).sum();
    ensure!(
        count(statistics, "dirty_bytes")? == bytes as u64,
        "{bytes}: {found}"
    );
    // The changed bytes, and no more than a twentieth of them for the positions.
    let delta = count(statistics, "delta_bytes")?;
    ensure!(
        0 < delta && delta <= (bytes + bytes / 20) as u64,
        "{bytes}: {found}"
    );
    for range in statistics["histogram"].as_array().context("no histogram")? {
        let (above, up_to) = (count(range, "above")?, count(range, "up_to")?);
        let inside = |bytes: usize| above < bytes as u64 && bytes as u64 <= up_to;
        let pages = differing.iter().filter(|page| inside(page.count)).count();
        ensure!(
            count(range, "pages")? == pages as u64,
            "{pages}: {range} of {found}"
        );
    }
    ensure!(fs::read_to_string(&svg)?.starts_with("<svg"));
    let table = stillframe.ok(&line[..3])?;
    ensure!(
        table.contains("(2048,4096]") && table.contains("8B dirty bytes"),
        "{table}"
    );
    // A checkpoint and itself.
    let same = stillframe.json(&["stats", "latest", "latest"])?;
    ensure!(
        count(&same["statistics"], "dirty_pages")? == 0
            && same["rates"]["dirty_bytes_per_s"].is_null(),
        "{same}"
    );
    expect_untouched(&guest, &mut monitor)
}

#[test]
fn stats_of_a_running_vm_leave_nothing_behind() -> Result<()> {
    let guest = Setup::small(Kind::Memfd, "live-stats").booted()?;
    let mut monitor = guest.second_monitor()?;
    let temporary = tempfile::tempdir()?;
    // No repository: it makes one of its own.
    let stillframe = Stillframe::at(&temporary.path().join("none"));
    let mut command =
        stillframe.command(&["stats", "--vm", "live-stats", "--over", "1s", "--json"])?;
    let output = command.env("TMPDIR", temporary.path()).output()?;
    ensure!(output.status.success(), "{output:?}");
    let found: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(found["vm"] == "live-stats");
    let statistics = &found["statistics"];
    ensure!(count(statistics, "dirty_pages")? > 0, "{found}");
    ensure!(statistics["interval_s"].as_f64() > Some(0.9), "{found}");
    ensure!(fs::read_dir(temporary.path())?.next().is_none());
    expect_nothing_left(guest.pid(), &mut monitor)?;
    expect_untouched(&guest, &mut monitor)
}

#[test]
fn stats_of_checkpoints_that_cannot_be_compared_say_why() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    for (name, ram_mib) in [("one", 128), ("other", 160)] {
        let mut setup = Setup::small(Kind::Private, name);
        setup.ram_mib = ram_mib;
        let guest = setup.boot()?;
        stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    }
    let list = stillframe.json(&["list"])?;
    let ids: Vec<&str> = list
        .as_array()
        .context("no list")?
        .iter()
        .filter_map(|one| one["checkpoint"].as_str())
        .collect();
    let said = stillframe.fails(&["stats", ids[0], ids[1]], 1)?;
    ensure!(said.contains("different RAM blocks"), "{said}");
    stillframe.fails(&["stats", ids[0]], 2)?;
    stillframe.fails(&["stats", "--pid", "1"], 2)?;
    stillframe.fails(&["stats", ids[0], "ffff"], 1)?;
    Ok(())
}
