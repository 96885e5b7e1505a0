//! `setup`: installs what the tests need on a Debian machine.

mod apt_sources;

use crate::guests::elf;
use crate::run::{output, run};
use anyhow::{Context, Result, bail};
use apt_sources::Source;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Minimum version of QEMU for the tests.
const QEMU_MAJOR_MIN: u32 = 10;
const QEMU: &str = "qemu-system-x86_64";
const QEMU_PACKAGE: &str = "qemu-system-x86";
/// apt's configuration.
const APT: &str = "/etc/apt";
/// The file that is added to apt if the release's QEMU is too old.
const BACKPORTS_FILE: &str = "/etc/apt/sources.list.d/stillframe-backports.sources";

/// Installs missing packages and reports them; fast if none is missing.
pub fn setup() -> Result<()> {
    install_missing(missing)
}

/// The same for programs that only some commands need; each comes with its package.
pub fn need_programs(programs: &[(&str, &'static str)]) -> Result<()> {
    install_missing(|| missing_programs(programs))
}

fn install_missing(find: impl Fn() -> Vec<Need>) -> Result<()> {
    let missing = find();
    if missing.is_empty() {
        println!("setup: nothing is missing");
        return Ok(());
    }
    for Need { package, why } in &missing {
        println!("setup: {why}: package {package} is needed");
    }
    let packages: Vec<_> = missing.iter().map(|need| need.package).collect();
    if find_program("apt-get").is_none() {
        bail!(
            "this machine has no apt-get: install QEMU >= {QEMU_MAJOR_MIN} and the equivalents of the Debian packages {} yourself",
            packages.join(", ")
        );
    }
    if !is_root()? {
        bail!(
            "packages are missing, and installing them needs root: run `cargo xtask setup` as root"
        );
    }
    install(&packages)?;
    match find().first() {
        None => Ok(()),
        Some(Need { why, .. }) => bail!("after the installation: {why}"),
    }
}

/// Whether this process runs as root.
pub fn is_root() -> Result<bool> {
    let own = fs::metadata("/proc/self").context("/proc is not mounted")?;
    Ok(own.uid() == 0)
}

/// A package to install, and the reason.
struct Need {
    package: &'static str,
    why: String,
}

fn missing() -> Vec<Need> {
    let mut needs = Vec::new();
    match qemu_major() {
        Some(major) if major >= QEMU_MAJOR_MIN => {}
        Some(major) => needs.push(Need {
            package: QEMU_PACKAGE,
            why: format!("QEMU has version {major}, the tests need {QEMU_MAJOR_MIN}"),
        }),
        None => needs.push(Need {
            package: QEMU_PACKAGE,
            why: format!("{QEMU} is missing"),
        }),
    }
    needs.extend(missing_programs(&[
        ("qemu-img", "qemu-utils"),
        ("as", "binutils"),
        ("ld", "binutils"),
        ("gdb", "gdb-minimal"),
        ("sqlite3", "sqlite3"),
        ("mkfs.ext4", "e2fsprogs"),
    ]));
    if static_busybox().is_err() {
        needs.push(Need {
            package: "busybox-static",
            why: "a statically linked busybox is missing".to_owned(),
        });
    }
    needs
}

/// The packages of missing programs, each once.
fn missing_programs(programs: &[(&str, &'static str)]) -> Vec<Need> {
    let mut needs: Vec<Need> = Vec::new();
    for &(program, package) in programs {
        if find_program(program).is_none() && needs.iter().all(|need| need.package != package) {
            let why = format!("{program} is missing");
            needs.push(Need { package, why });
        }
    }
    needs
}

/// The busybox that goes into the guests.
pub fn static_busybox() -> Result<PathBuf> {
    let path = find_program("busybox").context("busybox is missing: run `cargo xtask setup`")?;
    if !elf::is_static(&fs::read(&path)?) {
        bail!("{} is not static: run `cargo xtask setup`", path.display());
    }
    Ok(path)
}

pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // A user's PATH often lacks the sbin folders, and that of cron has only /usr/bin and /bin.
    std::env::split_paths(&path)
        .chain(["/usr/bin", "/bin", "/usr/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

fn qemu_major() -> Option<u32> {
    let printed = output(Command::new(QEMU).arg("--version")).ok()?;
    let (_, version) = printed.split_once("version ")?;
    version.split('.').next()?.parse().ok()
}

fn install(packages: &[&str]) -> Result<()> {
    run(&mut apt_get(&["update"]))?;
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    let suite;
    if packages.contains(&QEMU_PACKAGE) && candidate_major(QEMU_PACKAGE)? < QEMU_MAJOR_MIN {
        suite = use_backports()?;
        // apt installs from backports only if they are named.
        arguments.extend(["--target-release", &suite]);
        run(apt_get(&arguments).arg(QEMU_PACKAGE))?;
        arguments.truncate(3);
    }
    run(apt_get(&arguments).args(packages))
}

fn apt_get(arguments: &[&str]) -> Command {
    let mut command = Command::new("apt-get");
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .arg("--quiet")
        .args(arguments);
    command
}

/// The major version that `apt-get install` would choose.
fn candidate_major(package: &str) -> Result<u32> {
    let policy = output(
        Command::new("apt-cache")
            .env("LC_ALL", "C")
            .args(["policy", package]),
    )?;
    major_of_candidate(&policy).with_context(|| {
        format!("apt has no package {package}: add the component `main` to the apt sources")
    })
}

/// Reads `Candidate: 1:7.2+dfsg-7`; the epoch is optional.
fn major_of_candidate(policy: &str) -> Option<u32> {
    let version = policy
        .lines()
        .find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    let version = version.split_once(':').map_or(version, |(_, rest)| rest);
    version
        .split(|letter: char| !letter.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// Adds the backports of this release to apt if they are missing; returns their suite.
fn use_backports() -> Result<String> {
    let codename = codename()?;
    let suite = format!("{codename}-backports");
    let sources = apt_sources::read_all(Path::new(APT))?;
    if sources.iter().any(|source| source.has_suite(&suite)) {
        println!("setup: QEMU of {codename} is too old, installing it from {suite}");
        return Ok(suite);
    }
    let base = sources
        .iter()
        .find(|source| source.has_suite(&codename))
        .with_context(|| {
            format!(
                "{codename} has no QEMU {QEMU_MAJOR_MIN}, and {suite} cannot be added without an apt source of \
                 {codename}: install QEMU >= {QEMU_MAJOR_MIN} yourself"
            )
        })?;
    println!("setup: QEMU of {codename} is too old, adding {suite} to apt in {BACKPORTS_FILE}");
    fs::write(
        BACKPORTS_FILE,
        Source::other_suite(base, &suite).to_deb822(),
    )
    .with_context(|| format!("cannot write {BACKPORTS_FILE}"))?;
    run(&mut apt_get(&["update"]))?;
    Ok(suite)
}

/// The release of this machine.
fn codename() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(|name| name.trim_matches('"').to_owned())
        .context("/etc/os-release has no VERSION_CODENAME")
}

/// The mirror that apt uses for a release, else for the release of this machine, because mirrors have all releases;
/// `None` if apt has neither.
pub fn mirror(suite: &str) -> Result<Option<String>> {
    let sources = apt_sources::read_all(Path::new(APT))?;
    let own = codename()?;
    let of = |suite: &str| sources.iter().find(|source| source.has_suite(suite));
    Ok(of(suite)
        .or_else(|| of(&own))
        .and_then(|source| source.first_uri().map(str::to_owned)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_candidate_is_read_with_and_without_an_epoch() {
        let policy = "qemu-system-x86:\n  Installed: (none)\n  Candidate: 1:7.2+dfsg-7+deb12u15\n";
        assert_eq!(major_of_candidate(policy), Some(7));
        assert_eq!(major_of_candidate("  Candidate: 10.0.2~rc1\n"), Some(10));
        assert_eq!(major_of_candidate("  Candidate: (none)\n"), None);
        assert_eq!(major_of_candidate(""), None);
    }
}
