//! `restore`: starts a new QEMU from a checkpoint.

use std::fs::Permissions;
use std::io::IsTerminal;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use serde_json::json;
use stillframe_engine::restore::{
    self, Checkpoint, LazyEvent, LazySink, RestoreError, RestoreOptions, RestoreReport,
};
use stillframe_engine::{LaunchError, LaunchOptions, LaunchPlan, PAGE_BYTES, SecurityLabel};
use stillframe_repo::{CheckpointId, Manifest, Repository};
use tempfile::TempDir;

use super::launch::{self, absolute_path, suggest_new_disks, suggest_option};
use super::{Context, short, state_words, supervised_words};
use crate::args::{RestoreArgs, RestoreDisks};
use crate::durations;
use crate::error::CommandError;
use crate::interrupt::{AfterAbort, Interrupts};
use crate::progress::Meter;
use crate::shell;
use crate::table::{self, printable};

/// Restores, or prints the command that would start QEMU.
pub fn run(context: &Context, args: &RestoreArgs) -> anyhow::Result<()> {
    let requested_at = Instant::now();
    let mut repository = context.open()?;
    // Clap ensures that there is an id, unless there is --resume.
    let Some(name) = &args.id else {
        return resume(context, args, &mut repository);
    };
    if args.guest.verify && args.lazy && !args.guest.paused {
        anyhow::bail!("--verify compares memory before the guest runs: with --lazy, add --paused");
    }
    if matches!(args.disks, Some(RestoreDisks::Lazy(_))) && !args.lazy {
        anyhow::bail!(
            "--disks lazy=DIR fills disks while the guest runs: add --lazy, or say --disks new=DIR"
        );
    }
    let (id, manifest) = repository.resolve(name, args.vm.as_deref())?;
    let checkpoint = Checkpoint {
        id: &id,
        manifest: &manifest,
    };
    let qmp = match &args.qmp {
        Some(qmp) => qmp.clone(),
        None => recorded_monitor(&id, &manifest)?,
    };
    // QEMU has the images open when they are removed.
    let empty = empty_folder(args)?;
    let mut launch = launch_options(args, &qmp, checkpoint, empty.as_ref())?;
    // The plan comes before the start, so that its changes are reported even if the start fails.
    let mut plan = restore::plan(&id, &manifest, &launch);
    if let Err(RestoreError::Launch(LaunchError::CommandsNotAllowed { options })) = &plan
        && consents(context, options)
    {
        launch.allow_commands = true;
        plan = restore::plan(&id, &manifest, &launch);
    }
    let plan = plan.inspect_err(|error| suggest(context, error, &manifest))?;
    for change in &plan.changes {
        context.console.note(&format!("changed: {change}"));
    }
    if args.print_command {
        plan.check_version()?;
        return print_command(context, &plan);
    }
    let options = RestoreOptions {
        requested_at,
        launch,
        empty_disks: empty.is_some(),
        paused: args.guest.paused,
        keep_clock: args.guest.keep_guest_clock,
        verify: args.guest.verify,
        lazy: args.lazy,
        limit_fill: args.limit_fill,
        lock_wait: args.lock.lock_wait,
    };
    let (abort_at, first) = match args.lazy {
        false => (1, "interrupted: ending the restore"),
        true => (2, INTERRUPTED_LAZY),
    };
    let report = perform(context, abort_at, first, |events| {
        restore::restore(&mut repository, checkpoint, &plan, &options, events)
    })?;
    context.console.result(&report, || words(&report))?;
    Ok(())
}

