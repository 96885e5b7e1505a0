//! The rules of the pipeline, in every order of completion and failure. The VM counts its writes; sink and clock
//! are simulated, and all their choices are enumerated.
//!
//! Invariants: no write is lost (each is committed or still to be captured). A committed capture is a moment of the
//! VM: the writes up to it, and no others. Captures are settled in order. A failure rolls back the captures behind
//! it. Memory in flight is bounded.

mod migration;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::*;

/// Deviations from a smooth run that one run may have. Completions count for none: all their orders are tried.
const FAULTS_MAX: usize = 3;
const EVERY: Duration = Duration::from_millis(100);
const CAPTURE_BYTES: u64 = 10;

/// Goes through all sequences of choices, one run each: the last choice that has another option takes it.
#[derive(Default)]
struct Choices {
    /// The choices made, and of how many each.
    path: Vec<(usize, usize)>,
    at: usize,
    faults: usize,
}

impl Choices {
    fn of(&mut self, options: usize) -> usize {
        if self.at == self.path.len() {
            self.path.push((0, options));
        }
        let (chosen, of) = self.path[self.at];
        assert_eq!(of, options, "a run is not repeatable");
        self.at += 1;
        chosen
    }

    /// Whether, and which of `kinds`, something goes wrong here.
    fn fault(&mut self, kinds: usize) -> Option<usize> {
        if self.faults == FAULTS_MAX {
            return None;
        }
        let kind = self.of(kinds + 1).checked_sub(1);
        self.faults += usize::from(kind.is_some());
        kind
    }

    /// The next run; false when all were.
    fn advance(&mut self) -> bool {
        (self.at, self.faults) = (0, 0);
        while let Some((chosen, of)) = self.path.pop() {
            if chosen + 1 < of {
                self.path.push((chosen + 1, of));
                return true;
            }
        }
        false
    }
}

/// Everything that the fakes share.
struct World {
    choices: Choices,
    now: Instant,
    /// Writes of the guest so far; each is a number.
    written: u64,
    /// Writes in durable checkpoints: all up to this one.
    committed: u64,
    has_base: bool,
    exited: bool,
    interrupted: bool,
    attached: u32,
    taken: u64,
    most_in_flight: u64,
    /// Whether a capture may begin while others are in flight.
    overlaps: bool,
    /// Whether the sink keeps its lock.
    locked: bool,
    /// Captures of all memory that were committed.
    whole: u64,
    migration: Option<Migration>,
    /// Migrations so far.
    migrated: u64,
}

/// A migration that the user wants.
#[derive(Debug, Clone, Copy)]
struct Migration {
    /// Writes of the guest after which it is wanted.
    after: u64,
    outcome: Outgoing,
}

/// The outcomes of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outgoing {
    Away,
    Attached,
    Here,
    Unclear,
}

type Shared = Rc<RefCell<World>>;

/// A capture: the writes from one number on, up to another.
#[derive(Debug, Clone)]
struct FakeCapture {
    from: u64,
    to: u64,
}

struct FakeVm {
    world: Shared,
    /// The first write that is in no capture in flight.
    pending_from: u64,
    /// The first writes of the captures in flight.
    in_flight: VecDeque<u64>,
}

impl FakeVm {
    fn attach(world: &Shared) -> FakeVm {
        world.borrow_mut().attached += 1;
        let pending_from = world.borrow().committed;
        FakeVm {
            world: world.clone(),
            pending_from,
            in_flight: VecDeque::new(),
        }
    }

    /// The guest writes, and is captured.
    fn take(&mut self) -> FakeCapture {
        let mut world = self.world.borrow_mut();
        world.written += 1;
        world.now += Duration::from_millis(10);
        FakeCapture {
            from: self.pending_from,
            to: world.written,
        }
    }
}

impl PipelineVm for FakeVm {
    type Capture = FakeCapture;
    type Stored = ();
    type Report = u64;

    fn wants(&self) -> Option<ScheduleKind> {
        None
    }

    fn overlaps(&self) -> bool {
        self.world.borrow().overlaps
    }

    fn capture(&mut self) -> Result<FakeCapture, CheckpointError> {
        assert!(self.overlaps() || self.in_flight.is_empty());
        let fault = self.world.borrow_mut().choices.fault(3);
        match fault {
            Some(0) => Err(CheckpointError::RamChanged),
            Some(1) => Err(too_much()),
            Some(_) => Err(CheckpointError::Migrating {
                status: "active".to_owned(),
            }),
            None => Ok(self.take()),
        }
    }

