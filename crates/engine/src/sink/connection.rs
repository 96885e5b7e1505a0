//! A connection as a sink: each batch is one frame.
//!
//! The receiver keeps every page that it gets. So a page that is unchanged since it was last sent costs nothing,
//! and a page that changed little is sent as a delta. Both need a delta cache of the pages as last *sent*.

use std::io::Write;

use stillframe_page::hash::ContentHasher;

use super::{EncodedBatch, PageSink};
use crate::connection::batch::BatchWriter;
use crate::connection::framing::Kind;
use crate::connection::{Connection, ConnectionError};
use crate::encoding::page_encoder::PageEncoding;
use crate::memory::Page;
use crate::memory::outcome::Content;

/// Sets the content ids of pages that are transferred apart from those of any repository.
const CONTENT_KEY: [u8; 32] = *b"stillframe connection page v0001";

/// Makes the content ids by which sender and receiver compare pages. They find faults, not forgeries.
pub fn transfer_hasher() -> ContentHasher {
    ContentHasher::keyed(CONTENT_KEY)
}

/// The pages of a VM on their way into a connection.
pub struct ConnectionPages<S> {
    connection: Connection<S>,
    writer: BatchWriter,
}

impl<S> ConnectionPages<S> {
    /// Into this connection, whose other side expects pages.
    ///
    /// # Errors
    /// There is no memory for the compressor.
    pub fn new(connection: Connection<S>) -> Result<ConnectionPages<S>, ConnectionError> {
        Ok(ConnectionPages {
            connection,
            writer: BatchWriter::new()?,
        })
    }

    /// The connection, for a message between pages.
    pub fn connection(&mut self) -> &mut Connection<S> {
        &mut self.connection
    }

    /// Bytes sent over the connection so far.
    pub fn bytes_sent(&self) -> u64 {
        self.connection.bytes_sent()
    }
}

impl<S: Write> PageSink for ConnectionPages<S> {
    type Error = ConnectionError;

    /// The other side compares no ids.
    fn hasher(&self) -> Option<&ContentHasher> {
        None
    }

    fn put(&mut self, batch: EncodedBatch<'_>) -> Result<Vec<Content>, ConnectionError> {
        let mut contents = Vec::with_capacity(batch.pages.len());
        self.writer.begin(batch.block);
        for (&Page { number, bytes }, encoding) in batch.pages.iter().zip(batch.encodings) {
            contents.push(match encoding {
                PageEncoding::Zero => Content::Zero,
                PageEncoding::Same => Content::Known,
                PageEncoding::Delta | PageEncoding::Unknown | PageEncoding::TooMuch => Content::New,
            });
            match encoding {
                PageEncoding::Same | PageEncoding::Delta => {}
                PageEncoding::Zero | PageEncoding::Unknown | PageEncoding::TooMuch => {
                    self.writer.page(number, bytes)?;
                }
            }
        }
        for delta in &batch.deltas {
            self.writer.delta(&delta.bytes)?;
        }
        if contents.iter().any(|&content| content != Content::Known) {
            self.connection.send(Kind::Pages, self.writer.finish()?)?;
        }
        Ok(contents)
    }
}
