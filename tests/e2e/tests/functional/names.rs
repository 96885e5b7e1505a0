//! Names of checkpoints and of VMs.

use anyhow::{Context, Result, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::checkpoints;

#[test]
fn a_checkpoint_has_a_whole_name_short_ones_and_a_place_from_the_end() -> Result<()> {
    let guest = Setup::small(Kind::Memfd, "named").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    stillframe.ok(&["watch", "--vm", "named", "--every", "50ms", "--count", "3"])?;
    let ids = checkpoints(&stillframe)?;
    let means = |name: &str, id: &str| {
        let shown = stillframe.json(&["show", name])?;
        ensure!(
            shown["checkpoint"] == id,
            "{name} means {}",
            shown["checkpoint"]
        );
        Ok(())
    };
    for (place, id) in ids.iter().rev().enumerate() {
        means(&format!("latest~{place}"), id)?;
        means(id, id)?;
        means(&id.to_uppercase(), id)?;
        means(&id[..12], id)?;
    }
    means("latest", &ids[2])?;
    stillframe.fails(&["show", "latest~3"], 1)?;
    // What `list` and `checkpoint` print for readers is long enough to be used again.
    let listed = stillframe.ok(&["list"])?;
    let row = listed.lines().nth(1).context("no row")?;
    means(row.split_whitespace().next().context("no id")?, &ids[0])?;
    let printed = stillframe.ok(&["checkpoint", "--vm", "named"])?;
    let short = printed.split_whitespace().nth(1).context("no id")?;
    let newest = checkpoints(&stillframe)?.pop().context("no checkpoint")?;
    means(short, &newest)
}

/// By pid, by monitor, by name; without a name a VM still has one, and keeps it.
#[test]
fn a_vm_is_named_in_three_ways() -> Result<()> {
    let (named, nameless) = (Setup::small(Kind::Pc, "three,ways"), Setup::new(Kind::Pc));
    // QEMU reads two commas in a value as one.
    let mut named = named;
    named.extra = vec![
        "-name".to_owned(),
        "guest=three,,ways,debug-threads=on".to_owned(),
    ];
    let (named, nameless) = (named.start()?, nameless.start()?);
    let stillframe = Stillframe::init(&named.folder().join("repo"))?;
    let qmp = named.qmp_path().display().to_string();
    let other = named.folder().join("qmp2").display().to_string();
    let pid = named.pid_text();
    for selector in [
        ["--pid", &pid],
        ["--qmp", &qmp],
        ["--qmp", &other],
        ["--vm", "three,ways"],
    ] {
        let line = [&["checkpoint"][..], &selector[..]].concat();
        ensure!(stillframe.json(&line)?["vm"] == "three,ways");
    }
    let first = stillframe.json(&["checkpoint", "--pid", &nameless.pid_text()])?;
    let again = stillframe.json(&["checkpoint", "--pid", &nameless.pid_text()])?;
    let label = first["vm"].as_str().context("no label")?;
    ensure!(
        label.starts_with("qemu-") && first["vm"] == again["vm"],
        "{first} {again}"
    );
    let listed = stillframe.json(&["list", "--vm", label])?;
    ensure!(
        listed.as_array().is_some_and(|all| all.len() == 2),
        "{listed}"
    );
    ensure!(
        stillframe.json(&["show", "latest~1", "--vm", label])?["checkpoint"] == first["checkpoint"]
    );
    Ok(())
}
