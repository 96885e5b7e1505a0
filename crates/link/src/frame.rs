//! Frames over one byte stream: bounded by their kind, and checked.
//!
//! ```text
//!   length u32 | kind u8 | payload | check, 16 bytes          little-endian
//! ```
//!
//! The check is a hash (XXH3, 128 bits) over the frame's number in its direction, its header and its payload. A frame that
//! is damaged, lost, doubled or out of order is therefore noticed. It is no protection against a hostile peer: that is TLS.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::marker::PhantomData;

use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

/// Length and kind.
const HEADER_BYTES: usize = 5;
const CHECK_BYTES: usize = 16;
/// Sets these hashes apart from all others.
const CHECK_SEED: u64 = u64::from_le_bytes(*b"sf frame");
/// Bytes of a payload that are awaited at first, before more memory is used for it.
const EXPECTED_MAX: usize = 64 << 10;
/// Room for a payload that grows. The kernel gives memory when it is written.
const ROOM_MAX: usize = 2 << 20;

/// The kinds of frames of one protocol.
pub trait FrameKind: Copy + Eq {
    /// The kind with this number; none for a number that the protocol does not use.
    fn from_number(number: u8) -> Option<Self>;

    /// The number in the frame's header.
    fn number(self) -> u8;

    /// Upper bound on the payload, in bytes. Less than 2^32.
    fn bytes_max(self) -> usize;
}

/// Why no more frames can be exchanged.
#[derive(Debug, Error)]
pub enum FrameError {
    /// The stream failed.
    #[error("the connection failed while {doing}")]
    Io {
        /// The action that failed.
        doing: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The stream has ended.
    #[error("the other side has closed the connection; its own output says why")]
    Closed,
    /// No bytes came, or none were taken, within the stream's timeout.
    #[error("the other side has not answered in time: it hangs, or its machine is overloaded")]
    Silent,
    /// A frame is not the one that was sent.
    #[error("a frame of the connection is damaged: {what}")]
    Damaged {
        /// The part that does not fit.
        what: &'static str,
    },
}

/// A frame that was received.
#[derive(Debug)]
pub struct Frame<K> {
    /// The kind of the payload.
    pub kind: K,
    /// The content.
    pub payload: Vec<u8>,
}

/// One end of a stream of frames. After an error it is of no more use.
#[derive(Debug)]
pub struct FrameStream<S, K> {
    stream: S,
    kinds: PhantomData<K>,
    sent: u64,
    received: u64,
    bytes_sent: u64,
    /// The memory of a payload that was given back.
    spare: Vec<u8>,
}

impl<S, K> FrameStream<S, K> {
    /// The stream.
    pub fn stream(&self) -> &S {
        &self.stream
    }

    /// The same, to be waited for. Nothing may be read or written.
    pub fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Frames over a stream on which nothing was sent yet. The stream's timeouts apply.
    pub fn new(stream: S) -> FrameStream<S, K> {
        FrameStream {
            stream,
            kinds: PhantomData,
            sent: 0,
            received: 0,
            bytes_sent: 0,
            spare: Vec::new(),
        }
    }

    /// Gives back the payload of a frame that was received: the next long one is received into its memory, which the kernel
    /// need not find and clear again.
    pub fn give_back(&mut self, payload: Vec<u8>) {
        self.spare = payload;
    }

    /// Bytes sent so far, frames' own included.
    pub fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }
}

/// The check of the frame with this number; the payload may be in several parts.
fn check_of(number: u64, header: &[u8; HEADER_BYTES], payload: &[&[u8]]) -> [u8; CHECK_BYTES] {
    let mut hash = Xxh3::with_seed(CHECK_SEED);
    hash.update(&number.to_le_bytes());
    hash.update(header);
    payload.iter().for_each(|part| hash.update(part));
    hash.digest128().to_le_bytes()
}

