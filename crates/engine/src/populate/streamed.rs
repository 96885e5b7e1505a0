//! Streamed populate: pages are written as they come over a connection, in whatever order; the last version counts.

use std::ops::Range;

use stillframe_page::PAGE;
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::delta::Delta;
use stillframe_page::encoding::Decoder;
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::process::Process;

use super::eager::{self, PopulateError};
use crate::connection::ConnectionError;
use crate::connection::batch::Batch;
use crate::memory::BlockShape;
use crate::memory::block::{Block, Guest};
use crate::memory::ranges::{self, PageRanges};
use crate::source::{SourceError, TakeMany};

/// Pages that are zeroed with one call: 1 MiB.
const ZEROED_AT_ONCE: usize = 256;

/// The memory of a fresh QEMU that pages are streamed into.
pub struct StreamedMemory<'b> {
    blocks: &'b [Block],
    shapes: &'b [BlockShape],
    /// The pages that QEMU itself put into each block.
    in_use: Vec<Vec<Range<u64>>>,
    /// Reads pages that were not sent, and are changed.
    base: Option<ReadBase<'b>>,
}

/// Reads these pages of the block with this number from elsewhere.
pub type ReadBase<'b> =
    &'b (dyn Fn(usize, Vec<u64>, TakeMany<'_, PopulateError>) -> Result<(), PopulateError> + Sync);

/// Writes the pages that come over one connection. No other connection has them.
pub struct StreamWriter<'m> {
    memory: &'m StreamedMemory<'m>,
    decoder: Decoder,
    /// Pages that were compressed, or that a delta changes.
    buffer: Vec<u8>,
    /// Pages that came, by block.
    received: Vec<DirtyBitmap>,
}

impl<'b> StreamedMemory<'b> {
    /// The memory of a QEMU that has not run, and into which no page was written yet.
    ///
    /// # Errors
    /// Its memory cannot be inspected.
    pub fn new(
        process: &Process,
        blocks: &'b [Block],
        shapes: &'b [BlockShape],
    ) -> Result<StreamedMemory<'b>, PopulateError> {
        let pagemap = Pagemap::open(process)?;
        let in_use = blocks.iter().map(|block| eager::in_use(&pagemap, block));
        Ok(StreamedMemory {
            blocks,
            shapes,
            in_use: in_use.collect::<Result<_, _>>()?,
            base: None,
        })
    }

    /// The memory of a QEMU that has not run, with content of which the other side knows: it sends all that differs, pages
    /// of zeros, too.
    pub fn seeded(blocks: &'b [Block], shapes: &'b [BlockShape]) -> StreamedMemory<'b> {
        StreamedMemory {
            blocks,
            shapes,
            in_use: vec![Vec::new(); blocks.len()],
            base: None,
        }
    }

    /// The other side may send changes of pages that are read in this way.
    pub fn with_base(self, base: ReadBase<'b>) -> StreamedMemory<'b> {
        let base = Some(base);
        StreamedMemory { base, ..self }
    }

    /// A writer of some of its pages.
    ///
    /// # Errors
    /// There is no memory for the decoder.
    pub fn writer(&self) -> Result<StreamWriter<'_>, PopulateError> {
        Ok(StreamWriter {
            memory: self,
            decoder: Decoder::new().map_err(connection)?,
            buffer: Vec::new(),
            received: none_of(self.shapes),
        })
    }

    /// All pages have come, over all connections: the others are zero, unless memory had content of which the other side
    /// knows. Returns those that came.
    ///
    /// # Errors
    /// Memory cannot be written.
    pub fn finish(&self, writers: Vec<Received>) -> Result<Vec<DirtyBitmap>, PopulateError> {
        let mut received = none_of(self.shapes);
        for of_one in &writers {
            for (all, some) in received.iter_mut().zip(&of_one.0) {
                all.union_with(some);
            }
        }
        let both = self.blocks.iter().zip(&self.in_use);
        // Memory that QEMU has touched beforehand (`prealloc=on`) is all in use, and the guest is stopped.
        let zeros = vec![0; ZEROED_AT_ONCE * PAGE];
        for ((block, in_use), received) in both.zip(&received) {
            let came: Vec<Range<u64>> = received.ranges().collect();
            for range in ranges::subtract(in_use, &came) {
                for first in range.clone().step_by(ZEROED_AT_ONCE) {
                    let pages = ZEROED_AT_ONCE.min((range.end - first) as usize);
                    block.write(first, &zeros[..pages * PAGE])?;
                }
            }
        }
        Ok(received)
    }
}

/// The pages that came over one connection.
#[derive(Debug)]
pub struct Received(Vec<DirtyBitmap>);

