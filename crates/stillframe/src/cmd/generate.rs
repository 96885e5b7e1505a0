//! `completions` and `man`: shell completions and man pages, generated from the definition of the command line.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

use anyhow::Context as _;
use clap::CommandFactory as _;

use super::Context;
use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::output::{self, OutputError};
use crate::table;

const NAME: &str = "stillframe";

/// Prints the completions for a shell.
pub fn completions(args: &CompletionsArgs) -> Result<(), OutputError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), NAME, &mut script);
    let mut out = io::stdout().lock();
    let written = out.write_all(&script).and_then(|()| out.flush());
    written.map_err(output::failed)
}

/// Writes a page for the program and one for each command to a directory.
pub fn man(context: &Context, args: &ManArgs) -> anyhow::Result<()> {
    let into = &args.directory;
    fs::create_dir_all(into).with_context(|| format!("cannot create {}", into.display()))?;
    let mut command = Cli::command();
    command.build();
    let mut pages = vec![page(into, NAME, &command)?];
    for command in command.get_subcommands().filter(|one| !one.is_hide_set()) {
        let name = format!("{NAME}-{}", command.get_name());
        pages.push(page(into, &name, command)?);
    }
    let words = || {
        let count = table::count(pages.len() as u64, "page");
        format!("{count} in {}: man -l {}", into.display(), pages[0])
    };
    context
        .console
        .result(&serde_json::json!({ "pages": pages }), words)?;
    Ok(())
}

/// Writes one page; returns its path. The page of `stillframe checkpoint` is stillframe-checkpoint(1), as with git.
fn page(into: &Path, name: &str, command: &clap::Command) -> anyhow::Result<String> {
    let path = into.join(format!("{name}.1"));
    let mut text = Vec::new();
    clap_mangen::Man::new(command.clone())
        .render(&mut text)
        .and_then(|()| fs::write(&path, text))
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path.display().to_string())
}
