//! The fields and types of every JSON result. More fields may come; none may go or change its type.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::restored::Restored;

/// Fails unless `value` has everything `promise` names. A promise is a type by name, a list of one
/// promise for every item (of which there must be some), or an object of promises.
pub fn expect(value: &Value, promise: &Value) -> Result<()> {
    match promise {
        Value::String(kind) => match is_a(value, kind)? {
            true => Ok(()),
            false => bail!("{value} is no {kind}"),
        },
        Value::Array(items) => {
            let found = value.as_array().context("no list")?;
            ensure!(!found.is_empty(), "an empty list");
            found.iter().try_for_each(|item| expect(item, &items[0]))
        }
        Value::Object(fields) => fields.iter().try_for_each(|(name, promise)| {
            let field = value
                .get(name)
                .with_context(|| format!("no {name} in {value}"))?;
            expect(field, promise).with_context(|| name.clone())
        }),
        other => bail!("{other} is no promise"),
    }
}

fn is_a(value: &Value, kind: &str) -> Result<bool> {
    Ok(match kind {
        "count" => value.is_u64(),
        "flag" => value.is_boolean(),
        "text" => value.is_string(),
        "list" => value.is_array(),
        "anything" => true,
        "id" => is_id(value),
        "id or null" => value.is_null() || is_id(value),
        "text or null" => value.is_null() || value.is_string(),
        "time" => is_time(value),
        _ => bail!("no type is called {kind}"),
    })
}

fn is_id(value: &Value) -> bool {
    let digits = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    value.as_str().is_some_and(digits)
}

/// RFC 3339 in UTC: `2026-03-01T12:00:00.5Z`.
fn is_time(value: &Value) -> bool {
    let shape = |text: &str| {
        let bytes = text.as_bytes();
        bytes.len() >= 20 && bytes[4] == b'-' && bytes[10] == b'T' && text.ends_with('Z')
    };
    value.as_str().is_some_and(shape)
}

/// What `checkpoint`, `watch`, `list` and `show` report of every checkpoint.
fn checkpoint() -> Value {
    json!({
        "checkpoint": "id",
        "vm": "text",
        "time": "time",
        "parent": "id or null",
        "pages": {
            "total": "count", "captured": "count", "new": "count", "duplicate": "count",
            "zero": "count", "delta": "count", "unchanged": "count",
        },
        "bytes_stored": "count",
        "downtime_us": {
            "total": "count", "stop": "count", "scan": "count", "copy": "count",
            "device_state": "count", "wait": "count", "verify": "count", "resume": "count",
        },
    })
}

fn and(mut promise: Value, more: Value) -> Value {
    for (name, value) in more.as_object().into_iter().flatten() {
        promise[name] = value.clone();
    }
    promise
}

/// What only the command that took it reports.
fn taken() -> Value {
    let copied = json!({
        "full_pass": "count", "pre_copy": "count", "pause": "count", "after": "count",
        "on_fault": "count", "faults": "count", "left_unprotected": "count",
    });
    let phases = json!({ "copy": "count", "encode": "count", "write": "count", "commit": "count" });
    and(
        checkpoint(),
        json!({ "copied": copied, "total_us": "count", "phases_us": phases }),
    )
}

fn verify() -> Value {
    json!({ "verify": { "pages": "count", "differing": "count", "first": "list" } })
}

/// What only `list` and `show` report: what people said about it.
fn annotated() -> Value {
    json!({ "tags": "list", "note": "text or null" })
}

/// What `show` and `inspect` add to what `list` reports.
fn shown() -> Value {
    let block = json!({ "name": "text", "page_bytes": "count", "pages": "count", "root": "id" });
    let record = json!({
        "label": "text", "exe": "text", "cwd": "text", "arguments": ["text"], "disks": "list",
        "was_running": "flag", "pid": "count",
        "identity": { "qemu_version": "text", "machine": "text", "accelerator": "text" },
    });
    let more =
        json!({ "ram": [block], "streams": { "device-state": "anything" }, "vm_record": record });
    and(checkpoint(), more)
}

