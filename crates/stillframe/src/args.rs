//! The command line: subcommands and their options.

mod capture;
mod certs;
mod clone;
mod common;
mod copy;
mod forget;
mod generate;
mod index;
mod init;
mod interchange;
mod key;
mod launch;
mod list;
mod migrate;
mod restore;
mod rewind;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use stillframe_engine::Selector;

use crate::durations;
use crate::help;
pub use capture::{CaptureArgs, CheckpointArgs, WatchArgs};
pub use certs::{CertsArgs, CertsCommand, HostArgs};
pub use clone::CloneArgs;
pub use common::{GuestArgs, LockArgs, RestoreDisks};
pub use copy::CopyArgs;
pub use forget::{ForgetArgs, KeepArgs, PruneArgs};
pub use generate::{CompletionsArgs, ManArgs};
pub use index::IndexArgs;
pub use init::InitArgs;
pub use interchange::{ExportArgs, ImportArgs};
pub use key::{KeyArgs, KeyCommand};
pub use launch::LaunchArgs;
pub use list::ListArgs;
pub use migrate::{MigrateArgs, ReceiveArgs};
pub use restore::RestoreArgs;
pub use rewind::RewindArgs;

/// Takes checkpoints of running, unmodified QEMU VMs and restores them
#[derive(Debug, Parser)]
#[command(name = "stillframe", version, after_help = help::TOP)]
pub struct Cli {
    /// Options of every command.
    #[command(flatten, next_help_heading = "Options of every command")]
    pub global: GlobalArgs,
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
pub struct GlobalArgs {
    /// Directory of the repository
    #[arg(
        short,
        long,
        global = true,
        value_name = "DIR",
        env = "STILLFRAME_REPOSITORY"
    )]
    pub repository: Option<PathBuf>,
    /// The source of the repository's password.
    #[command(flatten)]
    pub password: PasswordArgs,
    /// Print results, notes and errors as JSON, one value per line
    #[arg(long, global = true)]
    pub json: bool,
    /// Print only results, warnings and errors: no progress, no notes
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// Print details as well
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    pub verbose: bool,
}

