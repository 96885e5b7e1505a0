//! `unlock`: keeps the repository's key in the kernel for a while.

use serde_json::json;
use stillframe_repo::Repository;

use super::Context;
use crate::args::UnlockArgs;
use crate::table::printable;
use crate::{durations, password, unlocked};

/// Puts the repository's key into the kernel's keyring, or removes it.
pub fn run(context: &Context, args: &UnlockArgs) -> anyhow::Result<()> {
    let directory = context.directory()?;
    let id = Repository::id_of(directory)?;
    let shown = printable(&directory.display().to_string());
    if args.end {
        let was_unlocked = unlocked::end(id)?;
        context.console.result(
            &json!({ "unlocked": false, "was_unlocked": was_unlocked }),
            || match was_unlocked {
                true => format!("{shown} needs its password again"),
                false => format!("{shown} was not unlocked"),
            },
        )?;
        return Ok(());
    }
    let password = password::of_existing(&context.global.password)?;
    unlocked::keep(id, &Repository::unlock(directory, &password)?, args.time)?;
    let seconds = args.time.as_secs();
    context
        .console
        .result(&json!({ "unlocked": true, "for_s": seconds }), || {
            format!(
                "{shown} is unlocked for {}: processes of this user need no password for it",
                durations::human(args.time)
            )
        })?;
    Ok(())
}
