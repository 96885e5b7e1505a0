//! Streamed populate: pages are written as they come over a connection, in whatever order; the last version counts.

use std::ops::Range;

use stillframe_page::PAGE;
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::encoding::Decoder;
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::process::Process;

use super::eager::{self, PopulateError};
use crate::connection::ConnectionError;
use crate::connection::batch::Batch;
use crate::memory::BlockShape;
use crate::memory::block::Block;
use crate::source::SourceError;

/// The memory of a fresh QEMU that pages are streamed into.
pub struct StreamedMemory<'b> {
    blocks: &'b [Block],
    shapes: &'b [BlockShape],
    decoder: Decoder,
    /// The pages that QEMU itself put into each block.
    in_use: Vec<Vec<Range<u64>>>,
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
            decoder: Decoder::new().map_err(connection)?,
            in_use: in_use.collect::<Result<_, _>>()?,
            received: shapes
                .iter()
                .map(|shape| DirtyBitmap::new(shape.pages))
                .collect(),
        })
    }

    /// Writes the pages of a batch ([`Batch`]).
    ///
    /// # Errors
    /// It is none, or memory cannot be written. Memory is worthless then.
    pub fn take(&mut self, payload: &[u8]) -> Result<(), PopulateError> {
        let batch = Batch::decode(payload, self.shapes).map_err(connection)?;
        let block = &self.blocks[batch.block];
        let received = &mut self.received[batch.block];
        batch.runs(&mut self.decoder, |first, bytes| {
            received.set_range(first..first + (bytes.len() / PAGE) as u64);
            block.write(first, bytes).map_err(PopulateError::from)
        })?;
        for delta in &batch.deltas {
            for (index, page) in delta.pages().enumerate() {
                if !received.get(page.into()) {
                    let what = "a delta of a page that it has not sent".to_owned();
                    return Err(connection(ConnectionError::Malformed { what }));
                }
                let mut bytes = [0; PAGE];
                block.read_slowly(page.into(), &mut bytes)?;
                delta.apply(index, &mut bytes);
                block.write(page.into(), &bytes)?;
            }
        }
        Ok(())
    }

    /// Pages that came, each counted once.
    pub fn pages(&self) -> u64 {
        self.received.iter().map(DirtyBitmap::count).sum()
    }

    /// All pages with content have come: the others are zero.
    ///
    /// # Errors
    /// Memory cannot be written.
    pub fn finish(&self) -> Result<(), PopulateError> {
        let both = self.blocks.iter().zip(&self.in_use);
        for ((block, in_use), received) in both.zip(&self.received) {
            let used = in_use.iter().cloned().flatten();
            for page in used.filter(|&page| !received.get(page)) {
                block.write(page, &[0; PAGE])?;
            }
        }
        Ok(())
    }
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
