//! Checkpoints that hold the disks of a guest which writes them in every way (`guest/workload`, `disk`).
//!
//! Two oracles:
//! - the engine is stopped in the pause, and each image copied, which QEMU has flushed: the checkpoint must have the
//!   same, to the byte;
//! - a VM is restored with disks written anew, and goes on: it knows the content of every sector from its memory, so
//!   memory and disks of different moments are found.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::committing::{expect_no_copy, make_image};
use stillframe_harness::fault::with_fault;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::expect_whole;
use stillframe_harness::random::Random;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_harness::serial::Serial;

const COMMAND: &str = "cargo xtask bench disk-exactness";
/// MiB of each disk.
const DISK_MIB: u32 = 32;
const PAGE_BYTES: usize = 4096;
/// Every checkpoint with this number is restored, too.
const RESTORED_EVERY: u64 = 4;
/// Checkpoints that the promise asks for.
const CHECKPOINTS_MIN: u64 = 200;
/// A watch takes one or more, at most this number; the last one is compared.
const WATCH_MAX: u64 = 3;

/// How the guest reaches its disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bus {
    /// virtio-blk.
    Virtio,
    /// A SCSI controller.
    Scsi,
    /// The IDE controller of the older machine.
    Ide,
}

/// A VM with disks.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Of all disks.
    pub bus: Bus,
    /// Of all images.
    pub format: &'static str,
    /// Number of disks.
    pub disks: usize,
}

/// All machines of the run.
const MACHINES: [Machine; 6] = [
    Machine::new(Bus::Virtio, "raw", 1),
    Machine::new(Bus::Virtio, "qcow2", 3),
    Machine::new(Bus::Scsi, "qcow2", 1),
    Machine::new(Bus::Scsi, "raw", 3),
    Machine::new(Bus::Ide, "raw", 1),
    Machine::new(Bus::Ide, "qcow2", 3),
];
/// The schedules, in turn.
pub(crate) const SCHEDULES: [&str; 4] = ["auto", "pre-copy", "stop-copy", "copy-on-write"];

/// What was compared.
#[derive(Debug, Default)]
pub struct Compared {
    /// Checkpoints.
    pub checkpoints: u64,
    /// Pages of disks.
    pub pages: u64,
    /// Those that differ.
    pub differing: u64,
    /// VMs that were restored and went on.
    pub restored: u64,
    /// One record of each checkpoint.
    pub raw: Vec<Value>,
}

/// A VM under test, and its images.
pub(crate) struct Scene {
    pub(crate) guest: Guest,
    pub(crate) stillframe: Stillframe,
    machine: Machine,
    images: Vec<PathBuf>,
    // After the guest: ends last.
    folder: tempfile::TempDir,
}

impl Machine {
    /// One with these disks.
    pub const fn new(bus: Bus, format: &'static str, disks: usize) -> Machine {
        Machine { bus, format, disks }
    }

    pub(crate) fn name(&self) -> String {
        format!("{:?} {} x{}", self.bus, self.format, self.disks)
    }

    /// The name of a disk in the guest.
    fn in_guest(&self, number: usize) -> String {
        let letter = char::from(b'a' + number as u8);
        match self.bus {
            Bus::Virtio => format!("vd{letter}"),
            Bus::Scsi | Bus::Ide => format!("sd{letter}"),
        }
    }

    fn arguments(&self, images: &[PathBuf]) -> Vec<String> {
        let mut words = Vec::new();
        if self.bus == Bus::Scsi {
            words.extend(["-device", "virtio-scsi-pci"].map(str::to_owned));
        }
        for (number, image) in images.iter().enumerate() {
            let drive = format!("file={},format={}", image.display(), self.format);
            let device = match self.bus {
                Bus::Virtio => "virtio-blk-pci",
                Bus::Scsi => "scsi-hd",
                Bus::Ide => {
                    words.extend(["-drive".to_owned(), format!("{drive},if=ide")]);
                    continue;
                }
            };
            words.extend([
                "-drive".to_owned(),
                format!("{drive},if=none,id=disk{number}"),
                "-device".to_owned(),
                format!("{device},drive=disk{number}"),
            ]);
        }
        words
    }

