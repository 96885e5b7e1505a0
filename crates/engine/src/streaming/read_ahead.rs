//! Read-ahead: threads read and hash the next pages of a running guest while the sink takes those before.
//!
//! ```text
//!   guest memory ──> threads: read, hash ──batches, in order──> the caller
//!                       ^                                          │
//!                       └───────────── empty buffers ──────────────┘
//! ```
//!
//! Memory is bounded by the number of buffers, however large the guest is. A batch is so small that its pages are hashed
//! from the processor's own cache.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use stillframe_page::PAGE_BYTES;
use stillframe_page::hash::ContentHasher;
use stillframe_sys::process::Process;

use super::StreamingError;
use crate::encoding::page_encoder::{EncodedPages, encode_unknown, threads};
use crate::memory::Page;
use crate::memory::block::{Block, BlockError, Guest};
use crate::memory::page_buffer::PageBuffer;
use crate::memory::ranges::{length, split};
use crate::placement::WhereIdle;
use crate::tracking::tracker::Collected;

/// Pages of a batch: 1 MiB.
const BATCH_PAGES: u64 = 256;
/// Buffers for each thread: one that it fills, and one that waits for the caller or is taken by it.
const BUFFERS: usize = 2;

/// Takes ascending pages of one block, given by its number, and what they are stored as.
pub(crate) type TakeBatch<'t, E> =
    &'t mut dyn FnMut(usize, &[Page<'_>], EncodedPages) -> Result<(), E>;

/// Pages of one block that are wanted.
struct Wanted<'v> {
    /// The number of the block.
    number: usize,
    block: &'v Block,
    pages: Vec<Range<u64>>,
    /// They were discarded: they are zeros, and not read.
    discarded: bool,
}

/// The same with their content, and what they are stored as.
struct Batch {
    /// The number of the block.
    number: usize,
    pages: Vec<Range<u64>>,
    bytes: PageBuffer,
    encoded: EncodedPages,
}

/// A batch and its place in the order, or the panic of a thread.
type Sent = thread::Result<(usize, Result<Batch, BlockError>)>;

/// What the threads take from, in this order.
struct Queue<'v> {
    wanted: Box<dyn Iterator<Item = (usize, Wanted<'v>)> + Send + 'v>,
    empty: Receiver<PageBuffer>,
}

/// Reads all pages that are wanted of a VM that runs, and hands them to `take`, in their order and in the caller's thread.
///
/// # Errors
/// Pages cannot be read, `take` fails, or no thread can be started. Nothing that comes after was taken then.
pub(super) fn read_ahead<E>(
    process: &Process,
    (blocks, wanted): (&[&Block], &Collected),
    hasher: &ContentHasher,
    take: TakeBatch<'_, E>,
) -> Result<(), StreamingError<E>> {
    let threads = threads().min(wanted.pages().div_ceil(BATCH_PAGES) as usize);
    let (give_back, empty) = channel();
    for _ in 0..threads * BUFFERS {
        let _ = give_back.send(PageBuffer::new(BATCH_PAGES as usize));
    }
    let wanted = Box::new(all_wanted(blocks, wanted).enumerate());
    let queue = Mutex::new(Queue { wanted, empty });
    thread::scope(|scope| {
        // The threads end when both channels are closed here.
        let give_back = give_back;
        let (sender, read) = channel();
        for _ in 0..threads {
            let (queue, sender) = (&queue, sender.clone());
            let thread = thread::Builder::new().name("page reader".to_owned());
            let started = thread.spawn_scoped(scope, move || {
                let run = || run(queue, &sender, process, hasher);
                if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
                    let _ = sender.send(Err(panic));
                }
            });
            started.map_err(StreamingError::Thread)?;
        }
        drop(sender);
        // After they were started: they begin where this thread may run, and could not leave where it is confined to.
        let mut placement = WhereIdle::confined(process);
        let (mut early, mut next) = (BTreeMap::new(), 0);
        for sent in read {
            // The others would wait for buffers that nothing gives back.
            let (place, batch) = sent.unwrap_or_else(|panic| resume_unwind(panic));
            early.insert(place, batch);
            while let Some(batch) = early.remove(&next) {
                placement.look();
                let mut batch: Batch = batch?;
                // They run at the same time.
                batch.encoded.took /= threads as u32;
                let pages = pages(&batch.pages, &batch.bytes);
                take(batch.number, &pages, batch.encoded).map_err(StreamingError::Sink)?;
                // The threads have ended when nothing more is wanted.
                let _ = give_back.send(batch.bytes);
                next += 1;
            }
        }
        Ok(())
    })
}

/// One of the threads. Each batch goes out with its place in the order; an error is the last.
fn run(queue: &Mutex<Queue<'_>>, sender: &Sender<Sent>, process: &Process, hasher: &ContentHasher) {
    let mut placement = WhereIdle::confined(process);
    loop {
        let (place, wanted, buffer) = {
            let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
            let Some((place, wanted)) = queue.wanted.next() else {
                return;
            };
            // Batches that come before have theirs, so the caller gets on, and gives one back.
            match queue.empty.recv() {
                Ok(buffer) => (place, wanted, buffer),
                Err(_) => return,
            }
        };
        placement.look();
        let batch = wanted.read(buffer, hasher);
        let failed = batch.is_err();
        if sender.send(Ok((place, batch))).is_err() || failed {
            return;
        }
    }
}

