//! Starting a second QEMU that takes the state of a recorded VM over.
//!
//! [`plan`] turns the recorded command line into one for the new process and refuses what cannot
//! be right; it changes nothing on the host. [`start`] runs it, and [`Starting::wait`] returns when QEMU waits for
//! incoming state. The caller then fills the RAM blocks and ends with [`load_device_state`]; `cont` sets the guest
//! going. Until [`Launched::keep`] the new QEMU belongs to this process: whatever fails, it is
//! killed and reaped, because half a guest is no guest.

mod adopt;
mod checks;
mod confinement;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod helper;
mod holders;
mod host_access;
mod load;
mod obstacles;
mod overlays;
mod owner;
mod program;
mod rewrite;
mod secrets;
mod start;

use std::path::PathBuf;

pub use adopt::adopt;
pub use checks::Unchecked;
pub use error::LaunchError;
pub use load::{ArmedLoad, arm, load_device_state};
pub use obstacles::restorability;
pub use overlays::Overlay;
pub use program::version_of;
pub use start::{Launched, Starting, start};

use crate::arguments::CommandLine;
use crate::credentials::Credentials;
use crate::guest_agent::AgentChannels;
use crate::monitor::{Disk, FeatureWord};
use crate::record::VmRecord;

/// The format of an image that is nothing but the disk's content.
const RAW: &str = "raw";
/// The format of an image that may have a backing file.
const QCOW2: &str = "qcow2";

/// The user's decisions about the new VM.
#[derive(Debug, Clone)]
pub struct LaunchOptions {
    /// Where its QMP monitor listens.
    pub qmp: PathBuf,
    /// The backend of its first serial port, in the words of `-serial`; nothing when none.
    pub serial: Option<String>,
    /// Whether to use the disks although they changed since the record or cannot be compared. A
    /// guest whose disk is not what its memory believes may destroy the disk's content.
    pub disks_as_they_are: bool,
    /// Where the VM's disks come from.
    pub disk_origin: DiskOrigin,
    /// Disks that get another image than the recorded one, whose content comes later.
    pub images: Vec<NewImage>,
    /// File that QEMU's own messages are appended to.
    pub log: PathBuf,
    /// Words of the command line to be replaced by others, wherever they stand in an option's value.
    pub replace: Vec<(String, String)>,
    /// The settings that make it one of several.
    pub clone: Option<CloneOptions>,
    /// The QEMU program to run instead of the recorded one.
    pub qemu: Option<PathBuf>,
    /// Whether the program may be of a newer version than the VM ran under.
    pub newer_qemu: bool,
    /// Whether it starts as root, whatever user the VM ran as.
    pub as_root: bool,
    /// Whether it starts without the security label that confined the VM.
    pub without_label: bool,
    /// Whether it starts in the control group of this process, not in the VM's.
    pub without_group: bool,
    /// Whether programs that the recorded command line names may run.
    pub allow_commands: bool,
    /// Where QEMU writes its process id.
    pub pidfile: Option<PathBuf>,
    /// The executable that answers to [`helper::SUBCOMMAND`].
    pub helper: PathBuf,
}

impl LaunchOptions {
    /// A VM whose monitor listens there and which logs there, and else is as it was.
    pub fn new(qmp: PathBuf, log: PathBuf) -> LaunchOptions {
        LaunchOptions {
            qmp,
            serial: None,
            disks_as_they_are: false,
            disk_origin: DiskOrigin::Recorded,
            images: Vec::new(),
            log,
            replace: Vec::new(),
            clone: None,
            qemu: None,
            newer_qemu: false,
            as_root: false,
            without_label: false,
            without_group: false,
            allow_commands: false,
            pidfile: None,
            helper: helper::this_program(),
        }
    }
}

impl LaunchOptions {
    /// The disks that the new VM will have, of those that were recorded, in their order.
    pub fn disks(&self, recorded: &[Disk]) -> Vec<Disk> {
        let mut disks = replaced(recorded, &self.replace);
        for disk in disks.iter_mut().filter(|disk| disk.is_image()) {
            let mut images = self.images.iter();
            if let Some(image) = images.find(|image| image.device == disk.device) {
                disk.path.clone_from(&image.path);
                if let Some(format) = image.format.name() {
                    format.clone_into(&mut disk.format);
                }
            }
        }
        disks
    }
}

