//! `clone --templates` and `--drop-templates`: lists and removes memory templates.

use std::path::PathBuf;

use serde_json::{Value, json};
use stillframe_engine::runtime;
use stillframe_engine::template::{self, KeptTemplate};
use stillframe_repo::{CheckpointId, Repository};

use super::launch::absolute_path;
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

/// The directory of the templates.
pub fn folder(args: &CloneArgs) -> anyhow::Result<PathBuf> {
    match &args.template_dir {
        Some(folder) => absolute_path(folder),
        None => Ok(runtime::templates()),
    }
}

/// Removes templates of checkpoints that the repository no longer has from the default directory. A template that
/// cannot be removed is reported; the command does not fail.
pub fn drop_forgotten(context: &Context, repository: &Repository) {
    let id = repository.id().to_string();
    let forgotten = |template: &KeptTemplate| {
        let (of_repository, checkpoint) = template.ids();
        let checkpoint = CheckpointId::from_hex(checkpoint);
        // If this cannot be read, the checkpoint may still exist.
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
                "memory templates of forgotten checkpoints may remain: {}",
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