impl Wanted<'_> {
    fn read(self, mut bytes: PageBuffer, hasher: &ContentHasher) -> Result<Batch, BlockError> {
        let room = &mut bytes[..(length(&self.pages) * PAGE_BYTES) as usize];
        match self.discarded {
            true => room.fill(0),
            false => {
                let into = &mut split(room, &self.pages);
                self.block.read(Guest::Running, into, &self.pages)?;
            }
        }
        let encoded = encode_unknown(hasher, &pages(&self.pages, &bytes));
        Ok(Batch {
            number: self.number,
            pages: self.pages,
            bytes,
            encoded,
        })
    }
}

fn pages<'b>(numbers: &[Range<u64>], bytes: &'b [u8]) -> Vec<Page<'b>> {
    let numbers = numbers.iter().flat_map(Clone::clone);
    let contents = numbers.zip(bytes.as_chunks().0);
    contents
        .map(|(number, bytes)| Page { number, bytes })
        .collect()
}

/// All that is wanted, in batches.
fn all_wanted<'v>(
    blocks: &'v [&'v Block],
    wanted: &'v Collected,
) -> impl Iterator<Item = Wanted<'v>> + Send {
    let of_block = |(number, block): (usize, &&'v Block)| {
        let block = *block;
        [(false, &wanted.written), (true, &wanted.discarded)]
            .into_iter()
            .flat_map(move |(discarded, ranges)| {
                Batches::of(&ranges[number]).map(move |pages| Wanted {
                    number,
                    block,
                    pages,
                    discarded,
                })
            })
    };
    blocks.iter().enumerate().flat_map(of_block)
}

/// Cuts ranges into batches of at most [`BATCH_PAGES`] pages.
struct Batches<'v> {
    /// What is left of a range that was cut.
    rest: Range<u64>,
    ranges: std::slice::Iter<'v, Range<u64>>,
}

impl Batches<'_> {
    fn of(ranges: &[Range<u64>]) -> Batches<'_> {
        Batches {
            rest: 0..0,
            ranges: ranges.iter(),
        }
    }
}

