//! `list`: lists checkpoints, oldest first.

use std::collections::HashMap;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};
use stillframe_repo::{CheckpointId, Manifest, Tags};

use super::{Context, short};
use crate::args::ListArgs;
use crate::durations;
use crate::durations::times;
use crate::table::{self, Align, Table};

/// Lists all checkpoints, or those that the options choose.
pub fn run(context: &Context, args: &ListArgs) -> anyhow::Result<()> {
    let mut checkpoints = context.open()?.manifests()?;
    choose(
        &mut checkpoints,
        args,
        Timestamp::now(),
        &TimeZone::system(),
    );
    let objects: Vec<Value> = checkpoints
        .iter()
        .map(|(id, manifest)| object(id, manifest))
        .collect();
    context
        .console
        .result(&objects, || words(&checkpoints))
        .map_err(Into::into)
}

/// Removes checkpoints that the options exclude; the order stays, oldest first.
fn choose(
    checkpoints: &mut Vec<(CheckpointId, Manifest)>,
    args: &ListArgs,
    now: Timestamp,
    zone: &TimeZone,
) {
    let since = args.since.map(|since| since.first(now, zone));
    let until = args.until.map(|until| until.last(now, zone));
    checkpoints.retain(|(_, manifest)| {
        args.vm.as_ref().is_none_or(|vm| manifest.vm == *vm)
            && manifest.tags.has_all(&args.tags)
            && since.is_none_or(|since| manifest.time >= since)
            && until.is_none_or(|until| manifest.time <= until)
    });
    let Some(last) = args.last else { return };
    let mut left: HashMap<String, usize> = HashMap::new();
    for (_, manifest) in checkpoints.iter() {
        *left.entry(manifest.vm.clone()).or_default() += 1;
    }
    checkpoints.retain(|(_, manifest)| {
        // Each VM was counted above.
        let left = left.entry(manifest.vm.clone()).or_default();
        *left = left.saturating_sub(1);
        *left < last.get()
    });
}

/// A checkpoint as JSON. Scripts rely on these keys.
pub fn object(id: &CheckpointId, manifest: &Manifest) -> Value {
    json!({
        "checkpoint": id.to_string(),
        "vm": manifest.vm,
        "time": manifest.time.to_string(),
        "parent": manifest.parent.map(|id| id.to_string()),
        "tags": manifest.tags,
        "note": manifest.note,
        "pages": manifest.pages,
        "bytes_stored": manifest.bytes_stored,
        "downtime_us": manifest.downtime_us,
        "obstacles": obstacles(manifest),
    })
}

/// Obstacles to a restore that were known at the checkpoint.
fn obstacles(manifest: &Manifest) -> Vec<&str> {
    let found = manifest
        .vm_record
        .get("obstacles")
        .and_then(Value::as_array);
    let found = found.into_iter().flatten();
    found.filter_map(Value::as_str).collect()
}

/// The size of the VM's memory, in bytes.
pub fn memory_bytes(manifest: &Manifest) -> u64 {
    let of_block = |table: &stillframe_repo::BlockTable| {
        table.pages.saturating_mul(u64::from(table.page_bytes))
    };
    manifest
        .ram
        .iter()
        .map(of_block)
        .fold(0, u64::saturating_add)
}

/// The downtime; `-` if it is not known.
pub fn pause(manifest: &Manifest) -> String {
    let total = manifest.downtime_us.get("total").and_then(Value::as_u64);
    total.map_or_else(|| "-".to_owned(), durations::human_us)
}

/// `before-upgrade, nightly`
pub fn tags(tags: &Tags) -> String {
    let words: Vec<&str> = tags.iter().map(|tag| tag.as_str()).collect();
    words.join(", ")
}

