//! Checkpoints that hold the disks of a guest which writes them in every way (`guest/workload`, `disk`).
//!
//! Three oracles:
//! - the engine is stopped in the pause, and each image copied, which QEMU has flushed: the checkpoint must have the
//!   same, to the byte;
//! - all of memory is compared with an image taken in the same pause;
//! - a VM is restored with disks written anew, and goes on: it knows the content of every sector from its memory, so
//!   memory and disks of different moments are found.
//!
//! One kind of guest writes its disks directly. The other one has a file in a file system that it also maps, and discards parts
//! of, files that come and go, and memory that is swapped to a second disk: file systems and swap are those of one moment if the
//! guest goes on, and `e2fsck` finds nothing. It has an agent, and what it calls free is left out of its checkpoints.

mod machine;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::committing::expect_no_copy;
use stillframe_harness::fault::with_fault;
use stillframe_harness::guest::Guest;
use stillframe_harness::health::expect_whole;
use stillframe_harness::random::Random;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_harness::serial::Serial;

pub(crate) use machine::execute;
pub use machine::{Bus, Machine};

const COMMAND: &str = "cargo xtask bench disk-exactness";
/// Pages that are swapped then, at least.
const SWAPPED_MIN: usize = 256;
const PAGE_BYTES: usize = 4096;
/// Every checkpoint with this number is restored, too.
const RESTORED_EVERY: u64 = 4;
/// Checkpoints that the promise asks for.
const CHECKPOINTS_MIN: u64 = 200;
/// A watch takes one or more, at most this number; the last one is compared.
const WATCH_MAX: u64 = 3;

/// All machines of the run.
const MACHINES: [Machine; 10] = [
    Machine::with_files(Bus::Virtio, "raw"),
    Machine::with_files(Bus::Scsi, "qcow2"),
    Machine::with_files(Bus::Ide, "raw"),
    Machine::with_files(Bus::Virtio, "qcow2").whose_agent_lies(),
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
    /// Pages of memory.
    pub memory_pages: u64,
    /// Those that differ.
    pub memory_differing: u64,
    /// Pages that the guest called free, and that are zeros in the checkpoint and not in memory.
    pub free: u64,
    /// VMs that were restored and went on.
    pub restored: u64,
    /// One record of each checkpoint.
    pub raw: Vec<Value>,
}

/// A VM under test, and its images.
pub(crate) struct Scene {
    pub(crate) guest: Guest,
    pub(crate) stillframe: Stillframe,
    pub(crate) machine: Machine,
    images: Vec<PathBuf>,
    // After the guest: ends last.
    folder: tempfile::TempDir,
}

impl Machine {
    pub(crate) fn boot(self) -> Result<Scene> {
        let folder = tempfile::Builder::new()
            .prefix("stillframe-disks-")
            .tempdir()?;
        let image = |number| folder.path().join(format!("{number}.img"));
        let images: Vec<PathBuf> = (0..self.disks).map(image).collect();
        for (number, image) in images.iter().enumerate() {
            self.make(image, number)?;
        }
        let guest = self.setup(&images).boot()?;
        let begun = format!("disk {} tick 5", self.in_guest(0));
        guest.serial.wait_for(&begun, PATIENCE)?;
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
        let mut line = [&line[..], &more, &schedule_words, &["--verify"]].concat();
        line.extend(self.machine.files.then_some("--free-pages"));
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
        let verify = &report["verify"];
        let counted = |name: &str| verify[name].as_u64().context("no comparison");
        compared.memory_pages += counted("pages")?;
        compared.memory_differing += counted("differing")?;
        compared.free += counted("free")?;
        compared.checkpoints += 1;
        Ok((id, report))
    }

