//! The rules of a rewind over a fake monitor and guardian: the VM ends as the checkpoint or as it was, and runs only
//! if it is one of the two.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use stillframe_qemu::monitor::Monitor;

use super::exchange::Before;
use super::*;
use crate::fakes::checkpoints::{MACHINE, NO_WAIT};
use crate::fakes::{FakeGuardian, FakeMemory, FakeQemu, FakeRepository};
use crate::fakes::{device_state, pages, vm_record};

const RAM: &str = "pc.ram";
const ROM: &str = "/rom@etc/acpi/tables";
/// What QEMU fills the table with when it resets the machine.
const RESET: u8 = 99;

/// Fillings of the pages of both blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Memory {
    ram: Vec<u8>,
    rom: Vec<u8>,
}

const THEN: [u8; 6] = [1, 2, 0, 3, 0, 4];
const NOW: [u8; 6] = [1, 9, 5, 0, 0, 4];

fn then() -> Memory {
    Memory {
        ram: THEN.to_vec(),
        rom: vec![7, 8],
    }
}

fn now() -> Memory {
    Memory {
        ram: NOW.to_vec(),
        rom: vec![6, 8],
    }
}

fn options() -> RewindOptions {
    RewindOptions {
        paused: false,
        keep_clock: true,
        verify: false,
        pause_limit: Duration::from_secs(60),
        copy_buffer_bytes: 1 << 20,
        disks_as_they_are: false,
        of_vm: None,
        lock_wait: NO_WAIT,
    }
}

fn report() -> RewindReport {
    RewindReport {
        checkpoint: String::new(),
        vm: String::new(),
        pid: 0,
        running: false,
        suspended: false,
        compared: 0,
        written: 0,
        disks: Vec::new(),
        downtime_us: RewindDowntime::default(),
        total_us: 0,
        clock: None,
        verify: None,
    }
}

/// The guest's memory, which the observer of QEMU's commands sees too.
struct Guest {
    ram: FakeMemory,
    rom: FakeMemory,
}

impl Guest {
    fn new(memory: &Memory) -> Arc<Guest> {
        Arc::new(Guest {
            ram: FakeMemory::new(RAM, &memory.ram),
            rom: FakeMemory::new(ROM, &memory.rom),
        })
    }

    fn memory(&self) -> Memory {
        let fillings = |memory: &FakeMemory| {
            let bytes = memory.bytes();
            let filled: Vec<u8> = bytes
                .chunks(PAGE_BYTES as usize)
                .map(|page| page[0])
                .collect();
            assert!(pages(&filled) == bytes, "a page is half written");
            filled
        };
        Memory {
            ram: fillings(&self.ram),
            rom: fillings(&self.rom),
        }
    }
}

/// What was to be seen when QEMU was given a command.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    command: String,
    ram: Vec<u8>,
    is_guarded: bool,
}

/// How a rewind ended.
struct End {
    memory: Memory,
    result: Result<(), RewindError>,
    runs: bool,
    /// Whether QEMU refuses `cont`.
    is_blocked: bool,
    written: u64,
    seen: Vec<Seen>,
}

impl End {
    fn count(&self, command: &str) -> usize {
        self.seen
            .iter()
            .filter(|seen| seen.command == command)
            .count()
    }

    fn at(&self, command: &str) -> &Seen {
        let mut seen = self.seen.iter();
        seen.find(|seen| seen.command == command).unwrap()
    }
}

/// Rewinds a VM whose memory is [`now`] to [`then`]. `runs`: it is not paused.
fn rewind(
    runs: bool,
    options: &RewindOptions,
    set_up: impl FnOnce(&FakeQemu, &FakeGuardian),
) -> End {
    let guest = Guest::new(&now());
    let (guardian, engine_side) = FakeGuardian::start();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (qemu, mut monitor) = FakeQemu::observed({
        let (guest, guardian, seen) = (guest.clone(), guardian.clone(), seen.clone());
        move |command, _| {
            seen.lock().unwrap().push(Seen {
                command: command.to_owned(),
                ram: guest.memory().ram,
                is_guarded: guardian.is_armed(),
            });
            if command == "snapshot-load" {
                guest.rom.write(0, RESET);
            }
        }
    });
    qemu.state().running = runs;
    set_up(&qemu, &guardian);
    let mut written = report();
    let result = exchange(
        &guest,
        &mut monitor,
        &engine_side,
        runs,
        options,
        &mut written,
    );
    let is_blocked = monitor.is_dumping().unwrap();
    let seen = seen.lock().unwrap().clone();
    End {
        memory: guest.memory(),
        result,
        runs: qemu.state().running,
        is_blocked,
        written: written.written,
        seen,
    }
}

