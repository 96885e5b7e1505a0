//! The subcommands, one file each, and helpers that several of them use.

mod capture;
mod certs;
mod check;
mod checkpoint;
mod clone;
mod contents;
mod copy;
mod export;
mod forget;
mod generate;
mod import;
mod index;
mod init;
mod inspect;
mod key;
mod launch;
mod list;
mod migrate;
mod probe;
mod prune;
mod rebuild_index;
mod receive;
mod restore;
mod rewind;
mod show;
mod stats;
mod templates;
mod unlock;
mod watch;

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use stillframe_engine::migration::Supervised;
use stillframe_engine::post_restore::ClockReport;
use stillframe_engine::verify::VerifyReport;
use stillframe_repo::Repository;

use crate::args::{Cli, Command, GlobalArgs};
use crate::durations;
use crate::durations::times;
use crate::error::CommandError;
use crate::exit::Exit;
use crate::interrupt::{AfterAbort, Interrupts};
use crate::output::Console;
use crate::password;
use crate::table::{self, printable};
use crate::unlocked;

/// Number of digits of a shortened checkpoint id.
const SHORT_ID_DIGITS: usize = 8;

/// The input of every command.
#[derive(Debug, Clone)]
pub struct Context {
    /// The destination of results and messages.
    pub console: Console,
    /// The options that all commands share.
    pub global: GlobalArgs,
}

impl Context {
    /// The repository's directory.
    pub fn directory(&self) -> Result<&Path, CommandError> {
        self.global
            .repository
            .as_deref()
            .ok_or(CommandError::NoRepository)
    }

    /// Opens the repository. Prompts for the password if the repository is locked and no other source has it.
    pub fn open(&self) -> anyhow::Result<Repository> {
        let directory = self.directory()?;
        // An unlocked repository needs no password; deriving a key from one takes 0.1 s.
        if let Ok(id) = Repository::id_of(directory)
            && let Some(key) = unlocked::find(id)
        {
            return Ok(Repository::open_with(directory, &key)?);
        }
        let password = password::of_existing(&self.global.password)?;
        Ok(Repository::open(directory, &password)?)
    }

    /// Handles Ctrl-C from now on; see [`Interrupts::listen`]. Called after the password prompt, so that Ctrl-C there
    /// just ends the program.
    pub fn listen(&self, abort_at: u32, first: &'static str) -> anyhow::Result<Interrupts> {
        let listening = Interrupts::listen(self.console, abort_at, first, AfterAbort::Exit);
        listening.context("cannot handle signals")
    }
}

/// Carries out the command.
pub fn run(cli: Cli, console: Console) -> anyhow::Result<Exit> {
    let context = Context {
        console,
        global: cli.global,
    };
    match &cli.command {
        Command::Init(args) => init::run(&context, args),
        Command::Key(args) => key::run(&context, args),
        Command::Unlock(args) => unlock::run(&context, args),
        Command::Checkpoint(args) => checkpoint::run(&context, args),
        Command::Watch(args) => watch::run(&context, args),
        Command::List(args) => list::run(&context, args),
        Command::Show(args) => show::run(&context, args),
        Command::Restore(args) => restore::run(&context, args),
        Command::Clone(args) => clone::run(&context, args),
        Command::Rewind(args) => rewind::run(&context, args),
        Command::Migrate(args) => migrate::run(&context, args),
        Command::Receive(args) => receive::run(&context, args),
        Command::Export(args) => export::run(&context, args),
        Command::Import(args) => import::run(&context, args),
        Command::Copy(args) => copy::run(&context, args),
        Command::Check(args) => check::run(&context, args),
        Command::Forget(args) => forget::run(&context, args),
        Command::Prune(args) => prune::run(&context, args),
        Command::Inspect(args) => inspect::run(&context, args),
        Command::Index(args) => index::run(&context, args),
        Command::RebuildIndex => rebuild_index::run(&context),
        Command::Stats(args) => stats::run(&context, args),
        Command::Probe => probe::run(&context),
        Command::Completions(args) => Ok(generate::completions(args)?),
        Command::Man(args) => generate::man(&context, args),
        Command::Certs(args) => certs::run(&context, args),
    }?;
    Ok(Exit::Done)
}

/// A note about a VM that runs before its memory is complete.
fn supervised_words(event: &Supervised) -> String {
    match event {
        Supervised::Waits { reason } => format!(
            "the VM is paused: a page or a block that its guest needs cannot be read ({reason}); it resumes when that \
             can be read"
        ),
        Supervised::Resumed => "all that is needed can be read again; the VM is resumed".to_owned(),
        Supervised::CannotFill { reason } => format!(
            "not everything can be filled in now ({reason}); the guest runs on without it, and stillframe tries again"
        ),
    }
}

/// The state of a VM that was brought to a checkpoint, as the end of a line.
fn state_words(
    verify: Option<&VerifyReport>,
    clock: Option<&ClockReport>,
    running: bool,
    suspended: bool,
) -> String {
    let verified = verify.map(|verify| table::count(verify.pages, "page"));
    let mut words = verified.map_or_else(String::new, |pages| format!(", all {pages} verified"));
    words += &clock.map_or_else(String::new, clock_words);
    if suspended {
        words += "; the guest is suspended to RAM, as at the checkpoint; `system_wakeup` on the monitor wakes it";
    } else if !running {
        words += "; the guest is paused, `cont` on the monitor resumes it";
    }
    words
}

fn clock_words(clock: &ClockReport) -> String {
    if let Some(why) = &clock.not_set {
        return format!("; the guest's clock is not set: {}", printable(why));
    }
    let Some(behind_ms) = clock.was_behind_ms else {
        return "; the guest's clock is set".to_owned();
    };
    let time = durations::human(Duration::from_millis(behind_ms.unsigned_abs()));
    let word = if behind_ms < 0 { "ahead" } else { "behind" };
    format!("; the guest's clock was {time} {word} and is set")
}

/// The first digits of an id.
fn short(id: &str) -> &str {
    id.get(..SHORT_ID_DIGITS).unwrap_or(id)
}

/// A time in the user's time zone.
fn local_time(time: jiff::Timestamp) -> String {
    times::local(time)
}
