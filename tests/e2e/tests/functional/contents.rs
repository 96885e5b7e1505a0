//! What the pages of a checkpoint are (`show --contents`), counted again from its exported memory and disk.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stillframe_harness::committing::Committing;
use stillframe_harness::databases::Database;
use stillframe_harness::running::Running;

const PAGE: usize = 4096;

/// Exports a disk, or all of the main memory, and returns its bytes.
fn exported(it: &Committing, id: &str, what: &[&str], to: &Path) -> Result<Vec<u8>> {
    let file = to.display().to_string();
    let line = ["export", id, "-o", &file];
    it.stillframe.ok(&[&line[..], what].concat())?;
    let bytes = fs::read(to)?;
    fs::remove_file(to)?;
    Ok(bytes)
}

/// The pages of the main memory that are zero, on the disk, and equal to one before.
fn counted(memory: &[u8], disk: &[u8]) -> [u64; 3] {
    let blocks: HashSet<&[u8]> = disk.chunks(PAGE).collect();
    let mut seen = HashSet::new();
    let [mut zero, mut on_disk, mut duplicate] = [0; 3];
    for page in memory.chunks(PAGE) {
        if page.iter().all(|&byte| byte == 0) {
            zero += 1;
        } else if blocks.contains(page) {
            on_disk += 1;
        } else if !seen.insert(page) {
            duplicate += 1;
        }
    }
    [zero, on_disk, duplicate]
}

fn contents(it: &Committing, id: &str) -> Result<(Value, u64)> {
    let mut shown = it.stillframe.json(&["show", id, "--contents"])?;
    let pages = shown["pages"]["total"].as_u64().context("no pages")?;
    Ok((shown["contents"].take(), pages))
}

#[test]
fn pages_that_are_on_the_disk_are_counted() -> Result<()> {
    let it = Committing::database("contents", Database::Sqlite)?;
    let pid = it.guest.pid_text();
    let watch = ["watch", "--pid", &pid, "--every", "1s", "--count", "3"];
    let more = ["--disks", "capture", "--pause-limit", "60s", "--json"];
    let watch = it.stillframe.command(&[&watch[..], &more].concat())?;
    let taken = Running::start(watch)?.end()?.results()?;
    let ids: Vec<&str> = taken
        .iter()
        .filter_map(|one| one["checkpoint"].as_str())
        .collect();
    let [first, _, last] = ids[..] else {
        anyhow::bail!("{taken:?}");
    };
    for id in [first, last] {
        let (classes, pages) = contents(&it, id)?;
        let class = |name: &str| classes[name].as_u64().context("no such class");
        let file = it.guest.folder().join("exported");
        let memory = exported(&it, id, &["--format", "raw"], &file)?;
        let disk = exported(&it, id, &["--disk", "journal"], &file)?;
        // Other RAM blocks, video memory for instance, are in no raw export.
        let others = pages - (memory.len() / PAGE) as u64;
        let names = ["zero", "on_disk", "duplicate"];
        for (name, least) in names.into_iter().zip(counted(&memory, &disk)) {
            let found = class(name)?;
            ensure!(
                (least..=least + others).contains(&found),
                "{name} {least}: {classes}"
            );
        }
        // SQLite's file in the guest's page cache.
        ensure!(class("on_disk")? > 4, "{classes}");
        ensure!((class("changed")? > 0) == (id == last), "{classes}");
        let all = names.into_iter().chain(["changed", "other"]);
        let all = all.map(class).sum::<Result<u64>>()?;
        ensure!(all == pages, "{all} of {pages}");
    }
    let text = it.stillframe.ok(&["show", last, "--contents"])?;
    ensure!(
        text.contains("CONTENT") && text.contains("on disk"),
        "{text}"
    );

    // All of them, one after the other.
    let svg = it.guest.folder().join("contents.svg");
    let path = svg.display().to_string();
    let line = ["stats", "--contents", "--vm", "contents", "--svg", &path];
    let rows = it.stillframe.json(&line)?;
    let rows = rows.as_array().context("no rows")?;
    let found: Vec<&str> = rows
        .iter()
        .filter_map(|row| row["checkpoint"].as_str())
        .collect();
    ensure!(found == ids, "{found:?}");
    for row in rows {
        let id = row["checkpoint"].as_str().context("no id")?;
        let (shown, pages) = contents(&it, id)?;
        ensure!(row["contents"] == shown && row["pages"] == pages, "{row}");
    }
    let svg = fs::read_to_string(svg)?;
    ensure!(svg.contains("on disk") && svg.contains(&last[..8]), "{svg}");
    let other = ["stats", "--contents", "--vm", "another"];
    it.stillframe.fails(&other, 1)?;
    // Its parent is gone.
    it.stillframe.ok(&["forget", first, ids[1]])?;
    let (alone, _) = contents(&it, last)?;
    ensure!(alone["changed"] == 0, "{alone}");
    Ok(())
}