/// As [`Vm::rewind`] does it, without the parts that inspect a real process.
fn exchange(
    guest: &Guest,
    monitor: &mut Monitor,
    guardian: &crate::guardian::Guardian,
    runs: bool,
    options: &RewindOptions,
    report: &mut RewindReport,
) -> Result<(), RewindError> {
    let record = vm_record("vm", &[guest.ram.ram.clone(), guest.rom.ram.clone()]);
    let raw = device_state(&[("timer", &[1; 16])]);
    let then = then();
    let mut stored = FakeRepository::new();
    let blocks = [(RAM, pages(&then.ram)), (ROM, pages(&then.rom))];
    let (id, manifest) = stored.checkpoint(&record, &blocks, &raw);
    let hasher = stored.repository.hasher();
    let reader = stored.repository.reader(NO_WAIT)?;
    let blocks = [guest.ram.block(), guest.rom.block()];
    let (staged, firmware) = stages(&blocks, &shapes(&manifest.ram), &manifest, &reader)?;
    let mut job = Job {
        then: &record,
        options,
        reader: &reader,
        manifest: &manifest,
        hasher: hasher.clone(),
        state: (
            restore::device_sections(&id, &manifest, &reader)?,
            restore::device_state(&id, &manifest, &record, &reader)?,
        ),
        staged,
        firmware,
        disks: StagedDisks::default(),
        budget: Budget {
            taken_bytes: 0,
            limit_bytes: options.copy_buffer_bytes,
        },
    };
    for staged in &mut job.staged {
        let all = staged.block.whole();
        staged.compare(&all, &hasher, &mut job.budget)?;
    }
    let paused = PausedVm::stop(monitor, guardian, options.pause_limit, runs)?;
    let before = Before::take(&job, &raw, MACHINE)?;
    let (paused, done) = job.change_blocked(paused, None, before, runs, report)?;
    match is_to_run(runs, options, &done) {
        true => paused.resume()?,
        false => paused.keep_paused()?,
    }
    done
}

#[test]
fn a_vm_becomes_its_checkpoint_while_nobody_can_resume_it() {
    let end = rewind(true, &options(), |_, _| ());
    assert!(end.result.is_ok());
    assert_eq!(end.memory, then());
    assert!(end.runs && !end.is_blocked);
    // Three pages of RAM and one of the table.
    assert_eq!(end.written, 4);
    let block = end.at("dump-guest-memory");
    assert!(block.ram == NOW && block.is_guarded, "{block:?}");
    let load = end.at("snapshot-load");
    assert!(load.ram == THEN && !load.is_guarded, "{load:?}");
    assert!(end.at("cont").is_guarded);
}

#[test]
fn a_rewind_can_leave_the_vm_paused() {
    let paused = RewindOptions {
        paused: true,
        verify: true,
        ..options()
    };
    let end = rewind(true, &paused, |_, _| ());
    assert!(end.result.is_ok());
    assert_eq!(end.memory, then());
    assert!(!end.runs && !end.is_blocked);
    assert_eq!(end.count("cont"), 0);
}

#[test]
fn a_vm_that_was_paused_stays_so() {
    for loads in [None, Some("bad state")] {
        let end = rewind(false, &options(), |qemu, _| {
            qemu.state().loads.push_back(loads);
        });
        assert_eq!(end.result.is_ok(), loads.is_none());
        assert!(!end.runs && !end.is_blocked);
        assert_eq!((end.count("stop"), end.count("cont")), (0, 0));
    }
}

#[test]
fn a_device_state_that_fails_to_load_is_undone() {
    let end = rewind(true, &options(), |qemu, _| {
        qemu.state().loads.push_back(Some("bad state"));
    });
    assert!(matches!(end.result, Err(RewindError::Reload(_))));
    assert_eq!(end.memory, now());
    assert!(end.runs && !end.is_blocked);
    assert_eq!(end.count("snapshot-load"), 2);
}

/// QEMU has not touched its devices: so their state is not loaded again.
#[test]
fn a_device_state_that_is_refused_leaves_the_devices_alone() {
    let end = rewind(true, &options(), |qemu, _| {
        qemu.state().refused.push("blockdev-add");
    });
    assert!(matches!(end.result, Err(RewindError::Reload(_))));
    assert_eq!(end.memory, now());
    assert!(end.runs && !end.is_blocked);
    assert_eq!(end.count("snapshot-load"), 0);
}