    pub(crate) fn boot(self) -> Result<Scene> {
        let folder = tempfile::Builder::new()
            .prefix("stillframe-disks-")
            .tempdir()?;
        let image = |number| folder.path().join(format!("{number}.img"));
        let images: Vec<PathBuf> = (0..self.disks).map(image).collect();
        for image in &images {
            make_image(image, self.format, DISK_MIB)?;
        }
        let kind = match self.bus {
            Bus::Ide => Kind::Pc,
            Bus::Virtio | Bus::Scsi => Kind::Private,
        };
        let words = self.arguments(&images);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let names: Vec<String> = (0..self.disks)
            .map(|number| self.in_guest(number))
            .collect();
        let disks = format!("sf.disks={DISK_MIB}:{}", names.join(","));
        let setup = Setup::small(kind, "disks").with(&words);
        let guest = setup.with_drivers(&disks).boot()?;
        guest
            .serial
            .wait_for(&format!("disk {} tick 5", names[0]), PATIENCE)?;
        Ok(Scene {
            stillframe: Stillframe::init(&folder.path().join("repo"))?,
            guest,
            machine: self,
            images,
            folder,
        })
    }
}

impl Scene {
    /// A watch, of whose last checkpoint the disks are compared with copies that were made in its pause.
    pub(crate) fn checkpoint(
        &self,
        schedule: &str,
        count: u64,
        compared: &mut Compared,
    ) -> Result<(String, Value)> {
        let (pid, count_text) = (self.guest.pid_text(), count.to_string());
        let line = [
            "watch",
            "--pid",
            &pid,
            "--every",
            "200ms",
            "--count",
            &count_text,
        ];
        let more = ["--disks", "capture", "--pause-limit", "60s", "--json"];
        let schedule_words = ["--schedule", schedule];
        let line = [&line[..], &more, &schedule_words].concat();
        let fault = format!("pause.before-cont:stop:{count}");
        let command = self.stillframe.command(&line)?;
        let (command, reached) = with_fault(&command, &fault, self.folder.path())?;
        let mut engine = Running::start(command)?;
        engine.wait_until("the pause", |_| Ok(reached.exists()))?;
        let copied = self.copy_images();
        engine.signal("CONT")?;
        let ended = engine.end()?;
        let copies = copied?;
        fs::remove_file(&reached)?;
        ensure!(ended.code == Some(0), "{ended:?}");
        let report = ended.results()?.pop().context("no report")?;
        let id = report["checkpoint"].as_str().context("no id")?.to_owned();
        let disks = report["disks"].as_array().context("no disks")?;
        ensure!(disks.len() == copies.len(), "{report}");
        for (disk, copy) in disks.iter().zip(&copies) {
            let device = disk["device"].as_str().context("no device")?;
            self.compare(&id, device, copy, compared)?;
            fs::remove_file(copy)?;
        }
        compared.checkpoints += 1;
        Ok((id, report))
    }

