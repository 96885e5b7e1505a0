//! Post-copy at the source: the destination hears which pages it lacks, and fetches them when the VM runs there.
//!
//! Most of it is said while the VM still runs here, because what is outdated has to be discarded there, a range at a
//! time. In the pause only what was written since is left.

use super::Wire;
use super::error::MigrateError;
use crate::connection::ConnectionError;
use crate::connection::message::Control;
use crate::memory::ranges::{PageRanges, count};
use crate::streaming::{Iteration, Streaming};
use crate::tracking::tracker::Collected;

/// More pages than this that were written while the destination discarded the last ones: it hears of them, too, before
/// the VM is stopped.
const MORE: u64 = 512;
/// But not more often than this.
const TIMES_MAX: usize = 5;

/// Says which pages the destination is to fetch: those that are left of pre-copy, or all. One that is `based` reads all
/// others from a checkpoint. The VM runs on.
pub(super) fn announce(
    wire: &mut Wire,
    mut streaming: Streaming<'_>,
    left: Option<Collected>,
    based: bool,
) -> Result<(), MigrateError> {
    let mut left = match left {
        Some(left) if based => left,
        Some(left) => {
            let content = streaming.tracker.populated()?;
            let content = content.drained(streaming.monitor)?;
            wire.send_content(&content.written)?;
            left
        }
        None => {
            let content = streaming.wanted(Iteration::Bulk)?;
            wire.send_content(&content.written)?;
            let found = streaming.found()?;
            streaming.pending(found)
        }
    };
    for _ in 0..TIMES_MAX {
        outdated(wire, &left)?;
        streaming.tracker.streamed(&left);
        wire.send_control(&Control::Sync)?;
        wire.expect(|control| matches!(control, Control::Synced))?;
        let found = streaming.found()?;
        left = streaming.pending(found);
        if left.pages() <= MORE {
            break;
        }
    }
    outdated(wire, &left)?;
    streaming.tracker.streamed(&left);
    Ok(())
}

/// Says that the destination may not use what it has of these pages.
pub(super) fn outdated(wire: &mut Wire, pages: &Collected) -> Result<(), ConnectionError> {
    let all: [&PageRanges; 2] = [&pages.written, &pages.discarded];
    all.into_iter()
        .filter(|pages| count(pages) > 0)
        .try_for_each(|pages| {
            wire.send_ranges(pages, |block, ranges| Control::Outdated { block, ranges })
        })
}
