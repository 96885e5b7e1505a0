//! Starting a second QEMU that takes the state of a recorded VM over.
//!
//! [`plan`] turns the recorded command line into one for the new process and refuses what cannot
//! be right; it changes nothing on the host. [`start`] runs it, and [`Starting::wait`] returns when QEMU waits for
//! incoming state. The caller then fills the RAM blocks and ends with [`load_device_state`]; `cont` sets the guest
//! going. Until [`Launched::keep`] the new QEMU belongs to this process: whatever fails, it is
//! killed and reaped, because half a guest is no guest.

mod checks;
mod confinement;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod helper;
mod holders;
mod host_access;
mod obstacles;
mod owner;
mod program;
mod rewrite;
mod secrets;
mod start;

use std::io;
use std::path::PathBuf;

pub use obstacles::restorability;
pub use program::version_of;
pub use start::{Launched, Starting, load_device_state, start};

use crate::arguments::CommandLine;
use crate::credentials::Credentials;
use crate::device_state::DeviceStateError;
use crate::guest_agent;
use crate::monitor::{Disk, FeatureWord, MonitorError};
use crate::record::VmRecord;
use stillframe_sys::private_dir::PrivateError;

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
    /// File that QEMU's own messages are appended to.
    pub log: PathBuf,
    /// Words of the command line to be replaced by others, wherever they stand in an option's value.
    pub replace: Vec<(String, String)>,
    /// The settings that make it one of several.
    pub clone: Option<CloneOptions>,
    /// The QEMU program to run instead of the recorded one.
    pub qemu: Option<PathBuf>,
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
            log,
            replace: Vec::new(),
            clone: None,
            qemu: None,
            as_root: false,
            without_label: false,
            without_group: false,
            allow_commands: false,
            pidfile: None,
            helper: helper::this_program(),
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
    /// The differences from the recorded command line and their reasons, in words for the user.
    pub changes: Vec<String>,
}

impl LaunchPlan {
    /// Where the new VM's guest agent is spoken to, if it has a channel for one.
    pub fn guest_agent(&self) -> Option<PathBuf> {
        guest_agent::socket_path(&self.arguments, &self.cwd)
    }
}

