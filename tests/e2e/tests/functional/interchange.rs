//! `export` and `import`: files that other programs read and write. The other side is always the real one:
//! a stock QEMU, and gdb.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_nothing_left};
use stillframe_harness::memory::Image;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_harness::serial::Serial;

/// A QEMU that nobody of ours has started.
struct Stock {
    process: Child,
    folder: tempfile::TempDir,
    serial: Serial,
}

impl Stock {
    /// Starts it with the arguments of another VM, whose sockets and serial port were in `old`.
    fn start(arguments: &[String], old: &Path, stdin: Stdio) -> Result<Stock> {
        let folder = tempfile::tempdir()?;
        let new = folder.path().display().to_string();
        let old = old.display().to_string();
        // Files that were exported stay where they are.
        let moved = |word: &String| match word.starts_with("file:") && !word.ends_with("serial") {
            true => word.clone(),
            false => word.replace(&old, &new),
        };
        let process = Command::new("qemu-system-x86_64")
            .args(arguments.iter().skip(1).map(moved))
            .arg("-S")
            .stdin(stdin)
            .spawn()?;
        let serial = Serial::new(&folder.path().join("serial"));
        Ok(Stock {
            process,
            folder,
            serial,
        })
    }

    /// Its monitor, once the state has arrived and the VM waits to run.
    fn arrived(&self) -> Result<Qmp> {
        let mut qmp = Qmp::connect(&self.folder.path().join("qmp"))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match qmp.status()?.as_str() {
                "paused" => return Ok(qmp),
                status if Instant::now() > deadline => bail!("the VM is still {status}"),
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A guest that stands still, and a checkpoint of it.
struct Frozen {
    guest: Guest,
    monitor: Qmp,
    stillframe: Stillframe,
}

fn frozen(kind: Kind, name: &str) -> Result<Frozen> {
    let guest = Setup::small(kind, name).booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let pid = guest.pid_text();
    // Whole pages, deltas and zeros.
    stillframe.ok(&["watch", "--pid", &pid, "--every", "200ms", "--count", "3"])?;
    let mut monitor = guest.second_monitor()?;
    monitor.execute("stop", json!({}))?;
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    Ok(Frozen {
        guest,
        monitor,
        stillframe,
    })
}

impl Frozen {
    /// Exports the last checkpoint; the output, and the file.
    fn export(&self, format: &str) -> Result<(Value, PathBuf)> {
        let file = self.guest.folder().join(format);
        let path = file.display().to_string();
        let line = ["export", "latest", "--format", format, "-o", &path];
        Ok((self.stillframe.json(&line)?, file))
    }

    /// The stream, into a pipe.
    fn pipe(&self) -> Result<Stdio> {
        let line = ["export", "latest", "--format", "migration", "-o", "-"];
        let mut export = self.stillframe.command(&line)?;
        let mut export = export
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let pipe = export.stdout.take().context("no pipe")?;
        // It ends when the reader has all, or is gone.
        std::thread::spawn(move || export.wait());
        Ok(pipe.into())
    }
}

fn words(list: &Value) -> Result<Vec<String>> {
    serde_json::from_value(list.clone()).context("a list of words")
}

#[test]
fn a_stock_qemu_goes_on_with_what_was_exported() -> Result<()> {
    let mut frozen = frozen(Kind::TwoCpus, "exported")?;
    let original = Image::take(frozen.guest.pid(), &mut frozen.monitor)?;
    let last = frozen
        .guest
        .serial
        .ticks()?
        .last()
        .context("no tick")?
        .number;
    let mut arguments = Vec::new();
    for format in ["mapped-ram", "migration", "pipe"] {
        let stdin = if format == "pipe" {
            *arguments.last_mut().context("no arguments")? = "fd:0".to_owned();
            frozen.pipe()?
        } else {
            let (report, file) = frozen.export(format)?;
            let metadata = fs::metadata(&file)?;
            ensure!(metadata.mode() & 0o777 == 0o600, "{:o}", metadata.mode());
            ensure!(report["bytes"] == metadata.len(), "{report}");
            let is_sparse = metadata.blocks() * 512 < metadata.len();
            ensure!(is_sparse == (format == "mapped-ram"), "{report}");
            arguments = words(&report["load"]["arguments"])?;
            Stdio::null()
        };
        let stock = Stock::start(&arguments, frozen.guest.folder(), stdin)?;
        let mut monitor = stock.arrived().with_context(|| format.to_owned())?;
        let image = Image::take(stock.process.id() as i32, &mut monitor)?;
        let differing = original.differing(&image)?;
        ensure!(differing.is_empty(), "{format}: {differing:?}");
        monitor.execute("cont", json!({}))?;
        // Each tick checks a part of the memory; these are all of it.
        let ticks = stock.serial.wait_ticks(12, PATIENCE)?;
        let first = ticks[0].number;
        ensure!((last..=last + 2).contains(&first), "{first} after {last}");
    }
    Ok(())
}

/// QEMU's own words for its arguments.
fn command_line(pid: i32) -> Result<Vec<String>> {
    let line = fs::read_to_string(format!("/proc/{pid}/cmdline"))?;
    Ok(line
        .trim_end_matches('\0')
        .split('\0')
        .map(str::to_owned)
        .collect())
}

/// Lets QEMU migrate a running VM into a file, slowly enough that pages are sent again.
fn migrate(monitor: &mut Qmp, file: &Path, capabilities: &[&str]) -> Result<()> {
    let on: Vec<Value> = capabilities
        .iter()
        .map(|name| json!({"capability": name, "state": true}))
        .collect();
    monitor.execute("migrate-set-capabilities", json!({"capabilities": on}))?;
    let limit = json!({"max-bandwidth": 40 << 20, "downtime-limit": 20});
    monitor.execute("migrate-set-parameters", limit)?;
    monitor.execute(
        "migrate",
        json!({"uri": format!("file:{}", file.display())}),
    )?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let state = monitor.execute("query-migrate", json!({}))?;
        match state["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed") => bail!("{state}"),
            _ if Instant::now() > deadline => bail!("not within {PATIENCE:?}: {state}"),
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// A file that QEMU wrote, and the command line of that QEMU.
struct Migrated {
    guest: Guest,
    monitor: Qmp,
    file: PathBuf,
    command: Vec<String>,
}

fn migrated(kind: Kind, capabilities: &[&str]) -> Result<Migrated> {
    let guest = Setup::small(kind, "migrated").booted()?;
    let mut monitor = guest.second_monitor()?;
    let file = guest.folder().join("migration");
    migrate(&mut monitor, &file, capabilities)?;
    Ok(Migrated {
        command: command_line(guest.pid())?,
        guest,
        monitor,
        file,
    })
}

impl Migrated {
    fn import(&self, file: &Path, command: &[String]) -> Vec<String> {
        let mut line = vec![
            "import".to_owned(),
            file.display().to_string(),
            "--".to_owned(),
        ];
        line.extend(command.iter().cloned());
        line
    }
}

#[test]
fn what_qemu_wrote_is_imported_and_restored() -> Result<()> {
    let cases: [(Kind, &[&str], &str); 3] = [
        (Kind::Private, &[], "migration"),
        (Kind::Memfd, &["mapped-ram"], "mapped-ram"),
        (Kind::Pc, &["mapped-ram", "multifd"], "mapped-ram"),
    ];
    for (kind, capabilities, format) in cases {
        let mut migrated = migrated(kind, capabilities)?;
        let folder = tempfile::tempdir()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        let mut line = vec!["--json".to_owned()];
        line.extend(migrated.import(&migrated.file, &migrated.command));
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let report: Value = serde_json::from_str(&stillframe.ok(&line)?)?;
        ensure!(
            report["format"] == format && report["vm"] == "migrated",
            "{report}"
        );
        ensure!(stillframe.json(&["check", "--read-data"])?["clean"] == true);
        // The source stands as it was saved.
        let original = Image::take(migrated.guest.pid(), &mut migrated.monitor)?;
        let last = migrated
            .guest
            .serial
            .ticks()?
            .last()
            .context("no tick")?
            .number;
        for how in [["--verify"].as_slice(), &["--lazy", "--verify"]] {
            let options = [how, &["--paused"]].concat();
            let restored = Restored::start(&stillframe, "latest", folder.path(), &options)?;
            let mut monitor = restored.monitor()?;
            let image = Image::take(restored.pid, &mut monitor)?;
            let differing = original.differing(&image)?;
            ensure!(
                differing.is_empty(),
                "{} {how:?}: {differing:?}",
                kind.name()
            );
            monitor.execute("cont", json!({}))?;
            let ticks = restored.serial.wait_ticks(12, PATIENCE)?;
            let first = ticks[0].number;
            ensure!((last..=last + 2).contains(&first), "{first} after {last}");
            expect_nothing_left(restored.pid, &mut monitor)?;
            drop(monitor);
        }
    }
    Ok(())
}

/// What is wrong is named, and nothing is committed.
#[test]
fn files_that_cannot_be_right_are_refused() -> Result<()> {
    let migrated = migrated(Kind::Private, &[])?;
    let stillframe = Stillframe::init(&migrated.guest.folder().join("repo"))?;
    let refused = |file: &Path, command: &[String], words: &str| -> Result<()> {
        let line = migrated.import(file, command);
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let said = stillframe.fails(&line, 1)?;
        ensure!(said.contains(words), "{words:?} is not in: {said}");
        ensure!(checkpoints(&stillframe)?.is_empty());
        Ok(())
    };
    let changed = |name: &str, change: &dyn Fn(&File) -> Result<()>| -> Result<PathBuf> {
        let file = migrated.guest.folder().join(name);
        fs::copy(&migrated.file, &file)?;
        change(&File::options().read(true).write(true).open(&file)?)?;
        Ok(file)
    };
    let command = &migrated.command;
    let half = fs::metadata(&migrated.file)?.len() / 2;
    let cut = changed("cut", &|file| Ok(file.set_len(half)?))?;
    refused(&cut, command, "cut off")?;
    let cut = changed("cut-late", &|file| Ok(file.set_len(half * 2 - 5000)?))?;
    refused(&cut, command, "is not whole")?;
    // The first record of RAM: its place follows from the format, its flags are the low bits.
    let at = first_record(&migrated.file)?;
    let xbzrle = changed("xbzrle", &|file| Ok(file.write_all_at(&[0x40], at + 7)?))?;
    refused(&xbzrle, command, "xbzrle")?;
    let beyond = changed("beyond", &|file| Ok(file.write_all_at(&[0xff], at)?))?;
    refused(&beyond, command, "beyond the end")?;
    let foreign = changed("foreign", &|file| Ok(file.write_all_at(b"\x7fELF", 0)?))?;
    refused(&foreign, command, "no migration file")?;
    let other = |from: &str, to: &str| -> Vec<String> {
        command.iter().map(|word| word.replace(from, to)).collect()
    };
    refused(&migrated.file, &other("q35", "pc"), "-machine pc-q35-")?;
    refused(&migrated.file, &other("128M", "64M"), "pc.ram has")?;
    refused(
        &migrated.file,
        &other("qemu-system-x86_64", "no-such-qemu"),
        "no program",
    )?;
    refused(
        &migrated.guest.folder().join("none"),
        command,
        "cannot open",
    )?;
    refused(migrated.guest.folder(), command, "is no file")
}

/// Where the first record of RAM is: behind the first section's footer and the next one's head.
fn first_record(file: &Path) -> Result<u64> {
    let mut start = vec![0; 4096];
    File::open(file)?.read_exact(&mut start)?;
    let end = b"\0\0\0\0\0\0\0\x10\x7e";
    let at = start.windows(end.len()).position(|window| window == end);
    Ok(at.context("no section of RAM")? as u64 + 9 + 4 + 5)
}

#[test]
fn a_file_that_exists_is_not_written_over() -> Result<()> {
    let frozen = frozen(Kind::Private, "kept")?;
    let file = frozen.guest.folder().join("kept.raw");
    fs::write(&file, "precious")?;
    let path = file.display().to_string();
    let line = ["export", "latest", "--format", "raw", "-o", &path];
    let said = frozen.stillframe.fails(&line, 1)?;
    ensure!(
        said.contains("--force") && fs::read(&file)? == b"precious",
        "{said}"
    );
    frozen.stillframe.ok(&[&line[..], &["--force"]].concat())?;
    ensure!(fs::metadata(&file)?.len() == 128 << 20);
    let said = frozen
        .stillframe
        .fails(&["export", "latest", "--format", "elf", "-o", "-"], 1)?;
    ensure!(said.contains("only the format migration"), "{said}");
    let said = frozen.stillframe.fails(
        &["export", "latest", "--format", "elf", "-o", "/dev/null"],
        1,
    )?;
    ensure!(said.contains("no file that could be replaced"), "{said}");
    let left = fs::read_dir(frozen.guest.folder())?.flatten();
    let left = left.filter(|entry| entry.file_name().to_string_lossy().contains("partial"));
    ensure!(left.count() == 0);
    Ok(())
}

/// Killed at any moment, an export leaves the whole file or nothing.
#[test]
fn a_killed_export_leaves_no_half_file() -> Result<()> {
    let frozen = frozen(Kind::Private, "cut")?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("cut.raw");
    let path = file.display().to_string();
    let line = ["export", "latest", "--format", "raw", "-o", &path];
    let mut cut = 0;
    for turn in 0..20 {
        let export = Running::start(frozen.stillframe.command(&line)?)?;
        std::thread::sleep(Duration::from_millis(20 * turn));
        export.signal("KILL")?;
        export.end()?;
        let left = fs::read_dir(folder.path())?.flatten();
        let left: Vec<PathBuf> = left.map(|entry| entry.path()).collect();
        match &left[..] {
            [] => cut += 1,
            [whole] if *whole == file => {
                ensure!(fs::metadata(&file)?.len() == 128 << 20, "it is not whole");
                fs::remove_file(&file)?;
            }
            _ => bail!("left behind: {left:?}"),
        }
    }
    ensure!(cut > 0, "none was killed on its way");
    Ok(())
}

/// Main RAM is where QEMU says it is.
#[test]
fn raw_memory_lies_at_its_physical_addresses() -> Result<()> {
    const MIB: u64 = 1 << 20;
    // Below 1 MiB the machine shows ROM and video memory instead; from 2 GiB on this one has a hole.
    let cases: [(Kind, &[u64]); 2] = [
        (Kind::Private, &[MIB, 16 * MIB, 100 * MIB, 127 * MIB]),
        (
            Kind::FiveGib,
            &[
                MIB,
                64 * MIB,
                2047 * MIB,
                4096 * MIB,
                5120 * MIB,
                7167 * MIB,
            ],
        ),
    ];
    for (kind, places) in cases {
        let mut frozen = frozen(kind, "raw")?;
        let (report, file) = frozen.export("raw")?;
        let raw = File::open(&file)?;
        ensure!(report["bytes"] == raw.metadata()?.len(), "{report}");
        let saved = frozen.guest.folder().join("saved");
        let mut content = false;
        for &at in places {
            let arguments = json!({"val": at, "size": MIB, "filename": saved});
            frozen.monitor.execute("pmemsave", arguments)?;
            let theirs = fs::read(&saved)?;
            let mut ours = vec![0; theirs.len()];
            raw.read_exact_at(&mut ours, at)?;
            ensure!(
                ours == theirs,
                "{}: the MiB at {at:#x} differs",
                kind.name()
            );
            content |= at >= 4096 * MIB && ours.iter().any(|&byte| byte != 0);
        }
        ensure!(
            content == (kind == Kind::FiveGib),
            "nothing was compared above 4 GiB"
        );
    }
    Ok(())
}

/// gdb's answer to some commands on a core.
fn gdb(core: &Path, commands: &[String]) -> Result<String> {
    let mut gdb = Command::new("gdb");
    gdb.args(["-nx", "-batch", "-iex", "set architecture i386:x86-64"]);
    gdb.arg("-ex").arg(format!("core-file {}", core.display()));
    for command in commands {
        gdb.args(["-ex", command]);
    }
    let output = gdb.output().context("no gdb: run `cargo xtask setup`")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(said + &String::from_utf8_lossy(&output.stderr))
}

/// All numbers behind a colon, on lines like `0xADDRESS: 0x1 0x2`.
fn numbers(said: &str) -> Vec<u64> {
    let lines = said.lines().filter_map(|line| line.split_once(':'));
    let printed = lines.filter(|(address, _)| {
        let address = address.split_whitespace().next().unwrap_or_default();
        u64::from_str_radix(address.trim_start_matches("0x"), 16).is_ok()
    });
    printed
        .flat_map(|(_, numbers)| numbers.split_whitespace())
        .filter_map(|number| u64::from_str_radix(number.trim_start_matches("0x"), 16).ok())
        .collect()
}

/// A register as `info registers` shows it.
fn register(registers: &str, name: &str) -> Result<u64> {
    let (_, rest) = registers
        .split_once(name)
        .with_context(|| name.to_owned())?;
    let digits: String = rest.chars().take_while(char::is_ascii_hexdigit).collect();
    Ok(u64::from_str_radix(&digits, 16)?)
}

/// With the kernel at a random address (KASLR), as Debian's is: registers, the kernel's memory at its virtual
/// addresses, and its banner, against what QEMU says of the same guest.
#[test]
fn gdb_reads_the_guests_kernel_in_a_core() -> Result<()> {
    let mut frozen = frozen(Kind::TwoCpus, "core")?;
    let (report, core) = frozen.export("elf")?;
    ensure!(
        report["cpus"] == 2 && report["mappings"].as_u64() > Some(2),
        "{report}"
    );
    let registers = frozen.monitor.human("info registers -a")?;
    let threads = gdb(
        &core,
        &["thread apply all -ascending info registers rip rsp".to_owned()],
    )?;
    let mut places = Vec::new();
    for cpu in registers.split("CPU#").skip(1) {
        let (rip, rsp) = (register(cpu, "RIP=")?, register(cpu, "RSP=")?);
        ensure!(
            threads.contains(&format!("{rip:#x}")) && threads.contains(&format!("{rsp:#x}")),
            "{rip:#x} or {rsp:#x} is not in: {threads}"
        );
        let tables = cpu.split_once("IDT=").context("no IDT")?.1.trim_start();
        places.push(u64::from_str_radix(
            tables.get(..16).context("no IDT")?,
            16,
        )?);
        places.extend([rip, rsp].into_iter().filter(|at| at >> 63 == 1));
    }
    ensure!(places.len() > 2, "no vCPU is in the kernel: {registers}");
    for at in &places {
        let theirs = frozen.monitor.human(&format!("x /16xg {at:#x}"))?;
        let said = gdb(&core, &[format!("x/16xg {at:#x}")])?;
        ensure!(numbers(&theirs).len() == 16, "{theirs}");
        ensure!(
            numbers(&said) == numbers(&theirs),
            "{at:#x}: {said} instead of {theirs}"
        );
    }
    // `linux_banner` is in the kernel's read-only data, behind its text.
    let text = places
        .iter()
        .copied()
        .find(|&at| at >= 0xffff_ffff_8000_0000);
    let text = text.context("no address of the kernel's text")? & !0x1f_ffff;
    let find = format!(
        "find /b1 {text:#x}, +0x2000000, 'L', 'i', 'n', 'u', 'x', ' ', 'v', 'e', 'r', 's', 'i', 'o', 'n', ' '"
    );
    let said = gdb(&core, &[find, "x/s $_".to_owned()])?;
    ensure!(said.contains("\"Linux version 6."), "{said}");
    // Physical addresses too, as crash uses them.
    let saved = frozen.guest.folder().join("saved");
    let arguments = json!({"val": 16 << 20, "size": 64, "filename": saved});
    frozen.monitor.execute("pmemsave", arguments)?;
    let theirs = fs::read(&saved)?;
    let said = gdb(&core, &["x/64xb 0x1000000".to_owned()])?;
    let ours: Vec<u8> = numbers(&said).iter().map(|&byte| byte as u8).collect();
    ensure!(ours == theirs, "{said}");
    let mut head = [0; 4];
    let mut file = File::open(&core)?;
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(&mut head)?;
    ensure!(&head == b"\x7fELF");
    Ok(())
}
