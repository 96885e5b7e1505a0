//! `restore`: a new QEMU in the state of a checkpoint.

use std::error::Error;
use std::io::IsTerminal;
use std::path::{Path, PathBuf, absolute};
use std::time::Instant;

use anyhow::Context as _;
use serde_json::json;
use stillframe_engine::clones::CloneError;
use stillframe_engine::restore::{
    self, LazyEvent, LazySink, RestoreError, RestoreOptions, RestoreReport,
};
use stillframe_engine::runtime;
use stillframe_engine::{LaunchError, LaunchOptions, LaunchPlan, SecurityLabel};
use stillframe_repo::{CheckpointId, Manifest, Repository};

use super::{Context, how_it_ended, short};
use crate::args::RestoreArgs;
use crate::durations;
use crate::error::CommandError;
use crate::interrupt::{AtLast, Interrupts};
use crate::progress::Meter;
use crate::shell;
use crate::table::{self, printable};

/// Restores, or only prints how QEMU would be started.
pub fn run(context: &Context, args: &RestoreArgs) -> anyhow::Result<()> {
    let asked_at = Instant::now();
    let mut repository = context.open()?;
    // Without --resume there is an id; clap sees to that.
    let Some(name) = &args.id else {
        return resume(context, args, &mut repository);
    };
    if args.verify && args.lazy && !args.paused {
        anyhow::bail!("--verify compares before the guest runs: with --lazy, add --paused");
    }
    let (id, manifest) = repository.resolve(name, args.vm.as_deref())?;
    let qmp = match &args.qmp {
        Some(qmp) => here(qmp)?,
        None => recorded_monitor(&id, &manifest)?,
    };
    let mut launch = launch_options(args, qmp)?;
    // Planned before anything starts, so that the changes are known even if the start fails.
    let mut plan = restore::plan(&id, &manifest, &launch);
    if let Err(RestoreError::Launch(LaunchError::CommandsNotAllowed { options })) = &plan
        && consents(context, options)
    {
        launch.allow_commands = true;
        plan = restore::plan(&id, &manifest, &launch);
    }
    let plan = plan.inspect_err(|error| stands_in_the_way(context, error))?;
    for change in &plan.changes {
        context.console.note(&format!("changed: {change}"));
    }
    if args.print_command {
        plan.check_version()?;
        return print_command(context, &plan);
    }
    let options = RestoreOptions {
        asked_at,
        launch,
        paused: args.paused,
        keep_clock: args.keep_guest_clock,
        verify: args.verify,
        lazy: args.lazy,
        limit_fill: args.limit_fill,
        lock_wait: args.lock_wait,
    };
    let (patience, first) = match args.lazy {
        false => (1, "interrupted: giving the restore up"),
        true => (2, INTERRUPTED_LAZY),
    };
    let report = perform(context, patience, first, |events| {
        restore::restore(&mut repository, (&id, &manifest), &plan, &options, events)
    })?;
    context.console.result(&report, || words(&report))?;
    Ok(())
}

/// Asks, where there is a person to ask, whether these options of the recorded command line may stay.
fn consents(context: &Context, options: &[String]) -> bool {
    let console = context.console;
    let person = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !person || console.json || console.quiet {
        return false;
    }
    for option in options {
        console.note(&format!(
            "the VM's command line runs a program or writes to the host: {option}"
        ));
    }
    console.note("allow that? [y/N]");
    let mut answer = String::new();
    let read = std::io::stdin().read_line(&mut answer);
    read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}

/// What the user is told at the first signal.
const INTERRUPTED_LAZY: &str = "interrupted, but the VM needs this process until its memory is complete; interrupt again to leave: \
     a VM that does not run yet is ended then, one that does is paused, and `restore --resume` goes on";

fn resume(
    context: &Context,
    args: &RestoreArgs,
    repository: &mut Repository,
) -> anyhow::Result<()> {
    // Clap sees to it that there is one.
    let qmp = here(args.qmp.as_deref().unwrap_or(Path::new("")))?;
    let report = perform(context, 2, INTERRUPTED_LAZY, |events| {
        restore::resume(repository, &qmp, args.lock_wait, args.limit_fill, events)
    })?;
    context.console.result(&report, || words(&report))?;
    Ok(())
}

