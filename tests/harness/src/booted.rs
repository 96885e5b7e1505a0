//! Guests that have booted before: QEMU loads the state in which one like it was saved, a few ticks after its boot.
//!
//! Most tests do not care how their guest came to run, and a boot under TCG costs more than all the rest of them:
//! four seconds of a processor instead of a third of one. The state is made by QEMU itself, by a migration to a
//! file, once for each kind of guest. A test for which the boot matters calls [`Setup::boot`].

use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::guest::{BOOT_LIMIT, Guest, Kind, Setup, guests};

/// States older than this are removed when a new one is made: their QEMU, kernel or workload has changed.
const AGE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// Time for QEMU to save a guest.
const SAVE_LIMIT: Duration = Duration::from_secs(60);
/// Between two questions whether it has.
const SAVE_POLL: Duration = Duration::from_millis(50);

impl Setup {
    /// Starts it from the state that one like it had after its boot.
    pub fn booted(&self) -> Result<Guest> {
        if self.kind == Kind::KvmBootSector {
            // It takes no time.
            return self.boot();
        }
        let incoming = format!("file:{}", self.booted_state()?.display());
        let guest = self.clone().with(&["-incoming", &incoming]).start()?;
        guest.serial.wait_ticks(3, BOOT_LIMIT)?;
        Ok(guest)
    }

    /// The file of that state; it is made if there is none for this QEMU, kernel and workload.
    fn booted_state(&self) -> Result<PathBuf> {
        let folder = guests()?.join("booted");
        fs::create_dir_all(&folder)?;
        let key = self.key()?;
        let path = folder.join(format!("{key:016x}"));
        // Tests of several processes want it at the same time.
        let lock = File::create(folder.join(format!("{key:016x}.lock")))?;
        lock.lock()?;
        if !path.exists() {
            remove_old(&folder);
            let unfinished = path.with_extension("unfinished");
            save(&self.boot()?, &unfinished).context("cannot save a booted guest")?;
            fs::rename(&unfinished, &path)?;
        }
        Ok(path)
    }

    /// Differs where the state would: its name is not in it, and where its sockets are.
    fn key(&self) -> Result<u64> {
        let nowhere = Path::new("/nowhere");
        let mut arguments = self.arguments(nowhere)?;
        if let Some(name) = arguments.iter().position(|word| word == "-name") {
            arguments.drain(name..name + 2);
        }
        let mut hasher = DefaultHasher::new();
        arguments.hash(&mut hasher);
        let program = match self.program.components().count() {
            1 => Path::new("/usr/bin").join(&self.program),
            _ => self.program.clone(),
        };
        for file in arguments.iter().map(PathBuf::from).chain([program]) {
            if let Ok(metadata) = file.metadata() {
                (metadata.ino(), metadata.len()).hash(&mut hasher);
                (metadata.mtime(), metadata.mtime_nsec()).hash(&mut hasher);
            }
        }
        Ok(hasher.finish())
    }
}

/// Removes files that were made long ago; one that is still needed is made again.
fn remove_old(folder: &Path) {
    for file in fs::read_dir(folder).into_iter().flatten().flatten() {
        let modified = file.metadata().and_then(|metadata| metadata.modified());
        let age = modified.ok().and_then(|time| time.elapsed().ok());
        if age.is_some_and(|age| age > AGE_MAX) {
            let _ = fs::remove_file(file.path());
        }
    }
}

/// Has QEMU write the state of a running guest.
fn save(guest: &Guest, path: &Path) -> Result<()> {
    let mut monitor = guest.second_monitor()?;
    // While it runs: one that was stopped would be stopped where it is loaded.
    let uri = format!("file:{}", path.display());
    monitor.execute("migrate", json!({ "uri": uri }))?;
    let polls = SAVE_LIMIT.as_millis() / SAVE_POLL.as_millis();
    for _ in 0..polls {
        let status = monitor.execute("query-migrate", json!({}))?;
        match status["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => bail!("QEMU says: {status}"),
            _ => std::thread::sleep(SAVE_POLL),
        }
    }
    bail!("it takes longer than {SAVE_LIMIT:?}")
}
