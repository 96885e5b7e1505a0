//! The rules by which a VM is paused, resumed and let go while its memory is populated. The steps of the population
//! are given; monitor and guardian are fakes.

use std::cell::{Cell, RefCell};
use std::process::{Child, Command};
use std::time::Duration;

use stillframe_qemu::guest_agent::AgentChannels;
use stillframe_repo::CheckpointId;
use stillframe_sys::private_dir::PrivateDir;
use stillframe_sys::process::Process;
use tempfile::TempDir;

use crate::fakes::guest_memory::this_process;
use crate::fakes::{FakeGuardian, FakeQemu};
use crate::guardian::OnDisconnect;
use crate::populate::eager::PopulateError;
use crate::populate::lazy::supervision::{Populating, Supervised};
use crate::populate::lazy::{FillError, FillStatus, Filling};
use crate::restore::RestoreError;
use crate::restore::disk_streams::DiskStreams;
use crate::restore::events::LazyEvent;
use crate::restore::filling_record::RecordError;
use crate::restore::filling_record::{Files, FillingRecord, FillingVm};
use crate::restore::supervisor::Supervisor;

/// QEMU's own copy of the userfaultfd.
const REMOTE_FD: i32 = 7;

/// What the supervisor sees when it looks.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// The guest waits for no page.
    Fine,
    /// It has waited for this many milliseconds.
    Waits(u64),
    /// A page cannot be read that it does not wait for.
    Problem,
    /// Another client stops or resumes the VM.
    Another(bool),
    /// The VM ends.
    Ends,
    /// All pages are there; a fault handler may still report that the guest waits.
    Complete,
}

use Step::{Another, Complete, Ends, Fine, Problem, Waits};

struct FakePopulation<'t> {
    steps: RefCell<std::slice::Iter<'t, Step>>,
    waited_ms: Cell<Option<u64>>,
    has_problem: Cell<bool>,
    is_finished: Cell<bool>,
    qemu: &'t FakeQemu,
    vm: RefCell<Option<Child>>,
}

impl Populating for FakePopulation<'_> {
    fn status(&self, _limit: Duration) -> Result<FillStatus, PopulateError> {
        match self.steps.borrow_mut().next().unwrap() {
            Fine => self.waited_ms.set(None),
            Waits(waited_ms) => self.waited_ms.set(Some(*waited_ms)),
            Problem => self.has_problem.set(true),
            Another(running) => self.qemu.another_client_sets_running(*running),
            Ends => {
                let mut vm = self.vm.borrow_mut();
                let vm = vm.as_mut().unwrap();
                vm.kill().unwrap();
                vm.wait().unwrap();
            }
            Complete => return Ok(FillStatus::Complete),
        }
        Ok(FillStatus::None)
    }

    fn stall(&self) -> Option<(Duration, String)> {
        let waited_ms = self.waited_ms.get()?;
        Some((Duration::from_millis(waited_ms), "no disk".to_owned()))
    }

    fn take_problem(&self) -> Option<String> {
        self.has_problem.take().then(|| "no disk".to_owned())
    }

    fn filling(&self) -> Filling {
        Filling::default()
    }

    fn faults_by_step(&self) -> Vec<u64> {
        Vec::new()
    }

    fn finish(&self) -> Result<(), FillError> {
        self.is_finished.set(true);
        Ok(())
    }
}

/// What was done to the VM, and what was said of it.
struct End {
    result: Result<(), RestoreError>,
    commands: String,
    events: Vec<&'static str>,
    runs: bool,
    is_let_go: bool,
    has_files: bool,
    _root: TempDir,
}

