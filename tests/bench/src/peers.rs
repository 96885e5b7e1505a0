//! QEMU's own performance on the same work: its floor, and its own ways to save a VM.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use stillframe_harness::qmp::{Qmp, event_time_s};

/// Longest that one save may take.
const SAVE_LIMIT: Duration = Duration::from_secs(120);

/// One measurement of a way to save.
#[derive(Debug, Clone, Copy)]
pub struct Saved {
    /// The guest stood still for this long, by QEMU's own STOP and RESUME events.
    pub pause_ms: f64,
    /// Time from the command to the end of the save.
    pub total_ms: f64,
    /// The bytes that it wrote.
    pub bytes: u64,
}

/// The floor: stop, device state, cont. In milliseconds, from the first byte sent to the last answer.
pub fn floor_ms(qmp: &mut Qmp, file: &Path) -> Result<f64> {
    let begin = Instant::now();
    qmp.execute("stop", json!({}))?;
    qmp.execute(
        "xen-save-devices-state",
        json!({"filename": file, "live": false}),
    )?;
    qmp.execute("cont", json!({}))?;
    let took = begin.elapsed();
    qmp.take_events();
    Ok(took.as_secs_f64() * 1e3)
}

/// Makes an empty qcow2 disk that `savevm` can save a VM into. Returns the arguments that give it to QEMU.
pub fn make_disk(path: &Path) -> Result<Vec<String>> {
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(path)
        .arg("16G")
        .status()?;
    if !made.success() {
        bail!("qemu-img failed");
    }
    let drive = format!("file={},if=virtio,format=qcow2", path.display());
    Ok(vec!["-drive".to_owned(), drive])
}

/// Saves a guest into its disk under this name; the guest runs on.
pub fn keep_in_disk(qmp: &mut Qmp, name: &str) -> Result<()> {
    expect_silence(qmp, &format!("savevm {name}"))
}

/// Has a paused QEMU load such a state.
pub fn load_from_disk(qmp: &mut Qmp, name: &str) -> Result<()> {
    expect_silence(qmp, &format!("loadvm {name}"))
}

/// A command of the human monitor, which says something only if it fails.
fn expect_silence(qmp: &mut Qmp, command: &str) -> Result<()> {
    let said = qmp.human(command)?;
    match said.trim() {
        "" => Ok(()),
        said => bail!("{command}: {said}"),
    }
}

/// `savevm` into the VM's qcow2 disk.
pub fn savevm(qmp: &mut Qmp, disk: &Path) -> Result<Saved> {
    let before = allocated(disk)?;
    qmp.forget_events()?;
    let begin = Instant::now();
    expect_silence(qmp, "savevm bench")?;
    let total_ms = begin.elapsed().as_secs_f64() * 1e3;
    let pause_ms = pause_ms(qmp)?;
    // The first one grows the file by all it writes; a later one may reuse what delvm freed.
    let bytes = allocated(disk)?.saturating_sub(before);
    qmp.human("delvm bench")?;
    Ok(Saved {
        pause_ms,
        total_ms,
        bytes,
    })
}

/// `migrate file:` with the given capabilities on, and `cont` as soon as it is done.
pub fn migrate_to_file(qmp: &mut Qmp, file: &Path, capabilities: &[&str]) -> Result<Saved> {
    migrate(qmp, file, capabilities, None)
}

/// The same of a guest that is paused meanwhile, at this many bytes a second (0: as many as QEMU can). A guest that
/// writes faster than that might never be saved.
pub fn migrate_standing(qmp: &mut Qmp, file: &Path, bytes_per_s: u64) -> Result<Saved> {
    migrate(qmp, file, &[], Some(bytes_per_s))
}

fn migrate(
    qmp: &mut Qmp,
    file: &Path,
    capabilities: &[&str],
    standing_at: Option<u64>,
) -> Result<Saved> {
    let _ = std::fs::remove_file(file);
    set_capabilities(qmp, capabilities, true)?;
    // 0: as many as it can.
    let bytes_per_s = standing_at.unwrap_or(0);
    qmp.execute(
        "migrate-set-parameters",
        json!({"max-bandwidth": bytes_per_s}),
    )?;
    qmp.forget_events()?;
    let begin = Instant::now();
    if standing_at.is_some() {
        qmp.execute("stop", json!({}))?;
    }
    qmp.execute(
        "migrate",
        json!({"uri": format!("file:{}", file.display())}),
    )?;
    wait_completed(qmp)?;
    let total_ms = begin.elapsed().as_secs_f64() * 1e3;
    if qmp.status()? != "running" {
        qmp.execute("cont", json!({}))?;
    }
    let pause_ms = pause_ms(qmp)?;
    // QEMU says `completed` a little before its migration thread is done, and aborts ("Unknown
    // ending state") when the next save begins in between.
    std::thread::sleep(Duration::from_secs(1));
    set_capabilities(qmp, capabilities, false)?;
    let bytes = allocated(file)?;
    std::fs::remove_file(file)?;
    Ok(Saved {
        pause_ms,
        total_ms,
        bytes,
    })
}

/// Saves a paused guest into a mapped-ram file, which stays; the guest stays paused.
pub fn save_mapped_ram(qmp: &mut Qmp, file: &Path) -> Result<()> {
    set_capabilities(qmp, &["mapped-ram"], true)?;
    qmp.execute("migrate-set-parameters", json!({"max-bandwidth": 0}))?;
    qmp.execute("stop", json!({}))?;
    qmp.execute(
        "migrate",
        json!({"uri": format!("file:{}", file.display())}),
    )?;
    wait_completed(qmp)
}

/// Has a waiting QEMU load such a file.
pub fn load_mapped_ram(qmp: &mut Qmp, file: &Path) -> Result<()> {
    set_capabilities(qmp, &["mapped-ram"], true)?;
    qmp.execute(
        "migrate-incoming",
        json!({"uri": format!("file:{}", file.display())}),
    )?;
    wait_completed(qmp)
}

/// Turns these on or off.
pub fn set_capabilities(qmp: &mut Qmp, names: &[&str], on: bool) -> Result<()> {
    let list: Vec<Value> = names
        .iter()
        .map(|name| json!({"capability": name, "state": on}))
        .collect();
    qmp.execute("migrate-set-capabilities", json!({"capabilities": list}))?;
    Ok(())
}

fn wait_completed(qmp: &mut Qmp) -> Result<()> {
    let begin = Instant::now();
    loop {
        let answer = qmp.execute("query-migrate", json!({}))?;
        match answer["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => bail!("the migration failed: {answer}"),
            _ if begin.elapsed() > SAVE_LIMIT => bail!("no end after {SAVE_LIMIT:?}: {answer}"),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Time from the first STOP to the last RESUME.
fn pause_ms(qmp: &mut Qmp) -> Result<f64> {
    let resume = qmp.wait_event("RESUME", Duration::from_secs(10))?;
    let events = qmp.take_events();
    let stop = events
        .iter()
        .find(|event| event["event"] == "STOP")
        .context("no STOP event")?;
    let last = events
        .iter()
        .rfind(|event| event["event"] == "RESUME")
        .unwrap_or(&resume);
    Ok((event_time_s(last) - event_time_s(stop)) * 1e3)
}

/// Bytes that a file takes on the disk.
fn allocated(file: &Path) -> Result<u64> {
    Ok(std::fs::metadata(file)?.blocks() * 512)
}
