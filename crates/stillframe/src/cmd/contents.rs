//! What the pages of memory are, by their content: a section of `show`, and a table and picture of `stats`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use stillframe_engine::PAGE_BYTES;
use stillframe_engine::page_classes::{self, PageClasses};
use stillframe_repo::{CheckpointId, Manifest, Repository};

use super::{Context, list, local_time, short};
use crate::args::StatsArgs;
use crate::error::CommandError;
use crate::picture;
use crate::progress::Meter;
use crate::table::{self, Align, Table};

/// The classes in the order in which they are counted.
pub const NAMES: [&str; 7] = [
    "free",
    "zero",
    "on disk",
    "in image",
    "duplicate",
    "changed",
    "other",
];

/// The numbers of pages, in this order.
pub fn numbers(classes: &PageClasses) -> [u64; NAMES.len()] {
    let PageClasses {
        free,
        zero,
        on_disk,
        in_image,
        duplicate,
        changed,
        other,
    } = *classes;
    [free, zero, on_disk, in_image, duplicate, changed, other]
}

/// Classifies the pages of one checkpoint.
pub fn classify(
    context: &Context,
    repository: &mut Repository,
    manifest: &Manifest,
    lock_wait: Duration,
) -> anyhow::Result<PageClasses> {
    let hasher = repository.hasher();
    let mut meter = Meter::new(context.console);
    let reader = repository.reader(lock_wait)?;
    // One that was forgotten is no parent any more.
    let parent = manifest.parent.and_then(|id| reader.manifest(&id).ok());
    let progress = &mut |progress: stillframe_engine::Progress| meter.show(progress.into());
    let parent = parent.as_ref();
    let classes = page_classes::classify(&reader, &hasher, manifest, parent, progress)?;
    Ok(classes)
}

/// The classes of one checkpoint, in lines.
pub fn section(classes: &PageClasses) -> Table {
    let mut table = Table::new(&[
        ("CONTENT", Align::Left),
        ("PAGES", Align::Right),
        ("SIZE", Align::Right),
        ("SHARE", Align::Right),
    ]);
    let all = classes.pages();
    let lines = NAMES.into_iter().zip(numbers(classes));
    for (name, pages) in lines.chain([("all", all)]) {
        table.row([
            name.to_owned(),
            pages.to_string(),
            table::bytes(pages.saturating_mul(PAGE_BYTES)),
            share(pages, all),
        ]);
    }
    table
}

fn share(pages: u64, all: u64) -> String {
    format!("{:.1} %", pages as f64 * 100.0 / all.max(1) as f64)
}

/// A checkpoint and its classes.
type Counted = (CheckpointId, Manifest, PageClasses);

/// `stats --contents`: the checkpoints that are named, or all of the VM, oldest first.
pub fn run(context: &Context, args: &StatsArgs) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    let vm = args.vm.as_deref();
    let chosen = match args.checkpoints.as_slice() {
        [] => {
            let mut all = repository.manifests()?;
            all.retain(|(_, manifest)| vm.is_none_or(|vm| manifest.vm == vm));
            all
        }
        named => {
            let found = named.iter().map(|id| repository.resolve(id, vm));
            found.collect::<Result<Vec<_>, _>>()?
        }
    };
    if chosen.is_empty() {
        return Err(CommandError::NoCheckpoints.into());
    }
    let mut counted: Vec<Counted> = Vec::with_capacity(chosen.len());
    for (id, manifest) in chosen {
        let classes = classify(context, &mut repository, &manifest, args.lock.lock_wait)?;
        counted.push((id, manifest, classes));
    }
    if let Some(path) = &args.svg {
        draw(path, &counted)?;
    }
    let objects: Vec<Value> = counted.iter().map(object).collect();
    context.console.result(&objects, || words(&counted))?;
    Ok(())
}

fn object((id, manifest, classes): &Counted) -> Value {
    json!({
        "checkpoint": id.to_string(),
        "vm": manifest.vm,
        "time": manifest.time.to_string(),
        "pages": classes.pages(),
        "contents": classes,
    })
}

/// Shares of each class.
fn words(counted: &[Counted]) -> String {
    use Align::{Left, Right};
    let mut table = Table::new(&[
        ("CHECKPOINT", Left),
        ("VM", Left),
        ("TIME", Left),
        ("MEMORY", Right),
        ("FREE", Right),
        ("ZERO", Right),
        ("ON DISK", Right),
        ("IN IMAGE", Right),
        ("DUPLICATE", Right),
        ("CHANGED", Right),
        ("OTHER", Right),
    ]);
    for (id, manifest, classes) in counted {
        let all = classes.pages();
        let [free, zero, on_disk, in_image, duplicate, changed, other] =
            numbers(classes).map(|pages| share(pages, all));
        table.row([
            short(&id.to_string()).to_owned(),
            manifest.vm.clone(),
            local_time(manifest.time),
            table::bytes(list::memory_bytes(manifest)),
            free,
            zero,
            on_disk,
            in_image,
            duplicate,
            changed,
            other,
        ]);
    }
    table.render()
}

fn draw(path: &Path, counted: &[Counted]) -> anyhow::Result<()> {
    let bars: Vec<(String, [u64; NAMES.len()])> = counted
        .iter()
        .map(|(id, _, classes)| (short(&id.to_string()).to_owned(), numbers(classes)))
        .collect();
    let svg = picture::stacked("Pages of memory by content", NAMES, &bars)?;
    fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::list::tests::sample;

    const CLASSES: PageClasses = PageClasses {
        free: 3,
        zero: 47,
        on_disk: 20,
        in_image: 7,
        duplicate: 10,
        changed: 8,
        other: 5,
    };

    #[test]
    fn each_class_has_its_line_and_its_column() {
        let text = section(&CLASSES).render();
        for (name, pages) in NAMES
            .into_iter()
            .zip(["3", "47", "20", "7", "10", "8", "5"])
        {
            let mut lines = text.lines().filter(|line| line.starts_with(name));
            let line = lines.next().unwrap();
            assert!(
                line.contains(pages) && line.ends_with(&format!("{pages}.0 %")),
                "{text}"
            );
        }
        assert!(text.ends_with("100  400.0 KiB  100.0 %"), "{text}");
        let (id, manifest) = sample();
        let text = words(&[(id, manifest, CLASSES)]);
        let shares = [
            " 3.0 %", " 47.0 %", " 20.0 %", " 7.0 %", " 10.0 %", " 8.0 %", " 5.0 %",
        ];
        let at = shares.map(|share| text.find(share).unwrap());
        assert!(at.is_sorted(), "{text}");
    }

    #[test]
    fn a_bar_has_each_class_and_its_name() {
        let bars = [("3f2a".to_owned(), numbers(&CLASSES))];
        let svg = picture::stacked("title", NAMES, &bars).unwrap();
        for name in NAMES.into_iter().chain(["3f2a", "title"]) {
            assert!(svg.contains(name), "{name}: {svg}");
        }
    }
}
