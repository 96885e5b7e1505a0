//! `init`: creates a repository.

use serde_json::json;
use stillframe_repo::{Cost, Repository};

use super::Context;
use crate::args::InitArgs;
use crate::password;
use crate::table::printable;

/// Creates the repository.
pub fn run(context: &Context, args: &InitArgs) -> anyhow::Result<()> {
    let directory = context.directory()?;
    let password = password::for_new(&context.global.password)?;
    let cost = match args.random_password {
        true => Cost::NONE,
        false => Cost::STANDARD,
    };
    let repository = Repository::init_with(directory, &password, cost)?;
    let id = repository.id().to_string();
    let shown = directory.display().to_string();
    context
        .console
        .result(&json!({ "repository": id, "directory": shown }), || {
            format!(
                "created repository {} in {}",
                super::short(&id),
                printable(&shown)
            )
        })?;
    context
        .console
        .note("keep the password: without it nothing in this repository can be read");
    Ok(())
}
