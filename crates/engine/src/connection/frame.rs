//! Frames over one byte stream: bounded by their kind, and checked.
//!
//! ```text
//!   length u32 | kind u8 | payload | check, 16 bytes          little-endian
//! ```
//!
//! The check is a hash over the frame's number in its direction, its header and its payload. A frame that is
//! damaged, lost, doubled or out of order is therefore noticed. It is no protection against a hostile peer.

use std::io::{ErrorKind, Read, Write};

use stillframe_page::hash::ContentHasher;

use super::ConnectionError;

/// Length and kind.
const HEADER_BYTES: usize = 5;
/// The frame's number, which is hashed and not sent.
const NUMBER_BYTES: usize = 8;
const CHECK_BYTES: usize = 16;
/// Sets these hashes apart from all others.
const CHECK_KEY: [u8; 32] = *b"stillframe connection frame v001";

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
}

impl Kind {
    fn from_number(number: u8) -> Option<Kind> {
        [Kind::Control, Kind::Pages, Kind::DeviceState, Kind::Ids]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }

    /// Upper bound on the payload, in bytes.
    pub fn bytes_max(self) -> usize {
        match self {
            // The record of a VM with thousands of arguments; pages that may have content, in ranges.
            Kind::Control => 4 << 20,
            // 2048 pages of noise, and the bytes that are written beside each.
            Kind::Pages => 10 << 20,
            Kind::DeviceState => 1 << 30,
            Kind::Ids => 1 << 20,
        }
    }
}

/// A frame that was received.
#[derive(Debug)]
pub struct Frame {
    /// The kind of the payload.
    pub kind: Kind,
    /// That.
    pub payload: Vec<u8>,
}

/// One end of a connection. After an error it is of no more use.
#[derive(Debug)]
pub struct Connection<S> {
    stream: S,
    hasher: ContentHasher,
    sent: u64,
    received: u64,
    bytes_sent: u64,
    /// The frame that is put together.
    out: Vec<u8>,
}

impl<S> Connection<S> {
    /// A connection over a stream on which nothing was sent yet. The stream's timeouts apply.
    pub fn new(stream: S) -> Connection<S> {
        Connection {
            stream,
            hasher: ContentHasher::keyed(CHECK_KEY),
            sent: 0,
            received: 0,
            bytes_sent: 0,
            out: Vec::new(),
        }
    }

    /// Bytes sent so far, frames' own included.
    pub fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    fn check(&self, frame: &[u8]) -> [u8; CHECK_BYTES] {
        let mut check = [0; CHECK_BYTES];
        check.copy_from_slice(&self.hasher.id(frame).0[..CHECK_BYTES]);
        check
    }
}

impl<S: Write> Connection<S> {
    /// Sends a frame. The payload is not longer than [`Kind::bytes_max`].
    ///
    /// # Errors
    /// The stream failed, or the other side does not take it.
    pub fn send(&mut self, kind: Kind, payload: &[u8]) -> Result<(), ConnectionError> {
        if payload.len() > kind.bytes_max() {
            let what = "a frame that is put together is too long";
            return Err(ConnectionError::Damaged { what });
        }
        let mut frame = std::mem::take(&mut self.out);
        frame.clear();
        frame.extend(self.sent.to_le_bytes());
        // Shorter than 2^32.
        frame.extend((payload.len() as u32).to_le_bytes());
        frame.push(kind as u8);
        frame.extend(payload);
        let check = self.check(&frame);
        frame.extend(check);
        let sent = self.stream.write_all(&frame[NUMBER_BYTES..]);
        let sent = sent.and_then(|()| self.stream.flush());
        sent.map_err(|source| failed("sending", source))?;
        self.sent += 1;
        self.bytes_sent += (frame.len() - NUMBER_BYTES) as u64;
        self.out = frame;
        Ok(())
    }
}

