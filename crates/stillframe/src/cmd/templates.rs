//! Memory templates of clones: listing them, and taking them away.

use std::path::PathBuf;

use serde_json::{Value, json};
use stillframe_engine::runtime;
use stillframe_engine::template::{self, KeptTemplate};
use stillframe_repo::{CheckpointId, Repository};

use super::restore::here;
use super::{Context, local_time, short};
use crate::args::CloneArgs;
use crate::output;
use crate::table::{self, Align, Table};

/// Lists the templates, or removes them.
pub fn run(context: &Context, args: &CloneArgs) -> anyhow::Result<()> {
    let folder = folder(args)?;
    let found = match args.drop_templates {
        true => template::drop_kept(&folder, |_| true)?,
        false => template::kept(&folder)?,
    };
    let object = json!({
        "directory": folder,
        "removed": args.drop_templates,
        "templates": found.iter().map(object).collect::<Vec<Value>>(),
    });
    context
        .console
        .result(&object, || words(&found, args.drop_templates))?;
    Ok(())
}

/// Where the templates lie.
pub fn folder(args: &CloneArgs) -> anyhow::Result<PathBuf> {
    match &args.base_dir {
        Some(folder) => here(folder),
        None => Ok(runtime::templates()),
    }
}

/// Removes templates of checkpoints that the repository does not have any more, from the default directory.
/// A template that cannot be removed is reported; it is no error of the command.
pub fn drop_forgotten(context: &Context, repository: &Repository) {
    let id = repository.id().to_string();
    let forgotten = |template: &KeptTemplate| {
        let (of_repository, checkpoint) = template.ids();
        let checkpoint = CheckpointId::from_hex(checkpoint);
        // One that cannot be looked for may still be there.
        let gone = |id: CheckpointId| matches!(repository.has_manifest(&id), Ok(false));
        of_repository == id && checkpoint.is_some_and(gone)
    };
    match template::drop_kept(&runtime::templates(), forgotten) {
        Ok(dropped) if dropped.is_empty() => {}
        Ok(dropped) => context.console.note(&format!(
            "removed {} of forgotten checkpoints ({})",
            table::count(dropped.len() as u64, "memory template"),
            table::bytes(dropped.iter().map(|template| template.bytes).sum()),
        )),
        Err(error) => {
            let error = anyhow::Error::from(error);
            context.console.note(&format!(
                "memory templates of forgotten checkpoints may be left: {}",
                output::chain(error.chain())
            ));
        }
    }
}

fn object(template: &KeptTemplate) -> Value {
    let (repository, checkpoint) = template.ids();
    json!({
        "repository": repository,
        "checkpoint": checkpoint,
        "bytes": template.bytes,
        "used": used(template).to_string(),
    })
}

fn used(template: &KeptTemplate) -> jiff::Timestamp {
    jiff::Timestamp::try_from(template.used).unwrap_or_default()
}

fn words(templates: &[KeptTemplate], removed: bool) -> String {
    let columns = [
        ("CHECKPOINT", Align::Left),
        ("REPOSITORY", Align::Left),
        ("SIZE", Align::Right),
        ("LAST USED", Align::Left),
    ];
    let mut table = Table::new(&columns);
    for template in templates {
        let (repository, checkpoint) = template.ids();
        table.row([
            short(checkpoint).to_owned(),
            short(repository).to_owned(),
            table::bytes(template.bytes),
            local_time(used(template)),
        ]);
    }
    let count = table::count(templates.len() as u64, "memory template");
    match (templates.is_empty(), removed) {
        (true, _) => count,
        (false, true) => format!("{}\n{count} removed", table.render()),
        (false, false) => format!("{}\n{count}", table.render()),
    }
}
