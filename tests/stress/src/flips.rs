//! Bit flips and truncations of a repository's files: `check --read-data` must find every one, and a
//! restore must never continue silently with wrong memory.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::random::Random;
use stillframe_harness::results::{self, Claim, Goal};

/// A damage done to one file, and how to undo it.
#[derive(Debug)]
pub struct Damage {
    file: PathBuf,
    original: Vec<u8>,
    what: String,
}

impl Damage {
    /// Flips one bit, or cuts the file short, at a random place of a random file.
    pub fn random(files: &[PathBuf], random: &mut Random) -> Result<Damage> {
        let file = files[random.below(files.len() as u64) as usize].clone();
        let original = fs::read(&file)?;
        let mut bytes = original.clone();
        let at = random.below(bytes.len() as u64) as usize;
        let what = if random.below(4) == 0 {
            bytes.truncate(at);
            format!("cut to {at} of {} bytes", original.len())
        } else {
            let bit = random.below(8);
            bytes[at] ^= 1 << bit;
            format!("bit {bit} of byte {at} flipped")
        };
        write_anew(&file, &bytes)?;
        Ok(Damage {
            file,
            original,
            what,
        })
    }

    /// Puts the file back.
    pub fn undo(&self) -> Result<()> {
        write_anew(&self.file, &self.original)
    }

    /// The damaged file, and the kind of damage.
    pub fn describe(&self) -> String {
        let folder = self
            .file
            .parent()
            .and_then(Path::file_name)
            .unwrap_or_default();
        format!("{}: {}", folder.to_string_lossy(), self.what)
    }
}

/// Repository files may be read-only; root writes them all the same.
fn write_anew(file: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(file, bytes).with_context(|| file.display().to_string())
}

/// All files of a repository, but for locks and leftovers.
pub fn files(repository: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![repository.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let name = entry.file_name();
            if entry.file_type()?.is_dir() {
                if name != "locks" && name != "tmp" {
                    folders.push(entry.path());
                }
            } else if entry.metadata()?.len() > 0 {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}

/// A repository of a few checkpoints of a small real guest.
pub fn sample(folder: &Path) -> Result<Stillframe> {
    let stillframe = Stillframe::init(&folder.join("repo"))?;
    let mut setup = Setup {
        ram_mib: 96,
        ..Setup::new(Kind::Private)
    };
    setup.workload.mib = 8;
    let guest = setup.boot()?;
    let pid = guest.pid_text();
    stillframe.ok(&[
        "watch", "--pid", &pid, "--every", "500ms", "--count", "3", "--json",
    ])?;
    Ok(stillframe)
}

/// `check --read-data` on a damaged repository. True if it said so, with exit code 3; an error
/// if it crashed.
pub fn found(stillframe: &Stillframe, damage: &Damage) -> Result<bool> {
    let output = stillframe.run(&["check", "--read-data"])?;
    match output.status.code() {
        Some(3) => Ok(true),
        Some(0) => Ok(false),
        code => bail!(
            "check ended with {code:?} on {}: {}",
            damage.describe(),
            String::from_utf8_lossy(&output.stderr)
        ),
    }
}

/// `damages` damages, one at a time; writes `docs/results/flips/`. A twentieth of them is also
/// restored from: either that fails, or every page is as it was.
pub fn run(damages: u64, seed: u64) -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-flips-")
        .tempdir()?;
    let stillframe = sample(folder.path())?;
    let files = files(stillframe.repository())?;
    let mut random = Random::new(seed);
    let mut raw: Vec<Value> = Vec::new();
    let (mut missed, mut restores_refused, mut restores_exact) = (0u64, 0u64, 0u64);
    for number in 0..damages {
        let damage = Damage::random(&files, &mut random)?;
        let seen = found(&stillframe, &damage)?;
        if !seen {
            missed += 1;
            eprintln!("missed: {}", damage.describe());
        }
        if number % 20 == 0 {
            match restore(&stillframe, folder.path())? {
                true => restores_exact += 1,
                false => restores_refused += 1,
            }
        }
        raw.push(json!({"damage": damage.describe(), "found": seen}));
        damage.undo()?;
        if number % 100 == 99 {
            eprintln!("{} of {damages} damages, {missed} missed", number + 1);
        }
    }
    stillframe.ok(&["check", "--read-data"])?;
    println!(
        "{damages} damages over {} files: {missed} missed; of the restores tried {restores_refused} were refused, {restores_exact} needed nothing damaged and were exact",
        files.len()
    );
    results::write_raw("flips", "damages.jsonl", &raw)?;
    results::write_summary(
        "flips",
        &[Claim::new(
            "flips-found",
            Goal::Zero,
            missed as f64,
            "cases",
            "cargo xtask bench flips",
        )
        .if_enough(damages >= 1000)],
    )?;
    match missed {
        0 => Ok(()),
        missed => bail!("{missed} damages were missed"),
    }
}

/// True when the restore succeeded and verified every page; false when it was refused.
pub fn restore(stillframe: &Stillframe, folder: &Path) -> Result<bool> {
    let qmp = folder.join("flip.qmp").display().to_string();
    let output = stillframe.run(&[
        "restore", "latest", "--qmp", &qmp, "--paused", "--verify", "--json",
    ])?;
    match output.status.code() {
        Some(0) => {
            let report: Value = serde_json::from_slice(&output.stdout)?;
            let differing = report["verify"]["differing"].as_u64();
            let mut monitor = stillframe_harness::qmp::Qmp::connect(Path::new(&qmp))?;
            monitor.execute("quit", json!({})).ok();
            match differing {
                Some(0) => Ok(true),
                other => bail!("a restore went on with {other:?} differing pages"),
            }
        }
        Some(3 | 1) => Ok(false),
        code => bail!("restore ended with {code:?}"),
    }
}
