//! VMs with disks, as the runs start them: the kinds of disks, what is on them, and what their guests do.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use stillframe_harness::committing::make_image;
use stillframe_harness::guest::{Kind, Setup};

/// MiB of each disk.
const DISK_MIB: u32 = 32;
/// A byte that is written beyond that.
const BALLAST: u8 = 0x5a;
/// MiB of a disk with a file system or swap, and MiB of the file.
const FILES_MIB: u32 = 64;
const FILE_MIB: u32 = 24;
/// MiB that the guest uses then, and MiB of RAM: some of it is always swapped.
const PRESSING_MIB: u32 = 96;
const PRESSED_MIB: u32 = 136;

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
    /// The first one has a file system, and the second one swap.
    pub files: bool,
    /// Its agent calls every page free. What is restored from its checkpoints cannot run.
    pub lies: bool,
    /// MiB behind what the guest writes, of bytes like `BALLAST`.
    pub ballast_mib: u32,
}

impl Machine {
    /// One with these disks.
    pub const fn new(bus: Bus, format: &'static str, disks: usize) -> Machine {
        Machine {
            bus,
            format,
            disks,
            files: false,
            lies: false,
            ballast_mib: 0,
        }
    }

    /// One with a file system on its first disk, and swap on its second.
    pub const fn with_files(bus: Bus, format: &'static str) -> Machine {
        Machine {
            bus,
            format,
            disks: 2,
            files: true,
            lies: false,
            ballast_mib: 0,
        }
    }

    /// With an agent that calls every page free.
    pub const fn whose_agent_lies(self) -> Machine {
        Machine { lies: true, ..self }
    }

    /// With content that the guest never writes, in this number of MiB behind its own.
    pub const fn with_ballast(self, ballast_mib: u32) -> Machine {
        Machine {
            ballast_mib,
            ..self
        }
    }

    /// A command of `qemu-io` (`write` or `read`) for the ballast.
    pub(crate) fn ballast(&self, verb: &str) -> String {
        format!("{verb} -P {BALLAST} {DISK_MIB}M {}M", self.ballast_mib)
    }

    pub(crate) fn name(&self) -> String {
        let kind = match (self.files, self.lies) {
            (_, true) => " files, lies",
            (true, false) => " files",
            (false, false) => "",
        };
        format!("{:?} {} x{}{kind}", self.bus, self.format, self.disks)
    }

    /// The names in the guest of the disks that it checks.
    pub(super) fn checked(&self) -> Vec<String> {
        let checked = if self.files { 1 } else { self.disks };
        (0..checked).map(|number| self.in_guest(number)).collect()
    }

    /// Words for the guest's kernel.
    fn words(&self) -> String {
        let named = match self.bus {
            Bus::Virtio => String::new(),
            Bus::Scsi | Bus::Ide => format!(" sf.scsi={}", self.disks),
        };
        match self.files {
            true => {
                let (file, swap) = (self.in_guest(0), self.in_guest(1));
                let liar = if self.lies { " sf.liar=1" } else { "" };
                format!("sf.file={FILE_MIB}:{file} sf.swap={swap}{liar}{named}")
            }
            false => format!("sf.disks={DISK_MIB}:{}{named}", self.checked().join(",")),
        }
    }

    /// Makes the image of a disk.
    pub(super) fn make(&self, image: &Path, number: usize) -> Result<()> {
        match (self.files, number) {
            (false, _) => {
                make_image(image, self.format, DISK_MIB + self.ballast_mib)?;
                if self.ballast_mib == 0 {
                    return Ok(());
                }
                let mut command = Command::new("qemu-io");
                let write = self.ballast("write");
                execute(command.args(["-f", self.format, "-c", &write]).arg(image))
            }
            (true, 0) => make_file_system(image, self.format, FILES_MIB),
            (true, _) => make_image(image, self.format, FILES_MIB),
        }
    }

    /// The name of a disk in the guest.
    pub(super) fn in_guest(&self, number: usize) -> String {
        match self.bus {
            Bus::Virtio => format!("vd{}", char::from(b'a' + number as u8)),
            Bus::Scsi | Bus::Ide => format!("disk{number}"),
        }
    }

    fn arguments(&self, images: &[PathBuf]) -> Vec<String> {
        let mut words = Vec::new();
        if self.bus == Bus::Scsi {
            words.extend(["-device", "virtio-scsi-pci"].map(str::to_owned));
        }
        for (number, image) in images.iter().enumerate() {
            let drive = format!(
                "file={},format={},discard=unmap",
                image.display(),
                self.format
            );
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

    /// The guest to start, with these images.
    pub(super) fn setup(&self, images: &[PathBuf]) -> Setup {
        let kind = match self.bus {
            Bus::Ide => Kind::Pc,
            Bus::Virtio | Bus::Scsi => Kind::Private,
        };
        let words = self.arguments(images);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut setup = Setup::small(kind, "disks").with(&words);
        if self.files {
            setup.workload.mib = PRESSING_MIB;
            setup.ram_mib = PRESSED_MIB;
            setup = setup.with_agent();
        }
        setup.with_drivers(&self.words())
    }

    /// QEMU's name of a disk.
    pub(super) fn device(&self, number: usize) -> String {
        match self.bus {
            Bus::Ide => format!("ide0-hd{number}"),
            Bus::Virtio | Bus::Scsi => format!("disk{number}"),
        }
    }
}

/// Makes an image of this format with a file system in it.
fn make_file_system(image: &Path, format: &str, mib: u32) -> Result<()> {
    let raw = image.with_extension("raw");
    make_image(&raw, "raw", mib)?;
    let words = ["-q", "-F", "-b", "4096"];
    execute(Command::new("mkfs.ext4").args(words).arg(&raw))?;
    let words = ["convert", "-f", "raw", "-O", format];
    execute(Command::new("qemu-img").args(words).args([&raw, image]))?;
    Ok(fs::remove_file(raw)?)
}

pub(crate) fn execute(command: &mut Command) -> Result<()> {
    let ended = command.output()?;
    ensure!(ended.status.success(), "{command:?}: {ended:?}");
    Ok(())
}