fn supervise(steps: &[Step], is_to_run: bool, vm: Option<Child>) -> End {
    let root = tempfile::tempdir().unwrap();
    let directory = || PrivateDir::create(&root.path().join("run")).unwrap();
    let (qemu, monitor) = FakeQemu::start();
    qemu.state().running = is_to_run;
    let files = || Files::in_directory(directory(), &qemu.qmp());
    let (fake_guardian, guardian) = FakeGuardian::start();
    let process = match &vm {
        Some(child) => Process::open(child.id().cast_signed()).unwrap(),
        None => this_process(),
    };
    let filling = FillingVm {
        remote_fd: REMOTE_FD,
        checkpoint: CheckpointId([1; 32]),
        vm: "vm".to_owned(),
        repository: "repository".to_owned(),
        running: is_to_run,
        agents: AgentChannels::default(),
        blocks: Vec::new(),
        disks: Vec::new(),
    };
    let record = FillingRecord::new(&process, filling).unwrap();
    files().write(&record).unwrap();
    let population = FakePopulation {
        steps: RefCell::new(steps.iter()),
        waited_ms: Cell::default(),
        has_problem: Cell::default(),
        is_finished: Cell::default(),
        qemu: &qemu,
        vm: RefCell::new(vm),
    };
    let mut events = Vec::new();
    let mut supervisor = Supervisor::new(
        process,
        monitor,
        guardian,
        files(),
        record,
        DiskStreams::new(None),
    );
    supervisor.arm_guardian().unwrap();
    let result = supervisor.until_complete(Some(&population), None, &mut |event| match event {
        LazyEvent::Supervised(Supervised::Waits { .. }) => events.push("waits"),
        LazyEvent::Supervised(Supervised::Resumed) => events.push("continues"),
        LazyEvent::Supervised(Supervised::CannotFill { .. }) => events.push("cannot fill"),
        _ => {}
    });
    let is_let_go = population.is_finished.get()
        && fake_guardian.closed() == [REMOTE_FD]
        && fake_guardian.on_disconnect() == Some(OnDisconnect::Nothing);
    let is_kept = !population.is_finished.get()
        && fake_guardian.closed().is_empty()
        && fake_guardian.on_disconnect() == Some(OnDisconnect::Pause);
    assert!(is_let_go != is_kept, "half let go");
    let has_files = !matches!(files().read(), Err(RecordError::None { .. }));
    let state = qemu.state();
    let commands = state.commands.iter().skip(1);
    End {
        result,
        commands: commands.map(String::as_str).collect::<Vec<_>>().join(" "),
        events,
        runs: state.running,
        is_let_go,
        has_files,
        _root: root,
    }
}

/// A VM that is to run, and whose memory becomes complete.
fn completed(steps: &[Step]) -> End {
    let end = supervise(steps, true, None);
    assert!(end.result.is_ok() && end.is_let_go && !end.has_files);
    end
}

#[test]
fn a_guest_that_waits_long_is_paused_until_its_page_is_there() {
    let steps = [Waits(400), Waits(1400), Waits(2400), Fine, Complete];
    let end = completed(&steps);
    assert_eq!(end.commands, "stop cont");
    assert_eq!(end.events, ["waits", "continues"]);
    assert!(end.runs);
}

#[test]
fn a_guest_that_waits_shortly_is_not_paused() {
    let end = completed(&[Waits(900), Fine, Waits(900), Complete]);
    assert_eq!(end.commands, "");
    assert!(end.runs && end.events.is_empty());
}

/// The page came with others, and the fault handler does not know yet.
#[test]
fn a_guest_whose_memory_is_complete_does_not_wait_any_more() {
    let end = completed(&[Waits(1400), Complete]);
    assert_eq!(end.commands, "stop cont");
    assert!(end.runs);
}

#[test]
fn a_vm_that_another_client_has_stopped_is_never_resumed() {
    let end = completed(&[Another(false), Waits(1400), Fine, Waits(1400), Complete]);
    assert_eq!(end.commands, "");
    assert!(!end.runs && end.events.is_empty());
}

#[test]
fn a_vm_that_another_client_has_resumed_is_supervised_again() {
    let end = completed(&[Another(false), Another(true), Waits(1400), Fine, Complete]);
    assert_eq!(end.commands, "stop cont");
    assert!(end.runs);
}

#[test]
fn a_vm_that_is_to_stay_paused_does_so() {
    let end = supervise(&[Waits(1400), Fine, Complete], false, None);
    assert!(end.result.is_ok() && end.is_let_go);
    assert_eq!(end.commands, "");
    assert!(!end.runs);
}

#[test]
fn the_reason_is_given_once_in_a_while_and_not_while_the_guest_waits() {
    let end = completed(&[Problem, Problem, Complete]);
    assert_eq!(end.events, ["cannot fill"]);
    let end = completed(&[Waits(1400), Problem, Complete]);
    assert_eq!(end.events, ["waits", "continues"]);
}

/// Its files are removed, so that the monitor's path can be used again.
#[test]
fn a_vm_that_ends_is_reported() {
    let vm = Command::new("sleep").arg("600").spawn().unwrap();
    let end = supervise(&[Fine, Ends], true, Some(vm));
    assert!(matches!(
        end.result,
        Err(RestoreError::EndedMeanwhile { .. })
    ));
    assert!(!end.is_let_go && !end.has_files);
}