impl StreamWriter<'_> {
    /// Writes the pages of a batch ([`Batch`]).
    ///
    /// # Errors
    /// It is none, or memory cannot be written. Memory is worthless then.
    pub fn take(&mut self, payload: &[u8]) -> Result<(), PopulateError> {
        let batch = Batch::decode(payload, self.memory.shapes).map_err(connection)?;
        let block = &self.memory.blocks[batch.block];
        let received = &mut self.received[batch.block];
        let runs = batch.runs(&mut self.decoder, &mut self.buffer);
        let runs = runs.map_err(connection)?;
        let ranges = runs
            .iter()
            .map(|(first, bytes)| *first..first + (bytes.len() / PAGE) as u64);
        let ranges: Vec<Range<u64>> = ranges.collect();
        let contents: Vec<&[u8]> = runs.iter().map(|(_, bytes)| *bytes).collect();
        ranges
            .iter()
            .cloned()
            .for_each(|run| received.set_range(run));
        block.write_vectored(&contents, &ranges)?;
        for delta in &batch.deltas {
            let pages: Vec<u64> = delta.pages().map(u64::from).collect();
            let others = pages.iter().copied().filter(|&page| !received.get(page));
            let others: Vec<u64> = others.collect();
            if !others.is_empty() {
                let Some(base) = self.memory.base else {
                    let what = "a delta of a page that it has not sent".to_owned();
                    return Err(connection(ConnectionError::Malformed { what }));
                };
                base(batch.block, others.clone(), &|first, bytes| {
                    Ok(block.write(first, bytes)?)
                })?;
                others.iter().for_each(|&page| _ = received.set(page));
            }
            apply(delta, block, &pages, &mut self.buffer)?;
        }
        Ok(())
    }

    /// The blocks that it writes.
    pub fn shapes(&self) -> &[BlockShape] {
        self.memory.shapes
    }

    /// A list for pages of each block.
    pub fn no_pages(&self) -> PageRanges {
        vec![Vec::new(); self.memory.shapes.len()]
    }

    /// Writes these pages of a block, ascending, whose content was found here.
    ///
    /// # Errors
    /// Memory cannot be written. It is worthless then.
    pub fn write(
        &mut self,
        block: usize,
        pages: &[u64],
        contents: &mut [u8],
    ) -> Result<(), PopulateError> {
        let runs = ranges::runs(pages);
        let received = &mut self.received[block];
        runs.iter().cloned().for_each(|run| received.set_range(run));
        let parts: Vec<&[u8]> = ranges::split(contents, &runs)
            .into_iter()
            .map(|part| &*part)
            .collect();
        Ok(self.memory.blocks[block].write_vectored(&parts, &runs)?)
    }

    /// No more pages come.
    pub fn received(self) -> Received {
        Received(self.received)
    }
}

/// Brings these pages up to date: all of them are read, changed, and written with a few calls.
fn apply(
    delta: &Delta,
    block: &Block,
    pages: &[u64],
    buffer: &mut Vec<u8>,
) -> Result<(), PopulateError> {
    buffer.resize(pages.len() * PAGE, 0);
    let runs = ranges::runs(pages);
    block.read(Guest::Stopped, &mut ranges::split(buffer, &runs), &runs)?;
    for (index, bytes) in buffer.as_chunks_mut().0.iter_mut().enumerate() {
        delta.apply(index, bytes);
    }
    let parts: Vec<&[u8]> = ranges::split(buffer, &runs)
        .into_iter()
        .map(|part| &*part)
        .collect();
    Ok(block.write_vectored(&parts, &runs)?)
}

fn none_of(shapes: &[BlockShape]) -> Vec<DirtyBitmap> {
    let none = shapes.iter().map(|shape| DirtyBitmap::new(shape.pages));
    none.collect()
}

impl From<ConnectionError> for PopulateError {
    fn from(error: ConnectionError) -> PopulateError {
        PopulateError::Source(SourceError::from(error))
    }
}

/// An error of what came over the connection.
fn connection(error: impl Into<ConnectionError>) -> PopulateError {
    error.into().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::{FakeMemory, this_process};

    /// A hole between two ranges in use, and one of them longer than what is zeroed at once.
    #[test]
    fn what_qemu_had_there_and_did_not_come_is_zero() {
        let count = ZEROED_AT_ONCE + 40;
        let mut fillings = vec![3; count];
        fillings[10] = 0;
        let memory = FakeMemory::new("block", &fillings);
        let blocks = [memory.block()];
        let shapes = [BlockShape {
            name: "block".to_owned(),
            pages: count as u64,
        }];
        let streamed = StreamedMemory::new(&this_process(), &blocks, &shapes).unwrap();
        let came = |pages: &[u64]| {
            let mut came = DirtyBitmap::new(count as u64);
            pages.iter().for_each(|&page| _ = came.set(page));
            Received(vec![came])
        };
        let received = streamed.finish(vec![came(&[4, 20]), came(&[21, 290])]);
        let received: Vec<Range<u64>> = received.unwrap()[0].ranges().collect();
        let (pages, bytes) = ([4, 20, 21, 290], memory.bytes());
        assert_eq!(received, ranges::runs(&pages));
        let left = (0..count as u64).filter(|&page| bytes[page as usize * PAGE] == 3);
        assert_eq!(left.collect::<Vec<u64>>(), pages);
        let hole = ranges::runs(&[10]);
        assert!(!blocks[0].has_data(&hole).unwrap(), "a hole was filled");
    }
}