    /// The guest finds all of each disk as it must be, once more.
    pub(crate) fn goes_on(&self) -> Result<()> {
        let checked = || {
            let text = self.guest.serial.text();
            let names = (0..self.machine.disks).map(|number| self.machine.in_guest(number));
            let lines = names.map(|name| text.matches(&format!("disk {name} checked")).count());
            lines.collect::<Vec<usize>>()
        };
        let (before, deadline) = (checked(), Instant::now() + PATIENCE);
        while checked().iter().zip(&before).any(|(now, then)| now <= then) {
            let text = self.guest.serial.text();
            ensure!(!text.contains("CORRUPT"), "{}", last_lines(&text));
            ensure!(
                Instant::now() < deadline,
                "the guest is stuck: {}",
                last_lines(&text)
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        self.guest.serial.wait_more(1, PATIENCE).map(drop)
    }

    /// The guest with this serial port, which has said nothing before, goes on, and finds all of each disk as it must be.
    pub(crate) fn finds_all(&self, serial: &Serial) -> Result<()> {
        serial.wait_more(2, PATIENCE)?;
        for number in 0..self.machine.disks {
            let name = self.machine.in_guest(number);
            serial.wait_for(&format!("disk {name} checked"), PATIENCE)?;
        }
        serial.ticks()?;
        let text = serial.text();
        ensure!(!text.contains("CORRUPT"), "{}", last_lines(&text));
        Ok(())
    }

    /// A place for a file.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Raw copies of the images; QEMU has them open, and does not write.
    fn copy_images(&self) -> Result<Vec<PathBuf>> {
        let mut copies = Vec::new();
        for (number, image) in self.images.iter().enumerate() {
            let copy = self.folder.path().join(format!("copy-{number}"));
            let done = Command::new("qemu-img")
                .args(["convert", "-U", "-f", self.machine.format, "-O", "raw"])
                .args([image, &copy])
                .output()?;
            ensure!(done.status.success(), "{done:?}");
            copies.push(copy);
        }
        Ok(copies)
    }

    /// Compares the images, of a VM that is paused, with a checkpoint.
    pub(crate) fn compare_images(&self, id: &str, compared: &mut Compared) -> Result<()> {
        let line = ["show", id];
        let shown = self.stillframe.json(&line)?;
        let disks = shown["disks"].as_array().context("no disks")?;
        let devices: Vec<&Value> = disks.iter().map(|disk| &disk["table"]["name"]).collect();
        let copies = self.copy_images()?;
        ensure!(devices.len() == copies.len(), "{disks:?}");
        for (device, copy) in devices.iter().zip(&copies) {
            let device = device.as_str().context("no device")?;
            self.compare(id, device, copy, compared)?;
            fs::remove_file(copy)?;
        }
        Ok(())
    }

    fn compare(&self, id: &str, device: &str, copy: &Path, compared: &mut Compared) -> Result<()> {
        let out = self.folder.path().join("exported");
        let out_text = out.display().to_string();
        let line = ["export", id, "--disk", device, "-o", &out_text];
        self.stillframe.ok(&line)?;
        let (stored, copy) = (fs::read(&out)?, fs::read(copy)?);
        fs::remove_file(&out)?;
        ensure!(stored.len() == copy.len(), "{device} has another length");
        let pages = stored.chunks(PAGE_BYTES).zip(copy.chunks(PAGE_BYTES));
        let differing = pages.filter(|(one, other)| one != other).count();
        compared.pages += (copy.len() / PAGE_BYTES) as u64;
        compared.differing += differing as u64;
        Ok(())
    }

    /// A VM is restored with disks of its own, and finds all of them as its memory knows them.
    pub(crate) fn restore(&self, id: &str, more: &str) -> Result<()> {
        let folder = self.folder.path().join("restored");
        let words = format!("--disks=new={}", folder.display());
        let restored = Restored::start(&self.stillframe, id, self.folder.path(), &[&words, more])?;
        self.finds_all(&restored.serial)?;
        // It ends by `quit`: one that is killed leaves clusters that are not used.
        drop(restored);
        for image in fs::read_dir(&folder)? {
            let image = image?.path();
            if self.machine.format == "qcow2" {
                let checked = Command::new("qemu-img").arg("check").arg(&image).output()?;
                ensure!(checked.status.success(), "{checked:?}");
            }
            fs::remove_file(image)?;
        }
        Ok(())
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join(" | ")
}

/// This number of checkpoints of one machine, of which the first is restored.
pub fn one_machine(
    machine: Machine,
    count: u64,
    random: &mut Random,
    compared: &mut Compared,
) -> Result<()> {
    let scene = machine.boot()?;
    let mut taken = Vec::new();
    for number in 0..count {
        let schedule = SCHEDULES[number as usize % SCHEDULES.len()];
        let before = compared.differing;
        let watched = 1 + random.below(WATCH_MAX);
        let (id, report) = scene.checkpoint(schedule, watched, compared)?;
        let restored = number % RESTORED_EVERY == 0;
        if restored {
            let more = match number / RESTORED_EVERY % 2 {
                0 => "--quiet",
                _ => "--lazy",
            };
            scene.restore(&id, more)?;
            compared.restored += 1;
        }
        taken.push(id);
        scene.guest.serial.wait_more(1, PATIENCE)?;
        compared.raw.push(json!({
            "machine": machine.name(), "schedule": schedule, "watched": watched, "disks": report["disks"],
            "pause_us": report["downtime_us"]["total"], "restored": restored,
            "differing": compared.differing - before,
        }));
    }
    expect_no_copy(&mut scene.guest.second_monitor()?)?;
    expect_whole(&scene.stillframe, &taken)
}

/// All machines in turn; writes `docs/results/disk-exactness/`.
pub fn run(count: u64, seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let mut compared = Compared::default();
    for machine in MACHINES {
        let share = count.div_ceil(MACHINES.len() as u64);
        one_machine(machine, share, &mut random, &mut compared).with_context(|| machine.name())?;
        eprintln!(
            "{:20} {} checkpoints so far, {} pages of disks compared, {} differing, {} VMs restored",
            machine.name(),
            compared.checkpoints,
            compared.pages,
            compared.differing,
            compared.restored
        );
    }
    results::write_raw("disk-exactness", "checkpoints.jsonl", &compared.raw)?;
    let differing = compared.differing as f64;
    let claim = Claim::new("exact-disks", Goal::Zero, differing, "pages", COMMAND);
    let enough = compared.checkpoints >= CHECKPOINTS_MIN;
    results::write_summary("disk-exactness", &[claim.if_enough(enough)])?;
    match compared.differing {
        0 => Ok(()),
        differing => bail!("{differing} pages differ"),
    }
}
