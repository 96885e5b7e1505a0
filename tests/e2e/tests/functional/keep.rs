//! `forget`, `prune` and `check` on a repository of real checkpoints.

use anyhow::{Result, ensure};
use serde_json::Value;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup, Workload};
use stillframe_harness::health::checkpoints;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

fn ids(list: &Value) -> Vec<&str> {
    let list = list.as_array().into_iter().flatten();
    list.filter_map(|one| one["checkpoint"].as_str()).collect()
}

#[test]
fn forgetting_and_pruning_free_space_and_nothing_else() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut setup = Setup::small(Kind::Private, "kept-by-rule");
    // All of little memory, over and over.
    setup.workload = Workload {
        mib: 2,
        pattern: "random",
        tick_ms: 20,
        writes_per_tick: 600,
        share: 4,
    };
    let guest = setup.boot()?;
    // Whole pages, because what replaced them frees them; deltas need what they change.
    stillframe.ok(&[
        "watch",
        "--vm",
        "kept-by-rule",
        "--every",
        "400ms",
        "--count",
        "6",
        "--delta-cache",
        "0",
    ])?;
    let all = checkpoints(&stillframe)?;

    // A dry run says what would be, and does nothing.
    let rule = [
        "forget",
        "--keep-last",
        "2",
        "--keep-hourly",
        "1",
        "--dry-run",
        "--prune",
    ];
    let planned = stillframe.json(&rule)?;
    ensure!(ids(&planned["forgotten"]) == all[..4], "{planned}");
    ensure!(
        planned["kept"][0]["reasons"] == serde_json::json!(["last"]),
        "{planned}"
    );
    ensure!(
        planned["kept"][1]["reasons"] == serde_json::json!(["last", "hourly"]),
        "{planned}"
    );
    ensure!(checkpoints(&stillframe)? == all);

    // By name, then by rule, then the space.
    let by_name = stillframe.json(&["forget", &all[0][..10], "latest~4"])?;
    ensure!(ids(&by_name["forgotten"]) == all[..2], "{by_name}");
    ensure!(checkpoints(&stillframe)? == all[2..]);
    let other_vm = stillframe.json(&["forget", "--vm", "another VM", "--keep-last", "1"])?;
    ensure!(ids(&other_vm["forgotten"]).is_empty(), "{other_vm}");
    let by_rule = stillframe.json(&["forget", "--keep-last", "1", "--keep-weekly", "3"])?;
    ensure!(ids(&by_rule["forgotten"]) == all[2..5], "{by_rule}");
    ensure!(checkpoints(&stillframe)? == all[5..]);
    stillframe.ok(&["check", "--read-data"])?;
    space(&stillframe)?;

    // What is left needed none of the others.
    drop(guest);
    let restored = Restored::start(&stillframe, "latest", folder.path(), &["--verify"])?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    Ok(())
}

fn space(stillframe: &Stillframe) -> Result<()> {
    let freed = |report: &Value| {
        let [before, after] = ["bytes_before", "bytes_after"].map(|field| report[field].as_u64());
        before.zip(after).map(|(before, after)| before - after)
    };
    let planned = stillframe.json(&["prune", "--dry-run"])?;
    ensure!(
        planned["blobs_unused"] != 0 && freed(&planned) > Some(0),
        "{planned}"
    );
    let before = stillframe.json(&["check"])?["pack_bytes"].as_u64();
    ensure!(before == planned["bytes_before"].as_u64(), "{planned}");
    let pruned = stillframe.json(&["prune"])?;
    let after = stillframe.json(&["check", "--read-data"])?;
    ensure!(
        after["clean"] == true && after["checkpoints"] == 1,
        "{after}"
    );
    ensure!(
        after["pack_bytes"] == pruned["bytes_after"] && freed(&pruned) > Some(0),
        "{pruned}"
    );
    ensure!(after["pack_bytes"].as_u64() < before, "{after}");
    // Nothing is left to do.
    let again = stillframe.json(&["prune"])?;
    ensure!(
        freed(&again) == Some(0) && again["packs_removed"] == 0,
        "{again}"
    );
    Ok(())
}

/// A watch whose last checkpoint is forgotten under it starts anew, and everything fits together.
#[test]
fn a_repository_is_pruned_while_a_watch_goes_on() -> Result<()> {
    let guest = Setup::small(Kind::Memfd, "pruned-under").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let line = [
        "watch",
        "--vm",
        "pruned-under",
        "--every",
        "250ms",
        "--verify",
        "--json",
    ];
    let mut watch = stillframe_harness::running::Running::start(stillframe.command(&line)?)?;
    watch.wait_results(2)?;
    for _ in 0..3 {
        let before = watch.results()?.len();
        stillframe.ok(&["forget", "--keep-last", "1", "--prune"])?;
        watch.wait_results(before + 1)?;
        stillframe.ok(&["forget", "latest", "--prune"])?;
        watch.wait_results(before + 3)?;
    }
    watch.signal("TERM")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    let results = ended.results()?;
    ensure!(
        results
            .iter()
            .all(|result| result["verify"]["differing"] == 0),
        "{results:?}"
    );
    ensure!(stillframe.json(&["check", "--read-data"])?["clean"] == true);
    let restored = Restored::start(&stillframe, "latest", guest.folder(), &["--verify"])?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    Ok(())
}