/// Where the disks of a new VM come from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DiskOrigin {
    /// They are those of the record, unchanged since.
    #[default]
    Recorded,
    /// Another QEMU has them in use, and hands them over: they need only be there, with their size.
    HandedOver,
}

/// Another image for a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewImage {
    /// The drive or device, as [`Disk`] names it.
    pub device: String,
    /// The image. When QEMU starts it must be there, with the disk's size.
    pub path: PathBuf,
    /// Its format.
    pub format: NewFormat,
}

/// The format of another image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewFormat {
    /// That of the disk. It has no backing file.
    Recorded,
    /// Raw, whatever the disk was.
    Raw,
    /// qcow2, whatever the disk was: what it lacks is read from this backing file, which the image itself names.
    Overlay(String),
}

impl NewFormat {
    /// QEMU's name for it, if it does not depend on the disk.
    fn name(&self) -> Option<&'static str> {
        match self {
            NewFormat::Recorded => None,
            NewFormat::Raw => Some(RAW),
            NewFormat::Overlay(_) => Some(QCOW2),
        }
    }
}

/// The settings that make a VM one of several that start from the same checkpoint.
#[derive(Debug, Clone, Default)]
pub struct CloneOptions {
    /// The number of the clone.
    pub number: u32,
    /// Memory that it begins with.
    pub memory: Vec<CloneMemory>,
}

/// A RAM block that begins as a private view of a file.
#[derive(Debug, Clone)]
pub struct CloneMemory {
    /// The block.
    pub block: String,
    /// Its length.
    pub bytes: u64,
    /// The file.
    pub file: PathBuf,
}

/// How the new QEMU will be started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LaunchPlan {
    /// The program.
    pub exe: PathBuf,
    /// The version that it must be.
    pub version: String,
    /// Whether it may be a newer one.
    pub or_newer: bool,
    /// The features that its processors must have.
    pub cpu_features: Vec<FeatureWord>,
    /// Its arguments, `argv[0]` included.
    pub arguments: Vec<String>,
    /// Its working directory.
    pub cwd: PathBuf,
    /// The credentials it runs with; none for the user of this process. Its label and control group are the ones
    /// that the new VM gets.
    pub credentials: Option<Credentials>,
    /// The executable that becomes it.
    pub helper: PathBuf,
    /// Images that are made for it, and lose their names when it has opened them.
    pub overlays: Vec<Overlay>,
    /// The differences from the recorded command line and their reasons, in words for the user.
    pub changes: Vec<String>,
}

impl LaunchPlan {
    /// Where the new VM's guest agents are spoken to.
    pub fn guest_agents(&self) -> AgentChannels {
        AgentChannels::of(&self.arguments, &self.cwd)
    }
}

/// Works out how to start the recorded VM again.
///
/// # Errors
/// Anything that would make the new VM wrong, or destroy something of another process. A program of another version
/// is found only when it runs.
pub fn plan(record: &VmRecord, options: &LaunchOptions) -> Result<LaunchPlan, LaunchError> {
    let mut owner = owner::decide(record, options)?;
    let run_as = owner.credentials.as_ref();
    let exe = program::choose(record, options.qemu.as_deref(), run_as)?;
    if let Some(then) = owner.credentials.as_ref().filter(|_| owner.is_another())
        && options.clone.is_some()
    {
        return Err(LaunchError::CloneNeedsRoot { uid: then.uid });
    }
    let busy = holders::is_in_use;
    let at = |path: &std::path::Path| holders::Endpoint::Unix(record.cwd.join(path));
    if busy(&at(&options.qmp)) {
        return Err(LaunchError::MonitorInUse {
            path: options.qmp.clone(),
        });
    }
    let settings = rewrite::Settings {
        options,
        run_as: owner.credentials.as_ref().filter(|_| owner.is_another()),
        disks: &record.disks,
    };
    let arguments = record.command_line().to_argv();
    let mut rewritten = rewrite::rewrite(&arguments, &record.cwd, &settings, &busy)?;
    rewritten.changes.extend(owner.changes);
    consent(record, options, &mut rewritten)?;
    secrets::check(&rewritten.arguments, &record.cwd)?;
    let disks = options.disks(&record.disks);
    let strangers = checks::strangers(&rewritten.arguments, &disks);
    if let Some(error) = strangers.into_iter().next() {
        return Err(error);
    }
    rewritten
        .changes
        .extend(checks::disks(&record.disks, &disks, options)?);
    checks::shared_ram(&rewritten.arguments, &record.cwd)?;
    if options.newer_qemu {
        name_machine(record, &mut rewritten);
    }
    if let Some(credentials) = &mut owner.credentials {
        confinement::leave_to_sandbox(credentials, &CommandLine::parse(&rewritten.arguments));
    }
    Ok(LaunchPlan {
        exe,
        version: record.identity.qemu_version.clone(),
        or_newer: options.newer_qemu,
        cpu_features: record.cpu_features.clone(),
        arguments: rewritten.arguments,
        cwd: record.cwd.clone(),
        credentials: owner.credentials,
        helper: options.helper.clone(),
        overlays: rewritten.overlays,
        changes: [record.hot_plug.changes(), rewritten.changes].concat(),
    })
}

