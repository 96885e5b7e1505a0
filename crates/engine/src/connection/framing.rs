//! The kinds of frames that two engines exchange, and how long each may be.

use std::io::{self, Read, Write};
use std::time::Duration;

use stillframe_link::{Closer, Frame, FrameKind, FrameStream, Stream};

use super::ConnectionError;
use super::image_pages::PAYLOAD_BYTES_MAX;

/// The kind of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A message in JSON.
    Control = 1,
    /// A batch of pages.
    Pages = 2,
    /// The device state of the VM.
    DeviceState = 3,
    /// Content ids of pages.
    Ids = 4,
    /// Bytes between two QEMUs, of which one copies a disk from the other: NBD.
    Disk = 5,
    /// Where the content of pages is in files that both hosts reach.
    ImagePages = 6,
}

impl FrameKind for Kind {
    fn from_number(number: u8) -> Option<Kind> {
        let kinds = [
            Kind::Control,
            Kind::Pages,
            Kind::DeviceState,
            Kind::Ids,
            Kind::Disk,
            Kind::ImagePages,
        ];
        kinds.into_iter().find(|kind| kind.number() == number)
    }

    fn number(self) -> u8 {
        self as u8
    }

    fn bytes_max(self) -> usize {
        match self {
            // The record of a VM with thousands of arguments; pages that may have content, in ranges.
            Kind::Control => 4 << 20,
            // 2048 pages of noise, and the bytes that are written beside each.
            Kind::Pages => 10 << 20,
            // Compressed, and hardly ever longer than before.
            Kind::DeviceState => 257 << 20,
            Kind::Ids | Kind::Disk => 1 << 20,
            Kind::ImagePages => PAYLOAD_BYTES_MAX,
        }
    }
}

/// One end of a connection. After an error it is of no more use.
#[derive(Debug)]
pub struct Connection<S> {
    frames: FrameStream<S, Kind>,
}

impl<S> Connection<S> {
    /// A connection over a stream on which nothing was sent yet. The stream's timeouts apply.
    pub fn new(stream: S) -> Connection<S> {
        Connection {
            frames: FrameStream::new(stream),
        }
    }

    /// Gives back the payload of a message, for the next one.
    pub fn give_back(&mut self, payload: Vec<u8>) {
        self.frames.give_back(payload);
    }

    /// Bytes sent so far, frames' own included.
    pub fn bytes_sent(&self) -> u64 {
        self.frames.bytes_sent()
    }
}

impl Connection<Stream> {
    /// How long the other side may be silent, or take nothing, from here on.
    pub fn limit_silence(&self, silence_max: Duration) {
        self.frames.stream().limit_silence(silence_max);
    }

    /// Waits for something to be received, or the end of the connection, for at most `limit`.
    pub fn has_input(&mut self, limit: Duration) -> bool {
        self.frames.stream_mut().has_input(limit)
    }

    /// What closes it from another thread.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn closer(&self) -> io::Result<Closer> {
        self.frames.stream().closer()
    }
}

impl<S: Write> Connection<S> {
    /// Sends a frame. The payload is not longer than its kind allows.
    ///
    /// # Errors
    /// The errors of [`FrameStream::send`].
    pub fn send(&mut self, kind: Kind, payload: &[u8]) -> Result<(), ConnectionError> {
        Ok(self.frames.send(kind, payload)?)
    }

    /// The same for a payload in several parts.
    ///
    /// # Errors
    /// The errors of [`FrameStream::send_parts`].
    pub fn send_parts(&mut self, kind: Kind, payload: &[&[u8]]) -> Result<(), ConnectionError> {
        Ok(self.frames.send_parts(kind, payload)?)
    }
}

impl<S: Read> Connection<S> {
    /// Waits for the next frame.
    ///
    /// # Errors
    /// The errors of [`FrameStream::receive`].
    pub fn receive(&mut self) -> Result<Frame<Kind>, ConnectionError> {
        Ok(self.frames.receive()?)
    }
}
