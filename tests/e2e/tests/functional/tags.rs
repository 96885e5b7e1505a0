//! Tags and notes of checkpoints, and what is listed and kept by them and by time.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::checkpoints;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

/// The ids in a list of `list` or `forget`.
fn ids(list: &Value) -> Vec<String> {
    let list = list.as_array().into_iter().flatten();
    let ids = list.filter_map(|one| one["checkpoint"].as_str());
    ids.map(str::to_owned).collect()
}

fn listed(stillframe: &Stillframe, options: &[&str]) -> Result<Vec<String>> {
    Ok(ids(&stillframe.json(&[&["list"], options].concat())?))
}

/// A VM of this name with four checkpoints: two of a watch with tag `auto`, one with tags and a note, one without.
fn tagged(stillframe: &Stillframe, name: &str) -> Result<(Guest, Vec<String>)> {
    let guest = Setup::small(Kind::Memfd, name).booted()?;
    let watch = ["watch", "--vm", name, "--every", "100ms", "--count", "2"];
    stillframe.ok(&[&watch[..], &["--tag", "auto", "--note", "by the hour"]].concat())?;
    let line = [
        "checkpoint",
        "--vm",
        name,
        "--tag",
        "release/1.2",
        "--tag",
        "auto",
    ];
    stillframe.ok(&[&line[..], &["--note", "before the upgrade, büro 3"]].concat())?;
    stillframe.ok(&["checkpoint", "--vm", name])?;
    let taken = listed(stillframe, &["--vm", name])?;
    ensure!(taken.len() == 4, "{taken:?}");
    Ok((guest, taken))
}

#[test]
fn tags_and_a_note_are_kept_shown_and_copied() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let (guest, taken) = tagged(&stillframe, "annotated")?;
    let expected = [
        (json!(["auto"]), json!("by the hour")),
        (json!(["auto"]), json!("by the hour")),
        (
            json!(["auto", "release/1.2"]),
            json!("before the upgrade, büro 3"),
        ),
        (json!([]), Value::Null),
    ];
    let all = stillframe.json(&["list"])?;
    for (place, (tags, note)) in expected.iter().enumerate() {
        let shown = stillframe.json(&["show", &taken[place]])?;
        for object in [&all[place], &shown] {
            ensure!(
                object["tags"] == *tags && object["note"] == *note,
                "{object}"
            );
        }
    }
    let text = stillframe.ok(&["show", &taken[2]])?;
    for words in ["auto, release/1.2", "before the upgrade, büro 3"] {
        ensure!(text.contains(words), "{text}");
    }
    let table = stillframe.ok(&["list"])?;
    ensure!(
        table.contains("TAGS") && table.contains("auto, release/1.2"),
        "{table}"
    );
    // Nothing in the repository can be read without its key, tags neither.
    let manifest = stillframe.repository().join("manifests").join(&taken[2]);
    let bytes = std::fs::read(manifest)?;
    ensure!(!bytes.windows(11).any(|bytes| bytes == b"release/1.2"));

    let other = Stillframe::init(&folder.path().join("other"))?;
    let password = folder.path().join("password");
    std::fs::write(&password, stillframe_harness::cli::PASSWORD)?;
    let (to, password) = (other.repository().display(), password.display());
    let [to, password] = [to.to_string(), password.to_string()];
    stillframe.ok(&[
        "copy",
        &taken[2],
        "--to",
        &to,
        "--to-password-file",
        &password,
    ])?;
    let copied = other.json(&["show", "latest"])?;
    ensure!(
        copied["tags"] == expected[2].0 && copied["note"] == expected[2].1,
        "{copied}"
    );

    drop(guest);
    let restored = Restored::start(&stillframe, &taken[2], folder.path(), &["--verify"])?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    ensure!(stillframe.json(&["check", "--read-data"])?["clean"] == true);
    Ok(())
}

#[test]
fn checkpoints_are_listed_by_tag_time_and_number() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let (_one, ones) = tagged(&stillframe, "listed-one")?;
    // An age has to tell the two VMs apart.
    std::thread::sleep(Duration::from_secs(2));
    let (_two, twos) = tagged(&stillframe, "listed-two")?;
    let all = checkpoints(&stillframe)?;
    ensure!(all == [ones.clone(), twos.clone()].concat());
    let means = |options: &[&str], expected: &[&str]| {
        let listed = listed(&stillframe, options)?;
        ensure!(listed == expected, "{options:?}: {listed:?}");
        Ok(())
    };
    means(
        &["--vm", "listed-two", "--tag", "auto"],
        &[&twos[0], &twos[1], &twos[2]],
    )?;
    means(
        &["--tag", "auto", "--tag", "release/1.2"],
        &[&ones[2], &twos[2]],
    )?;
    means(&["--tag", "AUTO"], &[])?;
    means(&["--last", "1"], &[&ones[3], &twos[3]])?;
    means(&["--last", "1", "--tag", "auto"], &[&ones[2], &twos[2]])?;

    // What `list` says can be given back to it, whichever way it says it.
    let time = stillframe.json(&["show", &twos[0]])?["time"].clone();
    let time = time.as_str().context("no time")?;
    let shared: Vec<&str> = twos.iter().map(String::as_str).collect();
    means(&["--since", time], &shared)?;
    means(&["--since", time, "--until", time], &[&twos[0]])?;
    let table = stillframe.ok(&["list", "--vm", "listed-two"])?;
    let row = table.lines().nth(1).context("no row")?;
    let cells: Vec<&str> = row.split_whitespace().collect();
    let shown = format!("{} {}", cells[2], cells[3]);
    means(
        &["--since", &shown, "--until", &shown, "--last", "9"],
        &[&twos[0]],
    )?;

    means(&["--until", "2020-01-01"], &[])?;
    means(&["--since", "2999-01-01"], &[])?;
    means(&["--until", "0001-01-01T00:00:00+01:00"], &[])?;
    let every: Vec<&str> = all.iter().map(String::as_str).collect();
    means(&["--since", "1d"], &every)?;
    means(&["--until", "1h"], &[])?;
    Ok(())
}