#[test]
fn every_result_of_a_checkpoint_has_its_fields() -> Result<()> {
    let guest = Setup::small(Kind::Private, "shapes").booted()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::at(&folder.path().join("repo"));
    let made = stillframe.json(&["init"])?;
    expect(&made, &json!({ "repository": "text", "directory": "text" }))?;
    let pid = guest.pid_text();
    let one = stillframe.json(&["checkpoint", "--pid", &pid])?;
    expect(&one, &taken())?;
    ensure!(
        one.get("verify").is_none() && one["vm"] == "shapes",
        "{one}"
    );
    let verified = stillframe.json(&["checkpoint", "--pid", &pid, "--verify"])?;
    expect(&verified, &and(taken(), verify()))?;
    let lines =
        stillframe.json_lines(&["watch", "--vm", "shapes", "--every", "50ms", "--count", "2"])?;
    expect(&json!(lines), &json!([taken()]))?;

    let listed = stillframe.json(&["list"])?;
    expect(&listed, &json!([and(checkpoint(), annotated())]))?;
    let ids: Vec<&Value> = [&one, &verified, &lines[0], &lines[1]]
        .map(|it| &it["checkpoint"])
        .into();
    ensure!(
        listed
            .as_array()
            .is_some_and(|all| all.iter().map(|it| &it["checkpoint"]).eq(ids))
    );
    let shown_last = stillframe.json(&["show", "latest"])?;
    expect(&shown_last, &and(shown(), annotated()))?;
    expect(&shown_last["streams"]["device-state"], &json!("count"))?;
    // The same words mean the same thing wherever they stand.
    for field in ["checkpoint", "vm", "time", "parent", "pages", "downtime_us"] {
        ensure!(
            shown_last[field] == lines[1][field],
            "{field}: {shown_last} {}",
            lines[1]
        );
        ensure!(
            shown_last[field] == listed[3][field],
            "{field}: {shown_last} {listed}"
        );
    }
    restored(&stillframe, folder.path())?;
    inspected(&stillframe)?;
    maintained(&stillframe)
}

fn restored(stillframe: &Stillframe, folder: &std::path::Path) -> Result<()> {
    let qmp = folder.join("shape.qmp");
    let qmp_text = qmp.display().to_string();
    let plan = stillframe.json(&["restore", "latest", "--qmp", &qmp_text, "--print-command"])?;
    let promise =
        json!({ "exe": "text", "arguments": ["text"], "cwd": "text", "changes": ["text"] });
    expect(&plan, &promise)?;
    let report = stillframe.json(&["restore", "latest", "--qmp", &qmp_text, "--verify"])?;
    let restored = Restored {
        pid: report["pid"].as_i64().context("no pid")? as i32,
        qmp,
        serial: stillframe_harness::serial::Serial::new(&folder.join("none")),
    };
    let promise = json!({
        "checkpoint": "id", "vm": "text", "pid": "count", "qmp": "text", "running": "flag",
        "pages": "count", "total_us": "count", "changes": ["text"],
    });
    expect(&report, &and(promise, verify()))?;
    ensure!(report["running"] == true && restored.monitor()?.status()? == "running");
    ensure!(report["qmp"] == qmp_text.as_str(), "{report}");
    Ok(())
}

fn inspected(stillframe: &Stillframe) -> Result<()> {
    let repository = stillframe.repository().display().to_string();
    let promise = json!({
        "kind": "text", "repository": "text", "checkpoints": "count", "packs": "count",
        "pack_bytes": "count", "blobs": "count", "blob_bytes": "count", "index_files": "count",
        "index_bytes": "count", "images": "count", "image_blobs": "count",
    });
    let whole = stillframe.json(&["inspect", &repository])?;
    expect(&whole, &promise)?;
    ensure!(
        whole["kind"] == "repository" && whole["checkpoints"] == 4,
        "{whole}"
    );
    let checkpoint = stillframe.json(&["inspect", "latest"])?;
    expect(&checkpoint, &and(shown(), json!({ "kind": "text" })))?;
    let pieces = json!({ "bytes": "count", "pieces": ["id"] });
    expect(&checkpoint["streams"]["device-state"], &pieces)?;
    for file in stillframe_stress::flips::files(stillframe.repository())? {
        let described = stillframe.json(&["inspect", &file.display().to_string()])?;
        expect(&described, &json!({ "kind": "text" }))
            .with_context(|| file.display().to_string())?;
    }
    Ok(())
}

