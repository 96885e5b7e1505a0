//! Pages that the guest calls free, so that a checkpoint need not have them.
//!
//! ```text
//!   scan, protect ---> question to the guest's agent ---> pages called free ---> each later scan: minus those written
//! ```
//!
//! What a guest says is old when it arrives, and may be a lie. A page that was protected before the question, was called
//! free, and was not written since has no content that the guest may rely on: whatever it means to keep, it writes after
//! it has allocated the page. So an old answer costs space, and a lie costs the guest that lies its own pages, which come
//! back as zeros. (Page cache exclusion, section 4; QEMU `docs/interop/qemu-ga-ref`, `guest-file-read`.)
//!
//! A kernel with `page_poison=1` relies on the content of free pages. Some are looked at after each question.

use std::ops::Range;
use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_qemu::guest_agent::{AgentChannels, AgentError};
use stillframe_qemu::monitor::{Monitor, MonitorError, RamBlock};
use stillframe_qemu::physical_memory::{self, PhysicalRange};

use crate::memory::block::{Block, BlockError};
use crate::memory::ranges::{PageRanges, intersect, length};
use crate::tracking::tracker::Tracker;

/// Fewer pages are stored sooner than the guest answers.
const WORTH_PAGES: u64 = 256;
/// Time for the agent to answer at all.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Time for the whole question.
const QUESTION_LIMIT: Duration = Duration::from_secs(10);
/// After a question without an answer the next one comes no sooner than this.
const AGAIN_AFTER: Duration = Duration::from_secs(60);
/// Free pages that are looked at.
const LOOKED_AT: u64 = 64;
/// What a kernel fills free pages with, if it checks them (Linux `include/linux/poison.h`, `PAGE_POISON`).
const POISON: u8 = 0xaa;

/// What came of the question for one checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct FreePagesReport {
    /// Captured pages that are kept as zeros, because the guest calls them free.
    pub left_out: u64,
    /// How long the question took, in microseconds, the guest running.
    pub question_us: u64,
    /// Why free pages are not known, or not all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_known: Option<String>,
}

/// Queries one guest.
#[derive(Debug)]
pub(crate) struct FreePages {
    /// The channels to its agents.
    agents: AgentChannels,
    /// Where main RAM lies; found for the first question.
    place: Option<Option<MainRam>>,
    /// Earliest time of the next question, and why there was no answer to the last.
    not_before: Option<(Instant, String)>,
    /// Of the question for the checkpoint that is being taken.
    report: FreePagesReport,
}

/// The block of main RAM, and its physical addresses.
#[derive(Debug, Clone)]
struct MainRam {
    block: usize,
    ranges: Vec<PhysicalRange>,
}

impl FreePages {
    /// Of a guest with these channels to agents.
    pub(crate) fn new(agents: AgentChannels) -> FreePages {
        FreePages {
            agents,
            place: None,
            not_before: None,
            report: FreePagesReport::default(),
        }
    }

    /// What came of the last question.
    pub(crate) fn report(&self) -> FreePagesReport {
        self.report.clone()
    }

    /// Which of `wanted` the guest calls free, by block. These were protected before, or the next scan reports them.
    ///
    /// # Errors
    /// QEMU does not answer, or memory cannot be read. That the guest does not answer is in the report.
    pub(crate) fn among(
        &mut self,
        tracker: &Tracker,
        monitor: &mut Monitor,
        wanted: &PageRanges,
    ) -> Result<PageRanges, FreePagesError> {
        let begin = Instant::now();
        self.report = FreePagesReport::default();
        let mut free = vec![Vec::new(); wanted.len()];
        let ram: Vec<RamBlock> = tracker.blocks().iter().map(|one| one.ram.clone()).collect();
        match self.query(&ram, monitor, wanted) {
            Ok(Some(Named { block, pages })) => {
                free[block] = intersect(&pages, &wanted[block]);
                if is_poisoned(&tracker.blocks()[block].block, &free[block])? {
                    free[block].clear();
                    self.report.not_known = Some(
                        "the guest's kernel relies on what free pages hold (page_poison)"
                            .to_owned(),
                    );
                }
            }
            Ok(None) => {}
            Err(Unanswered::Because(why)) => self.report.not_known = Some(why),
            Err(Unanswered::Monitor(error)) => return Err(error.into()),
        }
        self.report.question_us = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        Ok(free)
    }

