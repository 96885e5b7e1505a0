//! `show`: shows one checkpoint in detail.

use serde_json::{Value, json};
use stillframe_engine::VmRecord;
use stillframe_engine::restore;
use stillframe_repo::{CheckpointId, ImageId, Manifest, Repository};

use super::{Context, contents, list, local_time};
use crate::args::ShowArgs;
use crate::durations;
use crate::shell;
use crate::table::{self, Align, Table, printable};

/// Shows the checkpoint.
pub fn run(context: &Context, args: &ShowArgs) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    let named = &args.checkpoint;
    let (id, manifest) = repository.resolve(&named.id, named.vm.as_deref())?;
    let working_set = repository.working_set(&id)?;
    let working_set = working_set.map(|set| set.pages.len() as u64);
    let classes = match args.contents {
        true => {
            let lock_wait = args.lock.lock_wait;
            Some(contents::classify(
                context,
                &mut repository,
                &manifest,
                lock_wait,
            )?)
        }
        false => None,
    };
    let images = images(&repository, &manifest);
    let mut object = object(&id, &manifest);
    object["images"] = json!(
        images
            .iter()
            .map(|(id, words)| json!({ "image": id, "state": words }))
            .collect::<Vec<Value>>()
    );
    object["working_set_pages"] = json!(working_set);
    if let Some(classes) = classes {
        object["contents"] = json!(classes);
    }
    context.console.result(&object, || {
        let sections = [
            Some(words(&id, &manifest, working_set)),
            (!images.is_empty()).then(|| images_section(&images).render()),
            classes.map(|classes| contents::section(&classes).render()),
        ];
        let sections: Vec<String> = sections.into_iter().flatten().collect();
        sections.join("\n\n")
    })?;
    Ok(())
}

/// The images that a checkpoint may need, and the path and state of each.
fn images(repository: &Repository, manifest: &Manifest) -> Vec<(ImageId, String)> {
    let named = manifest.images.iter();
    let found = named.map(|&id| {
        let words = match repository.image(id) {
            Ok(image) => format!("{}: {}", image.record.path, image.state),
            // `show` must not fail where `check` reports it.
            Err(error) => error.to_string(),
        };
        (id, words)
    });
    found.collect()
}

fn images_section(images: &[(ImageId, String)]) -> Table {
    let mut table = Table::list();
    for (_, words) in images {
        table.entry("needs image", printable(words));
    }
    table
}

/// The JSON of `list`, with RAM blocks, streams and the VM record.
fn object(id: &CheckpointId, manifest: &Manifest) -> Value {
    let mut object = list::object(id, manifest);
    object["ram"] = json!(manifest.ram);
    object["disks"] = json!(manifest.disks);
    let streams = manifest.streams.iter();
    object["streams"] = streams
        .map(|(name, stream)| (name.clone(), json!(stream.bytes)))
        .collect();
    object["vm_record"] = manifest.vm_record.clone();
    object
}

/// Sections of aligned lines.
pub fn words(id: &CheckpointId, manifest: &Manifest, working_set: Option<u64>) -> String {
    let mut sections = vec![head(id, manifest, working_set).render()];
    // A record of another version is left out here; `--json` prints it unchanged.
    if let Ok(record) = restore::vm_record(id, manifest) {
        sections.push(vm(&record).render());
        if !record.obstacles.is_empty() {
            sections.push(obstacles(&record).render());
        }
        if !record.disks.is_empty() {
            sections.push(disks(&record, manifest).render());
        }
    }
    sections.push(ram(manifest).render());
    sections.join("\n\n")
}

fn head(id: &CheckpointId, manifest: &Manifest, working_set: Option<u64>) -> Table {
    let pages = &manifest.pages;
    let parent = manifest
        .parent
        .map_or_else(|| "none".to_owned(), |id| id.to_string());
    let mut table = Table::list();
    table.entry("checkpoint", id);
    table.entry("vm", &manifest.vm);
    table.entry(
        "time",
        format!("{} ({})", local_time(manifest.time), manifest.time),
    );
    table.entry("parent", parent);
    if !manifest.tags.is_empty() {
        table.entry("tags", list::tags(&manifest.tags));
    }
    if let Some(note) = &manifest.note {
        table.entry("note", note);
    }
    table.entry("memory", table::bytes(list::memory_bytes(manifest)));
    table.entry(
        "pages",
        format!(
            "{} in total, {} captured: {} new, {} as deltas, {} duplicate, {} zero, {} unchanged; {} left out as free",
            pages.total,
            pages.captured,
            pages.new,
            pages.delta,
            pages.duplicate,
            pages.zero,
            pages.unchanged,
            pages.free
        ),
    );
    table.entry("stored", table::bytes(manifest.bytes_stored));
    table.entry("pause", phases(manifest));
    for (name, stream) in &manifest.streams {
        table.entry(name, table::bytes(stream.bytes));
    }
    if let Some(pages) = working_set {
        table.entry("working set", table::count(pages, "page"));
    }
    table
}

