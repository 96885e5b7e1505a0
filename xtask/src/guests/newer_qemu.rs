//! A QEMU of a newer Debian release, with the libraries that it needs, in a folder of its own: migrations into a newer QEMU
//! are tested with it. Nothing of it is installed.

use crate::run::run;
use crate::setup;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The suites with the program, and with what it needs besides.
const SUITES: [&str; 2] = ["trixie-backports", "trixie"];
const PACKAGE: &str = "qemu-system-x86";
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Debian's own.
const MIRROR: &str = "http://deb.debian.org/debian";
const PROGRAMS: &[(&str, &str)] = &[("patchelf", "patchelf")];
/// In the packages.
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";

/// Fetches it into a folder among the guests, unless it is there.
pub fn fetch(guests: &Path) -> Result<()> {
    let folder = guests.join("newer-qemu");
    if folder.join(PROGRAM).exists() {
        return Ok(());
    }
    setup::need_programs(PROGRAMS)?;
    let work = guests.join("newer-qemu.new");
    if work.exists() {
        // Left by an interrupted run.
        fs::remove_dir_all(&work).with_context(|| format!("cannot clear {}", work.display()))?;
    }
    let root = work.join("root");
    for package in packages(&work)? {
        run(Command::new("dpkg").arg("-x").args([&package, &root]))?;
    }
    // It uses its own libraries, whatever this machine has.
    let program = root.join(PROGRAM);
    run(Command::new("patchelf")
        .arg("--set-interpreter")
        .arg(folder.join(LOADER))
        .args(["--force-rpath", "--set-rpath"])
        .arg(folder.join(LIBRARIES))
        .arg(&program))?;
    fs::rename(&root, &folder).with_context(|| format!("cannot install {}", folder.display()))?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))
}

/// Fetches the package and all that it needs, as if nothing was installed.
fn packages(work: &Path) -> Result<Vec<PathBuf>> {
    let (lists, archives) = (work.join("lists"), work.join("archives"));
    for folder in [&lists, &archives] {
        let partial = folder.join("partial");
        fs::create_dir_all(&partial)
            .with_context(|| format!("cannot create {}", partial.display()))?;
    }
    let mirror = setup::mirror(SUITES[0])?.unwrap_or_else(|| MIRROR.to_owned());
    let line = |suite| format!("deb [signed-by={KEYS}] {mirror} {suite} main\n");
    let (sources, installed) = (work.join("sources.list"), work.join("installed"));
    fs::write(&sources, SUITES.map(line).concat())
        .and_then(|()| fs::write(&installed, ""))
        .with_context(|| format!("cannot write to {}", work.display()))?;
    let apt = || {
        let mut apt = Command::new("apt-get");
        apt.arg("--quiet");
        let folder = |name: &str, path: &Path| format!("{name}={}", path.display());
        for option in [
            folder("Dir::State::lists", &lists),
            folder("Dir::State::status", &installed),
            folder("Dir::Cache", work),
            folder("Dir::Cache::archives", &archives),
            folder("Dir::Etc::sourcelist", &sources),
            folder("Dir::Etc::sourceparts", &work.join("none")),
            folder("Dir::Etc::preferencesparts", &work.join("none")),
            format!("APT::Default-Release={}", SUITES[0]),
            "APT::Install-Recommends=false".to_owned(),
            // apt's sandbox user cannot write to this folder.
            "APT::Sandbox::User=root".to_owned(),
        ] {
            apt.args(["--option", &option]);
        }
        apt
    };
    run(apt().arg("update"))?;
    run(apt().args(["--yes", "--download-only", "install", PACKAGE]))?;
    let files = fs::read_dir(&archives)
        .with_context(|| format!("cannot list {}", archives.display()))?
        .flatten()
        .map(|entry| entry.path());
    let packages: Vec<PathBuf> = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .collect();
    match packages.is_empty() {
        true => bail!("apt has fetched no package {PACKAGE}"),
        false => Ok(packages),
    }
}