    /// Queries the guest; not where few pages are wanted.
    fn query(
        &mut self,
        ram: &[RamBlock],
        monitor: &mut Monitor,
        wanted: &PageRanges,
    ) -> Result<Option<Named>, Unanswered> {
        if self.agents.is_empty() {
            return because(AgentError::NoChannel.in_words());
        }
        if let Some((not_before, why)) = &self.not_before
            && Instant::now() < *not_before
        {
            return because(why.clone());
        }
        let place = match &self.place {
            Some(place) => place.clone(),
            None => {
                let place = physical_memory::of_running(monitor, ram)?;
                let place = place.map(|(block, ranges)| MainRam { block, ranges });
                self.place.insert(place).clone()
            }
        };
        let Some(place) = place else {
            return because(
                "it is not known where the VM's memory lies among its physical addresses",
            );
        };
        let wanted = &wanted[place.block];
        if length(wanted) < WORTH_PAGES {
            return Ok(None);
        }
        let deadline = Instant::now() + QUESTION_LIMIT;
        let (frames, error) = match self.agents.connect(CONNECT_LIMIT) {
            Ok(mut agent) => {
                let bytes = ram[place.block].used_bytes;
                if let Some(max) = agent.frames_max().filter(|max| bytes / PAGE_BYTES > *max) {
                    return because(too_much(bytes, max));
                }
                let named = agent.free_pages(&place.frames(wanted), deadline);
                (named.frames, named.error)
            }
            Err(error) => (Vec::new(), Some(error)),
        };
        if let Some(error) = error {
            let why = error.in_words();
            let at = Instant::now().checked_add(AGAIN_AFTER);
            self.not_before = at.map(|at| (at, why.clone()));
            if frames.is_empty() {
                return because(why);
            }
            // What it said before is as good as ever.
            self.report.not_known = Some(why);
        }
        Ok(Some(Named {
            block: place.block,
            pages: place.pages(&frames),
        }))
    }
}

/// The answer.
struct Named {
    /// The number of main RAM's block.
    block: usize,
    /// Its pages that the guest calls free.
    pages: Vec<Range<u64>>,
}

/// Why there is no answer.
enum Unanswered {
    /// The guest was not queried, or did not answer; in words.
    Because(String),
    /// QEMU did not answer.
    Monitor(MonitorError),
}

impl From<MonitorError> for Unanswered {
    fn from(error: MonitorError) -> Unanswered {
        Unanswered::Monitor(error)
    }
}

/// A guest of more memory than its agent is queried for.
fn too_much(bytes: u64, frames_max: u64) -> String {
    format!(
        "the VM has {} MiB of RAM: qemu-ga would take too long for more than {} MiB; stillframe-guest-agent does not",
        bytes >> 20,
        (frames_max * PAGE_BYTES) >> 20
    )
}

fn because<T>(why: impl Into<String>) -> Result<T, Unanswered> {
    Err(Unanswered::Because(why.into()))
}

impl MainRam {
    /// Page frames of these pages of the block, ascending.
    fn frames(&self, pages: &[Range<u64>]) -> Vec<Range<u64>> {
        self.translate(pages, |range| (range.block_offset, range.address))
    }

    /// Pages of the block at these page frames, ascending.
    fn pages(&self, frames: &[Range<u64>]) -> Vec<Range<u64>> {
        self.translate(frames, |range| (range.address, range.block_offset))
    }

    fn translate(
        &self,
        what: &[Range<u64>],
        from_and_to: impl Fn(&PhysicalRange) -> (u64, u64),
    ) -> Vec<Range<u64>> {
        let mut translated = Vec::new();
        for range in &self.ranges {
            let (from, to) = from_and_to(range);
            let (from, to) = (from / PAGE_BYTES, to / PAGE_BYTES);
            let whole = from..from + range.bytes / PAGE_BYTES;
            let inside = intersect(what, std::slice::from_ref(&whole));
            translated.extend(
                inside
                    .iter()
                    .map(|pages| pages.start - from + to..pages.end - from + to),
            );
        }
        translated
    }
}

/// Why free pages could not be found for a reason that is not the guest's.
#[derive(Debug, thiserror::Error)]
pub enum FreePagesError {
    /// QEMU does not answer.
    #[error("QEMU failed a command")]
    Monitor(#[from] MonitorError),
    /// Reading memory failed.
    #[error("cannot read the VM's memory")]
    Block(#[from] BlockError),
}

/// Whether a free page is filled with poison, of some that lie all over memory.
fn is_poisoned(block: &Block, free: &[Range<u64>]) -> Result<bool, BlockError> {
    let pages = length(free);
    let step = pages.div_ceil(LOOKED_AT).max(1) as usize;
    let mut bytes = [0; PAGE];
    for page in free.iter().cloned().flatten().step_by(step) {
        block.read_slowly(page, &mut bytes)?;
        if bytes.iter().all(|&byte| byte == POISON) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_and_frames_are_the_same_memory() {
        let range = |address: u64, block_offset: u64, bytes| PhysicalRange {
            address,
            block_offset,
            bytes,
        };
        let place = MainRam {
            block: 0,
            ranges: vec![range(0, 0, 3 << 30), range(4 << 30, 3 << 30, 1 << 30)],
        };
        let (low, high) = ((3 << 30) / PAGE_BYTES, (4 << 30) / PAGE_BYTES);
        let pages = [5..9, low - 2..low + 3, high - 1..high];
        let frames = place.frames(&pages);
        let last = high + (1 << 30) / PAGE_BYTES;
        assert_eq!(frames, [5..9, low - 2..low, high..high + 3, last - 1..last]);
        let same = [5..9, low - 2..low, low..low + 3, high - 1..high];
        assert_eq!(place.pages(&frames), same);
        // A guest may name what it has not.
        let lies = [low + 7..high, last..u64::MAX];
        assert_eq!(place.pages(&lies), []);
    }
}