fn words(checkpoints: &[(CheckpointId, Manifest)]) -> String {
    use Align::{Left, Right};
    // Columns that would be empty are left out.
    let any = |has: fn(&Manifest) -> bool| checkpoints.iter().any(|(_, one)| has(one));
    let tagged = any(|manifest| !manifest.tags.is_empty());
    let marked = any(|manifest| !obstacles(manifest).is_empty());
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
    columns.extend(tagged.then_some(("TAGS", Left)));
    columns.extend(marked.then_some(("RESTORE", Left)));
    let mut table = Table::new(&columns);
    let taken = checkpoints
        .iter()
        .map(|(_, one)| (one.vm.as_str(), one.time));
    for ((id, manifest), time) in checkpoints.iter().zip(times::local_column(taken)) {
        let parent = manifest.parent.map(|id| id.to_string());
        let mark = match obstacles(manifest).len() {
            0 => String::new(),
            count => format!("{} (see `show`)", table::count(count as u64, "obstacle")),
        };
        let mut row = vec![
            short(&id.to_string()).to_owned(),
            manifest.vm.clone(),
            time,
            table::bytes(memory_bytes(manifest)),
            manifest.pages.new.to_string(),
            table::bytes(manifest.bytes_stored),
            pause(manifest),
            parent.as_deref().map_or("-", short).to_owned(),
        ];
        row.extend(tagged.then(|| tags(&manifest.tags)));
        row.extend(marked.then_some(mark));
        table.row(row);
    }
    let total = table::count(checkpoints.len() as u64, "checkpoint");
    format!("{}\n{total}", table.render())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use stillframe_repo::{BlockTable, PageCounts, Tag};

    use super::*;

    /// A checkpoint for the tests of `list` and `show`.
    pub fn sample() -> (CheckpointId, Manifest) {
        let id = CheckpointId::from_hex(&"1a2b3c4d".repeat(8)).unwrap();
        let content = "5e".repeat(32);
        let table: BlockTable = serde_json::from_value(
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
            disks: Vec::new(),
            images: BTreeSet::new(),
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
    fn each_checkpoint_is_one_line() {
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

    fn tagged(tags: &[&str]) -> Tags {
        let tags: Vec<Tag> = tags.iter().map(|tag| tag.parse().unwrap()).collect();
        tags.try_into().unwrap()
    }

    #[test]
    fn tags_have_a_column_if_there_are_any() {
        let ((id, mut with), without) = (sample(), sample());
        with.tags = tagged(&["nightly", "before-upgrade"]);
        with.note = Some("by hand".parse().unwrap());
        let object = object(&id, &with);
        assert_eq!(object["tags"], json!(["before-upgrade", "nightly"]));
        assert_eq!(object["note"], "by hand");
        let text = words(&[(id, with), without]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].ends_with("PARENT  TAGS"), "{text}");
        assert!(
            lines[1].ends_with("-       before-upgrade, nightly"),
            "{text}"
        );
        assert!(lines[2].ends_with("  -"), "{text}");
    }

    #[test]
    fn milliseconds_are_shown_if_seconds_are_not_enough() {
        let ((id, mut early), (_, mut late)) = (sample(), sample());
        early.time = "2026-03-01T12:00:00.25Z".parse().unwrap();
        late.time = "2026-03-01T12:00:00.5Z".parse().unwrap();
        let text = words(&[(id, early.clone()), (id, late.clone())]);
        assert!(
            text.contains(":00.250") && text.contains(":00.500"),
            "{text}"
        );
        late.vm = "other".to_owned();
        assert!(!words(&[(id, early), (id, late)]).contains(".500"));
    }

    /// The indices of the chosen checkpoints. The list has one an hour, of the VMs a, b, a, b, ...; the first two and
    /// the last are tagged.
    fn chosen(args: &ListArgs) -> Vec<u8> {
        let start: Timestamp = "2026-03-01T12:00:00Z".parse().unwrap();
        let one = |n: u8| {
            let (_, mut manifest) = sample();
            manifest.vm = ["a", "b"][usize::from(n % 2)].to_owned();
            manifest.time = start + jiff::SignedDuration::from_hours(n.into());
            if [0, 1, 7].contains(&n) {
                manifest.tags = tagged(&["t", "u"]);
            }
            (CheckpointId([n; 32]), manifest)
        };
        let mut all: Vec<_> = (0..8).map(one).collect();
        let now = "2026-03-01T19:30:00Z".parse().unwrap();
        choose(&mut all, args, now, &TimeZone::UTC);
        all.iter().map(|(id, _)| id.0[0]).collect()
    }

    #[test]
    fn options_choose_together() {
        use crate::args::{Cli, Command};
        use clap::Parser as _;
        let chosen = |options: &str| {
            let line = ["stillframe", "list"]
                .into_iter()
                .chain(options.split_whitespace());
            match Cli::try_parse_from(line).unwrap().command {
                Command::List(args) => chosen(&args),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(chosen(""), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(chosen("--vm b"), [1, 3, 5, 7]);
        assert_eq!(chosen("--tag t --tag u"), [0, 1, 7]);
        assert_eq!(chosen("--tag t --tag v"), [0; 0]);
        assert_eq!(chosen("--since 2h"), [6, 7]);
        assert_eq!(chosen("--since 2026-03-01T18:00:00Z"), [6, 7]);
        assert_eq!(chosen("--until 2026-03-01T14:00:00Z"), [0, 1, 2]);
        assert_eq!(chosen("--since 2026-03-01 --until 2026-03-01").len(), 8);
        assert_eq!(chosen("--until 2026-02-28"), [0; 0]);
        assert_eq!(chosen("--last 1"), [6, 7]);
        assert_eq!(chosen("--last 3"), [2, 3, 4, 5, 6, 7]);
        assert_eq!(chosen("--last 9 --vm a"), [0, 2, 4, 6]);
        // The newest among those that match the other options.
        assert_eq!(chosen("--last 1 --until 3h"), [3, 4]);
        assert_eq!(chosen("--last 1 --tag t"), [0, 7]);
    }

    #[test]
    fn obstacles_to_a_restore_are_marked() {
        let ((id, mut with), without) = (sample(), sample());
        with.vm_record = json!({ "obstacles": ["a", "b"] });
        assert_eq!(object(&id, &with)["obstacles"], json!(["a", "b"]));
        let text = words(&[(id, with), without]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].ends_with("RESTORE"), "{text}");
        assert!(lines[1].ends_with("2 obstacles (see `show`)"), "{text}");
        assert!(!lines[2].contains("obstacle"), "{text}");
    }

    #[test]
    fn the_json_has_all_documented_keys() {
        let (id, manifest) = sample();
        let object = object(&id, &manifest);
        assert_eq!(object["checkpoint"], "1a2b3c4d".repeat(8));
        assert_eq!(object["vm"], "web\x1b1");
        assert_eq!(object["time"], "2026-03-01T12:00:00Z");
        assert_eq!(object["parent"], Value::Null);
        assert_eq!(object["tags"], json!([]));
        assert_eq!(object["note"], Value::Null);
        assert_eq!(object["pages"]["new"], 7);
        assert_eq!(object["bytes_stored"], 2048);
    }
}
