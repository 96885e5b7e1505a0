//! The command line: what can be asked for, and with which words.

mod capture;
mod clone;
mod copy;
mod forget;
mod generate;
mod interchange;
mod key;
mod list;
mod rewind;
mod start;
mod transfer;

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use stillframe_engine::Selector;

use crate::durations;
use crate::help;
use crate::sizes;
pub use capture::{CaptureArgs, CheckpointArgs, WatchArgs};
pub use clone::CloneArgs;
pub use copy::CopyArgs;
pub use forget::{ForgetArgs, KeepArgs, PruneArgs};
pub use generate::{CompletionsArgs, ManArgs};
pub use interchange::{ExportArgs, ImportArgs};
pub use key::{KeyArgs, KeyCommand};
pub use list::ListArgs;
pub use rewind::RewindArgs;
pub use start::StartArgs;
pub use transfer::{ReceiveArgs, SendArgs, TransferArgs, TransferSide};

/// Checkpoints and restores running QEMU VMs, from outside and without their help.
#[derive(Debug, Parser)]
#[command(name = "stillframe", version, after_help = help::TOP)]
pub struct Cli {
    /// What every command understands.
    #[command(flatten, next_help_heading = "Options of every command")]
    pub global: GlobalArgs,
    /// What is to be done.
    #[command(subcommand)]
    pub command: Command,
}

/// What every command understands.
#[derive(Debug, Clone, Args)]
pub struct GlobalArgs {
    /// The repository: a directory
    #[arg(
        short,
        long,
        global = true,
        value_name = "DIR",
        env = "STILLFRAME_REPOSITORY"
    )]
    pub repository: Option<PathBuf>,
    /// Where the repository's password comes from.
    #[command(flatten)]
    pub password: PasswordArgs,
    /// Print results, notes and errors as JSON, one object a line
    #[arg(long, global = true)]
    pub json: bool,
    /// Print results and errors only: no progress, no notes
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// Print details, too
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    pub verbose: bool,
}

/// Where the repository's password comes from. There is no option that takes the password itself:
/// every user of a machine can read every command line.
#[derive(Debug, Clone, Default, Args)]
pub struct PasswordArgs {
    /// Read the password from this file [env: STILLFRAME_PASSWORD_FILE]
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        conflicts_with = "password_command"
    )]
    pub password_file: Option<PathBuf>,
    /// What this prints is the password [env: STILLFRAME_PASSWORD_COMMAND]
    #[arg(long, global = true, value_name = "COMMAND")]
    pub password_command: Option<String>,
}

/// What is to be done.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create a repository
    #[command(after_help = help::INIT)]
    Init,
    /// Need no password for a while
    #[command(after_help = help::UNLOCK)]
    Unlock(UnlockArgs),
    /// Add, remove, list and change the passwords of the repository
    #[command(after_help = help::KEY)]
    Key(KeyArgs),
    /// Take one checkpoint of a running VM
    #[command(after_help = help::CHECKPOINT)]
    Checkpoint(CheckpointArgs),
    /// Stay attached to a VM and take a checkpoint every so often
    #[command(after_help = help::WATCH)]
    Watch(WatchArgs),
    /// List the checkpoints
    #[command(visible_alias = "ls", after_help = help::LIST)]
    List(ListArgs),
    /// Show everything about one checkpoint
    #[command(after_help = help::SHOW)]
    Show(NamedCheckpoint),
    /// Start a new QEMU in the state of a checkpoint
    #[command(after_help = help::RESTORE)]
    Restore(RestoreArgs),
    /// Start several VMs from one checkpoint, which share its memory
    #[command(after_help = help::CLONE)]
    Clone(CloneArgs),
    /// Take a running VM back to one of its checkpoints, in the same QEMU
    #[command(after_help = help::REWIND)]
    Rewind(RewindArgs),
    /// Write a checkpoint as a file that QEMU, gdb or crash can read
    #[command(after_help = help::EXPORT)]
    Export(ExportArgs),
    /// Make a checkpoint of a migration file that QEMU wrote
    #[command(after_help = help::IMPORT)]
    Import(ImportArgs),
    /// Copy checkpoints into another repository
    #[command(after_help = help::COPY)]
    Copy(CopyArgs),
    /// Look for damage in the repository
    #[command(after_help = help::CHECK)]
    Check(CheckArgs),
    /// Remove checkpoints; their space is freed by prune
    #[command(after_help = help::FORGET)]
    Forget(ForgetArgs),
    /// Free the space of what no checkpoint needs
    #[command(after_help = help::PRUNE)]
    Prune(PruneArgs),
    /// Make the index again from the packs, when index files are lost or damaged
    #[command(after_help = help::REBUILD_INDEX)]
    RebuildIndex,
    /// Describe the repository, a file of it, or a checkpoint as it is stored
    #[command(after_help = help::INSPECT)]
    Inspect(InspectArgs),
    /// Count what changes in a VM's memory, page by page and byte by byte
    #[command(after_help = help::STATS)]
    Stats(StatsArgs),
    /// Try what this machine's kernel can do
    #[command(after_help = help::PROBE)]
    Probe,
    /// Print a shell's completions for this program
    #[command(after_help = help::COMPLETIONS)]
    Completions(CompletionsArgs),
    /// Write this program's man pages into a directory
    #[command(after_help = help::MAN)]
    Man(ManArgs),
    /// Send a running VM to another process of this host: for the stress runs of the project
    #[command(hide = true)]
    Transfer(TransferArgs),
}