/// The source of the repository's password. No option takes the password itself, because every user of a machine
/// can read every command line.
#[derive(Debug, Clone, Default, Args)]
pub struct PasswordArgs {
    /// File with the password [env: STILLFRAME_PASSWORD_FILE]
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        conflicts_with = "password_command"
    )]
    pub password_file: Option<PathBuf>,
    /// Command that prints the password [env: STILLFRAME_PASSWORD_COMMAND]
    #[arg(long, global = true, value_name = "COMMAND")]
    pub password_command: Option<String>,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create a repository
    #[command(after_help = help::INIT)]
    Init(InitArgs),
    /// Keep the key in the kernel, so that commands need no password for a while
    #[command(after_help = help::UNLOCK)]
    Unlock(UnlockArgs),
    /// List, add, remove and change the passwords of the repository
    #[command(after_help = help::KEY)]
    Key(KeyArgs),
    /// Take one checkpoint of a running VM
    #[command(after_help = help::CHECKPOINT)]
    Checkpoint(CheckpointArgs),
    /// Stay attached to a running VM and take checkpoints at an interval
    #[command(after_help = help::WATCH)]
    Watch(WatchArgs),
    /// List checkpoints
    #[command(visible_alias = "ls", after_help = help::LIST)]
    List(ListArgs),
    /// Show one checkpoint in detail
    #[command(after_help = help::SHOW)]
    Show(ShowArgs),
    /// Start a new QEMU from a checkpoint
    #[command(after_help = help::RESTORE)]
    Restore(RestoreArgs),
    /// Start several VMs from one checkpoint; they share its memory
    #[command(after_help = help::CLONE)]
    Clone(CloneArgs),
    /// Return a running VM to one of its checkpoints, in the same QEMU
    #[command(
        after_help = help::REWIND,
        override_usage = "stillframe rewind [OPTIONS] <ID> <VM|--pid <N>|--qmp <PATH>|--vm <NAME>>"
    )]
    Rewind(RewindArgs),
    /// Move a running VM to another host
    #[command(
        after_help = help::MIGRATE,
        override_usage = "stillframe migrate [OPTIONS] --to <HOST[:PORT]> <--certs <DIR>|--plain-text> <VM|--pid <N>|--qmp <PATH>|--vm <NAME>>"
    )]
    Migrate(MigrateArgs),
    /// Wait for a VM from another host, and start it here
    #[command(after_help = help::RECEIVE)]
    Receive(ReceiveArgs),
    /// Write a checkpoint to a file for QEMU, gdb or crash
    #[command(after_help = help::EXPORT)]
    Export(ExportArgs),
    /// Create a checkpoint from a migration file of QEMU
    #[command(after_help = help::IMPORT)]
    Import(ImportArgs),
    /// Copy checkpoints to another repository
    #[command(after_help = help::COPY)]
    Copy(CopyArgs),
    /// Check the repository for damage
    #[command(after_help = help::CHECK)]
    Check(CheckArgs),
    /// Remove checkpoints; prune then frees their space
    #[command(after_help = help::FORGET)]
    Forget(ForgetArgs),
    /// Free the space of data that no checkpoint needs
    #[command(after_help = help::PRUNE)]
    Prune(PruneArgs),
    /// Let checkpoints refer to the content of an image that stays as it is, in place of storing it
    #[command(after_help = help::INDEX)]
    Index(IndexArgs),
    /// Rebuild the index from the packs, after index files were lost or damaged
    #[command(after_help = help::REBUILD_INDEX)]
    RebuildIndex,
    /// Describe the repository, one of its files, or a checkpoint as stored
    #[command(after_help = help::INSPECT)]
    Inspect(InspectArgs),
    /// Count the pages and bytes that change in a VM's memory
    #[command(
        after_help = help::STATS,
        override_usage = "stillframe stats [OPTIONS] <OLDER> <NEWER>\n       stillframe stats [OPTIONS] --over <TIME> <--pid <N>|--qmp <PATH>|--vm <NAME>>"
    )]
    Stats(StatsArgs),
    /// Test whether this machine's kernel can do what stillframe needs
    #[command(after_help = help::PROBE)]
    Probe,
    /// Print shell completions for stillframe
    #[command(after_help = help::COMPLETIONS)]
    Completions(CompletionsArgs),
    /// Write man pages to a directory
    #[command(after_help = help::MAN)]
    Man(ManArgs),
    /// Make the certificates by which hosts trust each other
    #[command(after_help = help::CERTS)]
    Certs(CertsArgs),
}

/// A running VM, selected by exactly one of these.
#[derive(Debug, Clone, Args)]
#[group(required = true, multiple = false)]
pub struct VmSelector {
    /// Select the VM by its -name
    #[arg(value_name = "VM")]
    pub name: Option<String>,
    /// Select the VM by the process id of its QEMU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
    /// Select the VM by the unix socket of one of its QMP monitors
    #[arg(long, value_name = "PATH")]
    pub qmp: Option<PathBuf>,
    /// The same as VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
}

impl VmSelector {
    /// The same for the engine. `None` cannot come from the command line, because the group is required.
    pub fn selector(&self) -> Option<Selector> {
        let by_pid = self.pid.map(Selector::Pid);
        let by_qmp = || self.qmp.clone().map(Selector::Qmp);
        let name = self.name.clone().or_else(|| self.vm.clone());
        let by_name = || name.map(Selector::Name);
        by_pid.or_else(by_qmp).or_else(by_name)
    }
}

/// One checkpoint.
#[derive(Debug, Clone, Args)]
pub struct NamedCheckpoint {
    /// The checkpoint: its id, the first digits of it, `latest`, or `latest~2` (two before)
    #[arg(value_name = "ID")]
    pub id: String,
    /// Consider only checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
}

/// `show`
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The checkpoint.
    #[command(flatten)]
    pub checkpoint: NamedCheckpoint,
    /// Also count the pages of memory by their content: zero, on a captured disk, in an image, duplicate, changed since the parent, other
    #[arg(long)]
    pub contents: bool,
    /// How the repository is locked.
    #[command(flatten)]
    pub lock: LockArgs,
}