#[test]
fn what_cannot_be_undone_never_runs() {
    let end = rewind(true, &options(), |qemu, _| {
        qemu.state()
            .loads
            .extend([Some("bad state"), Some("again")]);
    });
    assert!(matches!(end.result, Err(RewindError::Stuck { .. })));
    assert!(!end.runs && end.is_blocked);
    assert_eq!(end.count("cont"), 0);
}

#[test]
fn a_watchdog_that_was_quicker_leaves_all_as_it_was() {
    let end = rewind(true, &options(), |_, guardian| guardian.fire());
    assert!(matches!(end.result, Err(RewindError::Overrun { .. })));
    assert_eq!(end.memory, now());
    assert!(end.runs && !end.is_blocked);
    assert_eq!(end.count("snapshot-load"), 0);
}

#[test]
fn a_vm_that_another_client_has_resumed_in_between_is_stopped_for_good() {
    let end = rewind(true, &options(), |qemu, _| {
        qemu.state().resumed_in_load = true;
    });
    assert!(matches!(end.result, Err(RewindError::ResumedByOthers)));
    assert!(!end.runs && end.is_blocked);
}

#[test]
fn where_cont_cannot_be_blocked_nothing_is_changed() {
    let end = rewind(true, &options(), |qemu, _| {
        qemu.state().refused.push("dump-guest-memory");
    });
    assert!(end.result.is_err());
    assert_eq!(end.memory, now());
    assert!(end.runs && !end.is_blocked);
}

#[test]
fn more_than_may_be_kept_is_refused_before_the_pause() {
    let small = RewindOptions {
        copy_buffer_bytes: 2 * PAGE_BYTES,
        ..options()
    };
    let end = rewind(true, &small, |_, _| ());
    assert!(matches!(end.result, Err(RewindError::TooMuch { .. })));
    assert_eq!(end.memory, now());
    assert!(end.runs && end.count("stop") == 0);
}

#[test]
fn another_vm_or_machine_is_refused() {
    let mut stored = FakeRepository::new();
    let then = vm_record("vm", &[]);
    let (id, manifest) = stored.checkpoint(&then, &[], &device_state(&[]));
    let check = |now: &VmRecord, of_vm: Option<&str>| {
        let options = RewindOptions {
            of_vm: of_vm.map(str::to_owned),
            ..options()
        };
        same_machine(&id, &manifest, &then, now, &options)
    };
    check(&then, None).unwrap();
    let renamed = vm_record("other", &[]);
    assert!(matches!(
        check(&renamed, None),
        Err(RewindError::OtherVm { .. })
    ));
    check(&renamed, Some("vm")).unwrap();
    let mut newer = then.clone();
    "10.1.0".clone_into(&mut newer.identity.qemu_version);
    let refused = check(&newer, None);
    assert!(matches!(refused, Err(RewindError::OtherMachine { what, .. }) if what == "its QEMU"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The guest writes between the comparison and the pause; tracking reports a superset of its pages.
    #[test]
    fn exchanged_pages_are_those_of_the_checkpoint_and_come_back(
        then in prop::collection::vec(0u8..4, 40),
        first in prop::collection::vec(0u8..4, 40),
        writes in prop::collection::btree_map(0u64..40, 0u8..4, 0..20),
        reported in prop::collection::btree_set(0u64..40, 0..10),
    ) {
        let mut stored = FakeRepository::new();
        let record = vm_record("vm", &[]);
        let (_, manifest) = stored.checkpoint(&record, &[(RAM, pages(&then))], &device_state(&[]));
        let hasher = stored.repository.hasher();
        let reader = stored.repository.reader(NO_WAIT).unwrap();
        let memory = FakeMemory::new(RAM, &first);
        let block = memory.block();
        let map = PageMap::read(&reader, &manifest.ram[0]).unwrap();
        let mut staged = StagedBlock::new(&block, map);
        let mut budget = Budget { taken_bytes: 0, limit_bytes: 1 << 20 };
        // As tracking reports them: a page that is not populated is zero.
        let populated: Vec<u64> = (0..40).filter(|&page| first[page as usize] != 0).collect();
        staged.compare(&crate::memory::ranges::runs(&populated), &hasher, &mut budget).unwrap();
        let differing = then.iter().zip(&first).filter(|(then, first)| then != first).count();
        prop_assert_eq!(budget.taken_bytes, differing as u64 * PAGE_BYTES);
        for (&page, &filling) in &writes {
            memory.write(page, filling);
        }
        staged.gather(writes.keys().copied().chain(reported), &mut budget).unwrap();
        let before = memory.bytes();
        let mut exchanged = 0;
        staged.exchange(&mut exchanged).unwrap();
        prop_assert!(memory.bytes() == pages(&then));
        staged.put_back(exchanged).unwrap();
        prop_assert!(memory.bytes() == before);
    }
}
