//! The part of the server that the fuzz target reaches: all that it reads from a client, and its replies.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex};

use super::negotiation::{Session, negotiate};
use super::replies::Replies;
use super::requests::{Query, Subject, receive};
use super::{Export, answer};
use crate::ranges::Extent;
use crate::wire::{
    CHUNK_BYTES, Chunk, ChunkKind, Fields, SIMPLE_REPLY_BYTES, SimpleReply, decode_error,
    decode_status, is_simple_reply,
};

/// Length of the disk in bytes: more than one piece of a structured reply.
const DISK_BYTES: u64 = 512 << 10;
/// Length of each of its parts in bytes. Every second one is a hole.
const PART_BYTES: u64 = 48 << 10;
/// A part that cannot be read.
const BAD_PART: u64 = 4;

static CONTENT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let bytes = (0..DISK_BYTES).map(|at| match flags_of(at / PART_BYTES) {
        0 => (at % 251) as u8 + 1,
        _ => 0,
    });
    bytes.collect()
});

fn content_of(range: Range<u64>) -> &'static [u8] {
    &CONTENT[range.start as usize..range.end as usize]
}

/// The disk.
struct Disk;

impl Export for Disk {
    fn bytes(&self) -> u64 {
        DISK_BYTES
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let range = offset..offset + into.len() as u64;
        if (offset / PART_BYTES..=(range.end - 1) / PART_BYTES).contains(&BAD_PART) {
            return Err(io::Error::other("a bad part"));
        }
        into.copy_from_slice(content_of(range));
        Ok(())
    }

    fn allocation(&self, range: Range<u64>) -> io::Result<Vec<Extent>> {
        let parts = range.start / PART_BYTES..=(range.end - 1) / PART_BYTES;
        let extents = parts.map(|part| Extent {
            bytes: range.start.max(part * PART_BYTES)..(part + 1) * PART_BYTES,
            flags: flags_of(part),
        });
        Ok(extents.collect())
    }
}

fn flags_of(part: u64) -> u32 {
    match part % 2 {
        0 => 0,
        _ => Extent::HOLE | Extent::ZERO,
    }
}

/// A client whose bytes are given, and which takes all that is written.
struct Client<'b>(&'b [u8]);

impl Read for Client<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Client<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the server sends.
#[derive(Clone, Default)]
struct Sent(Arc<Mutex<Vec<u8>>>);

impl Sent {
    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.lock().expect("one thread"))
    }
}

impl Write for Sent {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("one thread").write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Serves a client that sends these bytes, and checks the reply to each of its requests for content or extents.
pub fn server(bytes: &[u8]) {
    let disk: Arc<dyn Export> = Arc::new(Disk);
    let exports = BTreeMap::from([("disk".to_owned(), disk)]);
    let mut client = Client(bytes);
    let Ok(Some(session)) = negotiate(&mut client, &exports) else {
        return;
    };
    let sent = Sent::default();
    let replies = Replies::new(sent.clone(), session.structured);
    let mut buffer = Vec::new();
    let ended = receive(client, &session, &replies, |query| {
        // Confirmations and refusals of other requests.
        drop(sent.take());
        answer(&query, &session, &replies, &mut buffer).expect("taken");
        check(&session, &query, &sent.take());
        true
    });
    drop(ended);
}

/// Checks that this is the one reply to a request, and that it is right.
fn check(session: &Session<'_>, query: &Query, reply: &[u8]) {
    let mut fields = Fields(reply);
    if !session.structured {
        let head = fields.take(SIMPLE_REPLY_BYTES).expect("a head");
        let head = head.try_into().expect("its length");
        assert!(is_simple_reply(head), "a simple reply");
        let head = SimpleReply::decode(head).expect("a reply");
        assert_eq!(head.cookie, query.cookie, "of this request");
        match head.error {
            0 => assert!(fields.0 == content_of(query.range.clone()), "the content"),
            _ => assert!(fields.0.is_empty(), "no bytes after an error"),
        }
        return;
    }
    let mut at = query.range.start;
    loop {
        let head = fields.take(CHUNK_BYTES).expect("a head");
        let chunk = Chunk::decode(head.try_into().expect("its length")).expect("a chunk");
        assert_eq!(chunk.cookie, query.cookie, "of this request");
        let payload = fields.take(chunk.length as usize).expect("a payload");
        let failed = chunk.kind == ChunkKind::Error;
        at = check_chunk(query, chunk.kind, payload, at);
        if chunk.done {
            let whole = query.subject != Subject::Content || at == query.range.end;
            assert!(failed || whole, "all bytes, or an error");
            break;
        }
        assert!(!failed, "an error is the end");
    }
    assert!(fields.0.is_empty(), "nothing after the last chunk");
}

/// Checks a chunk whose bytes begin at `at`, and returns where they end.
fn check_chunk(query: &Query, kind: ChunkKind, payload: &[u8], at: u64) -> u64 {
    let mut fields = Fields(payload);
    match kind {
        ChunkKind::Data | ChunkKind::Hole => {
            assert_eq!(query.subject, Subject::Content, "content was requested");
            assert_eq!(fields.u64().expect("an offset"), at, "the next bytes");
            let length = match kind {
                ChunkKind::Data => fields.0.len() as u64,
                _ => fields.u32().expect("a length").into(),
            };
            let end = at + length;
            assert!(length > 0 && end <= query.range.end, "of the range");
            match kind {
                ChunkKind::Data => assert!(fields.0 == content_of(at..end), "the content"),
                _ => assert!(content_of(at..end).iter().all(|&byte| byte == 0), "zeros"),
            }
            end
        }
        ChunkKind::BlockStatus => {
            let Subject::Allocation { extents_max } = query.subject else {
                panic!("content was requested");
            };
            let (_, ranges) = decode_status(payload).expect("extents");
            assert!(
                (1..=extents_max).contains(&ranges.len()),
                "too few, or more than the client takes"
            );
            ranges.iter().fold(at, |at, &(length, flags)| {
                let end = at + u64::from(length);
                assert!(length > 0 && end <= query.range.end, "of the range");
                assert_eq!(flags, flags_of(at / PART_BYTES), "their flags");
                end
            })
        }
        ChunkKind::Error => {
            decode_error(payload).expect("an error");
            at
        }
        ChunkKind::None => panic!("a reply without content"),
    }
}
