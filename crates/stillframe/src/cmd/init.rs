//! `init`: creates a repository.

use serde_json::json;
use stillframe_repo::Repository;

use super::Context;
use crate::password;
use crate::table::printable;

/// Creates the repository.
pub fn run(context: &Context) -> anyhow::Result<()> {
    let directory = context.directory()?;
    let password = password::for_new(&context.global.password)?;
    let repository = Repository::init(directory, &password)?;
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
