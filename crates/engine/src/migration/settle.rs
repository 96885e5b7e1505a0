//! The source of a hand-over that an earlier engine left undecided.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use stillframe_qemu::monitor::Monitor;
use stillframe_qemu::target::{self, Selector};
use stillframe_sys::process::Process;
use thiserror::Error;

use super::commit::{CommitError, Undecided, Wish};
use super::handover::Source;
use super::record::{GivenUp, RecordError, Served, SourceRecord};
use super::serving::Serving;
use super::{CompressionChoice, END_LIMIT, Reconnect};
use crate::attach::AttachError;
use crate::capture::paused_vm::HandedOver;
use crate::connection::message::Control;
use crate::connection::word::Word;
use crate::guardian::Guardian;
use crate::inhibitor::{InhibitorError, ResumeInhibitor};
use crate::memory::block::Guest;
use crate::populate::eager::{self, PopulateError};

/// Time for the monitor of a VM that an earlier engine gave up.
const MONITOR_LIMIT: Duration = Duration::from_secs(2);
/// The guardian's limit for the `cont` of a VM that is taken back.
const RESUME_LIMIT: Duration = Duration::from_secs(30);

/// Why it is not known where a VM runs, or why it cannot be brought about.
#[derive(Debug, Error)]
pub enum SettleError {
    /// The VM cannot be reached.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// There is nothing to be settled, or the record cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The destination lacks pages, and they cannot be read.
    #[error("cannot read the memory of the VM, which the destination lacks")]
    Memory(#[source] PopulateError),
    /// Other clients could resume it meanwhile.
    #[error(transparent)]
    Inhibitor(#[from] InhibitorError),
    /// It is not settled.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// Where a VM runs after a hand-over that had been interrupted.
#[derive(Debug, Clone, Serialize)]
pub struct SettledReport {
    /// The VM's name.
    pub vm: String,
    /// Whether it moved: it runs at the destination, and its QEMU here has ended. Else it runs here.
    pub moved: bool,
}

/// Settles the migration of a VM that was given up by an engine that did not learn what became of it.
///
/// # Errors
/// The VM stays paused here.
pub fn settle(
    selector: &Selector,
    wish: Wish,
    patience: Duration,
    reconnect: Reconnect<'_>,
) -> Result<SettledReport, SettleError> {
    let target = target::find(selector).map_err(AttachError::from)?;
    let (record, content, given_up) = SourceRecord::find(&target.process)?;
    if !given_up {
        return Ok(kept(&record, content, reconnect)?);
    }
    let monitor = Monitor::connect(&target, MONITOR_LIMIT);
    let mut monitor = monitor.map_err(AttachError::from)?;
    let guardian = Guardian::start().map_err(AttachError::from)?;
    let socket = monitor.client().socket();
    guardian.watch(socket).map_err(AttachError::from)?;
    let run_state = monitor.run_state().map_err(AttachError::from)?;
    // Another client has resumed it: it must not run there, too.
    let wish = match run_state.running {
        true => Wish::Here,
        false => wish,
    };
    let serving = served(&target.process, &mut monitor, &content)?;
    let left = ResumeInhibitor::left_behind(&mut monitor, &target.process)?;
    let mut vm = HandedOver::found(&mut monitor, &guardian, RESUME_LIMIT, content.runs, left);
    if !run_state.running {
        // An engine that died early had not come to it.
        vm.block_cont()?;
    }
    let disks = (content.disks, target.process.pid());
    let named = (record, content.session);
    let undecided = Undecided::found(vm, named, disks, reconnect, (wish, patience));
    let undecided = undecided.with_lanes(serving);
    let moved = match undecided.decide(Source::RECORDED) {
        Ok(_) => {
            target.process.wait_exit(END_LIMIT);
            true
        }
        Err(CommitError::NotTaken { .. } | CommitError::Lost { .. }) => false,
        Err(error) => return Err(error.into()),
    };
    let vm = content.vm;
    Ok(SettledReport { vm, moved })
}

/// What serves the pages that the destination lacks.
fn served(
    process: &Process,
    monitor: &mut Monitor,
    content: &GivenUp,
) -> Result<Option<Serving>, SettleError> {
    let Served { lanes, blocks } = &content.served;
    if *lanes == 0 {
        return Ok(None);
    }
    let ram = monitor.ram_blocks().map_err(AttachError::from)?;
    let blocks = eager::open_blocks(process, &ram, blocks).map_err(SettleError::Memory)?;
    let blocks = blocks.into_iter().map(Arc::new).collect();
    let serving = Serving::new(&content.session, blocks, *lanes, CompressionChoice::Auto);
    serving.begin(Guest::Stopped);
    Ok(Some(serving))
}

/// The VM was never given up: it is the source's, and the destination need not wait.
fn kept(
    record: &SourceRecord,
    content: GivenUp,
    reconnect: Reconnect<'_>,
) -> Result<SettledReport, RecordError> {
    // A destination that is out of reach gives up by itself.
    if let Ok(mut wire) = reconnect() {
        let session = content.session;
        let (word, why) = (Word::Settled, None);
        let again = wire.send_control(&Control::Again { session, lanes: 0 });
        let _ = again.and_then(|()| wire.send_control(&Control::Word { word, why }));
    }
    record.remove()?;
    Ok(SettledReport {
        vm: content.vm,
        moved: false,
    })
}
