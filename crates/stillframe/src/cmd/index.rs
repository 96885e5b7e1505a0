//! `index`: makes the blocks of an image blobs of the repository, without copying them.

use std::path::Path;

use serde_json::{Value, json};
use stillframe_repo::{
    Image, ImageId, ImageRecord, ImageState, IndexReport, Indexed, Progress, Repository,
};

use super::Context;
use crate::args::IndexArgs;
use crate::error::CommandError;
use crate::progress::Meter;
use crate::table::{self, Align, Table, printable};

/// Indexes images, lists them, or removes them.
pub fn run(context: &Context, args: &IndexArgs) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    if args.list {
        let images = repository.images()?;
        let object = json!({ "images": images.iter().map(object).collect::<Vec<Value>>() });
        context.console.result(&object, || listed(&images))?;
        return Ok(());
    }
    for path in &args.images {
        match args.remove {
            true => remove(context, &mut repository, path)?,
            false => index(context, &mut repository, path, args)?,
        }
    }
    Ok(())
}

fn index(
    context: &Context,
    repository: &mut Repository,
    path: &Path,
    args: &IndexArgs,
) -> anyhow::Result<()> {
    let first =
        "interrupted: nothing is recorded of this image; `stillframe prune` frees what was written";
    let interrupts = context.listen(1, first)?;
    let mut meter = Meter::new(context.console);
    let report = interrupts.interruptible(|| {
        repository.index_image(path, args.lock.lock_wait, &mut |progress: Progress| {
            meter.show(progress.into());
            interrupts.step();
        })
    })??;
    drop(meter);
    let mut object = record(&report.image);
    object["found"] = match &report.found {
        Indexed::New => json!("new"),
        Indexed::Moved { from } => {
            object["from"] = json!(from);
            json!("moved")
        }
        Indexed::Known => json!("known"),
    };
    object["bytes_stored"] = json!(report.bytes_stored);
    context.console.result(&object, || words(&report))?;
    Ok(())
}

fn remove(context: &Context, repository: &mut Repository, named: &Path) -> anyhow::Result<()> {
    let image = find(repository.images()?, named)?;
    repository.remove_image(image.record.id)?;
    let mut object = object(&image);
    object["removed"] = json!(true);
    context.console.result(&object, || {
        format!(
            "{} is no image of this repository any more; `stillframe prune` frees its entries",
            printable(&image.record.path)
        )
    })?;
    Ok(())
}

/// The image of this path or id.
fn find(images: Vec<Image>, named: &Path) -> Result<Image, CommandError> {
    let id = named.to_str().and_then(ImageId::from_hex);
    // One that is gone has no canonical path.
    let whole = named.canonicalize().unwrap_or_else(|_| named.to_owned());
    let is_it =
        |image: &Image| Some(image.record.id) == id || Path::new(&image.record.path) == whole;
    let mut found = images.into_iter().filter(is_it);
    match (found.next(), found.next()) {
        (Some(image), None) => Ok(image),
        (None, _) => Err(CommandError::NoSuchImage(named.display().to_string())),
        (Some(_), Some(_)) => Err(CommandError::SeveralImages(named.display().to_string())),
    }
}

fn record(image: &ImageRecord) -> Value {
    json!({
        "image": image.id,
        "path": image.path,
        "bytes": image.bytes,
        "blocks": image.blocks,
        "modified": image.modified,
        "indexed": image.indexed,
    })
}

fn object(image: &Image) -> Value {
    let mut object = record(&image.record);
    object["intact"] = json!(image.state == ImageState::Intact);
    object["state"] = json!(image.state.to_string());
    object
}

fn words(report: &IndexReport) -> String {
    let image = &report.image;
    let path = printable(&image.path);
    let size = table::bytes(image.bytes);
    match &report.found {
        Indexed::Known => format!("{path} is indexed, and has not changed since"),
        Indexed::Moved { from } if *from == image.path => {
            format!(
                "{path} has the content that was indexed, and a new time of change, which is recorded"
            )
        }
        Indexed::Moved { from } => format!(
            "{path} has the content of {}, and is read in its place from now on",
            printable(from)
        ),
        Indexed::New if image.blocks == 0 => {
            format!("{path} ({size}) has nothing but zeros: no checkpoint will find a page in it")
        }
        Indexed::New => format!(
            "{path} ({size}) has {} that checkpoints need not store; {} written. Keep the image as it is, where it is",
            table::count(image.blocks, "page"),
            table::bytes(report.bytes_stored)
        ),
    }
}

fn listed(images: &[Image]) -> String {
    let columns = [
        ("IMAGE", Align::Left),
        ("PATH", Align::Left),
        ("SIZE", Align::Right),
        ("PAGES", Align::Right),
        ("STATE", Align::Left),
    ];
    let mut table = Table::new(&columns);
    for Image { record, state } in images {
        table.row([
            record.id.to_string(),
            printable(&record.path),
            table::bytes(record.bytes),
            record.blocks.to_string(),
            state.to_string(),
        ]);
    }
    match images.is_empty() {
        true => "no image is indexed".to_owned(),
        false => table.render(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: u8, path: &str, state: ImageState) -> Image {
        let mut bytes = [0; 16];
        bytes[15] = id;
        Image {
            record: serde_json::from_value(json!({
                "id": ImageId::decode(bytes),
                "path": path,
                "bytes": 1 << 30,
                "modified": "2026-03-01T12:00:00Z",
                "content": "5e".repeat(32),
                "blocks": 7,
                "indexed": "2026-03-01T12:00:00Z",
            }))
            .unwrap(),
            state,
        }
    }

    #[test]
    fn an_image_is_found_by_its_path_or_its_id() {
        let images = || {
            vec![
                image(1, "/gone/a", ImageState::Intact),
                image(2, "/gone/a", ImageState::Changed),
                image(3, "/gone/b", ImageState::Missing("no such file".into())),
            ]
        };
        let found = |named: &str| find(images(), Path::new(named)).map(|image| image.record.id);
        assert_eq!(found("/gone/b").unwrap(), images()[2].record.id);
        assert_eq!(found(&format!("{:032}", 2)).unwrap(), images()[1].record.id);
        assert!(matches!(
            found("/gone/a"),
            Err(CommandError::SeveralImages(_))
        ));
        assert!(matches!(
            found("/gone/c"),
            Err(CommandError::NoSuchImage(_))
        ));
        let table = listed(&images());
        assert!(table.contains("missing: no such file"), "{table}");
    }

    #[test]
    fn what_was_indexed_in_one_line() {
        let report = |found| IndexReport {
            image: image(1, "/a", ImageState::Intact).record,
            found,
            bytes_stored: 2048,
        };
        let new = words(&report(Indexed::New));
        assert!(new.starts_with(
            "/a (1.0 GiB) has 7 pages that checkpoints need not store; 2.0 KiB written."
        ));
        let from = "/b".to_owned();
        assert!(words(&report(Indexed::Moved { from })).contains("the content of /b"));
        let from = "/a".to_owned();
        assert!(words(&report(Indexed::Moved { from })).contains("a new time of change"));
    }
}