/// Which running VM. Exactly one of these.
#[derive(Debug, Clone, Args)]
#[group(required = true, multiple = false)]
pub struct VmSelector {
    /// The VM, by its -name
    #[arg(value_name = "VM")]
    pub name: Option<String>,
    /// The VM, by the process id of its QEMU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
    /// The VM, by the unix socket of a QMP monitor of its
    #[arg(long, value_name = "PATH")]
    pub qmp: Option<PathBuf>,
    /// The same as VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
}

impl VmSelector {
    /// As the engine wants it. `None` cannot come from the command line (the group is required).
    pub fn selector(&self) -> Option<Selector> {
        let by_pid = self.pid.map(Selector::Pid);
        let by_qmp = || self.qmp.clone().map(Selector::Qmp);
        let name = self.name.clone().or_else(|| self.vm.clone());
        let by_name = || name.map(Selector::Name);
        by_pid.or_else(by_qmp).or_else(by_name)
    }
}

/// One checkpoint by name.
#[derive(Debug, Clone, Args)]
pub struct NamedCheckpoint {
    /// The checkpoint: its id, the first digits of it, `latest`, or `latest~2` (two before)
    #[arg(value_name = "ID")]
    pub id: String,
    /// Only look among the checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
}

/// `restore`
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// The checkpoint: its id, the first digits of it, `latest`, or `latest~2` (two before)
    #[arg(value_name = "ID", required_unless_present = "resume")]
    pub id: Option<String>,
    /// Only look among the checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Where the new QEMU's QMP monitor listens: a unix socket [default: where the VM's first one did]
    #[arg(long, value_name = "PATH")]
    pub qmp: Option<PathBuf>,
    /// The new VM's first serial port, as for QEMU's -serial [default: as it was where it listened, else null]
    #[arg(long, value_name = "SPEC")]
    pub serial: Option<String>,
    /// Have another word in the VM's command line (the path of a disk's copy, a tap, a port)
    #[arg(long, value_name = "OLD=NEW", value_parser = clone::parse_replacement)]
    pub replace: Vec<(String, String)>,
    /// Leave the guest paused, ready to run
    #[arg(long)]
    pub paused: bool,
    /// Leave the guest's clock as at the checkpoint; else guest agents are asked to set them
    #[arg(long)]
    pub keep_guest_clock: bool,
    /// Compare all memory with the checkpoint before the guest runs; with --lazy only together with
    /// --paused
    #[arg(long)]
    pub verify: bool,
    /// Let the guest run at once, and fill its memory meanwhile
    #[arg(long)]
    pub lazy: bool,
    /// With --lazy: fill at most so much a second of what the guest has not asked for
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_positive)]
    pub limit_fill: Option<NonZeroU64>,
    /// Go on with a lazy restore that was killed, of the VM with this --qmp
    #[arg(
        long,
        requires = "qmp",
        conflicts_with_all = ["id", "vm", "serial", "replace", "paused", "keep_guest_clock", "verify", "lazy", "disks_as_they_are", "qemu", "as_root", "without_label", "without_group", "allow_commands", "pidfile", "log", "print_command"]
    )]
    pub resume: bool,
    /// Go on although a disk is no longer what the guest remembers
    #[arg(long)]
    pub disks_as_they_are: bool,
    /// How QEMU is started.
    #[command(flatten)]
    pub start: StartArgs,
    /// What the new QEMU writes to its standard error [default: a file in the runtime directory]
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Where the new QEMU writes its process id [default: where the VM did, if that file is free]
    #[arg(long, value_name = "FILE")]
    pub pidfile: Option<PathBuf>,
    /// Only print the command that would start QEMU
    #[arg(long)]
    pub print_command: bool,
    /// Wait so long for another process' lock on the repository
    #[arg(long, value_name = "TIME", value_parser = durations::parse, default_value = "10s")]
    pub lock_wait: Duration,
}