#[test]
fn the_table_has_zones_and_milliseconds_where_they_are_needed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = Setup::small(Kind::Memfd, "clocked").booted()?;
    stillframe.ok(&[
        "watch", "--vm", "clocked", "--every", "50ms", "--count", "4",
    ])?;
    drop(guest);
    let in_zone = |arguments: &[&str]| -> Result<String> {
        // Such a zone needs no files of the host: five and a half hours before UTC.
        let mut command = stillframe.command(arguments)?;
        let output = command.env("TZ", "TST-5:30").output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let table = in_zone(&["list"])?;
    let column = |line: &str| {
        line.split_whitespace()
            .skip(2)
            .take(2)
            .collect::<Vec<_>>()
            .join(" ")
    };
    let mut times: Vec<String> = table.lines().skip(1).take(4).map(column).collect();
    for time in &times {
        ensure!(
            time.len() == "2026-11-24 10:00:00.123+05:30".len(),
            "{table}"
        );
        ensure!(time.ends_with("+05:30"), "{table}");
    }
    times.dedup();
    ensure!(times.len() == 4, "{table}");
    // One is not mistaken for another.
    let one = in_zone(&["list", "--last", "1"])?;
    let time = column(one.lines().nth(1).context("no row")?);
    ensure!(time.len() == "2026-11-24 10:00:00+05:30".len(), "{one}");
    let json: Value = serde_json::from_str(&in_zone(&["list", "--json"])?)?;
    let exact = json[3]["time"].as_str().context("no time")?;
    ensure!(exact.ends_with('Z'), "{exact}");
    let shown = in_zone(&["show", "latest"])?;
    ensure!(shown.contains(&format!("{time} ({exact})")), "{shown}");
    Ok(())
}

#[test]
fn rules_of_tags_and_ages_keep_what_they_say() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let (guest, taken) = tagged(&stillframe, "retained")?;
    let reasons = |plan: &Value, place: usize| {
        let kept = plan["kept"].as_array().into_iter().flatten();
        let mut of = kept.filter(|one| one["checkpoint"] == taken[place].as_str());
        of.next().map(|one| one["reasons"].clone())
    };
    let plan = |options: &[&str]| stillframe.json(&[&["forget", "--dry-run"], options].concat());

    let by_tag = plan(&["--keep-tag", "release/1.2", "--keep-tag", "unused"])?;
    ensure!(reasons(&by_tag, 2) == Some(json!(["tag"])), "{by_tag}");
    ensure!(ids(&by_tag["forgotten"]) == [&taken[..2], &taken[3..]].concat());
    let by_age = plan(&["--keep-within", "1h"])?;
    ensure!(ids(&by_age["forgotten"]).is_empty(), "{by_age}");
    ensure!(reasons(&by_age, 0) == Some(json!(["within"])), "{by_age}");
    let by_calendar = plan(&["--keep-monthly", "1", "--keep-yearly", "1"])?;
    ensure!(
        ids(&by_calendar["forgotten"]) == taken[..3],
        "{by_calendar}"
    );
    ensure!(reasons(&by_calendar, 3) == Some(json!(["monthly", "yearly"])));
    // The rules look at those with a tag, and leave the others alone.
    let among = plan(&["--tag", "auto", "--keep-last", "1"])?;
    ensure!(ids(&among["forgotten"]) == taken[..2], "{among}");
    ensure!(reasons(&among, 3) == Some(json!([])), "{among}");

    // By name only what goes has a line, and the others are counted.
    let printed = stillframe.ok(&["forget", &taken[0], "--dry-run"])?;
    let lines: Vec<&str> = printed.lines().collect();
    ensure!(
        lines.len() == 3 && lines[1].starts_with("forget  "),
        "{printed}"
    );
    ensure!(
        lines[2] == "1 checkpoint would be forgotten, 3 kept",
        "{printed}"
    );
    ensure!(checkpoints(&stillframe)? == taken);

    // Two seconds later a short age does not reach back to them any more.
    std::thread::sleep(Duration::from_secs(2));
    stillframe.ok(&["checkpoint", "--vm", "retained"])?;
    let newest = checkpoints(&stillframe)?[4].clone();
    let line = ["forget", "--keep-within", "2s", "--keep-tag", "release/1.2"];
    stillframe.ok(&[&line[..], &["--prune"]].concat())?;
    ensure!(checkpoints(&stillframe)? == [taken[2].clone(), newest]);
    ensure!(stillframe.json(&["check", "--read-data"])?["clean"] == true);
    drop(guest);
    let restored = Restored::start(&stillframe, &taken[2], folder.path(), &["--verify"])?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    Ok(())
}
