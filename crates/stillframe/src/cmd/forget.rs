//! `forget`: removes checkpoints by name or by rule.

use serde_json::{Value, json};
use stillframe_repo::{Forget, ForgetReport, KeepPolicy, KeepReason, Repository, Summary};

use super::{Context, prune, short, templates};
use crate::args::{ForgetArgs, KeepArgs};
use crate::durations::times;
use crate::error::CommandError;
use crate::table::{self, Align, Table, printable};

/// Forgets, and prunes afterwards with `--prune`.
pub fn run(context: &Context, args: &ForgetArgs) -> anyhow::Result<()> {
    let policy = policy(&args.keep);
    if args.ids.is_empty() && policy.is_empty() {
        return Err(CommandError::NothingToForget.into());
    }
    let mut repository = context.open()?;
    let what = Forget {
        ids: resolve(&repository, args)?,
        policy,
        vm: args.vm.clone(),
        tags: args.tags.clone(),
        break_leases: args.break_leases,
        dry_run: args.dry_run,
    };
    let report = repository.forget(&what)?;
    if !args.dry_run {
        templates::drop_forgotten(context, &repository);
    }
    for lease in &report.broken {
        context.console.note(&format!(
            "lease broken: {}; if that VM still runs, it loses the memory that it has not read yet",
            printable(&lease.to_string())
        ));
    }
    let mut object = object(&report, args.dry_run);
    let text = || words(&report, args.dry_run);
    if !args.prune {
        context.console.result(&object, text)?;
        return Ok(());
    }
    // JSON is one object for both, printed at the end; text is printed step by step.
    let json = context.console.json;
    if !json {
        context.console.result(&object, text)?;
    }
    if args.dry_run {
        let note = "what prune would free now, before anything is forgotten:";
        context.console.note(note);
    }
    let pruned = prune::perform(context, &mut repository, args.dry_run);
    if let Ok(pruned) = &pruned {
        object["prune"] = prune::object(pruned, args.dry_run);
    }
    // The forgotten checkpoints are reported even if the prune failed.
    if json || pruned.is_ok() {
        let text = || pruned.as_ref().map(|done| prune::words(done, args.dry_run));
        context
            .console
            .result(&object, || text().unwrap_or_default())?;
    }
    pruned.map(|_| ())
}

fn policy(keep: &KeepArgs) -> KeepPolicy {
    KeepPolicy {
        last: keep.keep_last.unwrap_or(0),
        hourly: keep.keep_hourly.unwrap_or(0),
        daily: keep.keep_daily.unwrap_or(0),
        weekly: keep.keep_weekly.unwrap_or(0),
        monthly: keep.keep_monthly.unwrap_or(0),
        yearly: keep.keep_yearly.unwrap_or(0),
        within: keep.keep_within,
        tags: keep.keep_tags.clone(),
    }
}

fn resolve(
    repository: &Repository,
    args: &ForgetArgs,
) -> Result<Vec<stillframe_repo::CheckpointId>, stillframe_repo::RepoError> {
    let vm = args.vm.as_deref();
    args.ids
        .iter()
        .map(|name| repository.resolve(name, vm).map(|(id, _)| id))
        .collect()
}

fn summary(summary: &Summary) -> Value {
    json!({
        "checkpoint": summary.id.to_string(),
        "vm": summary.vm,
        "time": summary.time.to_string(),
        "tags": summary.tags,
    })
}

fn reasons(reasons: &[KeepReason]) -> Vec<String> {
    reasons.iter().map(KeepReason::to_string).collect()
}

fn object(report: &ForgetReport, dry_run: bool) -> Value {
    let forgotten: Vec<Value> = report.forgotten.iter().map(summary).collect();
    let kept = report.kept.iter().map(|(kept, why)| {
        let mut kept = summary(kept);
        kept["reasons"] = json!(reasons(why));
        kept
    });
    let leased = report.leased.iter().map(|(left, lease)| {
        let mut left = summary(left);
        left["lease"] = json!(lease);
        left
    });
    json!({
        "dry_run": dry_run,
        "forgotten": forgotten,
        "kept": kept.collect::<Vec<Value>>(),
        "leased": leased.collect::<Vec<Value>>(),
        "leases_broken": report.broken,
    })
}

