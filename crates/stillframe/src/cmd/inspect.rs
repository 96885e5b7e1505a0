//! `inspect`: describes a repository, one of its files, or a checkpoint, as stored.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use stillframe_repo::{CheckpointId, Manifest, Repository};

use super::{Context, list, show};
use crate::args::InspectArgs;
use crate::table::{self, Table};

/// Describes the repository, file or checkpoint with this name.
pub fn run(context: &Context, args: &InspectArgs) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    let description = match inside(context.directory()?, &args.what) {
        Some(file) if file.as_os_str().is_empty() => whole(&mut repository)?,
        Some(file) => repository.inspect(&file)?,
        // Names of checkpoints have no slash; the repository gives the better error.
        None if args.what.contains('/') => repository.inspect(Path::new(&args.what))?,
        None => {
            let (id, manifest) = repository.resolve(&args.what, args.vm.as_deref())?;
            let object = checkpoint(&id, &manifest);
            context
                .console
                .result(&object, || show::words(&id, &manifest, None))?;
            return Ok(());
        }
    };
    context
        .console
        .result(&description, || words(&description))?;
    Ok(())
}

/// The path within the repository, if `what` names a file there: relative to the current directory or to the
/// repository's.
fn inside(directory: &Path, what: &str) -> Option<PathBuf> {
    let named = Path::new(what).canonicalize().ok();
    if let (Some(named), Ok(directory)) = (named, directory.canonicalize())
        && let Ok(file) = named.strip_prefix(directory)
    {
        return Some(file.to_owned());
    }
    let within = Path::new(what).is_relative() && directory.join(what).is_file();
    within.then(|| what.into())
}

fn whole(repository: &mut Repository) -> anyhow::Result<Value> {
    let stats = repository.stats()?;
    Ok(json!({
        "kind": "repository",
        "repository": repository.id().to_string(),
        "checkpoints": stats.checkpoints,
        "packs": stats.packs,
        "pack_bytes": stats.pack_bytes,
        "frames": stats.frames,
        "blobs": stats.blobs,
        "blob_bytes": stats.blob_bytes,
        "images": stats.images,
        "image_blobs": stats.image_blobs,
        "index_files": stats.index_files,
        "index_bytes": stats.index_bytes,
    }))
}

/// The whole manifest.
fn checkpoint(id: &CheckpointId, manifest: &Manifest) -> Value {
    let mut object = list::object(id, manifest);
    object["kind"] = json!("checkpoint");
    object["ram"] = json!(manifest.ram);
    object["images"] = json!(manifest.images);
    object["streams"] = json!(manifest.streams);
    object["vm_record"] = manifest.vm_record.clone();
    object
}

/// Simple values as they are, and the length of each list; `--json` prints the lists.
fn words(description: &Value) -> String {
    let mut table = Table::list();
    for (name, value) in description.as_object().into_iter().flatten() {
        entry(&mut table, &name.replace('_', " "), value);
    }
    table.render()
}

fn entry(table: &mut Table, name: &str, value: &Value) {
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                entry(table, &format!("{name} {}", field.replace('_', " ")), value);
            }
        }
        Value::Array(items) => {
            let lines = items.len() as u64;
            table.entry(
                name,
                format!("{} (see --json)", table::count(lines, "item")),
            );
        }
        Value::Number(number) if name.ends_with(" bytes") => {
            let bytes = number.as_u64().unwrap_or(0);
            table.entry(name, format!("{number} ({})", table::bytes(bytes)));
        }
        Value::String(text) => table.entry(name, text),
        other => table.entry(name, other),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn files_are_found_relative_to_two_directories_and_nothing_else_is_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let repository = folder.path().join("repo");
        fs::create_dir_all(repository.join("keys")).unwrap();
        for file in ["repo/config", "repo/keys/a", "latest"] {
            fs::write(folder.path().join(file), "").unwrap();
        }
        let inside = |what: &str| inside(&repository, what);
        let absolute = |name: &str| folder.path().join(name).display().to_string();
        assert_eq!(inside(&absolute("repo/keys/a")), Some("keys/a".into()));
        assert_eq!(
            inside(&absolute("repo/../repo/config")),
            Some("config".into())
        );
        assert_eq!(inside(&absolute("repo")), Some("".into()));
        assert_eq!(inside("keys/a"), Some("keys/a".into()));
        assert_eq!(inside("config"), Some("config".into()));
        assert_eq!(inside(&absolute("latest")), None);
        assert_eq!(inside("latest"), None);
    }

    #[test]
    fn lists_are_shown_by_their_length() {
        let description = json!({ "body": { "pack_bytes": 2048, "x": null }, "frames": [1, 2] });
        assert_eq!(
            words(&description),
            "body pack bytes  2048 (2.0 KiB)\nbody x           null\nframes           2 items (see --json)"
        );
    }
}
