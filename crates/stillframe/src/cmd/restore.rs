//! `restore`: a new QEMU in the state of a checkpoint.

use std::path::{Path, PathBuf, absolute};

use anyhow::Context as _;
use serde_json::json;
use stillframe_engine::restore::{self, RestoreError, RestoreOptions, RestoreReport};
use stillframe_engine::{LaunchError, LaunchOptions, LaunchPlan};
use stillframe_repo::Repository;

use super::{Context, short};
use crate::args::RestoreArgs;
use crate::durations;
use crate::interrupt::{AtLast, Interrupts};
use crate::progress::Meter;
use crate::shell;
use crate::table::{self, printable};

/// Restores, or only prints how QEMU would be started.
pub fn run(context: &Context, args: &RestoreArgs) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    let name = &args.checkpoint;
    let (id, manifest) = repository.resolve(&name.id, name.vm.as_deref())?;
    let launch = launch_options(args)?;
    // Planned before anything starts, so that the changes are known even if the start fails.
    let plan = restore::plan(&id, &manifest, &launch).inspect_err(|error| {
        if disks_stand_in_the_way(error) {
            let option = "--disks-as-they-are restores all the same, at the risk of damaging them";
            context.console.note(option);
        }
    })?;
    for change in &plan.changes {
        context.console.note(&format!("changed: {change}"));
    }
    if args.print_command {
        return print_command(context, &plan);
    }
    let options = RestoreOptions {
        launch,
        paused: args.paused,
        verify: args.verify,
        lock_wait: args.lock_wait,
    };
    let report = perform(context, &mut repository, &id, &options)?;
    context.console.result(&report, || words(&report))?;
    Ok(())
}

fn perform(
    context: &Context,
    repository: &mut Repository,
    id: &stillframe_repo::CheckpointId,
    options: &RestoreOptions,
) -> anyhow::Result<RestoreReport> {
    let first = "interrupted: giving the restore up";
    let interrupts = Interrupts::listen(context.console, 1, first, AtLast::Wait)
        .context("cannot listen to signals")?;
    let mut meter = Meter::new(context.console);
    // Given up between two steps, the new QEMU is dropped, and with that ended.
    let restored = interrupts.interruptible(|| {
        restore::restore(repository, id, options, &mut |progress| {
            meter.show(progress.into());
            interrupts.step();
        })
    });
    Ok(restored??)
}

/// Whether the user may decide to go on: not where a disk has another user.
fn disks_stand_in_the_way(error: &RestoreError) -> bool {
    matches!(
        error,
        RestoreError::Launch(
            LaunchError::DiskChanged { .. }
                | LaunchError::DiskTemporary { .. }
                | LaunchError::DiskUnknown { .. }
        )
    )
}

fn launch_options(args: &RestoreArgs) -> anyhow::Result<LaunchOptions> {
    let here = |path: &Path| {
        // QEMU runs in the recorded directory, not in this one.
        absolute(path).with_context(|| format!("{} is no path", path.display()))
    };
    let qmp = here(&args.qmp)?;
    let log = match &args.log {
        Some(log) => here(log)?,
        None => default_log(&qmp),
    };
    let serial = args
        .serial
        .as_deref()
        .map(|spec| serial_from_here(spec, here))
        .transpose()?;
    Ok(LaunchOptions {
        qmp,
        serial,
        disks_as_they_are: args.disks_as_they_are,
        log,
    })
}

/// `/run/x.qmp` logs to `/run/x.qmp.log`.
fn default_log(qmp: &Path) -> PathBuf {
    let mut log = qmp.to_owned().into_os_string();
    log.push(".log");
    log.into()
}

/// A serial port's file or socket, named relative to where the user is.
fn serial_from_here(
    spec: &str,
    here: impl Fn(&Path) -> anyhow::Result<PathBuf>,
) -> anyhow::Result<String> {
    for kind in ["file:", "unix:", "pipe:"] {
        if let Some(rest) = spec.strip_prefix(kind) {
            let path = here(Path::new(rest))?;
            return Ok(format!("{kind}{}", path.display()));
        }
    }
    Ok(spec.to_owned())
}

fn print_command(context: &Context, plan: &LaunchPlan) -> anyhow::Result<()> {
    let object = json!({
        "exe": plan.exe,
        "arguments": plan.arguments,
        "cwd": plan.cwd,
        "changes": plan.changes,
    });
    context.console.result(&object, || command(plan))?;
    Ok(())
}

/// The plan as one line for a shell. The recorded `argv[0]` is left to the shell.
fn command(plan: &LaunchPlan) -> String {
    let (cwd, exe) = (
        plan.cwd.display().to_string(),
        plan.exe.display().to_string(),
    );
    let arguments = plan.arguments.iter().skip(1).map(String::as_str);
    let start = shell::join(std::iter::once(exe.as_str()).chain(arguments));
    format!("{} && {start}", shell::join(["cd", &cwd]))
}

fn words(report: &RestoreReport) -> String {
    let mut line = format!(
        "restored {} of {} in {}: process {}, {} filled, monitor at {}",
        short(&report.checkpoint),
        printable(&report.vm),
        durations::human_us(report.total_us),
        report.pid,
        table::count(report.pages, "page"),
        printable(&report.qmp.display().to_string()),
    );
    if let Some(verify) = &report.verify {
        line += &format!(", all {} verified", table::count(verify.pages, "page"));
    }
    if !report.running {
        line += "; the guest is paused, `cont` on the monitor lets it run";
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_lies_beside_the_monitor() {
        assert_eq!(
            default_log(Path::new("/run/x.qmp")),
            Path::new("/run/x.qmp.log")
        );
    }

    #[test]
    fn a_serial_file_is_named_from_where_the_user_is() {
        let here = |path: &Path| Ok(Path::new("/here").join(path));
        let spec = |text| serial_from_here(text, here).unwrap();
        assert_eq!(spec("file:out"), "file:/here/out");
        assert_eq!(spec("file:/tmp/out"), "file:/tmp/out");
        assert_eq!(
            spec("unix:s,server=on,wait=off"),
            "unix:/here/s,server=on,wait=off"
        );
        assert_eq!(
            spec("tcp:127.0.0.1:1,server=on,wait=off"),
            "tcp:127.0.0.1:1,server=on,wait=off"
        );
        assert_eq!(spec("null"), "null");
    }

    #[test]
    fn the_command_can_be_pasted() {
        let plan = LaunchPlan {
            exe: "/usr/bin/qemu".into(),
            arguments: ["qemu", "-append", "a b"].map(str::to_owned).to_vec(),
            cwd: "/my vms".into(),
            changes: Vec::new(),
        };
        assert_eq!(
            command(&plan),
            "cd '/my vms' && /usr/bin/qemu -append 'a b'"
        );
    }

    #[test]
    fn a_paused_guest_is_told() {
        let report = RestoreReport {
            checkpoint: "1a2b3c4d5e".to_owned(),
            vm: "vm1".to_owned(),
            pid: 4711,
            qmp: "/run/x.qmp".into(),
            running: false,
            pages: 1,
            total_us: 800_000,
            changes: Vec::new(),
            verify: None,
        };
        assert_eq!(
            words(&report),
            "restored 1a2b3c4d of vm1 in 800 ms: process 4711, 1 page filled, monitor at /run/x.qmp; \
             the guest is paused, `cont` on the monitor lets it run"
        );
    }
}