impl<S: Read> Connection<S> {
    /// Waits for the next frame.
    ///
    /// # Errors
    /// The stream failed or ended, nothing came, or the received bytes are no frame.
    pub fn receive(&mut self) -> Result<Frame, ConnectionError> {
        let mut header = [0; HEADER_BYTES];
        let read = self.stream.read_exact(&mut header);
        read.map_err(|source| failed("receiving", source))?;
        let [a, b, c, d, number] = header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        let unknown = ConnectionError::Damaged {
            what: "its kind is unknown",
        };
        let kind = Kind::from_number(number).ok_or(unknown)?;
        if length > kind.bytes_max() {
            return Err(ConnectionError::Damaged {
                what: "it is longer than its kind allows",
            });
        }
        let mut frame = Vec::from(self.received.to_le_bytes());
        frame.extend(header);
        // Memory grows with what really comes.
        let rest = (length + CHECK_BYTES) as u64;
        let read = self.stream.by_ref().take(rest).read_to_end(&mut frame);
        if read.map_err(|source| failed("receiving", source))? as u64 != rest {
            return Err(ConnectionError::Closed);
        }
        let (content, check) = frame.split_at(frame.len() - CHECK_BYTES);
        if self.check(content) != check {
            return Err(ConnectionError::Damaged {
                what: "its content does not have the hash that came with it",
            });
        }
        self.received += 1;
        frame.truncate(frame.len() - CHECK_BYTES);
        frame.drain(..NUMBER_BYTES + HEADER_BYTES);
        Ok(Frame {
            kind,
            payload: frame,
        })
    }
}

fn failed(doing: &'static str, source: std::io::Error) -> ConnectionError {
    match source.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
            ConnectionError::Closed
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => ConnectionError::Silent,
        _ => ConnectionError::Io { doing, source },
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    fn sent(payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut connection = Connection::new(&mut bytes);
        for payload in payloads {
            connection.send(Kind::Pages, payload).unwrap();
        }
        bytes
    }

    /// The payloads received until an error, and whether the error is the end of the stream.
    fn received(bytes: &[u8]) -> (Vec<Vec<u8>>, bool) {
        let mut connection = Connection::new(Cursor::new(bytes));
        let mut payloads = Vec::new();
        loop {
            match connection.receive() {
                Ok(frame) => payloads.push(frame.payload),
                Err(error) => return (payloads, matches!(error, ConnectionError::Closed)),
            }
        }
    }

    proptest! {
        #[test]
        fn frames_come_as_they_were_sent(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8)) {
            prop_assert_eq!(received(&sent(&payloads)), (payloads, true));
        }

        /// Any byte changed: the frames before it come, and no other.
        #[test]
        fn a_changed_byte_is_noticed(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..6),
            at in any::<prop::sample::Index>(),
            flip in 1..=255u8,
        ) {
            let mut bytes = sent(&payloads);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let mut end = 0;
            let whole = payloads.iter().take_while(|payload| {
                end += HEADER_BYTES + payload.len() + CHECK_BYTES;
                end <= at
            }).count();
            prop_assert_eq!(received(&bytes).0, &payloads[..whole]);
        }

        /// Frames in another order, doubled or left out.
        #[test]
        fn another_order_is_noticed(order in prop::collection::vec(0..4usize, 1..8)) {
            let payloads: Vec<Vec<u8>> = (0..4).map(|number| vec![number; 9]).collect();
            let frames: Vec<Vec<u8>> = (1..=4)
                .map(|count| sent(&payloads[..count]).split_off(sent(&payloads[..count - 1]).len()))
                .collect();
            let bytes: Vec<u8> = order.iter().flat_map(|&frame| frames[frame].clone()).collect();
            let in_order = order.iter().enumerate().take_while(|(place, frame)| place == *frame).count();
            prop_assert_eq!(received(&bytes).0, &payloads[..in_order]);
        }
    }

    #[test]
    fn a_length_beyond_its_kind_allocates_nothing() {
        let mut bytes = Vec::from(u32::MAX.to_le_bytes());
        bytes.push(Kind::Control as u8);
        let mut connection = Connection::new(Cursor::new(bytes));
        assert!(matches!(
            connection.receive(),
            Err(ConnectionError::Damaged { .. })
        ));
    }

    #[test]
    fn a_payload_beyond_its_kind_is_not_sent() {
        let mut bytes = Vec::new();
        let mut connection = Connection::new(&mut bytes);
        let payload = vec![0; Kind::Ids.bytes_max() + 1];
        assert!(connection.send(Kind::Ids, &payload).is_err());
        assert!(bytes.is_empty());
    }
}