/// Writes all of these, in as few calls as the stream allows.
fn write_all(stream: &mut impl Write, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
    // Parts of no bytes go first: a call with nothing to write looks as if nothing could be written.
    IoSlice::advance_slices(&mut parts, 0);
    while !parts.is_empty() {
        match stream.write_vectored(parts) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut parts, written),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl<S: Write, K: FrameKind> FrameStream<S, K> {
    /// Sends a frame. The payload is not longer than [`FrameKind::bytes_max`].
    ///
    /// # Errors
    /// The stream failed, or the other side does not take it.
    pub fn send(&mut self, kind: K, payload: &[u8]) -> Result<(), FrameError> {
        self.send_parts(kind, &[payload])
    }

    /// The same for a payload in several parts.
    ///
    /// # Errors
    /// Those of [`FrameStream::send`].
    pub fn send_parts(&mut self, kind: K, payload: &[&[u8]]) -> Result<(), FrameError> {
        let length: usize = payload.iter().map(|part| part.len()).sum();
        if length > kind.bytes_max() {
            let what = "a frame that is put together is too long";
            return Err(FrameError::Damaged { what });
        }
        // Shorter than 2^32.
        let [a, b, c, d] = (length as u32).to_le_bytes();
        let header = [a, b, c, d, kind.number()];
        let check = check_of(self.sent, &header, payload);
        let all = [&header[..]].into_iter().chain(payload.iter().copied());
        let mut all: Vec<IoSlice<'_>> = all.chain([&check[..]]).map(IoSlice::new).collect();
        let sent = write_all(&mut self.stream, &mut all);
        let sent = sent.and_then(|()| self.stream.flush());
        sent.map_err(|source| failed("sending", source))?;
        self.sent += 1;
        self.bytes_sent += (HEADER_BYTES + length + CHECK_BYTES) as u64;
        Ok(())
    }
}

impl<S: Read, K: FrameKind> FrameStream<S, K> {
    /// Waits for the next frame.
    ///
    /// # Errors
    /// The stream failed or ended, nothing came, or the received bytes are no frame.
    pub fn receive(&mut self) -> Result<Frame<K>, FrameError> {
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header)?;
        let [a, b, c, d, number] = header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        let unknown = FrameError::Damaged {
            what: "its kind is unknown",
        };
        let kind = K::from_number(number).ok_or(unknown)?;
        if length > kind.bytes_max() {
            return Err(FrameError::Damaged {
                what: "it is longer than its kind allows",
            });
        }
        let payload = self.payload(length)?;
        let mut check = [0; CHECK_BYTES];
        self.fill(&mut check)?;
        if check_of(self.received, &header, &[&payload]) != check {
            return Err(FrameError::Damaged {
                what: "its content does not have the hash that came with it",
            });
        }
        self.received += 1;
        Ok(Frame { kind, payload })
    }

    /// Receives this number of bytes.
    fn payload(&mut self, length: usize) -> Result<Vec<u8>, FrameError> {
        let mut payload = match length > EXPECTED_MAX {
            true => std::mem::take(&mut self.spare),
            false => Vec::new(),
        };
        // Not copied while it grows.
        payload.reserve_exact(length.min(ROOM_MAX).saturating_sub(payload.len()));
        let mut filled = 0;
        while filled < length {
            // Memory grows with what really comes. What is there already is overwritten.
            let room = payload.len().max(2 * filled).max(EXPECTED_MAX);
            payload.resize(room.min(length), 0);
            self.fill(&mut payload[filled..])?;
            filled = payload.len();
        }
        Ok(payload)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), FrameError> {
        let read = self.stream.read_exact(bytes);
        read.map_err(|source| failed("receiving", source))
    }
}

fn failed(doing: &'static str, source: io::Error) -> FrameError {
    match source.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
            FrameError::Closed
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => FrameError::Silent,
        _ => FrameError::Io { doing, source },
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Payload;

    const PAYLOAD_BYTES_MAX: usize = 4 * EXPECTED_MAX;

    impl FrameKind for Payload {
        fn from_number(number: u8) -> Option<Payload> {
            (number == 2).then_some(Payload)
        }

        fn number(self) -> u8 {
            2
        }

        fn bytes_max(self) -> usize {
            PAYLOAD_BYTES_MAX
        }
    }

    fn sent(payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut frames = FrameStream::new(&mut bytes);
        for payload in payloads {
            frames.send(Payload, payload).unwrap();
        }
        bytes
    }

    /// The payloads received until an error, and whether the error is the end of the stream.
    fn received(bytes: &[u8]) -> (Vec<Vec<u8>>, bool) {
        let mut frames = FrameStream::<_, Payload>::new(Cursor::new(bytes));
        let mut payloads = Vec::new();
        loop {
            match frames.receive() {
                Ok(frame) => {
                    payloads.push(frame.payload.clone());
                    frames.give_back(frame.payload);
                }
                Err(error) => return (payloads, matches!(error, FrameError::Closed)),
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

    /// A payload longer than the one whose memory it gets, and a shorter one.
    #[test]
    fn long_frames_come_as_they_were_sent_and_damage_is_noticed() {
        let lengths = [
            EXPECTED_MAX,
            EXPECTED_MAX + 1,
            PAYLOAD_BYTES_MAX,
            PAYLOAD_BYTES_MAX / 2,
        ];
        let payloads: Vec<Vec<u8>> = (1..)
            .zip(lengths)
            .map(|(factor, length)| (0..length).map(|at| (at * factor) as u8).collect())
            .collect();
        let bytes = sent(&payloads);
        assert!(received(&bytes) == (payloads.clone(), true));
        let ends = [1, 2, 3, 4].map(|count| sent(&payloads[..count]).len());
        let overhead = HEADER_BYTES + CHECK_BYTES;
        assert_eq!(ends[1] - ends[0], EXPECTED_MAX + 1 + overhead);
        for at in [ends[0] + 1, ends[0] + HEADER_BYTES + 9, ends[1] - 1] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(received(&damaged).0 == payloads[..1]);
        }
    }

    #[test]
    fn a_length_beyond_its_kind_allocates_nothing() {
        let mut bytes = Vec::from(u32::MAX.to_le_bytes());
        bytes.push(Payload.number());
        let mut frames = FrameStream::<_, Payload>::new(Cursor::new(bytes));
        assert!(matches!(frames.receive(), Err(FrameError::Damaged { .. })));
    }

    #[test]
    fn a_payload_beyond_its_kind_is_not_sent() {
        let mut bytes = Vec::new();
        let mut frames = FrameStream::new(&mut bytes);
        let payload = vec![0; PAYLOAD_BYTES_MAX + 1];
        assert!(frames.send(Payload, &payload).is_err());
        assert!(bytes.is_empty());
    }
}
