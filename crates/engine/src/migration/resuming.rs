//! A destination whose engine was killed: another one goes on, from what is on record.

use std::path::Path;
use std::time::Duration;

use stillframe_qemu::monitor::Monitor;
use stillframe_sys::process::Process;

use super::destination::{pass_on, result};
use super::error::ReceiveError;
use super::filling::{self, LateMemory};
use super::handover::Destination;
use super::receiver::{ReceiveEvent, ReceiveSink};
use super::record::{DestinationRecord, RecordError};
use super::seed::{Seed, SeedFrom};
use super::takeover::{NewVm, READY_LIMIT, Takeover, TakeoverEvent};
use super::{Awaited, Listen, ReceiveReport};
use crate::guardian::{Guardian, OnDisconnect};

/// Time for the monitor of a VM that an earlier engine started.
const MONITOR_LIMIT: Duration = Duration::from_secs(10);

/// Goes on with the migration to this monitor, whose process was killed: answers the source, and runs the VM if the
/// source lets it. A VM that lacks pages gets them, from the source or from a checkpoint in `from`.
///
/// # Errors
/// There is none on record, or the VM does not run here.
pub fn resume(
    qmp: &Path,
    listen: Listen<'_>,
    from: Option<&mut SeedFrom<'_>>,
    events: ReceiveSink<'_>,
) -> Result<(), ReceiveError> {
    let record = DestinationRecord::find(qmp)?;
    let content = record.content().clone();
    let process = content.process().map_err(RecordError::Process)?;
    if content.settled && process.is_none() {
        record.remove()?;
        let why = "it was here, and its QEMU has ended".to_owned();
        return Err(ReceiveError::NotHere { why });
    }
    let seed = process.as_ref().and_then(|_| seed(&record, from));
    let seed = seed.transpose()?;
    let late = process
        .as_ref()
        .and_then(|process| late_memory(&record, process, seed.as_ref()));
    let late = late.transpose()?.flatten();
    let mut events = |event: TakeoverEvent<'_>| match event {
        TakeoverEvent::Arrived(process, running) => {
            events(ReceiveEvent::Arrived(&ReceiveReport {
                vm: content.vm.clone(),
                pid: process.pid(),
                qmp: qmp.to_owned(),
                running,
                pages: 0,
                changes: Vec::new(),
                verify: None,
            }));
        }
        other => pass_on(other, events),
    };
    std::thread::scope(|scope| {
        let running = late.as_ref().map(|late| late.running(scope, content.runs));
        let vm = (NewVm::Gone, None);
        let mut takeover = Takeover::new(vm, record, (None, listen), running, &mut events);
        let end = late.as_ref().map(|late| late.begin(scope));
        let _end = end.transpose()?;
        // QEMU's main thread may be waiting for a page itself.
        if late.as_ref().is_some_and(LateMemory::needs_source)
            && !takeover.connected((Awaited::Again, READY_LIMIT))
        {
            let why = "the source has not connected again".to_owned();
            return Err(ReceiveError::Lacks { why });
        }
        let mut _beating = None;
        if let Some(process) = process {
            let reached = Monitor::reach(qmp, process.pid(), MONITOR_LIMIT)?;
            let mut monitor = reached.negotiate(MONITOR_LIMIT)?;
            if late.is_some() {
                let guardian = Guardian::start()?;
                guardian.watch(monitor.client().socket())?;
                guardian.on_disconnect(OnDisconnect::Pause)?;
                _beating = Some(filling::beat(&guardian)?);
                takeover.guardian = Some(guardian);
            }
            takeover.vm = NewVm::Kept(process, monitor);
        }
        let lives = matches!(takeover.vm, NewVm::Kept(..));
        result(takeover.decide(Destination::recorded(content.mark, lives)))?;
        takeover.finish()
    })
}

/// The checkpoint that has what the VM lacks, if the source does not have it.
fn seed<'r>(
    record: &DestinationRecord,
    from: Option<&'r mut SeedFrom<'_>>,
) -> Option<Result<Seed<'r>, ReceiveError>> {
    let lacking = record.content().lacking.as_ref()?;
    let base = lacking.base.as_ref()?;
    Some(match from {
        Some(from) => Seed::again(from, base, (&record.content().vm, &lacking.blocks)),
        None => Err(ReceiveError::no_base(base)),
    })
}

/// What the VM lacks, if it lacks anything.
fn late_memory<'s>(
    record: &DestinationRecord,
    process: &Process,
    seed: Option<&'s Seed<'_>>,
) -> Option<Result<Option<LateMemory<'s>>, ReceiveError>> {
    let lacking = record.content().lacking.as_ref()?;
    let bitmap = record.open_fill_bitmap().map_err(ReceiveError::from);
    Some(bitmap.and_then(|bitmap| LateMemory::found(process, lacking, seed, bitmap)))
}
