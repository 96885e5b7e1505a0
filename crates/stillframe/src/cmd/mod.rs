//! The subcommands, one file each, and what several of them need.

mod capture;
mod check;
mod checkpoint;
mod clone;
mod copy;
mod export;
mod forget;
mod generate;
mod import;
mod init;
mod inspect;
mod key;
mod list;
mod probe;
mod prune;
mod rebuild_index;
mod restore;
mod rewind;
mod show;
mod stats;
mod templates;
mod transfer;
mod unlock;
mod watch;

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use stillframe_engine::post_restore::ClockReport;
use stillframe_engine::verify::VerifyReport;
use stillframe_repo::Repository;

use crate::args::{Cli, Command, GlobalArgs};
use crate::durations;
use crate::durations::times;
use crate::error::CommandError;
use crate::exit::Exit;
use crate::interrupt::{AtLast, Interrupts};
use crate::output::Console;
use crate::password;
use crate::table::{self, printable};
use crate::unlocked;

/// Digits of a checkpoint id that are shown where a line has to stay short.
const SHORT_ID_DIGITS: usize = 8;

/// What every command gets.
#[derive(Debug, Clone)]
pub struct Context {
    /// Where to write.
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

    /// Opens the repository; asks for the password where it is locked and has to be typed.
    pub fn open(&self) -> anyhow::Result<Repository> {
        let directory = self.directory()?;
        // Unlocked, it needs no password; deriving a key from one takes a tenth of a second.
        if let Ok(id) = Repository::id_of(directory)
            && let Some(key) = unlocked::find(id)
        {
            return Ok(Repository::open_with(directory, &key)?);
        }
        let password = password::of_existing(&self.global.password)?;
        Ok(Repository::open(directory, &password)?)
    }

    /// Listens to Ctrl-C from now on; see [`Interrupts::listen`]. Called after a password was
    /// typed, so that Ctrl-C at the prompt just ends the program.
    pub fn listen(&self, patience: u32, first: &'static str) -> anyhow::Result<Interrupts> {
        let listening = Interrupts::listen(self.console, patience, first, AtLast::End);
        listening.context("cannot listen to signals")
    }
}

/// Carries out the command.
pub fn run(cli: Cli, console: Console) -> anyhow::Result<Exit> {
    let context = Context {
        console,
        global: cli.global,
    };
    match &cli.command {
        Command::Init => init::run(&context),
        Command::Key(args) => key::run(&context, args),
        Command::Unlock(args) => unlock::run(&context, args),
        Command::Checkpoint(args) => checkpoint::run(&context, args),
        Command::Watch(args) => watch::run(&context, args),
        Command::List(args) => list::run(&context, args),
        Command::Show(args) => show::run(&context, args),
        Command::Restore(args) => restore::run(&context, args),
        Command::Clone(args) => clone::run(&context, args),
        Command::Rewind(args) => rewind::run(&context, args),
        Command::Export(args) => export::run(&context, args),
        Command::Import(args) => import::run(&context, args),
        Command::Copy(args) => copy::run(&context, args),
        Command::Check(args) => check::run(&context, args),
        Command::Forget(args) => forget::run(&context, args),
        Command::Prune(args) => prune::run(&context, args),
        Command::Inspect(args) => inspect::run(&context, args),
        Command::RebuildIndex => rebuild_index::run(&context),
        Command::Stats(args) => stats::run(&context, args),
        Command::Probe => probe::run(&context),
        Command::Completions(args) => Ok(generate::completions(args)?),
        Command::Man(args) => generate::man(&context, args),
        Command::Transfer(args) => transfer::run(&context, args),
    }?;
    Ok(Exit::Done)
}

/// The end of a line that reports a VM brought to a checkpoint.
fn how_it_ended(
    verify: Option<&VerifyReport>,
    clock: Option<&ClockReport>,
    running: bool,
    suspended: bool,
) -> String {
    let verified = verify.map(|verify| table::count(verify.pages, "page"));
    let mut words = verified.map_or_else(String::new, |pages| format!(", all {pages} verified"));
    words += &clock.map_or_else(String::new, clock_words);
    if suspended {
        words +=
            "; the guest is suspended to RAM as it was, `system_wakeup` on the monitor wakes it";
    } else if !running {
        words += "; the guest is paused, `cont` on the monitor lets it run";
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

/// A time as the user's clock shows it.
fn local_time(time: jiff::Timestamp) -> String {
    times::local(time)
}