/// `unlock`
#[derive(Debug, Args)]
pub struct UnlockArgs {
    /// For so long
    #[arg(long = "for", value_name = "TIME", value_parser = durations::parse_positive, default_value = "8h")]
    pub time: Duration,
    /// Need the password again from now on
    #[arg(long, conflicts_with = "time")]
    pub end: bool,
}

/// `check`
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Also read and verify every byte
    #[arg(long)]
    pub read_data: bool,
}

/// `stats`
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Two checkpoints, the older one first
    #[arg(value_names = ["OLDER", "NEWER"], num_args = 2, conflicts_with = "over")]
    pub checkpoints: Vec<String>,
    /// Instead, look at a running VM over so long a time
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive)]
    pub over: Option<Duration>,
    /// The running VM, by the process id of its QEMU
    #[arg(long, value_name = "N", requires = "over", conflicts_with_all = ["qmp", "vm"], value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
    /// The running VM, by the unix socket of a QMP monitor of its
    #[arg(long, value_name = "PATH", requires = "over", conflicts_with = "vm")]
    pub qmp: Option<PathBuf>,
    /// The running VM, by its -name; or whose checkpoints the two are
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Also draw the histogram, as an SVG file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Wait so long for another process' lock on the repository
    #[arg(long, value_name = "TIME", value_parser = durations::parse, default_value = "10s")]
    pub lock_wait: Duration,
}

impl StatsArgs {
    /// The running VM.
    pub fn selector(&self) -> VmSelector {
        VmSelector {
            name: None,
            pid: self.pid,
            qmp: self.qmp.clone(),
            vm: self.vm.clone(),
        }
    }
}

/// `inspect`
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The repository's directory, a file in it, or a checkpoint
    #[arg(value_name = "FILE|ID")]
    pub what: String,
    /// Only look among the checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
}

#[cfg(test)]
mod tests {
    //! The rules of the command line, and its stability: scripts rely on these words.

