//! A connection as a sink: each batch is one frame.
//!
//! The receiver keeps every page that it gets. So a page that is unchanged since it was last sent costs nothing,
//! and a page that changed little is sent as a delta. Both need a delta cache of the pages as last *sent*.

use std::io::Write;
use std::ops::Sub;
use std::time::{Duration, Instant};

use stillframe_page::encoding::Compression;
use stillframe_page::hash::ContentHasher;

use super::{EncodedBatch, PageSink};
use crate::connection::batch::BatchWriter;
use crate::connection::compression::CompressionChoice;
use crate::connection::framing::Kind;
use crate::connection::image_pages::ImagePages;
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

/// Bytes that pages took on a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// All but the changes.
    pub whole: u64,
    /// Changes of pages.
    pub deltas: u64,
}

impl Sub for Sizes {
    type Output = Sizes;

    fn sub(self, before: Sizes) -> Sizes {
        Sizes {
            whole: self.whole - before.whole,
            deltas: self.deltas - before.deltas,
        }
    }
}

/// The pages of a VM on their way into a connection.
pub struct ConnectionPages<S> {
    connection: Connection<S>,
    writer: BatchWriter,
    /// How long the connection took, of what is not yet accounted for.
    sending: Duration,
    /// Bytes that are accounted for.
    accounted: u64,
    sizes: Sizes,
}

impl<S> ConnectionPages<S> {
    /// Into this connection, whose other side expects pages; compressed in this way.
    ///
    /// # Errors
    /// There is no memory for the compressor, or it has no such level.
    pub fn new(
        connection: Connection<S>,
        choice: CompressionChoice,
    ) -> Result<ConnectionPages<S>, ConnectionError> {
        Ok(ConnectionPages {
            accounted: connection.bytes_sent(),
            connection,
            writer: BatchWriter::new(choice)?,
            sending: Duration::ZERO,
            sizes: Sizes::default(),
        })
    }

    /// What pages took so far.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// How pages are compressed now.
    pub fn compression(&mut self) -> Compression {
        self.writer.compressor().compression()
    }

    /// All since the last call took this time, besides that for which the sender was held back.
    ///
    /// # Errors
    /// The compressor failed.
    pub fn account(&mut self, whole: Duration, held_back: Duration) -> Result<(), ConnectionError> {
        let sent = self.connection.bytes_sent();
        let bytes = sent - std::mem::replace(&mut self.accounted, sent);
        let sending = std::mem::take(&mut self.sending);
        let compressor = self.writer.compressor();
        compressor.sent(bytes, sending + held_back, whole + held_back)?;
        Ok(())
    }

    /// Sends where the content of pages is.
    ///
    /// # Errors
    /// The errors of [`Connection::send`].
    pub fn put_places(&mut self, pages: &ImagePages) -> Result<(), ConnectionError>
    where
        S: Write,
    {
        let begun = Instant::now();
        self.connection.send(Kind::ImagePages, &pages.encode())?;
        self.sending += begun.elapsed();
        Ok(())
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
            let payload = self.writer.finish()?;
            let deltas = batch.deltas.iter().map(|delta| delta.bytes.len() as u64);
            let deltas = deltas.sum::<u64>();
            self.sizes.deltas += deltas;
            self.sizes.whole += payload.map(<[u8]>::len).iter().sum::<usize>() as u64 - deltas;
            let begun = Instant::now();
            self.connection.send_parts(Kind::Pages, &payload)?;
            self.sending += begun.elapsed();
        }
        Ok(contents)
    }
}
