//! Ways to compress the pages of a migration: each moves the VM whole, and the smaller one sends less of each page.

use anyhow::{Result, ensure};
use serde_json::Value;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::migration::Order;
use stillframe_harness::running::PATIENCE;

/// From the largest to the smallest.
const WAYS: [&str; 3] = ["none", "lz4", "zstd:3"];

#[test]
fn a_vm_moves_whole_however_its_pages_are_compressed() -> Result<()> {
    let guest = Setup::small(Kind::Private, "packed").boot()?;
    let stillframe = Stillframe::at(&guest.folder().join("none"));
    let mut pid = guest.pid();
    // A VM ends when it is dropped.
    let mut vms = Vec::new();
    for mode in ["pre-copy", "post-copy"] {
        let mut before = f64::INFINITY;
        for way in WAYS {
            let mut order = Order::of(&guest, format!("{mode}-{}", &way[..3]));
            let words = ["--mode", mode, "--compression", way, "--verify"];
            // What post-copy fetches is compared by the guest itself.
            let words = &words[..if mode == "pre-copy" { 5 } else { 4 }];
            order.migrate = words.iter().map(|&word| word.to_owned()).collect();
            let moved = order.perform(&stillframe, pid)?;
            let sent = &moved.sent;
            let reported = sent["compression"].as_str();
            let expected = (mode == "pre-copy").then_some(way);
            ensure!(reported == expected, "{way}: {sent}");
            let number = |value: &Value| value.as_f64().unwrap_or_default();
            // A busy machine has more rounds of pre-copy, in which pages are sent again; post-copy sends each once.
            let pages = match mode {
                "pre-copy" => number(&sent["pages"]["sent"]),
                _ => 1.0,
            };
            let bytes = number(&sent["bytes_sent"]) / pages;
            ensure!(
                bytes > 0.0 && bytes < 0.97 * before,
                "{mode}, {way}: {bytes} after {before}: {sent}"
            );
            before = bytes;
            moved.vm.serial.wait_ticks(3, PATIENCE)?;
            pid = moved.vm.pid;
            vms.push(moved.vm);
        }
    }
    Ok(())
}