/// Why a VM cannot be started again, or failed to.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program is gone.
    #[error("the recorded QEMU program {exe} is missing; install QEMU {version}")]
    ProgramMissing {
        /// The program.
        exe: PathBuf,
        /// Its recorded version.
        version: String,
    },
    /// Other users can exchange the program.
    #[error(
        "the VM's program {exe} is not run: {part} {why}, so another user can decide what would run; \
         name a QEMU of your own choice with --qemu PATH"
    )]
    ProgramNotTrusted {
        /// The program.
        exe: PathBuf,
        /// The file or folder that is not safe.
        part: PathBuf,
        /// Why.
        why: String,
    },
    /// The VM's user can exchange the program, and did.
    #[error(
        "the VM's program {exe} is not run: user {uid} can change it, and it is not the program that the VM ran; \
         name a QEMU of your own choice with --qemu PATH"
    )]
    ProgramChanged {
        /// The program.
        exe: PathBuf,
        /// The user that the VM ran as.
        uid: u32,
    },
    /// An older record.
    #[error(
        "the checkpoint does not say as which user the VM ran (an earlier version took it); --as-root \
         starts it as root"
    )]
    OwnerUnknown,
    /// Only root can start a VM as root.
    #[error("--as-root is for root: a user starts VMs as that user")]
    NotRoot,
    /// The label that confined the VM would not confine the new QEMU.
    #[error(
        "the VM was confined by the security label {label}, which QEMU cannot be given: {why}; load its policy, or \
         start QEMU without that confinement: --without-label"
    )]
    LabelNotGiven {
        /// The label.
        label: String,
        /// The reason.
        why: String,
    },
    /// The command line needs more rights than the VM has.
    #[error(
        "`{option}` needs root, but the VM ran as user {uid}; --as-root starts QEMU as root, which then \
         changes its user by itself if its command line says so (-run-with user=)"
    )]
    NeedsRoot {
        /// The option.
        option: String,
        /// The VM's user.
        uid: u32,
    },
    /// Clones read files that the VM's user cannot read.
    #[error(
        "clones share memory in files that user {uid}, which the VM ran as, cannot read; --as-root starts them \
         as root, restore starts one VM as that user"
    )]
    CloneNeedsRoot {
        /// The VM's user.
        uid: u32,
    },
    /// A file with a secret is gone.
    #[error("`{option}` needs {path}, which is missing; put it back")]
    SecretMissing {
        /// The option.
        option: String,
        /// The file.
        path: PathBuf,
    },
    /// A file with a secret goes with the VM.
    #[error(
        "`{option}` needs {path}, which libvirt removes when the domain ends; keep a copy of it to put back"
    )]
    SecretGoes {
        /// The option.
        option: String,
        /// The file.
        path: PathBuf,
    },
    /// The command line runs programs.
    #[error(
        "the VM's command line makes QEMU run programs or write files with rights of yours: {}; a guest that \
         broke into its QEMU could have put that there: --allow-commands if they are as you know them", options.join(", ")
    )]
    CommandsNotAllowed {
        /// The options.
        options: Vec<String>,
    },
    /// The helper could not become QEMU.
    #[error("QEMU was not started: {words}")]
    NotStarted {
        /// The helper's words.
        words: String,
    },
    /// The program is another version.
    #[error(
        "{exe} is now QEMU {found}, but the VM ran under {recorded}; install that version: device \
         state is only loaded into the version that saved it"
    )]
    VersionDiffers {
        /// The program.
        exe: PathBuf,
        /// The version it is now.
        found: String,
        /// The version of the record.
        recorded: String,
    },
    /// The guest would not find features that it relies on.
    #[error(
        "the processors of the new VM lack what the guest was started with ({missing}): this host cannot run it, or -cpu names another model"
    )]
    CpuFeatures {
        /// The features.
        missing: String,
    },
    /// The program cannot be run.
    #[error("cannot run {program}")]
    Run {
        /// The program.
        program: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The old process was given open files by its parent.
    #[error(
        "the VM was started with a descriptor inherited from its parent (`{option}`), which cannot \
         be had again; start such a VM with paths and names instead"
    )]
    InheritedDescriptor {
        /// The option.
        option: String,
    },
    /// The machine was put together by monitor commands before it started.
    #[error("the VM was put together by monitor commands (-preconfig), which are not recorded")]
    Preconfig,
    /// Its disks would not be its own.
    #[error(
        "`{option}` is a disk that all clones would write to: start the VM with -drive, or with the disk read-only, to clone it"
    )]
    BlockdevOfClone {
        /// The option.
        option: String,
    },
    /// A word that is not there.
    #[error("nothing to replace: {word:?} does not stand in the VM's command line")]
    NothingToReplace {
        /// The word.
        word: String,
    },
    /// The user named a serial port that the VM does not have.
    #[error("the VM has no serial port to connect to {spec:?}, and adding one would change the VM")]
    NoSerialPort {
        /// The named serial port.
        spec: String,
    },
    /// The text that names the serial port's backend is no such thing.
    #[error(
        "{spec:?} is nothing a background VM's serial port can be connected to; use file:PATH, \
         unix:PATH,server=on,wait=off, tcp:HOST:PORT,server=on,wait=off, pty or null"
    )]
    Serial {
        /// The given text.
        spec: String,
    },
    /// A path cannot be written into a command line.
    #[error("{path:?} is not UTF-8 and cannot be passed to QEMU")]
    NotUtf8 {
        /// The path.
        path: PathBuf,
    },
    /// The new monitor's path is in use.
    #[error("a living process listens on {path}; choose another path for the new VM's monitor")]
    MonitorInUse {
        /// The socket.
        path: PathBuf,
    },
    /// A disk file is gone.
    #[error("disk {device}: {path} is missing; put it back as it was at the checkpoint")]
    DiskMissing {
        /// The drive.
        device: String,
        /// Its file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A disk file has changed.
    #[error(
        "disk {device}: {path} {what} since the checkpoint; put back the disk of that time, or use \
         the disks as they are at the risk of damaging them"
    )]
    DiskChanged {
        /// The drive.
        device: String,
        /// Its file.
        path: PathBuf,
        /// How it differs.
        what: &'static str,
    },
    /// Another file takes the place of a recorded disk.
    #[error(
        "disk {device}: {path} takes the place of {recorded}, and it cannot be seen whether it has the content of \
         the checkpoint; use the disks as they are if it has"
    )]
    DiskReplaced {
        /// The drive.
        device: String,
        /// The new file.
        path: PathBuf,
        /// The recorded one.
        recorded: PathBuf,
    },
    /// A disk's writes went to a throw-away file.
    #[error(
        "disk {device} was opened with snapshot=on: what the guest wrote since its start is lost \
         with the old process; use the disks as they are only if the guest can bear that"
    )]
    DiskTemporary {
        /// The drive.
        device: String,
    },
    /// A disk is no file and cannot be compared.
    #[error(
        "disk {device}: {path} is no file of this host, so a change of it cannot be detected; \
         use the disks as they are if you know it did not"
    )]
    DiskUnknown {
        /// The drive.
        device: String,
        /// QEMU's name for it.
        path: PathBuf,
    },
    /// A disk came into the VM after its start.
    #[error(
        "disk {device}: {path} is not in the VM's command line; it was exchanged while the VM ran, \
         and starting the old command line would use another disk"
    )]
    DiskNotInArguments {
        /// The drive.
        device: String,
        /// Its file.
        path: PathBuf,
    },
    /// Another process has a disk open that the VM writes to.
    #[error(
        "disk {device}: {path} is open in process {pid} ({program}); two users of one disk destroy \
         it: end the other one, or give the new VM a copy"
    )]
    DiskInUse {
        /// The drive.
        device: String,
        /// Its file.
        path: PathBuf,
        /// The other process.
        pid: i32,
        /// Its program.
        program: String,
    },
    /// Another process has the file open that is to contain the RAM.
    #[error(
        "the RAM file {path} (share=on) is in use by process {pid} ({program}); the new VM would \
         overwrite its memory: end it first"
    )]
    RamInUse {
        /// The file.
        path: PathBuf,
        /// The other process.
        pid: i32,
        /// Its program.
        program: String,
    },
    /// The log file cannot be written.
    #[error("cannot write QEMU's log {path}")]
    Log {
        /// The log file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The log file could be another user's.
    #[error("cannot write QEMU's log")]
    LogNotOurs(#[from] PrivateError),
    /// The new QEMU ended.
    #[error("the new QEMU ended while {doing} ({status}); its last words:\n{log}")]
    Exited {
        /// The action that failed.
        doing: &'static str,
        /// How it ended.
        status: String,
        /// The end of its log.
        log: String,
    },
    /// The new QEMU could not be talked to.
    #[error("{doing} failed; the new QEMU's last words:\n{log}")]
    Monitor {
        /// The action that failed.
        doing: &'static str,
        /// The error.
        #[source]
        source: Box<MonitorError>,
        /// The end of its log.
        log: String,
    },
    /// The new QEMU was too slow.
    #[error("the new QEMU did not finish {doing} within {limit_ms} ms; its last words:\n{log}")]
    Timeout {
        /// The action that failed.
        doing: &'static str,
        /// The limit in milliseconds.
        limit_ms: u128,
        /// The end of its log.
        log: String,
    },
    /// The new QEMU would not take the device state.
    #[error("the new QEMU did not take the device state ({status}); its last words:\n{log}")]
    Load {
        /// QEMU's word for the state of the migration or VM, and its reason if it gave one.
        status: String,
        /// The end of its log.
        log: String,
    },
    /// The device state cannot be handed over.
    #[error("cannot hand the device state to the new QEMU")]
    Memfd(#[from] stillframe_sys::memfd::MemfdError),
    /// The new process cannot be watched.
    #[error("cannot watch the new QEMU")]
    Process(#[from] stillframe_sys::process::ProcessError),
    /// The device state is damaged.
    #[error("the device state of the checkpoint cannot be used")]
    DeviceState(#[from] DeviceStateError),
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
    let disks = replaced(&record.disks, &options.replace);
    let strangers = checks::strangers(&rewritten.arguments, &disks);
    if let Some(error) = strangers.into_iter().next() {
        return Err(error);
    }
    rewritten
        .changes
        .extend(checks::disks(&record.disks, &disks, options)?);
    checks::shared_ram(&rewritten.arguments, &record.cwd)?;
    if let Some(credentials) = &mut owner.credentials {
        confinement::leave_to_sandbox(credentials, &CommandLine::parse(&rewritten.arguments));
    }
    Ok(LaunchPlan {
        exe,
        version: record.identity.qemu_version.clone(),
        cpu_features: record.cpu_features.clone(),
        arguments: rewritten.arguments,
        cwd: record.cwd.clone(),
        credentials: owner.credentials,
        helper: options.helper.clone(),
        changes: [record.hot_plug.changes(), rewritten.changes].concat(),
    })
}

/// The disks that the new VM will have, in their order: words of their paths are replaced as in the command line.
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

/// Makes sure that the disks of a VM that runs, `now`, are what they were `then`.
///
/// # Errors
/// [`LaunchError::DiskChanged`]; none with `as_they_are`.
pub fn check_running_disks(
    then: &VmRecord,
    now: &VmRecord,
    as_they_are: bool,
) -> Result<(), LaunchError> {
    checks::running_disks(then, now, as_they_are)
}

/// The RAM blocks of a VM that can begin as a view of a file ([`CloneMemory`]): its main memory.
pub fn memory_blocks(record: &VmRecord) -> Vec<String> {
    rewrite::memory_blocks(record)
}