    /// The guest finds all of each disk as it must be, once more.
    pub(crate) fn goes_on(&self) -> Result<()> {
        let checked = || {
            let text = self.guest.serial.text();
            let names = self.machine.checked().into_iter();
            let lines = names.map(|name| text.matches(&format!("disk {name} checked")).count());
            lines.collect::<Vec<usize>>()
        };
        let (before, deadline) = (checked(), Instant::now() + PATIENCE);
        while checked().iter().zip(&before).any(|(now, then)| now <= then) {
            let text = self.guest.serial.text();
            ensure!(
                !text.contains("CORRUPT"),
                "{}",
                self.guest.serial.last_lines()
            );
            ensure!(
                Instant::now() < deadline,
                "the guest is stuck: {}",
                self.guest.serial.last_lines()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        self.guest.serial.wait_more(1, PATIENCE).map(drop)
    }

    /// The guest with this serial port finds all of each disk as it must be, in a check that begins from now on.
    pub(crate) fn finds_all_anew(&self, serial: &Serial) -> Result<()> {
        let before = serial.text().len();
        // The number in the first line that begins so.
        let number = |text: &str, beginning: String, above: u64| {
            let mut lines = text
                .split_inclusive('\n')
                .filter(|line| line.ends_with('\n'));
            lines.find_map(|line| {
                let number = line.strip_prefix(&*beginning)?.trim().parse::<u64>().ok()?;
                (number > above).then_some(number)
            })
        };
        // A check that ends with a tick begins after the line of the tick before.
        let is_checked = |text: &str, name: &str| {
            let begun = number(text, format!("disk {name} tick "), 0);
            begun.is_some_and(|tick| number(text, format!("disk {name} checked "), tick).is_some())
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            serial.ticks()?;
            let text = serial.text();
            let new = text.get(before..).unwrap_or_default();
            if (self.machine.checked().iter()).all(|name| is_checked(new, name)) {
                return serial.wait_more(1, PATIENCE).map(drop);
            }
            let late = Instant::now() > deadline;
            ensure!(!late, "the guest is stuck: {}", serial.last_lines());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The guest with this serial port, which has said nothing before, goes on, and finds all of each disk as it must be.
    pub(crate) fn finds_all(&self, serial: &Serial) -> Result<()> {
        serial.wait_more(2, PATIENCE)?;
        for name in self.machine.checked() {
            serial.wait_for(&format!("disk {name} checked"), PATIENCE)?;
        }
        serial.ticks()?;
        let text = serial.text();
        ensure!(!text.contains("CORRUPT"), "{}", serial.last_lines());
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
            convert(image, self.machine.format, &copy)?;
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

    /// The file system of a checkpoint needs no repair, and memory was swapped.
    fn check_files(&self, id: &str) -> Result<()> {
        let out = self.folder.path().join("files");
        let out_text = out.display().to_string();
        let export = |number: usize| {
            let device = self.machine.device(number);
            let line = ["export", id, "--disk", &device, "-o", &out_text];
            self.stillframe.ok(&line)
        };
        export(0)?;
        check_file_system(&out)?;
        fs::remove_file(&out)?;
        export(1)?;
        let swapped = fs::read(&out)?;
        fs::remove_file(&out)?;
        let used = |page: &&[u8]| page.iter().any(|&byte| byte != 0);
        let used = swapped.chunks(PAGE_BYTES).filter(used).count();
        ensure!(used >= SWAPPED_MIN, "{used} pages are swapped only");
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
            let name = image.file_name().unwrap_or_default();
            if self.machine.files && name.to_string_lossy().starts_with('0') {
                let raw = self.folder.path().join("raw");
                convert(&image, self.machine.format, &raw)?;
                check_file_system(&raw)?;
                fs::remove_file(raw)?;
            }
            fs::remove_file(image)?;
        }
        Ok(())
    }
}

/// Makes a raw copy of an image, which a QEMU may have open.
fn convert(image: &Path, format: &str, to: &Path) -> Result<()> {
    let mut command = Command::new("qemu-img");
    let words = ["convert", "-U", "-f", format, "-O", "raw"];
    execute(command.args(words).args([image, to]))
}

/// The journal of the file system is replayed, as the next mount does it; then nothing is to be mended.
fn check_file_system(raw: &Path) -> Result<()> {
    for words in [&["-y", "-E", "journal_only"][..], &["-f", "-n"]] {
        execute(Command::new("e2fsck").args(words).arg(raw))?;
    }
    Ok(())
}

/// This number of checkpoints of one machine, of which the first is restored.
pub fn one_machine(
    machine: Machine,
    count: u64,
    random: &mut Random,
    compared: &mut Compared,
) -> Result<()> {
    let mut scene = machine.boot()?;
    let done = checkpoints_of(&scene, count, random, compared);
    done.with_context(|| scene.guest.state())
}

fn checkpoints_of(
    scene: &Scene,
    count: u64,
    random: &mut Random,
    compared: &mut Compared,
) -> Result<()> {
    let machine = scene.machine;
    let mut taken = Vec::new();
    for number in 0..count {
        let schedule = SCHEDULES[number as usize % SCHEDULES.len()];
        let before = compared.differing;
        let watched = 1 + random.below(WATCH_MAX);
        let (id, report) = scene.checkpoint(schedule, watched, compared)?;
        if machine.files {
            scene.check_files(&id)?;
        }
        let restored = number % RESTORED_EVERY == 0 && !machine.lies;
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
            "differing": compared.differing - before, "memory": report["verify"], "free_pages": report["free_pages"],
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
            "{:20} {} checkpoints so far; {} pages of disks compared, {} differing; {} of memory, {} differing, {} free; {} VMs restored",
            machine.name(),
            compared.checkpoints,
            compared.pages,
            compared.differing,
            compared.memory_pages,
            compared.memory_differing,
            compared.free,
            compared.restored
        );
    }
    results::write_raw("disk-exactness", "checkpoints.jsonl", &compared.raw)?;
    let enough = compared.checkpoints >= CHECKPOINTS_MIN;
    let claim = |id, differing: u64| {
        let claim = Claim::new(id, Goal::Zero, differing as f64, "pages", COMMAND);
        claim.if_enough(enough)
    };
    let claims = [
        claim("exact-disks", compared.differing),
        claim("exact-disks-memory", compared.memory_differing),
    ];
    results::write_summary("disk-exactness", &claims)?;
    match compared.differing + compared.memory_differing {
        0 => Ok(()),
        differing => bail!("{differing} pages differ"),
    }
}