    fn bytes(_: &FakeCapture) -> u64 {
        CAPTURE_BYTES
    }

    fn mark_in_flight(&mut self) {
        self.in_flight.push_back(self.pending_from);
        self.pending_from = self.world.borrow().written;
        let bytes = self.in_flight.len() as u64 * CAPTURE_BYTES;
        let mut world = self.world.borrow_mut();
        world.most_in_flight = world.most_in_flight.max(bytes);
    }

    fn settle(
        &mut self,
        capture: FakeCapture,
        stored: Result<(), CheckpointError>,
    ) -> Result<u64, CheckpointError> {
        // In their order, and only of captures in flight.
        assert_eq!(self.in_flight.pop_front(), Some(capture.from));
        match stored {
            Ok(()) => Ok(capture.to),
            Err(error) => {
                self.pending_from = capture.from;
                self.in_flight.clear();
                Err(error)
            }
        }
    }

    fn discard(&mut self, capture: FakeCapture) {
        // A pipeline that was interrupted ends, and settles nothing any more.
        let is_over = self.world.borrow().interrupted;
        let in_flight = self.in_flight.contains(&capture.from);
        assert!(is_over || !in_flight, "{capture:?} is in flight");
    }
}

fn too_much() -> CheckpointError {
    CheckpointError::StagingBuffer(crate::capture::staging::StagingError::Full { limit_bytes: 1 })
}

struct FakeSink(Shared);

impl FakeSink {
    fn commit(&self, from: u64, to: u64) -> Outcome<()> {
        let mut world = self.0.borrow_mut();
        world.locked = true;
        match world.choices.fault(3) {
            Some(0) => Err(Failure::Checkpoint(CheckpointError::RamChanged)),
            Some(1) => {
                world.has_base = false;
                Err(Failure::Checkpoint(CheckpointError::ParentGone))
            }
            Some(_) => {
                world.interrupted = true;
                Err(Failure::Interrupted)
            }
            None => {
                // A moment of the VM: nothing between the last checkpoint and this one is missing.
                assert!(from <= world.committed, "{from} after {}", world.committed);
                world.committed = to;
                world.has_base = true;
                Ok(())
            }
        }
    }
}

impl CaptureSink<FakeVm> for FakeSink {
    fn has_base(&self) -> bool {
        self.0.borrow().has_base
    }

    fn forget_base(&mut self) {
        self.0.borrow_mut().has_base = false;
    }

    fn store(&mut self, capture: &FakeCapture) -> Outcome<()> {
        assert!(self.has_base(), "an increment of nothing");
        self.commit(capture.from, capture.to)
    }

    fn whole(&mut self, vm: &mut FakeVm) -> Outcome<u64> {
        assert!(vm.in_flight.is_empty(), "captures in flight are overtaken");
        let to = vm.take().to;
        self.commit(0, to)?;
        self.0.borrow_mut().whole += 1;
        vm.pending_from = to;
        Ok(to)
    }

    fn expect_more(&mut self, more: bool) {
        self.0.borrow_mut().locked = more;
    }
}

/// Stores when the pipeline takes the result, or earlier.
struct FakeQueue {
    sink: FakeSink,
    waiting: VecDeque<FakeCapture>,
    failed: bool,
}

impl FakeQueue {
    fn store_oldest(&mut self) -> Option<Completion<FakeVm>> {
        let capture = self.waiting.pop_front()?;
        let outcome = (!self.failed).then(|| self.sink.store(&capture));
        self.failed |= !matches!(outcome, Some(Ok(())));
        Some(Completion { capture, outcome })
    }
}

impl StoreQueue<FakeVm, FakeSink> for FakeQueue {
    fn push(&mut self, capture: FakeCapture) {
        self.waiting.push_back(capture);
    }

    fn complete(&mut self) -> Option<Completion<FakeVm>> {
        if self.waiting.is_empty() {
            return None;
        }
        let complete = self.sink.0.borrow_mut().choices.of(2) == 1;
        complete.then(|| self.store_oldest())?
    }

    fn wait(&mut self) -> Option<Completion<FakeVm>> {
        self.store_oldest()
    }

    fn finish(self) -> FakeSink {
        assert!(self.waiting.is_empty(), "captures are left unsettled");
        self.sink
    }
}

struct FakeEnvironment(Shared);