/// `unlock`
#[derive(Debug, Args)]
pub struct UnlockArgs {
    /// How long commands need no password
    #[arg(long = "for", value_name = "TIME", value_parser = durations::parse_positive, default_value = "8h")]
    pub time: Duration,
    /// Remove the key from the kernel now
    #[arg(long, conflicts_with = "time")]
    pub end: bool,
}

/// `check`
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Also read and verify every byte of the packs
    #[arg(long)]
    pub read_data: bool,
}

/// `stats`
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Two checkpoints, the older one first; with --contents, any number, or all of the VM
    #[arg(value_name = "ID", conflicts_with = "over")]
    pub checkpoints: Vec<String>,
    /// Count the pages of memory by their content: zero, on a captured disk, in an image, duplicate, changed since the parent, other
    #[arg(long, conflicts_with = "over")]
    pub contents: bool,
    /// Measure a running VM over this time instead
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive)]
    pub over: Option<Duration>,
    /// Select the running VM by the process id of its QEMU
    #[arg(long, value_name = "N", requires = "over", conflicts_with_all = ["qmp", "vm"], value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
    /// Select the running VM by the unix socket of one of its QMP monitors
    #[arg(long, value_name = "PATH", requires = "over", conflicts_with = "vm")]
    pub qmp: Option<PathBuf>,
    /// Select the running VM by its -name; without --over, consider only checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Also draw it into this SVG file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// How the repository is locked.
    #[command(flatten)]
    pub lock: LockArgs,
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
    /// Consider only checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
}

#[cfg(test)]
mod tests {
    //! The rules of the command line, and its stability, which scripts rely on.

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
    fn global_options_are_accepted_before_and_after_the_command() {
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
        assert!(parse("restore --resume --qmp /a --limit-fill 1M").is_ok());
        for option in ["latest", "--paused", "--as-root", "--replace=a=b", "--lazy"] {
            let line = format!("restore --resume --qmp /a {option}");
            assert_eq!(refused(&line), ErrorKind::ArgumentConflict, "{line}");
        }
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
            "stats --contents --vm a --svg /x.svg",
            "stats --contents 1a 2b 3c",
        ] {
            assert!(parse(line).is_ok(), "{line}");
        }
        assert_eq!(
            refused("stats --contents --over 1s --vm a"),
            ErrorKind::ArgumentConflict
        );
        assert_eq!(refused("stats a b --over 1s"), ErrorKind::ArgumentConflict);
        assert_eq!(refused("stats --pid 7"), ErrorKind::MissingRequiredArgument);
        assert_eq!(
            refused("stats --over 0s --vm a"),
            ErrorKind::ValueValidation
        );
    }

    #[test]
    fn forget_and_the_other_commands_parse() {
        for line in [
            "forget --keep-last 3 --keep-hourly 1 --keep-daily 2 --keep-weekly 4 --prune --dry-run",
            "forget 1a2b latest~3 --vm a",
            "forget --keep-within 1y6mo --keep-monthly 2 --keep-yearly 1 --keep-tag a --keep-tag b",
            "forget --keep-tag a --tag b --tag c --vm d",
            "check --read-data",
            "prune --dry-run",
            "rebuild-index",
            "index /srv/golden.qcow2 b --lock-wait 1m",
            "index --list",
            "index --remove /srv/golden.qcow2",
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
        assert_eq!(refused("index"), ErrorKind::MissingRequiredArgument);
        assert_eq!(
            refused("index --remove"),
            ErrorKind::MissingRequiredArgument
        );
        assert_eq!(refused("index a --list"), ErrorKind::ArgumentConflict);
    }

    #[test]
    fn a_tag_limits_only_the_rules() {
        assert_eq!(
            refused("forget latest --tag a"),
            ErrorKind::MissingRequiredArgument
        );
        assert!(parse("forget latest --tag a --keep-last 1").is_ok());
    }
}