impl Iterator for Batches<'_> {
    type Item = Vec<Range<u64>>;

    fn next(&mut self) -> Option<Vec<Range<u64>>> {
        let mut batch = Vec::new();
        let mut room = BATCH_PAGES;
        while room > 0 {
            if self.rest.is_empty() {
                match self.ranges.next() {
                    Some(range) => self.rest = range.clone(),
                    None => break,
                }
            }
            let end = self.rest.end.min(self.rest.start + room);
            room -= end - self.rest.start;
            batch.push(self.rest.start..end);
            self.rest.start = end;
        }
        (!batch.is_empty()).then_some(batch)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;
    use std::thread::sleep;
    use std::time::Duration;

    use proptest::prelude::*;
    use stillframe_page::GuestPage;
    use thiserror::Error;

    use super::*;
    use crate::encoding::delta_cache::DeltaCache;
    use crate::encoding::page_encoder::{PageEncoder, PageEncoding};
    use crate::fakes::{FakeMemory, this_process};

    #[derive(Debug, Error)]
    #[error("full")]
    struct Full;

    fn read<E>(
        memory: &[FakeMemory],
        wanted: &Collected,
        take: TakeBatch<'_, E>,
    ) -> Result<(), StreamingError<E>> {
        let blocks: Vec<Block> = memory.iter().map(FakeMemory::block).collect();
        let blocks: Vec<&Block> = blocks.iter().collect();
        let hasher = ContentHasher::keyed([3; 32]);
        read_ahead(&this_process(), (&blocks, wanted), &hasher, take)
    }

    /// Pages of two blocks that are longer than all buffers; a third of them are zeros.
    fn memory() -> [FakeMemory; 2] {
        let fillings = |seed: usize| {
            let filling = move |page: usize| match (page * seed) % 3 {
                0 => 0,
                _ => (page % 251) as u8 | 1,
            };
            (0..5000).map(filling).collect::<Vec<u8>>()
        };
        [
            FakeMemory::new("one", &fillings(5)),
            FakeMemory::new("two", &fillings(7)),
        ]
    }

    fn all_of(memory: &[FakeMemory]) -> Collected {
        let whole = |memory: &FakeMemory| memory.block().whole();
        Collected::written(memory.iter().map(whole).collect())
    }

    fn ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
        prop::collection::vec((1u64..400, 1u64..700), 0..5).prop_map(|parts| {
            let mut at = 0;
            let range = |(gap, pages)| {
                let start = at + gap;
                at = start + pages;
                start..at
            };
            parts.into_iter().map(range).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn batches_are_full_and_have_each_page_once(ranges in ranges()) {
            let batches: Vec<_> = Batches::of(&ranges).collect();
            let lengths: Vec<u64> = batches.iter().map(|batch| length(batch)).collect();
            let (&last, others) = lengths.split_last().unwrap_or((&0, &[]));
            prop_assert!(others.iter().all(|&pages| pages == BATCH_PAGES));
            prop_assert!(last <= BATCH_PAGES);
            let all: Vec<u64> = batches.into_iter().flatten().flatten().collect();
            prop_assert_eq!(all, ranges.into_iter().flatten().collect::<Vec<_>>());
        }

        /// Against pages that are read one by one, and encoded by the encoder of increments.
        #[test]
        fn what_is_read_ahead_is_what_is_there(written in [ranges(), ranges()], discarded in [ranges(), ranges()]) {
            let memory = memory();
            let wanted = Collected { written: written.to_vec(), discarded: discarded.to_vec() };
            let hasher = ContentHasher::keyed([3; 32]);
            let (mut encoder, nothing) = (PageEncoder::in_one_thread(), DeltaCache::default());
            let mut came = Vec::new();
            let done = read(&memory, &wanted, &mut |block, pages, encoded| {
                let expected = encoder.batch(Some(&hasher), &nothing, block, pages).unwrap();
                assert_eq!((encoded.encodings, encoded.ids), (expected.encodings, expected.ids));
                for page in pages {
                    came.push((GuestPage::new(block, page.number), *page.bytes));
                }
                Ok::<(), Full>(())
            });
            prop_assert!(done.is_ok());
            let mut expected = Vec::new();
            for (block, memory) in memory.iter().enumerate() {
                for page in written[block].iter().cloned().flatten() {
                    let mut bytes = [0; stillframe_page::PAGE];
                    memory.block().read_slowly(page, &mut bytes).unwrap();
                    expected.push((GuestPage::new(block, page), bytes));
                }
                let zeros = discarded[block].iter().cloned().flatten();
                expected.extend(zeros.map(|page| (GuestPage::new(block, page), [0; stillframe_page::PAGE])));
            }
            prop_assert!(came == expected);
        }
    }

    #[test]
    fn a_sink_that_fails_gets_nothing_more() {
        let memory = memory();
        let mut taken = 0;
        let done = read(&memory, &all_of(&memory), &mut |_, _, encoded| {
            taken += 1;
            assert!(encoded.encodings.contains(&PageEncoding::Zero));
            if taken == 3 { Err(Full) } else { Ok(()) }
        });
        assert!(matches!(done, Err(StreamingError::Sink(Full))), "{done:?}");
        assert_eq!(taken, 3);
    }

    #[test]
    fn pages_behind_those_that_cannot_be_read_do_not_come() {
        let memory = memory();
        let mut wanted = all_of(&memory);
        // The second block ends before.
        wanted.written[1] = vec![0..300, 1_000_000..1_000_001, 4000..4001];
        let mut pages_taken = 0;
        let done = read(&memory, &wanted, &mut |_, pages, _| {
            pages_taken += pages.len() as u64;
            Ok::<(), Full>(())
        });
        assert!(matches!(done, Err(StreamingError::Block(_))), "{done:?}");
        assert_eq!(pages_taken, 5000 + BATCH_PAGES);
    }

    /// The others would wait for its buffer.
    #[test]
    #[should_panic(expected = "overflow")]
    fn a_panic_of_one_thread_is_one_of_all() {
        let memory = memory();
        let mut wanted = all_of(&memory);
        wanted.written[0] = vec![0..300, 1 << 60..(1 << 60) + 1];
        let _ = read(&memory, &wanted, &mut |_, _, _| Ok::<(), Full>(()));
    }

    /// It does if it is started where the caller is confined to.
    #[test]
    fn no_thread_stays_on_few_processors_beside_an_idle_vm() {
        let anywhere = allowed("/proc/thread-self");
        let memory = memory();
        let mut vm = Command::new("sleep").arg("60").spawn().unwrap();
        // It has started when it has run.
        sleep(Duration::from_millis(50));
        let process = Process::open(vm.id().cast_signed()).unwrap();
        let blocks = memory.each_ref().map(FakeMemory::block);
        let hasher = ContentHasher::keyed([3; 32]);
        let parts = (&blocks.each_ref()[..], &all_of(&memory));
        let mut found = Vec::new();
        let done = read_ahead(&process, parts, &hasher, &mut |_, _, _| {
            sleep(Duration::from_millis(5));
            for task in fs::read_dir("/proc/self/task").unwrap() {
                let task = task.unwrap().path();
                let name = fs::read_to_string(task.join("comm")).unwrap_or_default();
                if name.trim() == "page reader" {
                    found.push(allowed(task.to_str().unwrap()));
                }
            }
            Ok::<(), Full>(())
        });
        vm.kill().unwrap();
        vm.wait().unwrap();
        assert!(done.is_ok(), "{done:?}");
        assert!(found.contains(&anywhere), "{anywhere:?}: {found:?}");
    }

    /// The processors of a task, by proc(5).
    fn allowed(task: &str) -> Option<String> {
        let status = fs::read_to_string(format!("{task}/status")).ok()?;
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Some(line.trim().to_owned())
    }
}
