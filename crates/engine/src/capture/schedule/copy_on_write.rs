//! Copy-on-write: in the pause pages are only protected. They are copied when the guest runs again; a page that the
//! guest is about to write is saved first.
//!
//! (Copy-on-write checkpointing, chapter 4.) Protecting written pages costs more than scanning, so most of it is
//! done just before the pause. Write-hot pages are unprotected as soon as they are copied.

use std::sync::PoisonError;
use std::time::Instant;

use stillframe_fault::{self as fault, Point};
use stillframe_qemu::monitor::Monitor;

use super::{Copied, FEW_PAGES, ROUNDS_MAX, Schedule, ScheduleError, Work};
use crate::capture::downtime::{DowntimeRecord, us};
use crate::capture::staging::StagingBuffer;
use crate::memory::block::Guest;
use crate::memory::ranges::{PageRanges, count, runs, subtract_all};
use crate::tracking::error::TrackerError;
use crate::tracking::fault_handler::{CopierAtWork, Saved};
use crate::tracking::tracker::{Collected, Tracker};

/// Pages claimed and copied at once. A writer of one of them waits for all: 64 us.
const BATCH_PAGES: usize = 256;

/// The schedule, and the pages that are left to be copied.
#[derive(Debug, Default)]
pub struct CopyOnWrite {
    /// Armed in the pause; by block.
    armed: PageRanges,
}

impl Schedule for CopyOnWrite {
    fn before(&mut self, work: &mut Work<'_>, _monitor: &mut Monitor) -> Result<(), ScheduleError> {
        // Allocating memory for the copies may take longer than all rounds. The guest continues writing in them, and
        // waits, so the allocation comes first.
        let expected = count(&work.tracker.pending()) + work.tracker.written_pages()?;
        work.staging.reserve(expected);
        // Collecting protects. The number of remaining pages does not show whether another round is worth it. In
        // the next round the guest has no time to write more than a page a fault, whatever the number was.
        for _ in 0..ROUNDS_MAX {
            // Copied after the pause, whose stop drains the disks.
            let found = work.tracker.collect_running()?;
            let pages = count(&work.tracker.pending());
            work.staging.expect_room(pages)?;
            work.staging.reserve(pages);
            if found.pages() <= FEW_PAGES {
                break;
            }
        }
        Ok(())
    }

    fn stopped(
        &mut self,
        work: &mut Work<'_>,
        record: &mut DowntimeRecord,
    ) -> Result<(), ScheduleError> {
        let tracker = &mut *work.tracker;
        let begin = Instant::now();
        let pause_lock = tracker.fault_handler()?.pause_lock();
        let _no_fault_is_served = pause_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let found = tracker.collect_stopped()?;
        let discarded = Collected {
            written: vec![Vec::new(); found.written.len()],
            discarded: found.discarded,
        };
        work.staging
            .capture_all(tracker, Guest::Stopped, &discarded)?;
        work.copied.pause += discarded.pages();
        let armed = subtract_all(&tracker.pending(), &discarded.discarded);
        work.staging.expect_room(count(&armed))?;
        record.scan = us(begin);
        let begin = Instant::now();
        let server = tracker.fault_handler()?;
        server.begin();
        for (block, ranges) in armed.iter().enumerate() {
            let claims = server.claims(block);
            for page in ranges.iter().cloned().flatten() {
                claims.arm(page);
            }
        }
        self.armed = armed;
        record.copy = us(begin);
        Ok(())
    }

    fn after(&mut self, work: &mut Work<'_>) -> Result<(), ScheduleError> {
        let tracker = &*work.tracker;
        let server = tracker.fault_handler()?;
        let at_work = server.copier_at_work();
        let copying = copy_all(tracker, work.staging, work.copied, &self.armed, &at_work);
        if copying.is_err() {
            self.give_up(tracker);
        }
        // A page that is being saved right now is not in the queue yet.
        server.wait_until_idle();
        work.copied.faults += server.take_faults();
        let mut saved: Vec<Saved> = std::iter::from_fn(|| server.take_saved()).collect();
        self.armed.clear();
        if copying.is_ok() {
            work.copied.on_fault += saved.len() as u64;
            work.staging.put_all(&mut saved);
        }
        for saved in saved {
            server.recycle(saved.bytes);
        }
        copying?;
        Ok(server.take_failure()?)
    }

    fn give_up(&mut self, tracker: &Tracker) {
        let Ok(server) = tracker.fault_handler() else {
            return;
        };
        for (number, ranges) in std::mem::take(&mut self.armed).into_iter().enumerate() {
            let claims = server.claims(number);
            for page in ranges.into_iter().flatten() {
                // A page that is being saved right now is unprotected by its saver.
                if claims.claim(page) && claims.done(page) {
                    tracker.unprotect(number, runs(&[page]));
                }
            }
        }
        server.wait_until_idle();
        while let Some(saved) = server.take_saved() {
            server.recycle(saved.bytes);
        }
    }
}

fn copy_all(
    tracker: &Tracker,
    staging: &mut StagingBuffer,
    copied: &mut Copied,
    armed: &PageRanges,
    at_work: &CopierAtWork,
) -> Result<(), ScheduleError> {
    let server = tracker.fault_handler()?;
    for (number, ranges) in armed.iter().enumerate() {
        let tracked = &tracker.blocks()[number];
        let claims = server.claims(number);
        let hot = tracked.hot();
        let mut pages = ranges.iter().cloned().flatten().peekable();
        while pages.peek().is_some() {
            at_work.step();
            let batch = pages.by_ref().take(BATCH_PAGES);
            let claimed: Vec<u64> = batch.filter(|&page| claims.claim(page)).collect();
            let runs_claimed = runs(&claimed);
            let mut read = || -> Result<bool, ScheduleError> {
                fault::at(Point::CopyOnWriteBatch).map_err(TrackerError::Injected)?;
                staging.capture(number, &tracked.block, Guest::Running, &runs_claimed)?;
                Ok(tracker.still_protected(number, &runs_claimed)?)
            };
            let read = read();
            // After a failure too: no thread may wait for a page that is not being saved.
            let mut open = claimed.clone();
            open.retain(|&page| claims.done(page) || hot.get(page));
            tracker.unprotect(number, runs(&open));
            if !read? {
                return Err(TrackerError::ProtectionLost.into());
            }
            copied.left_unprotected += open.len() as u64;
            copied.after += claimed.len() as u64;
        }
    }
    Ok(())
}
