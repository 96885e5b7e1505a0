//! What keeps a recorded VM from being started again.

use std::io;
use std::path::PathBuf;

use stillframe_sys::private_dir::PrivateError;

use crate::device_state::DeviceStateError;
use crate::monitor::MonitorError;
use crate::target::TargetError;

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
         state is only loaded into the version that saved it (`receive --newer-qemu` allows a newer one, after a \
         rehearsal)"
    )]
    VersionDiffers {
        /// The program.
        exe: PathBuf,
        /// The version it is now.
        found: String,
        /// The version of the record.
        recorded: String,
    },
    /// There is no QEMU that waits.
    #[error("there is no QEMU to receive into")]
    NotFound(#[source] TargetError),
    /// It does something else.
    #[error(
        "the QEMU at {path} is {status}: it has to be started with -incoming defer, and have got nothing yet"
    )]
    NotWaiting {
        /// Its monitor.
        path: PathBuf,
        /// Its run state.
        status: String,
    },
    /// It cannot become the VM.
    #[error("the QEMU that waits has another {what} than the VM: {found}, and not {recorded}")]
    OtherMachine {
        /// The property.
        what: &'static str,
        /// That of the QEMU.
        found: String,
        /// That of the VM.
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
    /// What a clone writes has no place.
    #[error(
        "cannot make {path} for what a clone writes to a disk: {why}. Another directory can be named with TMPDIR"
    )]
    Overlay {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: String,
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
    /// A disk cannot get another image.
    #[error(
        "disk {device} cannot get a new image: the VM's command line does not name its file {path}. Write the image with \
         `export --disk`, and restore with --replace and --disks-as-they-are"
    )]
    ImageNotInArguments {
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
    /// The kernel gives no pipe for the device state.
    #[error("cannot make a pipe for the device state")]
    Pipe(#[source] io::Error),
    /// The new process cannot be watched.
    #[error("cannot watch the new QEMU")]
    Process(#[from] stillframe_sys::process::ProcessError),
    /// The device state is damaged.
    #[error("the device state of the checkpoint cannot be used")]
    DeviceState(#[from] DeviceStateError),
}