/// Given up between two steps, a QEMU that has not run yet is dropped, and with that ended.
fn perform(
    context: &Context,
    patience: u32,
    first: &'static str,
    work: impl FnOnce(LazySink<'_>) -> Result<RestoreReport, RestoreError>,
) -> anyhow::Result<RestoreReport> {
    let interrupts = Interrupts::listen(context.console, patience, first, AtLast::Wait)
        .context("cannot listen to signals")?;
    let mut meter = Meter::new(context.console);
    let console = context.console;
    let mut is_there = false;
    let restored = interrupts.interruptible(|| {
        work(&mut |event| {
            is_there |= matches!(event, LazyEvent::Runs { .. });
            match event {
                LazyEvent::Progress(progress) => meter.show(progress.into()),
                LazyEvent::Runs { after_us } => console.note(&format!(
                    "the VM is there after {}; filling its memory",
                    durations::human_us(after_us)
                )),
                LazyEvent::Waits { reason } => console.note(&format!(
                    "the guest waits for a page that cannot be read ({reason}); it is paused, and goes on when \
                     the page can be read"
                )),
                LazyEvent::NotLeased { reason } => console.note(&format!(
                    "no lease can be left in the repository ({reason}): until the VM has all its memory, see that \
                     its checkpoint is not forgotten or pruned elsewhere"
                )),
                LazyEvent::GoesOn => console.note("all pages can be read again; the guest goes on"),
                LazyEvent::CannotFill { reason } => console.note(&format!(
                    "some pages cannot be read now ({reason}); the guest runs on without them, and they are \
                     tried again"
                )),
            }
            interrupts.step();
        })
    });
    let report = restored
        .map_err(anyhow::Error::from)
        .and_then(|done| Ok(done?));
    if report.is_err() && is_there {
        console.note(
            "if the VM still exists, it is paused, and its memory is not complete: `restore --resume` with this --qmp goes on",
        );
    }
    report
}

/// Tells of the option, where the user may decide to go on: not where a disk has another user.
pub(super) fn stands_in_the_way(context: &Context, error: &(dyn Error + 'static)) {
    let may_go_on = |error: &(dyn Error + 'static)| {
        matches!(
            error.downcast_ref(),
            Some(RestoreError::Launch(
                LaunchError::DiskChanged { .. }
                    | LaunchError::DiskReplaced { .. }
                    | LaunchError::DiskTemporary { .. }
                    | LaunchError::DiskUnknown { .. }
            ))
        )
    };
    let inner = match error.downcast_ref() {
        Some(CloneError::Restore(error)) => may_go_on(error),
        _ => may_go_on(error),
    };
    if inner {
        let option = "--disks-as-they-are goes on all the same, at the risk of damaging them";
        context.console.note(option);
    }
}

/// QEMU runs in the recorded directory, not in this one.
pub(super) fn here(path: &Path) -> anyhow::Result<PathBuf> {
    absolute(path).with_context(|| format!("{} is no path", path.display()))
}

/// Where the VM had its monitor. A process that listens there keeps the restore from being planned.
fn recorded_monitor(id: &CheckpointId, manifest: &Manifest) -> anyhow::Result<PathBuf> {
    let recorded = restore::vm_record(id, manifest)?.monitor_socket();
    Ok(recorded.ok_or(CommandError::NoMonitor)?)
}

fn launch_options(args: &RestoreArgs, qmp: PathBuf) -> anyhow::Result<LaunchOptions> {
    let log = match &args.log {
        Some(log) => here(log)?,
        None => runtime::default_log(&qmp),
    };
    let serial = args
        .serial
        .as_deref()
        .map(|spec| serial_from_here(spec, here))
        .transpose()?;
    Ok(LaunchOptions {
        serial,
        replace: args.replace.clone(),
        disks_as_they_are: args.disks_as_they_are,
        qemu: args.start.qemu.clone(),
        as_root: args.start.as_root,
        without_label: args.start.without_label,
        without_group: args.start.without_group,
        allow_commands: args.start.allow_commands,
        pidfile: args.pidfile.as_deref().map(here).transpose()?,
        ..LaunchOptions::new(qmp, log)
    })
}

/// A serial port's file or socket, named relative to where the user is.
pub(super) fn serial_from_here(
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
        "credentials": plan.credentials,
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
    let user = as_user(plan);
    let user = user.iter().map(String::as_str);
    let start = shell::join(user.chain([exe.as_str()]).chain(arguments));
    format!("{} && {start}", shell::join(["cd", &cwd]))
}

/// Runs a command in the VM's control group, with its label, as the user that it ran as; no words where all of that is
/// root's.
fn as_user(plan: &LaunchPlan) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    if let Some(file) = plan.control_group_file() {
        // A shell that moves itself, and becomes the rest of the line.
        let shell = ["sh", "-c", "echo $$ > \"$0\" && exec \"$@\""];
        words.extend(shell.map(str::to_owned));
        words.push(file.display().to_string());
    }
    let mut rights: Vec<String> = Vec::new();
    if let Some(owner) = plan.credentials.as_ref().filter(|owner| owner.uid != 0) {
        let groups: Vec<String> = owner.groups.iter().map(u32::to_string).collect();
        rights.push(format!("--reuid={}", owner.uid));
        rights.push(format!("--regid={}", owner.gid));
        rights.push(match groups.is_empty() {
            true => "--clear-groups".to_owned(),
            false => format!("--groups={}", groups.join(",")),
        });
        rights.extend(owner.no_new_privs.then(|| "--no-new-privs".to_owned()));
    }
    rights.extend(plan.security_label().map(|label| match label {
        SecurityLabel::SeLinux { context } => format!("--selinux-label={context}"),
        SecurityLabel::AppArmor { profile, .. } => format!("--apparmor-profile={profile}"),
    }));
    if !rights.is_empty() {
        words.push("setpriv".to_owned());
        words.extend(rights);
        words.push("--".to_owned());
    }
    words
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
    if let Some(lazy) = &report.lazy {
        line += &format!(
            "; the guest was there after {} and waited for a page {}",
            durations::human_us(lazy.runs_after_us),
            match lazy.faults {
                1 => "once".to_owned(),
                faults => format!("{faults} times"),
            }
        );
    }
    line + &how_it_ended(
        report.verify.as_ref(),
        report.clock.as_ref(),
        report.running,
        report.suspended,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillframe_engine::restore::RestorePhases;

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
            version: "10.0.2".to_owned(),
            cpu_features: Vec::new(),
            arguments: ["qemu", "-append", "a b"].map(str::to_owned).to_vec(),
            cwd: "/my vms".into(),
            ..LaunchPlan::default()
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
            suspended: false,
            pages: 1,
            total_us: 800_000,
            phases_us: RestorePhases::default(),
            changes: Vec::new(),
            lazy: None,
            clock: None,
            verify: None,
        };
        assert_eq!(
            words(&report),
            "restored 1a2b3c4d of vm1 in 800 ms: process 4711, 1 page filled, monitor at /run/x.qmp; \
             the guest is paused, `cont` on the monitor lets it run"
        );
    }
}