impl Environment for FakeEnvironment {
    type Vm = FakeVm;
    type Sink = FakeSink;
    type Queue = FakeQueue;
    type Error = io::Error;

    fn now(&self) -> Instant {
        self.0.borrow().now
    }

    fn wait_for_exit(&mut self, limit: Duration) -> bool {
        let mut world = self.0.borrow_mut();
        world.now += limit;
        if !world.exited && world.choices.fault(1).is_some() {
            world.exited = true;
        }
        world.exited
    }

    fn should_stop(&self) -> bool {
        false
    }

    fn wants_migration(&self) -> bool {
        let world = self.0.borrow();
        world
            .migration
            .is_some_and(|migration| world.written >= migration.after)
    }

    fn migrate(&mut self, vm: FakeVm, _: &mut FakeSink) -> Moved<FakeVm, io::Error> {
        assert!(vm.in_flight.is_empty(), "captures in flight are overtaken");
        let mut world = self.0.borrow_mut();
        assert!(!world.locked, "the destination cannot read the repository");
        world.now += 2 * EVERY;
        world.migrated += 1;
        match world.migration.take().unwrap().outcome {
            Outgoing::Away => Moved::Away,
            Outgoing::Attached => Moved::Attached(vm),
            Outgoing::Here => Moved::Here,
            Outgoing::Unclear => Moved::Unclear(io::ErrorKind::TimedOut.into()),
        }
    }

    fn attach_again(&mut self, _: ScheduleChoice) -> Result<FakeVm, AttachError> {
        Ok(FakeVm::attach(&self.0))
    }

    fn attach_anew(&mut self, _: FakeVm, _: ScheduleKind) -> Result<FakeVm, AnewError> {
        unreachable!("the VM never wants it")
    }

    fn release(&mut self, vm: FakeVm) {
        drop(vm);
    }

    fn start_queue(&mut self, sink: FakeSink) -> io::Result<FakeQueue> {
        Ok(FakeQueue {
            sink,
            waiting: VecDeque::new(),
            failed: false,
        })
    }

    fn report(&mut self, event: Event<'_, u64>) -> Result<(), Self::Error> {
        if let Event::Taken(to) = event {
            let mut world = self.0.borrow_mut();
            world.taken += 1;
            assert!(*to <= world.committed, "reported before it is durable");
        }
        Ok(())
    }
}

fn world(choices: Choices) -> Shared {
    Rc::new(RefCell::new(World {
        choices,
        now: Instant::now(),
        written: 0,
        committed: 0,
        has_base: false,
        exited: false,
        interrupted: false,
        attached: 0,
        taken: 0,
        most_in_flight: 0,
        overlaps: true,
        locked: false,
        whole: 0,
        migration: None,
        migrated: 0,
    }))
}

fn run(world: &Shared, count: u64, in_flight_bytes: u64) -> Ended {
    try_run(world, count, in_flight_bytes).unwrap()
}

fn try_run(
    world: &Shared,
    count: u64,
    in_flight_bytes: u64,
) -> Result<Ended, PipelineError<io::Error>> {
    let options = PipelineOptions {
        every: EVERY,
        count: Some(count),
        schedule: ScheduleChoice::Always(ScheduleKind::PreCopy),
        in_flight_bytes,
    };
    let pipeline = Pipeline::new(
        FakeEnvironment(world.clone()),
        FakeVm::attach(world),
        FakeSink(world.clone()),
        options,
    );
    pipeline.run()
}

/// Runs every sequence of choices; how many there were.
fn explore(count: u64, in_flight_bytes: u64, check: impl Fn(&World, Ended)) -> u64 {
    explore_if(true, count, in_flight_bytes, check)
}

fn explore_if(
    overlaps: bool,
    count: u64,
    in_flight_bytes: u64,
    check: impl Fn(&World, Ended),
) -> u64 {
    let mut choices = Choices::default();
    let mut runs = 0;
    loop {
        let world = world(choices);
        world.borrow_mut().overlaps = overlaps;
        let ended = run(&world, count, in_flight_bytes);
        let mut world = Rc::try_unwrap(world).ok().unwrap().into_inner();
        check(&world, ended);
        runs += 1;
        choices = std::mem::take(&mut world.choices);
        if !choices.advance() {
            return runs;
        }
    }
}

