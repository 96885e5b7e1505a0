//! The QEMU that becomes the VM: one that is started for it, or one that a manager has started.

use std::path::{Path, PathBuf};
use std::time::Duration;

use stillframe_qemu::launch::{
    self, DiskOrigin, LaunchOptions, Launched, NewFormat, NewImage, Starting,
};
use stillframe_qemu::monitor::image_of;
use stillframe_qemu::record::VmRecord;

use super::Mode;
use super::announced::same_machine;
use super::disks::{ADVICE, DestinationError};
use super::error::ReceiveError;
use crate::disks::images::NewImages;
use crate::guardian::{Guardian, OnDisconnect};
use crate::restore::{self, START_LIMIT};

/// Time for the monitor of a VM that a manager started.
const MONITOR_LIMIT: Duration = Duration::from_secs(10);

/// The QEMU that becomes the VM.
#[derive(Debug, Clone)]
pub enum NewQemu {
    /// It is started in this way.
    Start(Box<LaunchOptions>),
    /// Another program has started it, with this monitor and `-incoming defer`.
    Into(PathBuf),
}

impl NewQemu {
    /// Makes the images that these disks are copied into. A manager has made those of its QEMU.
    ///
    /// # Errors
    /// The errors of [`NewImages::make`].
    pub(super) fn make_images(
        &self,
        vm: &VmRecord,
        copied: &[String],
        overwrite: bool,
    ) -> Result<NewImages, DestinationError> {
        match self {
            NewQemu::Start(launch) => Ok(NewImages::make(vm, copied, launch, overwrite, &ADVICE)?),
            NewQemu::Into(_) => Ok(NewImages::none(&ADVICE)),
        }
    }

    /// Its monitor.
    pub fn qmp(&self) -> &Path {
        match self {
            NewQemu::Start(launch) => &launch.qmp,
            NewQemu::Into(qmp) => qmp,
        }
    }
}

/// A rehearsal that went well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rehearsal {
    vm: Box<VmRecord>,
    /// The version of the QEMU that has loaded its devices.
    version: String,
}

impl Rehearsal {
    /// One of this VM, in this QEMU.
    pub(super) fn of(vm: &VmRecord, launched: &Launched) -> Rehearsal {
        Rehearsal {
            vm: Box::new(vm.clone()),
            version: launched.version.clone(),
        }
    }

    /// Whether it says that this QEMU takes this VM: a device may have been plugged since.
    fn covers(&self, vm: &VmRecord, launched: &Launched) -> bool {
        self.version == launched.version && same_machine(&self.vm, vm)
    }
}

/// A newer QEMU than the VM ran under takes it only after a rehearsal.
fn expect_rehearsed(
    (vm, mode): (&VmRecord, Mode),
    launched: &Launched,
    rehearsed: Option<&Rehearsal>,
) -> Result<(), ReceiveError> {
    let recorded = &vm.identity.qemu_version;
    let covered = rehearsed.is_some_and(|this| this.covers(vm, launched));
    match mode == Mode::Rehearsal || launched.version == *recorded || covered {
        true => Ok(()),
        false => Err(ReceiveError::NotRehearsed {
            found: launched.version.clone(),
            recorded: recorded.clone(),
        }),
    }
}

/// A QEMU that ends with this process.
pub(super) enum NewProcess<'q> {
    /// It was started for this VM; how it differs, in words.
    Starting(Box<Starting>, Vec<String>),
    /// A manager has started it.
    Into(&'q Path),
}

/// Starts a QEMU, as far as its process, or names the one that is to be used.
pub(super) fn starting<'q>(
    qemu: &'q NewQemu,
    (vm, mode): (&VmRecord, Mode),
    copied: &[String],
    guardian: &Guardian,
) -> Result<NewProcess<'q>, ReceiveError> {
    let options = match (qemu, mode) {
        (NewQemu::Start(options), _) => options,
        (NewQemu::Into(_), Mode::Rehearsal) => return Err(ReceiveError::NoRehearsal),
        (NewQemu::Into(qmp), _) => return Ok(NewProcess::Into(qmp)),
    };
    let mut launch = LaunchOptions::clone(options);
    launch.disk_origin = DiskOrigin::HandedOver;
    let disks = launch.disks(&vm.disks);
    let of = |device: &String| image_of(&disks, device);
    let images = copied.iter().filter_map(of).map(|disk| NewImage {
        device: disk.device.clone(),
        path: disk.path.clone(),
        format: NewFormat::Recorded,
    });
    launch.images = images.collect();
    let plan = launch::plan(vm, &launch)?;
    let mut starting = restore::start(&plan, &launch, guardian)?;
    starting.go();
    Ok(NewProcess::Starting(Box::new(starting), plan.changes))
}

impl NewProcess<'_> {
    /// Waits until it waits for its state. A newer QEMU does so for a VM that was `rehearsed` in it.
    pub fn wait(
        self,
        (vm, mode): (&VmRecord, Mode),
        rehearsed: Option<&Rehearsal>,
        guardian: &Guardian,
    ) -> Result<(Launched, Vec<String>), ReceiveError> {
        match self {
            NewProcess::Starting(starting, changes) => {
                let launched = starting.wait(START_LIMIT)?;
                expect_rehearsed((vm, mode), &launched, rehearsed)?;
                Ok((launched, changes))
            }
            NewProcess::Into(qmp) => {
                let launched = launch::adopt(qmp, vm, MONITOR_LIMIT)?;
                guardian.on_disconnect(OnDisconnect::End {
                    pid: launched.process.pid(),
                    start_time: launched.process.start_time(),
                })?;
                Ok((launched, Vec::new()))
            }
        }
    }
}