/// Asks on the terminal, if there is one, whether QEMU may start with these options of the recorded command line.
fn consents(context: &Context, options: &[String]) -> bool {
    let console = context.console;
    let terminal = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !terminal || console.json || console.quiet {
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

/// The note at the first signal.
const INTERRUPTED_LAZY: &str = "interrupted, but the VM needs this process until its memory is complete; interrupt again to stop: \
     a VM that does not run yet is then ended, a running one is paused, and `restore --resume` continues";

fn resume(
    context: &Context,
    args: &RestoreArgs,
    repository: &mut Repository,
) -> anyhow::Result<()> {
    // Clap ensures that there is one.
    let qmp = absolute_path(args.qmp.as_deref().unwrap_or(Path::new("")))?;
    let report = perform(context, 2, INTERRUPTED_LAZY, |events| {
        restore::resume(
            repository,
            &qmp,
            args.lock.lock_wait,
            args.limit_fill,
            events,
        )
    })?;
    context.console.result(&report, || words(&report))?;
    Ok(())
}

/// Restores until done or interrupted. An interrupt drops, and so ends, a QEMU that has not run yet.
fn perform(
    context: &Context,
    abort_at: u32,
    first: &'static str,
    work: impl FnOnce(LazySink<'_>) -> Result<RestoreReport, RestoreError>,
) -> anyhow::Result<RestoreReport> {
    let interrupts = Interrupts::listen(context.console, abort_at, first, AfterAbort::Wait)
        .context("cannot handle signals")?;
    let mut meter = Meter::new(context.console);
    let console = context.console;
    let mut ready = false;
    let restored = interrupts.interruptible(|| {
        work(&mut |event| {
            ready |= matches!(event, LazyEvent::Runs { .. });
            match event {
                LazyEvent::Progress(progress) => meter.show(progress.into()),
                LazyEvent::Runs { after_us } => console.note(&format!(
                    "the VM is ready after {}; filling its memory",
                    durations::human_us(after_us)
                )),
                LazyEvent::NotLeased { reason } => console.note(&format!(
                    "the repository takes no lease ({reason}): until the VM's memory is complete, do not run \
                     `forget` or `prune` on another host"
                )),
                LazyEvent::FillsDisks => {
                    console.note("the VM's memory is complete; filling its disks");
                }
                LazyEvent::Completing { image } => console.note(&format!(
                    "the VM has ended; completing its disk {} with what the checkpoint holds",
                    printable(&image.display().to_string())
                )),
                LazyEvent::Supervised(event) => console.note(&supervised_words(&event)),
            }
            interrupts.step();
        })
    });
    let report = restored
        .map_err(anyhow::Error::from)
        .and_then(|done| Ok(done?));
    if report.is_err() && ready {
        console.note(
            "if the VM still exists, it is paused with incomplete memory: continue with `restore --resume` and this --qmp",
        );
    }
    report
}

/// The socket of the monitor that the VM had. The plan is refused if a process listens there.
fn recorded_monitor(id: &CheckpointId, manifest: &Manifest) -> anyhow::Result<PathBuf> {
    let recorded = restore::vm_record(id, manifest)?.monitor_socket();
    Ok(recorded.ok_or(CommandError::NoMonitor)?)
}

/// Names an option that would have prevented the error.
fn suggest(context: &Context, error: &RestoreError, manifest: &Manifest) {
    suggest_new_disks(context, error, manifest);
    suggest_option(context, error);
}

/// The folder of the images of `--disks none`. The VM's user must reach them, and no other user needs to list it.
fn empty_folder(args: &RestoreArgs) -> anyhow::Result<Option<TempDir>> {
    if args.disks != Some(RestoreDisks::Nothing) {
        return Ok(None);
    }
    if args.print_command {
        anyhow::bail!(
            "the images of --disks none are gone before the printed command could use them: say --disks new=DIR"
        );
    }
    let folder = tempfile::Builder::new()
        .prefix("stillframe-empty-")
        .permissions(Permissions::from_mode(0o711))
        .tempdir()
        .context("cannot create a directory for empty disks")?;
    Ok(Some(folder))
}

fn launch_options(
    args: &RestoreArgs,
    qmp: &Path,
    checkpoint: Checkpoint<'_>,
    empty: Option<&TempDir>,
) -> anyhow::Result<LaunchOptions> {
    let mut launch = launch::options(&args.launch, qmp, args.serial.as_deref())?;
    match &args.disks {
        Some(RestoreDisks::New(folder)) => {
            launch.images = restore::new_images(checkpoint, &absolute_path(folder)?)?;
        }
        Some(RestoreDisks::Lazy(folder)) => {
            launch.images = restore::lazy_images(checkpoint, &absolute_path(folder)?)?;
        }
        Some(RestoreDisks::AsTheyAre) => launch.disks_as_they_are = true,
        Some(RestoreDisks::Nothing) | None => {}
    }
    if let Some(folder) = empty {
        launch.images = restore::empty_images(checkpoint, folder.path())?;
    }
    if let Some(log) = &args.log {
        launch.log = absolute_path(log)?;
    }
    launch.pidfile = args.pidfile.as_deref().map(absolute_path).transpose()?;
    Ok(launch)
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

/// The plan as one shell command. The recorded `argv[0]` is left out.
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

/// The words that start a command in the VM's control group, with its label, as the user that it ran as; none where
/// that is the caller's.
fn as_user(plan: &LaunchPlan) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    if let Some(file) = plan.control_group_file() {
        // A shell that enters the group and then executes the rest of the line.
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
    for disk in &report.disks {
        line += &format!(
            "; disk {} in {}, {} written",
            printable(&disk.device),
            printable(&disk.file.display().to_string()),
            table::bytes(disk.pages.saturating_mul(PAGE_BYTES)),
        );
    }
    if let Some(lazy) = &report.lazy {
        line += &format!(
            "; the guest was ready after {} and waited for a page {}",
            durations::human_us(lazy.runs_after_us),
            match lazy.faults {
                1 => "once".to_owned(),
                faults => format!("{faults} times"),
            }
        );
    }
    line + &state_words(
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
    fn a_paused_guest_is_reported() {
        let report = RestoreReport {
            checkpoint: "1a2b3c4d5e".to_owned(),
            vm: "vm1".to_owned(),
            pid: 4711,
            qmp: "/run/x.qmp".into(),
            running: false,
            suspended: false,
            pages: 1,
            disks: Vec::new(),
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
             the guest is paused, `cont` on the monitor resumes it"
        );
    }
}