/// A line for each checkpoint that is forgotten, leased or kept by a rule, and the number of all that stay. The ones
/// that no rule applies to are only counted: there may be hundreds.
fn words(report: &ForgetReport, dry_run: bool) -> String {
    let forgotten = report.forgotten.iter();
    let forgotten = forgotten.map(|gone| ("forget", gone, String::new()));
    let kept = report.kept.iter().filter(|(_, why)| !why.is_empty());
    let kept = kept.map(|(kept, why)| ("keep", kept, reasons(why).join(", ")));
    let leased = report.leased.iter();
    let leased = leased.map(|(left, _)| ("leased", left, String::new()));
    let rows: Vec<(&str, &Summary, String)> = forgotten.chain(kept).chain(leased).collect();
    let shown = times::local_column(rows.iter().map(|(_, of, _)| (of.vm.as_str(), of.time)));

    let columns = ["", "CHECKPOINT", "VM", "TIME", "KEPT AS"].map(|name| (name, Align::Left));
    let mut table = Table::new(&columns);
    let is_empty = rows.is_empty();
    for ((action, of, why), time) in rows.into_iter().zip(shown) {
        let id = of.id.to_string();
        let cells = [action, short(&id), &of.vm].map(str::to_owned);
        table.row(cells.into_iter().chain([time, why]));
    }
    let needed = report.leased.iter().map(|(left, lease)| {
        format!(
            "\n{} is kept: a VM restored from it does not have all its memory yet, {}",
            short(&left.id.to_string()),
            printable(&lease.to_string()),
        )
    });
    let total = format!(
        "{} {}, {} kept{}",
        table::count(report.forgotten.len() as u64, "checkpoint"),
        if dry_run {
            "would be forgotten"
        } else {
            "forgotten"
        },
        report.kept.len() + report.leased.len(),
        needed.collect::<String>(),
    );
    match is_empty {
        true => total,
        false => format!("{}\n{total}", table.render()),
    }
}

#[cfg(test)]
mod tests {
    use stillframe_repo::CheckpointId;

    use super::*;

    fn report() -> ForgetReport {
        let summary = |digits: &str| Summary {
            id: CheckpointId::from_hex(&digits.repeat(8)).unwrap(),
            vm: "vm1".to_owned(),
            time: jiff::Timestamp::UNIX_EPOCH,
            tags: stillframe_repo::Tags::default(),
        };
        ForgetReport {
            forgotten: vec![summary("1a2b3c4d")],
            kept: vec![(
                summary("5e6f7a8b"),
                vec![KeepReason::Last, KeepReason::Daily],
            )],
            ..ForgetReport::default()
        }
    }

    #[test]
    fn each_checkpoint_is_forgotten_or_kept() {
        let text = words(&report(), false);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("forget  1a2b3c4d    vm1  "), "{text}");
        assert!(lines[2].starts_with("keep    5e6f7a8b    vm1  "), "{text}");
        assert!(lines[2].ends_with("last, daily"), "{text}");
        assert_eq!(lines[3], "1 checkpoint forgotten, 1 kept");
        assert!(words(&report(), true).contains("would be forgotten"));
    }

    #[test]
    fn checkpoints_that_no_rule_applies_to_are_counted_and_not_listed() {
        let mut report = report();
        for (_, why) in &mut report.kept {
            why.clear();
        }
        report.kept = vec![report.kept[0].clone(); 300];
        let text = words(&report, true);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("forget  1a2b3c4d"), "{text}");
        assert_eq!(lines[2..], ["1 checkpoint would be forgotten, 300 kept"]);
        report.forgotten.clear();
        assert_eq!(words(&report, false), "0 checkpoints forgotten, 300 kept");
        // JSON lists them all.
        assert_eq!(
            object(&report, false)["kept"].as_array().unwrap().len(),
            300
        );
    }

    #[test]
    fn json_has_the_same() {
        let object = object(&report(), true);
        assert_eq!(object["forgotten"][0]["checkpoint"], "1a2b3c4d".repeat(8));
        assert_eq!(object["kept"][0]["reasons"], json!(["last", "daily"]));
        assert_eq!(object["dry_run"], true);
    }

    #[test]
    fn a_rule_not_given_keeps_nothing_by_itself() {
        let keep = KeepArgs {
            keep_daily: Some(3),
            ..KeepArgs::default()
        };
        assert_eq!(
            policy(&keep),
            KeepPolicy {
                daily: 3,
                ..KeepPolicy::default()
            }
        );
    }
}
