//! Memory that a guest has given back to the host takes nothing of a checkpoint.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::golden;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

const PAGE: u64 = 4096;
const RAM_MIB: u32 = 256;
/// What the guest keeps.
const KEPT_MIB: u32 = 128;

fn pages(mib: u32) -> u64 {
    (u64::from(mib) << 20) / PAGE
}

/// Takes a checkpoint. Its report, and how many pages have content.
fn checkpoint(stillframe: &Stillframe, vm: &str) -> Result<(Value, u64)> {
    let report = stillframe.json(&["checkpoint", vm, "--verify"])?;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    let count = |name: &str| report["pages"][name].as_u64().context("no count");
    let content = count("captured")? - count("zero")?;
    Ok((report, content))
}

/// Has the balloon leave the guest this much, and waits until it does.
pub fn leave(monitor: &mut Qmp, mib: u32) -> Result<()> {
    let wanted = u64::from(mib) << 20;
    monitor.execute("balloon", json!({ "value": wanted }))?;
    for _ in 0..PATIENCE.as_millis() / 100 {
        let said = monitor.execute("query-balloon", json!({}))?;
        if said["actual"] == wanted {
            monitor.take_events();
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    bail!("the balloon does not get there")
}

#[test]
fn what_a_balloon_has_is_not_stored() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let image = folder.path().join("files.img");
    golden::make_image(&image, 120)?;
    let drive = format!("file={},if=virtio,format=raw,readonly=on", image.display());
    let mut setup = Setup::new(Kind::Private)
        .with(&["-name", "given-back", "-drive", &drive])
        .with(&["-device", "virtio-balloon-pci"])
        .with_drivers("sf.read=0:vda");
    setup.ram_mib = RAM_MIB;
    setup.workload.mib = 16;
    let guest = setup.boot()?;
    golden::wait_read(&guest)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let (report, before) = checkpoint(&stillframe, "given-back")?;
    let total = report["pages"]["total"].as_u64().context("no total")?;
    // All RAM blocks but the guest's own memory may have content.
    let bound = total - pages(RAM_MIB) + pages(KEPT_MIB);
    ensure!(
        before > bound,
        "only {before} pages of {total} have content"
    );
    let mut monitor = guest.second_monitor()?;
    leave(&mut monitor, KEPT_MIB)?;
    let (report, after) = checkpoint(&stillframe, "given-back")?;
    ensure!(after <= bound, "{after} pages of {bound} have content");
    let id = report["checkpoint"].as_str().context("no id")?;
    let words = ["--disks=as-they-are", "--verify"];
    let restored = Restored::start(&stillframe, id, guest.folder(), &words)?;
    restored.serial.wait_more(2, PATIENCE)?;
    let left = restored.monitor()?.execute("query-balloon", json!({}))?;
    ensure!(left["actual"] == u64::from(KEPT_MIB) << 20, "{left}");
    // What it gets back is zero, and its own.
    leave(&mut restored.monitor()?, RAM_MIB)?;
    restored.serial.wait_more(2, PATIENCE)?;
    restored.crash()?;
    expect_untouched(&guest, &mut monitor)
}
