//! `list`: the checkpoints, oldest first.

use serde_json::{Value, json};
use stillframe_repo::{CheckpointId, Manifest};

use super::{Context, local_time, short};
use crate::args::ListArgs;
use crate::durations;
use crate::table::{self, Align, Table};

/// Lists all checkpoints, or those of one VM.
pub fn run(context: &Context, args: &ListArgs) -> anyhow::Result<()> {
    let mut checkpoints = context.open()?.manifests()?;
    if let Some(vm) = &args.vm {
        checkpoints.retain(|(_, manifest)| manifest.vm == *vm);
    }
    let objects: Vec<Value> = checkpoints
        .iter()
        .map(|(id, manifest)| object(id, manifest))
        .collect();
    context
        .console
        .result(&objects, || words(&checkpoints))
        .map_err(Into::into)
}

/// What is promised to scripts about every checkpoint.
pub fn object(id: &CheckpointId, manifest: &Manifest) -> Value {
    json!({
        "checkpoint": id.to_string(),
        "vm": manifest.vm,
        "time": manifest.time.to_string(),
        "parent": manifest.parent.map(|id| id.to_string()),
        "pages": manifest.pages,
        "bytes_stored": manifest.bytes_stored,
        "downtime_us": manifest.downtime_us,
        "obstacles": obstacles(manifest),
    })
}

/// What would stand in the way of a restore, as far as it was known at the checkpoint.
fn obstacles(manifest: &Manifest) -> Vec<&str> {
    let found = manifest
        .vm_record
        .get("obstacles")
        .and_then(Value::as_array);
    let found = found.into_iter().flatten();
    found.filter_map(Value::as_str).collect()
}

/// The VM's memory of a checkpoint, in bytes.
pub fn memory_bytes(manifest: &Manifest) -> u64 {
    let of_block =
        |table: &stillframe_repo::RamTable| table.pages.saturating_mul(u64::from(table.page_bytes));
    manifest
        .ram
        .iter()
        .map(of_block)
        .fold(0, u64::saturating_add)
}

/// The downtime; `-` where that is not known.
pub fn pause(manifest: &Manifest) -> String {
    let total = manifest.downtime_us.get("total").and_then(Value::as_u64);
    total.map_or_else(|| "-".to_owned(), durations::human_us)
}

fn words(checkpoints: &[(CheckpointId, Manifest)]) -> String {
    use Align::{Left, Right};
    // Only where there is something to say.
    let marked = checkpoints
        .iter()
        .any(|(_, manifest)| !obstacles(manifest).is_empty());
    let mut columns = vec![
        ("CHECKPOINT", Left),
        ("VM", Left),
        ("TIME", Left),
        ("MEMORY", Right),
        ("NEW PAGES", Right),
        ("STORED", Right),
        ("PAUSE", Right),
        ("PARENT", Left),
    ];
    columns.extend(marked.then_some(("RESTORE", Left)));
    let mut table = Table::new(&columns);
    for (id, manifest) in checkpoints {
        let parent = manifest.parent.map(|id| id.to_string());
        let mark = match obstacles(manifest).len() {
            0 => String::new(),
            count => format!("{}, see show", table::count(count as u64, "obstacle")),
        };
        let mut row = vec![
            short(&id.to_string()).to_owned(),
            manifest.vm.clone(),
            local_time(manifest.time),
            table::bytes(memory_bytes(manifest)),
            manifest.pages.new.to_string(),
            table::bytes(manifest.bytes_stored),
            pause(manifest),
            parent.as_deref().map_or("-", short).to_owned(),
        ];
        row.extend(marked.then_some(mark));
        table.row(row);
    }
    let total = table::count(checkpoints.len() as u64, "checkpoint");
    format!("{}\n{total}", table.render())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use stillframe_repo::{PageCounts, RamTable, Tags};

    use super::*;

    /// A checkpoint as `list` and `show` meet it.
    pub fn sample() -> (CheckpointId, Manifest) {
        let id = CheckpointId::from_hex(&"1a2b3c4d".repeat(8)).unwrap();
        let content = "5e".repeat(32);
        let table: RamTable = serde_json::from_value(
            json!({ "name": "pc.ram", "page_bytes": 4096, "pages": 65536, "root": content }),
        )
        .unwrap();
        let manifest = Manifest {
            vm: "web\x1b1".to_owned(),
            time: "2026-03-01T12:00:00Z".parse().unwrap(),
            parent: None,
            tags: Tags::default(),
            note: None,
            ram: vec![table],
            streams: BTreeMap::new(),
            pages: PageCounts {
                total: 65536,
                captured: 10,
                new: 7,
                duplicate: 1,
                zero: 2,
                ..PageCounts::default()
            },
            bytes_stored: 2048,
            vm_record: Value::Null,
            downtime_us: json!({ "total": 3412, "stop": 1000 }),
        };
        (id, manifest)
    }

    #[test]
    fn a_line_a_checkpoint() {
        let text = words(&[sample()]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("CHECKPOINT  VM "));
        for expected in [
            "1a2b3c4d  ",
            "web\\u{1b}1",
            "256.0 MiB",
            "2.0 KiB",
            "3.4 ms",
        ] {
            assert!(lines[1].contains(expected), "{expected}: {text}");
        }
        assert_eq!(lines[2], "1 checkpoint");
    }

    #[test]
    fn what_stands_in_the_way_of_a_restore_is_marked() {
        let ((id, mut with), without) = (sample(), sample());
        with.vm_record = json!({ "obstacles": ["a", "b"] });
        assert_eq!(object(&id, &with)["obstacles"], json!(["a", "b"]));
        let text = words(&[(id, with), without]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].ends_with("RESTORE"), "{text}");
        assert!(lines[1].ends_with("2 obstacles, see show"), "{text}");
        assert!(!lines[2].contains("obstacle"), "{text}");
    }

    #[test]
    fn scripts_find_what_they_were_promised() {
        let (id, manifest) = sample();
        let object = object(&id, &manifest);
        assert_eq!(object["checkpoint"], "1a2b3c4d".repeat(8));
        assert_eq!(object["vm"], "web\x1b1");
        assert_eq!(object["time"], "2026-03-01T12:00:00Z");
        assert_eq!(object["parent"], Value::Null);
        assert_eq!(object["pages"]["new"], 7);
        assert_eq!(object["bytes_stored"], 2048);
    }
}