    use clap::CommandFactory;
    use clap::error::ErrorKind;

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(["stillframe"].into_iter().chain(line.split_whitespace()))
    }

    fn refused(line: &str) -> ErrorKind {
        parse(line).unwrap_err().kind()
    }

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn exactly_one_vm_is_named() {
        assert_eq!(refused("checkpoint"), ErrorKind::MissingRequiredArgument);
        assert_eq!(
            refused("checkpoint --pid 1 --vm a"),
            ErrorKind::ArgumentConflict
        );
        assert_eq!(
            refused("watch --every 2s --qmp /a --vm a"),
            ErrorKind::ArgumentConflict
        );
        assert_eq!(refused("checkpoint --pid 0"), ErrorKind::ValueValidation);
        assert_eq!(refused("checkpoint --pid -5"), ErrorKind::UnknownArgument);
        let selector = |line| match parse(line).unwrap().command {
            Command::Checkpoint(args) => args.vm.selector(),
            other => panic!("{other:?}"),
        };
        assert_eq!(selector("checkpoint --pid 7"), Some(Selector::Pid(7)));
        assert_eq!(
            selector("checkpoint --qmp /a"),
            Some(Selector::Qmp("/a".into()))
        );
        assert_eq!(
            selector("checkpoint --vm a"),
            Some(Selector::Name("a".into()))
        );
    }

    #[test]
    fn global_options_stand_before_or_behind_the_command() {
        for line in [
            "-r /r --json checkpoint --pid 1",
            "checkpoint --pid 1 --json --repository /r",
        ] {
            let cli = parse(line).unwrap();
            assert_eq!(cli.global.repository, Some("/r".into()));
            assert!(cli.global.json && !cli.global.quiet);
        }
    }

    #[test]
    fn pauses_are_limited_unless_memory_is_verified_in_them() {
        let limit_s = |line| match parse(line).unwrap().command {
            Command::Checkpoint(args) => args.capture.pause_limit().as_secs(),
            other => panic!("{other:?}"),
        };
        assert_eq!(limit_s("checkpoint --pid 1"), 3);
        assert_eq!(limit_s("checkpoint --pid 1 --verify"), 600);
        assert_eq!(limit_s("checkpoint --pid 1 --verify --pause-limit 20s"), 20);
    }

    #[test]
    fn deltas_are_made_unless_there_is_no_memory_for_them() {
        let cache = |line| match parse(line).unwrap().command {
            Command::Checkpoint(args) => args.capture.delta_cache,
            other => panic!("{other:?}"),
        };
        assert_eq!(cache("checkpoint --pid 1"), 256 << 20);
        assert_eq!(cache("checkpoint --pid 1 --delta-cache 0"), 0);
        assert_eq!(
            cache("checkpoint --pid 1 --delta-cache 1.5G --no-dedup"),
            3 << 29
        );
        let kind = refused("checkpoint --pid 1 --delta-cache much");
        assert_eq!(kind, ErrorKind::ValueValidation);
    }

    #[test]
    fn watch_needs_an_interval_and_counts_from_one() {
        assert_eq!(refused("watch --pid 1"), ErrorKind::MissingRequiredArgument);
        assert_eq!(
            refused("watch --pid 1 --every 0s"),
            ErrorKind::ValueValidation
        );
        assert_eq!(
            refused("watch --pid 1 --every 2"),
            ErrorKind::ValueValidation
        );
        assert_eq!(
            refused("watch --pid 1 --every 2s --count 0"),
            ErrorKind::ValueValidation
        );
        assert!(parse("watch --pid 1 --every 500ms --count 3").is_ok());
    }

    #[test]
    fn a_restore_needs_a_checkpoint_or_the_monitor_of_one_that_was_killed() {
        assert!(parse("restore latest").is_ok());
        assert_eq!(
            refused("restore --resume"),
            ErrorKind::MissingRequiredArgument
        );
        assert_eq!(
            refused("restore --qmp /a"),
            ErrorKind::MissingRequiredArgument
        );
        let line = "restore latest~2 --vm a --qmp /a --serial file:/x --paused --json --verify \
                    --disks-as-they-are --log /l --print-command";
        assert!(parse(line).is_ok());
    }

    #[test]
    fn a_password_cannot_be_given_in_two_places() {
        let kind = refused("list --password-file /a --password-command b");
        assert_eq!(kind, ErrorKind::ArgumentConflict);
        assert_eq!(refused("list --password x"), ErrorKind::UnknownArgument);
    }

    #[test]
    fn stats_take_two_checkpoints_or_a_vm_and_a_time() {
        for line in [
            "stats latest~1 latest",
            "stats 1a 2b --vm a --svg /x.svg",
            "stats --over 10s --pid 7",
            "stats --over 10s --vm a --json",
        ] {
            assert!(parse(line).is_ok(), "{line}");
        }
        assert_eq!(refused("stats latest"), ErrorKind::WrongNumberOfValues);
        assert_eq!(refused("stats a b --over 1s"), ErrorKind::ArgumentConflict);
        assert_eq!(refused("stats --pid 7"), ErrorKind::MissingRequiredArgument);
        assert_eq!(
            refused("stats --over 0s --vm a"),
            ErrorKind::ValueValidation
        );
    }

    #[test]
    fn forget_and_the_rest_of_the_contract() {
        for line in [
            "forget --keep-last 3 --keep-hourly 1 --keep-daily 2 --keep-weekly 4 --prune --dry-run",
            "forget 1a2b latest~3 --vm a",
            "forget --keep-within 1y6mo --keep-monthly 2 --keep-yearly 1 --keep-tag a --keep-tag b",
            "forget --keep-tag a --tag b --tag c --vm d",
            "check --read-data",
            "prune --dry-run",
            "rebuild-index",
            "inspect /r/config",
            "probe --json",
            "list --json",
            "list --vm a --tag b --tag c --since 3d --until 2026-11-24 --last 2",
            "checkpoint --vm a --tag nightly --tag v1.2 --note words",
            "watch --vm a --every 1s --tag nightly --note words",
            "show latest",
            "init -q",
            "copy latest 1a2b --vm a --to /other --to-password-file /p",
            "key list",
            "key add --new-password-file /p",
            "key remove 1a2b",
            "key passwd --new-password-command c --password-file /p",
        ] {
            assert!(parse(line).is_ok(), "{line}");
        }
        for line in [
            "forget --keep-last 0",
            "forget --keep-monthly 0",
            "forget --keep-within 5m",
            "forget --keep-within 0d",
            "forget --keep-tag a,b",
            "list --since yesterday",
            "list --until 2026-02-30",
            "list --last 0",
            "checkpoint --vm a --tag a,b",
        ] {
            assert_eq!(refused(line), ErrorKind::ValueValidation, "{line}");
        }
    }

    #[test]
    fn a_tag_chooses_what_rules_look_at_and_nothing_else() {
        assert_eq!(
            refused("forget latest --tag a"),
            ErrorKind::MissingRequiredArgument
        );
        assert!(parse("forget latest --tag a --keep-last 1").is_ok());
    }
}
