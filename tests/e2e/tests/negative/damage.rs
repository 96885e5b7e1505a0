//! Damaged repository files: whatever meets one says so with exit code 3; nothing panics, and no
//! restore continues with wrong memory.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_untouched, expect_whole, processes_with};
use stillframe_harness::restored::Restored;
use stillframe_harness::running::Running;
use stillframe_stress::flips;

/// One way to damage a file.
#[derive(Debug, Clone, Copy)]
enum Harm {
    /// The second half is gone.
    Halved,
    /// One bit of the first bytes.
    HeaderBit,
    /// One bit in the middle.
    MiddleBit,
    /// The file itself.
    Removed,
}

const HARMS: [Harm; 4] = [
    Harm::Halved,
    Harm::HeaderBit,
    Harm::MiddleBit,
    Harm::Removed,
];

impl Harm {
    fn apply(self, file: &Path) -> Result<()> {
        let mut bytes = fs::read(file)?;
        let middle = bytes.len() / 2;
        match self {
            Harm::Halved => bytes.truncate(middle),
            Harm::HeaderBit => bytes[9] ^= 1,
            Harm::MiddleBit => bytes[middle] ^= 0x10,
            Harm::Removed => return Ok(fs::remove_file(file)?),
        }
        fs::write(file, bytes)?;
        Ok(())
    }
}

/// How a command must end. Config and key are needed for everything; manifests for what names
/// checkpoints; the index to write and to read pages; a pack only to read them, and for a whole check. What is gone
/// altogether is another matter than damage: no repository, no checkpoint, an empty index.
fn exit_code(area: &str, harm: Harm, command: &str) -> Result<i32> {
    let removed = matches!(harm, Harm::Removed);
    Ok(match (area, command) {
        ("config", _) if removed => 1,
        ("config" | "keys", _) => 3,
        ("manifests", "checkpoint") => 0,
        ("manifests", "list" | "check") if removed => 0,
        ("manifests", _) if removed => 1,
        ("manifests", _) => 3,
        ("index", "list" | "show") => 0,
        ("index", "checkpoint") if removed => 0,
        ("index", _) => 3,
        ("packs", "restore" | "check") => 3,
        ("packs", _) => 0,
        _ => bail!("an unknown folder {area}"),
    })
}

/// The folder of the repository that a file lies in, or its own name.
fn area(repository: &Path, file: &Path) -> Result<String> {
    let relative = file.strip_prefix(repository)?;
    let first = relative.iter().next().context("no name")?;
    Ok(first.to_string_lossy().into_owned())
}

struct Bench {
    stillframe: Stillframe,
    guest: Guest,
    qmp: String,
    ids: Vec<String>,
}

impl Bench {
    /// One checkpoint, so that every file is needed to restore it.
    fn new() -> Result<Bench> {
        let guest = Setup::small(Kind::Memfd, "damage").booted()?;
        let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
        stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
        let ids = checkpoints(&stillframe)?;
        let qmp = guest.folder().join("damaged.qmp").display().to_string();
        Ok(Bench {
            stillframe,
            guest,
            qmp,
            ids,
        })
    }

    /// A checkpoint taken without a pack that is gone or cut short can be restored. Damage within a
    /// pack shows only when it is read.
    fn expect_good(&self, harm: Harm) -> Result<()> {
        if matches!(harm, Harm::Removed | Harm::Halved) {
            let more = ["--verify", "--paused"];
            Restored::start(&self.stillframe, "latest", self.guest.folder(), &more)?;
        }
        Ok(())
    }

    /// Every command on the damaged repository.
    fn try_all(&self, area: &str, harm: Harm) -> Result<()> {
        let (id, pid) = (self.ids[0].as_str(), self.guest.pid_text());
        let lines = [
            vec!["list"],
            vec!["show", id],
            vec!["check", "--read-data"],
            vec!["restore", id, "--qmp", &self.qmp, "--verify", "--paused"],
            vec!["checkpoint", "--pid", &pid],
        ];
        for line in lines {
            let about = || format!("{area}, {harm:?}, {line:?}");
            match exit_code(area, harm, line[0])? {
                0 => self.stillframe.ok(&line).map(drop),
                code => self.stillframe.fails(&line, code).and_then(clear),
            }
            .with_context(about)?;
            if area == "packs" && line[0] == "checkpoint" {
                self.expect_good(harm).with_context(about)?;
            }
            ensure!(
                processes_with(&self.qmp)? == 0,
                "{}: a QEMU is left",
                about()
            );
        }
        Ok(())
    }
}

/// Says what is wrong, in words of the documentation.
fn clear(said: String) -> Result<()> {
    let words = [
        "damaged",
        "not in the repository",
        "not a repository",
        "no checkpoint is called",
    ];
    ensure!(words.iter().any(|word| said.contains(word)), "{said}");
    Ok(())
}

/// Keeps the files of a repository and puts them all back.
struct Original(Vec<(PathBuf, Vec<u8>)>);

impl Original {
    fn keep(repository: &Path) -> Result<Original> {
        let files = flips::files(repository)?;
        let kept = files
            .into_iter()
            .map(|file| Ok((file.clone(), fs::read(file)?)));
        Ok(Original(kept.collect::<Result<_>>()?))
    }

    /// Also removes what has come since.
    fn put_back(&self, repository: &Path) -> Result<()> {
        for file in flips::files(repository)? {
            fs::remove_file(file)?;
        }
        for (file, bytes) in &self.0 {
            fs::write(file, bytes)?;
        }
        Ok(())
    }
}

#[test]
fn damage_is_told_by_whatever_meets_it() -> Result<()> {
    let bench = Bench::new()?;
    let mut monitor = bench.guest.second_monitor()?;
    let repository = bench.stillframe.repository().to_owned();
    let original = Original::keep(&repository)?;
    let mut areas = Vec::new();
    for (file, _) in &original.0 {
        let area = area(&repository, file)?;
        for harm in HARMS {
            harm.apply(file)?;
            bench.try_all(&area, harm)?;
            original.put_back(&repository)?;
        }
        areas.push(area);
    }
    areas.dedup();
    ensure!(
        areas == ["config", "index", "keys", "manifests", "packs"],
        "{areas:?}"
    );
    expect_untouched(&bench.guest, &mut monitor)?;
    expect_whole(&bench.stillframe, &bench.ids)
}

/// A watch whose repository loses packs starts anew, and says so: the increments it had begun would
/// lead to pages that are gone.
#[test]
fn a_watch_that_loses_packs_goes_on_with_a_whole_checkpoint() -> Result<()> {
    let guest = Setup::small(Kind::Private, "lossy").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let pid = guest.pid_text();
    let line = ["watch", "--pid", &pid, "--every", "400ms", "--json"];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    watch.wait_results(2)?;
    for file in flips::files(&stillframe.repository().join("packs"))? {
        fs::remove_file(file)?;
    }
    watch.wait_words("missing or cut short")?;
    let seen = watch.results()?.len();
    let results = watch.wait_results(seen + 1)?;
    let anew: Vec<bool> = results.iter().map(|one| one["parent"].is_null()).collect();
    ensure!(
        anew.iter().filter(|&&anew| anew).count() == 2,
        "{results:?}"
    );
    watch.signal("TERM")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    let more = ["--verify", "--paused"];
    drop(Restored::start(
        &stillframe,
        "latest",
        guest.folder(),
        &more,
    )?);
    expect_untouched(&guest, &mut monitor)
}