/// Names the versioned machine type, which a newer QEMU would not choose by itself. A later `-machine` changes what it names,
/// and leaves the rest as it is (`qemu_create_machine` in QEMU's system/vl.c).
fn name_machine(record: &VmRecord, rewritten: &mut rewrite::Rewritten) {
    let machine = &record.identity.machine;
    let option = ["-machine".to_owned(), format!("type={machine}")];
    rewritten.arguments.extend(option);
    let change = format!("`-machine type={machine}` added: a newer QEMU may run the VM");
    rewritten.changes.push(change);
}

/// These disks with words of their paths replaced as in the command line.
fn replaced(disks: &[Disk], replace: &[(String, String)]) -> Vec<Disk> {
    let mut disks = disks.to_vec();
    for disk in &mut disks {
        for (old, new) in replace {
            if let Some(path) = disk.path.to_str().filter(|path| path.contains(old)) {
                disk.path = path.replace(old, new).into();
            }
        }
    }
    disks
}

/// The effects of the command line on the host are shown. Effects that another person may have put there are
/// refused without consent.
fn consent(
    record: &VmRecord,
    options: &LaunchOptions,
    rewritten: &mut rewrite::Rewritten,
) -> Result<(), LaunchError> {
    let mut line = CommandLine::parse(&rewritten.arguments);
    line.options
        .retain(|option| rewritten.given.as_ref() != Some(option));
    let access = host_access::survey(&line);
    let was_root = record
        .credentials
        .as_ref()
        .is_some_and(|then| then.uid == 0);
    let gains = options.as_root && !was_root;
    let mut critical = access.programs;
    match gains {
        true => critical.extend(access.files),
        false => rewritten.changes.extend(
            access
                .files
                .into_iter()
                .map(|option| format!("`{option}` kept: it writes to the host")),
        ),
    }
    if !options.allow_commands && !critical.is_empty() {
        return Err(LaunchError::CommandsNotAllowed { options: critical });
    }
    let allowed = critical
        .into_iter()
        .map(|option| format!("`{option}` kept, as allowed"));
    rewritten.changes.extend(allowed);
    Ok(())
}

/// Makes sure that the disks of a VM that runs, `now`, are what they were `then`, but for those that are unchecked.
///
/// # Errors
/// [`LaunchError::DiskChanged`].
pub fn check_running_disks(
    then: &VmRecord,
    now: &VmRecord,
    unchecked: &Unchecked<'_>,
) -> Result<(), LaunchError> {
    checks::running_disks(then, now, unchecked)
}

/// Makes sure that the files of these disks, which no VM uses, are as they were.
///
/// # Errors
/// [`LaunchError::DiskChanged`], [`LaunchError::DiskMissing`], [`LaunchError::DiskInUse`] by a process other than
/// `except`.
pub fn check_idle_disks(disks: &[Disk], except: i32) -> Result<(), LaunchError> {
    disks
        .iter()
        .try_for_each(|disk| checks::idle_disk(disk, except))
}

/// The RAM blocks of a VM that can begin as a view of a file ([`CloneMemory`]): its main memory.
pub fn memory_blocks(record: &VmRecord) -> Vec<String> {
    rewrite::memory_blocks(record)
}