#[test]
fn no_order_of_completion_and_failure_loses_a_write_or_a_moment() {
    let runs = explore(4, 2 * CAPTURE_BYTES, |world, ended| {
        assert_eq!(ended.taken, world.taken);
        match ended.why {
            End::Count => {
                assert_eq!(ended.taken, 4);
                // Everything written before the last capture is durable.
                assert_eq!(world.committed, world.written);
            }
            End::Stopped | End::VmGone => assert!(ended.taken < 4),
            End::Migrated | End::MigratedAway => unreachable!("no such fault"),
        }
        assert!(world.most_in_flight <= 2 * CAPTURE_BYTES);
    });
    assert!(runs > 5_000, "only {runs} orders");
}

#[test]
fn captures_that_must_not_overlap_are_in_flight_alone() {
    let runs = explore_if(false, 3, 2 * CAPTURE_BYTES, |world, ended| {
        if matches!(ended.why, End::Count) {
            assert_eq!((ended.taken, world.committed), (3, world.written));
        }
        assert!(world.most_in_flight <= CAPTURE_BYTES);
    });
    assert!(runs > 100, "only {runs} orders");
}

#[test]
fn one_capture_may_be_larger_than_the_bound() {
    explore(3, CAPTURE_BYTES / 2, |world, _| {
        assert!(world.most_in_flight <= CAPTURE_BYTES);
    });
}

#[test]
fn a_capture_that_lags_keeps_others_from_being_added() {
    let begin = Instant::now();
    let later = |ms| begin + Duration::from_millis(ms);
    let mut in_flight = in_flight::InFlight::new(100);
    assert!(in_flight.has_room(1000, begin), "one alone may be large");
    in_flight.push(40, begin);
    assert!(in_flight.has_room(60, later(249)));
    assert!(!in_flight.has_room(61, later(249)), "memory");
    assert!(!in_flight.has_room(1, later(250)), "age");
    in_flight.push(40, later(200));
    in_flight.pop();
    assert!(in_flight.has_room(60, later(300)));
}

#[test]
fn an_attachment_that_is_of_no_use_is_replaced() {
    let mut attached = Vec::new();
    let mut choices = Choices::default();
    loop {
        let world = world(choices);
        run(&world, 2, 100);
        let mut world = Rc::try_unwrap(world).ok().unwrap().into_inner();
        if world.choices.faults <= 1 {
            attached.push(world.attached);
        }
        choices = std::mem::take(&mut world.choices);
        if !choices.advance() {
            break;
        }
    }
    assert!(attached.contains(&1), "a smooth run attaches once");
    assert!(attached.contains(&2), "a changed VM is attached to again");
    assert!(attached.iter().all(|&times| times <= 2));
}

#[test]
fn a_pipeline_in_which_nothing_works_ends() {
    struct Hopeless(Instant);
    impl Environment for Hopeless {
        type Vm = FakeVm;
        type Sink = FakeSink;
        type Queue = FakeQueue;
        type Error = std::convert::Infallible;
        fn now(&self) -> Instant {
            self.0
        }
        fn wait_for_exit(&mut self, limit: Duration) -> bool {
            self.0 += limit;
            false
        }
        fn should_stop(&self) -> bool {
            false
        }
        fn wants_migration(&self) -> bool {
            true
        }
        fn migrate(&mut self, _: FakeVm, _: &mut FakeSink) -> Moved<FakeVm, Self::Error> {
            unreachable!("nothing is attached")
        }
        fn attach_again(&mut self, _: ScheduleChoice) -> Result<FakeVm, AttachError> {
            Err(AttachError::HalfRewound)
        }
        fn attach_anew(&mut self, _: FakeVm, _: ScheduleKind) -> Result<FakeVm, AnewError> {
            Err(AttachError::HalfRewound.into())
        }
        fn release(&mut self, _: FakeVm) {}
        fn start_queue(&mut self, _: FakeSink) -> io::Result<FakeQueue> {
            Err(io::ErrorKind::OutOfMemory.into())
        }
        fn report(&mut self, _: Event<'_, u64>) -> Result<(), Self::Error> {
            Ok(())
        }
    }
    let world = world(Choices::default());
    let options = PipelineOptions {
        every: EVERY,
        count: None,
        schedule: ScheduleChoice::Auto,
        in_flight_bytes: 100,
    };
    let (vm, sink) = (FakeVm::attach(&world), FakeSink(world.clone()));
    let mut pipeline = Pipeline::new(Hopeless(Instant::now()), vm, sink, options);
    pipeline.vm = None;
    let ended = pipeline.run();
    assert!(matches!(ended, Err(PipelineError::TooManyFailures(10))));
}