fn maintained(stillframe: &Stillframe) -> Result<()> {
    let promise = json!({
        "clean": "flag", "problems": "list", "checkpoints": "count", "packs": "count",
        "blobs": "count", "pack_bytes": "count", "index_files": "count",
        "unindexed_packs": "count", "bytes_read": "count", "images": "count",
    });
    expect(&stillframe.json(&["check"])?, &promise)?;
    let read = stillframe.json(&["check", "--read-data"])?;
    expect(&read, &promise)?;
    ensure!(
        read["bytes_read"] == read["pack_bytes"] && read["clean"] == true,
        "{read}"
    );
    let summary = json!({ "checkpoint": "id", "vm": "text", "time": "time", "tags": "list" });
    let kept = and(summary.clone(), json!({ "reasons": ["text"] }));
    let promise = json!({ "dry_run": "flag", "forgotten": [summary], "kept": [kept] });
    expect(
        &stillframe.json(&["forget", "--keep-last", "1", "--dry-run"])?,
        &promise,
    )?;
    let pruned = json!({
        "dry_run": "flag", "checkpoints": "count", "blobs_used": "count", "blobs_unused": "count",
        "packs_kept": "count", "packs_removed": "count", "packs_repacked": "count",
        "packs_unindexed": "count", "bytes_before": "count", "bytes_after": "count",
    });
    expect(&stillframe.json(&["prune", "--dry-run"])?, &pruned)?;
    let both = stillframe.json(&["forget", "--keep-last", "1", "--prune"])?;
    expect(&both, &and(promise, json!({ "prune": pruned })))?;
    let image = stillframe.repository().with_extension("image");
    std::fs::write(&image, vec![7; 1 << 20])?;
    let image = image.display().to_string();
    let record = json!({
        "image": "text", "path": "text", "bytes": "count", "blocks": "count", "modified": "time", "indexed": "time",
    });
    let new = json!({ "found": "text", "bytes_stored": "count" });
    let indexed = stillframe.json(&["index", &image])?;
    expect(&indexed, &and(record.clone(), new))?;
    let state = json!({ "intact": "flag", "state": "text" });
    let listed = json!({ "images": [and(record.clone(), state.clone())] });
    expect(&stillframe.json(&["index", "--list"])?, &listed)?;
    let removed = and(and(record, state), json!({ "removed": "flag" }));
    expect(&stillframe.json(&["index", "--remove", &image])?, &removed)?;
    let rebuilt = json!({ "packs": "count", "index_files_replaced": "count", "problems": "list" });
    expect(&stillframe.json(&["rebuild-index"])?, &rebuilt)?;
    ensure!(stillframe.json(&["check", "--read-data"])?["clean"] == true);
    Ok(())
}

#[test]
fn probe_tells_of_every_ability() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // It needs neither a repository nor a password.
    let mut command = Stillframe::at(folder.path()).command(&["probe", "--json"])?;
    command
        .env_remove("STILLFRAME_REPOSITORY")
        .env_remove("STILLFRAME_PASSWORD");
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(0),
        "this machine lacks something: {said}"
    );
    let abilities: Value = serde_json::from_slice(&output.stdout)?;
    expect(
        &abilities,
        &json!([{ "name": "text", "need": "text", "present": "flag" }]),
    )?;
    for ability in abilities.as_array().into_iter().flatten() {
        ensure!(
            ["required", "optional"]
                .map(Value::from)
                .contains(&ability["need"]),
            "{ability}"
        );
        let printed = if ability["present"] == true {
            vec!["detail"]
        } else {
            vec!["cause", "remedy"]
        };
        ensure!(
            printed.iter().all(|field| ability[field].is_string()),
            "{ability}"
        );
    }
    Ok(())
}