/// `3.4 ms (stop 1.2 ms, scan 200 us, ...)`
fn phases(manifest: &Manifest) -> String {
    const PHASES: [&str; 7] = [
        "stop",
        "scan",
        "copy",
        "device_state",
        "wait",
        "verify",
        "resume",
    ];
    let parts: Vec<String> = PHASES
        .iter()
        .filter_map(|&name| {
            let us = manifest
                .downtime_us
                .get(name)?
                .as_u64()
                .filter(|&us| us > 0)?;
            Some(format!(
                "{} {}",
                name.replace('_', " "),
                durations::human_us(us)
            ))
        })
        .collect();
    format!("{} ({})", list::pause(manifest), parts.join(", "))
}

fn vm(record: &VmRecord) -> Table {
    let identity = &record.identity;
    let mut table = Table::list();
    let package = if identity.package.is_empty() { "" } else { " " };
    table.entry(
        "qemu",
        format!("{}{package}{}", identity.qemu_version, identity.package),
    );
    table.entry("program", record.exe.display());
    table.entry("machine", &identity.machine);
    table.entry(
        "state",
        match (record.was_running, record.was_suspended) {
            (true, _) => "running",
            (false, true) => "suspended to RAM",
            (false, false) => "paused",
        },
    );
    table.entry("process", record.pid);
    table.entry("user", user(record));
    let group = record.credentials.as_ref();
    if let Some(group) = group.and_then(|owner| owner.control_group.as_ref()) {
        table.entry("control group", group);
    }
    table.entry("directory", record.cwd.display());
    table.entry(
        "command",
        shell::join(record.arguments.iter().map(String::as_str)),
    );
    table
}

fn user(record: &VmRecord) -> String {
    let Some(owner) = &record.credentials else {
        return "not recorded".to_owned();
    };
    let label = owner.security_label.as_ref();
    let label = label.map_or_else(String::new, |label| format!(", confined by {label}"));
    format!("{} (group {}){label}", owner.uid, owner.gid)
}

fn obstacles(record: &VmRecord) -> Table {
    let mut table = Table::new(&[("OBSTACLES TO A RESTORE", Align::Left)]);
    for obstacle in &record.obstacles {
        table.row([obstacle.clone()]);
    }
    table
}

fn disks(record: &VmRecord, manifest: &Manifest) -> Table {
    use Align::{Left, Right};
    let mut table = Table::new(&[
        ("DISK", Left),
        ("FORMAT", Left),
        ("SIZE", Right),
        ("MODE", Left),
        ("CONTENT", Left),
        ("FILE", Left),
    ]);
    // A backing file belongs to the same device as the image over it, whose content is that of both.
    let mut captured: Vec<&str> = manifest
        .disks
        .iter()
        .map(|disk| &*disk.table.name)
        .collect();
    for disk in &record.disks {
        let mode = match (disk.read_only, disk.temporary) {
            (true, _) => "read-only",
            (false, true) => "temporary",
            (false, false) => "writable",
        };
        let found = captured.iter().position(|name| *name == disk.device);
        let content = match found.map(|at| captured.swap_remove(at)) {
            Some(_) => "in the checkpoint",
            None => "not stored",
        };
        table.row([
            disk.device.clone(),
            disk.format.clone(),
            table::bytes(disk.bytes),
            mode.to_owned(),
            content.to_owned(),
            disk.path.display().to_string(),
        ]);
    }
    table
}

fn ram(manifest: &Manifest) -> Table {
    let mut table = Table::new(&[
        ("RAM BLOCK", Align::Left),
        ("SIZE", Align::Right),
        ("PAGES", Align::Right),
    ]);
    for block in &manifest.ram {
        let bytes = block.pages.saturating_mul(u64::from(block.page_bytes));
        table.row([
            block.name.clone(),
            table::bytes(bytes),
            block.pages.to_string(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::list::tests::sample;

    #[test]
    fn a_checkpoint_with_a_foreign_record_is_shown_without_it() {
        let (id, manifest) = sample();
        let text = words(&id, &manifest, Some(7));
        assert!(
            text.contains("10 captured: 7 new, 0 as deltas, 1 duplicate, 2 zero, 0 unchanged; 0 left out as free"),
            "{text}"
        );
        assert!(text.contains("3.4 ms (stop 1.0 ms)"), "{text}");
        assert!(text.ends_with("pc.ram     256.0 MiB  65536"), "{text}");
        assert!(
            !text.contains("command") && text.contains("7 pages"),
            "{text}"
        );
        assert_eq!(object(&id, &manifest)["ram"][0]["name"], "pc.ram");
        assert!(!text.contains("tags") && !text.contains("note"), "{text}");
    }

    #[test]
    fn tags_and_note_are_shown_if_there_are_any() {
        let (id, mut manifest) = sample();
        let tags = ["nightly", "a"].map(|tag| tag.parse().unwrap());
        manifest.tags = tags.to_vec().try_into().unwrap();
        manifest.note = Some("before the upgrade".parse().unwrap());
        let text = words(&id, &manifest, None);
        assert!(text.contains("\ntags        a, nightly\n"), "{text}");
        assert!(
            text.contains("\nnote        before the upgrade\n"),
            "{text}"
        );
        // In the user's time zone, then exactly in UTC.
        assert!(text.contains(" (2026-03-01T12:00:00Z)\n"), "{text}");
        assert_eq!(object(&id, &manifest)["note"], "before the upgrade");
    }
}
