//! The client against a server that replies in every order and in pieces of every size, and against servers that lie.

use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::wire::{OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_BYTES, SERVER_MAGIC};

const LIMIT: Duration = Duration::from_secs(20);
const CONTEXT: &str = "qemu:dirty-bitmap:b";

const NONE: u16 = 0;
const DATA: u16 = 1;
const HOLE: u16 = 2;
const STATUS: u16 = 5;
const ERROR: u16 = (1 << 15) + 1;

/// A request as the server reads it: command, cookie, and a range of the disk.
type Request = (u16, u64, Range<usize>);

/// A server in a thread. `answer` replies to the requests that have come; it is called when no more come at once.
fn serve(
    bytes: usize,
    mut answer: impl FnMut(&mut UnixStream, Vec<Request>) + Send + 'static,
) -> (UnixStream, JoinHandle<()>) {
    let (near, mut far) = UnixStream::pair().expect("pair");
    let server = std::thread::spawn(move || {
        if negotiate(&mut far, bytes as u64, 0).is_none() {
            return;
        }
        loop {
            let mut requests = Vec::new();
            far.set_read_timeout(None).expect("timeout");
            loop {
                let mut request = [0; REQUEST_BYTES];
                if far.read_exact(&mut request).is_err() {
                    break;
                }
                let number = |at: usize, bytes: usize| {
                    let bytes = &request[at..at + bytes];
                    bytes
                        .iter()
                        .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
                };
                let (start, length) = (number(16, 8) as usize, number(24, 4) as usize);
                match number(6, 2) as u16 {
                    2 => return,
                    command => requests.push((command, number(8, 8), start..start + length)),
                }
                let soon = Some(Duration::from_millis(2));
                far.set_read_timeout(soon).expect("timeout");
            }
            if requests.is_empty() {
                return;
            }
            answer(&mut far, requests);
        }
    });
    (near, server)
}

/// The server's half of the negotiation.
fn negotiate(stream: &mut UnixStream, bytes: u64, flags: u16) -> Option<()> {
    let mut greeting = SERVER_MAGIC.to_be_bytes().to_vec();
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend(3u16.to_be_bytes());
    stream.write_all(&greeting).ok()?;
    stream.read_exact(&mut [0; 4]).ok()?;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head).ok()?;
        let option = u32::from_be_bytes(head[8..12].try_into().ok()?);
        let length = u32::from_be_bytes(head[12..].try_into().ok()?);
        stream.read_exact(&mut vec![0; length as usize]).ok()?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut out = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
            out.extend(option.to_be_bytes());
            out.extend(kind.to_be_bytes());
            out.extend((data.len() as u32).to_be_bytes());
            out.extend(data);
            stream.write_all(&out).ok()
        };
        if option == 10 {
            let mut context = 7u32.to_be_bytes().to_vec();
            context.extend(CONTEXT.as_bytes());
            reply(4, &context)?;
        }
        if option == 7 {
            let mut export = 0u16.to_be_bytes().to_vec();
            export.extend(bytes.to_be_bytes());
            export.extend(flags.to_be_bytes());
            reply(3, &export)?;
        }
        reply(1, &[])?;
        if option == 7 {
            return Some(());
        }
    }
}

fn chunk(stream: &mut UnixStream, kind: u16, cookie: u64, done: bool, payload: &[u8]) {
    let mut out = 0x668e_33efu32.to_be_bytes().to_vec();
    out.extend(u16::from(done).to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend((payload.len() as u32).to_be_bytes());
    out.extend(payload);
    // The client may have found a fault in an earlier one.
    let _ = stream.write_all(&out);
}

fn data(offset: usize, bytes: &[u8]) -> Vec<u8> {
    let mut payload = (offset as u64).to_be_bytes().to_vec();
    payload.extend(bytes);
    payload
}

fn open(socket: UnixStream) -> Client {
    Client::open(socket, "disk", &[CONTEXT], LIMIT).expect("opened")
}

type Pieces = Vec<(u64, Vec<u8>)>;

fn read(client: &mut Client, ranges: &[Range<u64>]) -> Result<Pieces, NbdError> {
    let mut pieces = Vec::new();
    client.read(ranges.iter().cloned(), &mut |offset, bytes: &[u8]| {
        pieces.push((offset, bytes.to_vec()));
        Ok::<(), NbdError>(())
    })?;
    Ok(pieces)
}

/// A disk: runs of a byte; a run of zeros is a hole.
fn disk(runs: &[(usize, u8)]) -> Vec<u8> {
    let runs = runs.iter();
    runs.flat_map(|&(length, byte)| std::iter::repeat_n(byte, length))
        .collect()
}

/// Replies to a read: pieces of at most `step` bytes, the last one first, holes where a piece is zero.
fn reply_in_pieces(stream: &mut UnixStream, disk: &[u8], step: usize, (_, cookie, range): Request) {
    let starts = range.clone().step_by(step).collect::<Vec<_>>();
    for &start in starts.iter().rev() {
        let piece = &disk[start..range.end.min(start + step)];
        match piece.iter().all(|&byte| byte == 0) {
            true => {
                let mut payload = (start as u64).to_be_bytes().to_vec();
                payload.extend((piece.len() as u32).to_be_bytes());
                chunk(stream, HOLE, cookie, false, &payload);
            }
            false => chunk(stream, DATA, cookie, false, &data(start, piece)),
        }
    }
    chunk(stream, NONE, cookie, true, &[]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// In whatever order and pieces replies come, `read` gives the same as a slice of the disk.
    #[test]
    fn reads_are_slices(
        runs in prop::collection::vec((1usize..200_000, 0u8..3), 1..12),
        wanted in prop::collection::vec((0.0f64..1.0, 0.0f64..1.0), 1..30),
        step in 1000usize..300_000,
        backwards in any::<bool>(),
    ) {
        let disk = disk(&runs);
        let content = disk.clone();
        let (socket, server) = serve(disk.len(), move |stream, mut requests| {
            if backwards {
                requests.reverse();
            }
            for one in requests {
                reply_in_pieces(stream, &content, step, one);
            }
        });
        let ranges = wanted.iter().map(|&(from, share)| {
            let start = (from * disk.len() as f64) as u64;
            let length = (share * (disk.len() as u64 - start) as f64) as u64;
            start..start + length
        });
        let ranges = ranges.collect::<Vec<_>>();
        let mut client = open(socket);
        let pieces = read(&mut client, &ranges).expect("read");
        client.close().expect("closed");
        server.join().expect("server");
        let expected = ranges.iter().filter(|range| !range.is_empty());
        let mut pieces = pieces.into_iter();
        for range in expected {
            let mut at = range.start;
            while at < range.end {
                let (offset, bytes) = pieces.next().expect("a piece");
                prop_assert_eq!(offset, at);
                at += bytes.len() as u64;
                prop_assert!(bytes.len() <= 256 << 10 && at <= range.end);
                prop_assert!(bytes == disk[offset as usize..at as usize]);
            }
        }
        prop_assert!(pieces.next().is_none());
    }
}

#[test]
fn extents_of_several_replies_are_joined() {
    let (socket, server) = serve(100, |stream, requests| {
        for (_, cookie, range) in requests {
            // A context that was not named, and 30 bytes at a time, the last of them behind the end.
            let mut other = 8u32.to_be_bytes().to_vec();
            other.extend([0; 8]);
            chunk(stream, STATUS, cookie, false, &other);
            let mut payload = 7u32.to_be_bytes().to_vec();
            payload.extend(30u32.to_be_bytes());
            payload.extend(u32::from(range.start >= 60).to_be_bytes());
            chunk(stream, STATUS, cookie, true, &payload);
        }
    });
    let mut client = open(socket);
    let extents = client.extents(0, 10..90).expect("extents");
    let expected = [(10..70, 0), (70..90, 1)];
    let expected = expected.map(|(bytes, flags)| Extent { bytes, flags });
    assert_eq!(extents, expected);
    assert!(client.extents(0, 10..101).is_err(), "behind the end");
    assert!(client.extents(1, 0..1).is_err(), "no such context");
    client.close().expect("closed");
    server.join().expect("server");
}

/// A range that is read.
const WANTED: Range<u64> = 50..150;

/// What a server replies to a read of [`WANTED`].
type Lie = (&'static str, fn(&mut UnixStream, u64));

#[test]
fn lies_are_errors() {
    let lies: [Lie; 10] = [
        ("missing", |to, cookie| {
            chunk(to, DATA, cookie, false, &data(50, &[1; 40]));
            chunk(to, DATA, cookie, true, &data(100, &[1; 50]));
        }),
        ("without its last", |to, cookie| {
            chunk(to, DATA, cookie, true, &data(50, &[1; 99]));
        }),
        ("twice", |to, cookie| {
            chunk(to, DATA, cookie, false, &data(50, &[1; 60]));
            chunk(to, DATA, cookie, true, &data(100, &[1; 50]));
        }),
        ("no request was for", |to, cookie| {
            chunk(to, DATA, cookie, true, &data(49, &[1; 100]));
        }),
        ("no request was for", |to, cookie| {
            let mut hole = 50u64.to_be_bytes().to_vec();
            hole.extend(101u32.to_be_bytes());
            chunk(to, HOLE, cookie, true, &hole);
        }),
        ("a chunk that no read is for", |to, cookie| {
            chunk(to, DATA, cookie, true, &data(50, &[1; 101]));
        }),
        ("a chunk of no bytes", |to, cookie| {
            chunk(to, DATA, cookie, false, &data(50, &[]));
        }),
        ("a reply to no request", |to, cookie| {
            chunk(to, DATA, cookie + 1, true, &data(50, &[1; 100]));
        }),
        ("too short", |to, cookie| {
            chunk(to, ERROR, cookie, true, &[0; 5]);
        }),
        ("a reply that begins", |to, _| {
            let _ = to.write_all(&[0x67; 20]);
        }),
    ];
    for (words, lie) in lies {
        let (socket, server) = serve(200, move |stream, requests| lie(stream, requests[0].1));
        let mut client = open(socket);
        let error = read(&mut client, std::slice::from_ref(&WANTED))
            .expect_err(words)
            .to_string();
        assert!(error.contains(words), "{words}: {error}");
        drop(client);
        server.join().expect("server");
    }
}

#[test]
fn an_error_of_the_server_names_the_place() {
    let (socket, server) = serve(200, |stream, requests| {
        let mut payload = 5u32.to_be_bytes().to_vec();
        payload.extend(7u16.to_be_bytes());
        payload.extend(b"no disk");
        chunk(stream, ERROR, requests[0].1, true, &payload);
    });
    let mut client = open(socket);
    let error = read(&mut client, std::slice::from_ref(&WANTED)).expect_err("refused");
    assert_eq!(
        error.to_string(),
        "the NBD server cannot read 100 bytes at 50 (no disk)"
    );
    let NbdError::Request { source, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(source.raw_os_error(), Some(5));
    drop(client);
    server.join().expect("server");
}

#[test]
fn a_context_must_be_there() {
    let (socket, server) = serve(200, |_, _| ());
    let error = Client::open(socket, "disk", &[CONTEXT, "base:allocation"], LIMIT);
    let error = error.expect_err("refused").to_string();
    assert_eq!(error, "the NBD export 'disk' has no 'base:allocation'");
    server.join().expect("server");
}

/// The export takes a flush, and ranges of zeros.
const TAKES_ALL: u16 = 1 << 2 | 1 << 6;

/// How a server confirms a write.
#[derive(Debug, Clone, Copy)]
enum Confirm {
    Simply,
    InAChunk,
}

/// A server that is written to. It confirms `held` requests at a time, the last one first. Returns the disk.
fn serve_writes(
    bytes: usize,
    held: usize,
    how: Confirm,
    error: u32,
) -> (UnixStream, JoinHandle<Vec<u8>>) {
    let (near, mut far) = UnixStream::pair().expect("pair");
    let server = std::thread::spawn(move || {
        let mut disk = vec![0xee; bytes];
        negotiate(&mut far, bytes as u64, TAKES_ALL).expect("negotiated");
        let mut cookies = Vec::new();
        let mut flushed = false;
        loop {
            let mut request = [0; REQUEST_BYTES];
            let soon = Some(Duration::from_millis(5)).filter(|_| !cookies.is_empty());
            far.set_read_timeout(soon).expect("timeout");
            let more = far.read_exact(&mut request).is_ok();
            if !more || cookies.len() == held {
                let silent = cookies.is_empty();
                for cookie in cookies.drain(..).rev() {
                    confirm(&mut far, how, cookie, error);
                }
                match (more, silent) {
                    (false, true) => return disk,
                    (false, false) => continue,
                    _ => {}
                }
            }
            far.set_read_timeout(None).expect("timeout");
            let field = |at: usize| u64::from_be_bytes(request[at..at + 8].try_into().expect("8"));
            let length = u32::from_be_bytes(request[24..].try_into().expect("4")) as usize;
            let place = field(16) as usize..field(16) as usize + length;
            match u16::from_be_bytes([request[6], request[7]]) {
                1 => far.read_exact(&mut disk[place]).expect("payload"),
                3 => assert!(cookies.is_empty(), "a flush before a write is confirmed"),
                6 => disk[place].fill(0),
                _ => {
                    assert!(flushed, "no flush at the end");
                    return disk;
                }
            }
            flushed = request[7] == 3;
            cookies.push(field(8));
        }
    });
    (near, server)
}

fn confirm(to: &mut UnixStream, how: Confirm, cookie: u64, error: u32) {
    match how {
        Confirm::Simply => {
            let mut out = 0x6744_6698u32.to_be_bytes().to_vec();
            out.extend(error.to_be_bytes());
            out.extend(cookie.to_be_bytes());
            let _ = to.write_all(&out);
        }
        Confirm::InAChunk if error == 0 => chunk(to, NONE, cookie, true, &[]),
        Confirm::InAChunk => {
            let mut payload = error.to_be_bytes().to_vec();
            payload.extend(0u16.to_be_bytes());
            chunk(to, ERROR, cookie, true, &payload);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever is written, in pieces of every size and confirmed in any order, is on the disk afterwards.
    #[test]
    fn writes_are_on_the_disk(
        runs in prop::collection::vec((1usize..3_000_000, 0u8..3), 1..8),
        held in 1usize..12,
        simply in any::<bool>(),
    ) {
        let content = disk(&runs);
        let how = if simply { Confirm::Simply } else { Confirm::InAChunk };
        let (socket, server) = serve_writes(content.len(), held, how, 0);
        let mut client = Client::open(socket, "disk", &[], LIMIT).expect("opened");
        let mut writer = client.writer().expect("writer");
        let mut at = 0;
        for (length, byte) in runs {
            let end = at + length;
            match byte {
                0 => writer.write_zeros(at as u64..end as u64).expect("zeros"),
                _ => writer.write(at as u64, &content[at..end]).expect("write"),
            }
            at = end;
        }
        writer.finish().expect("finished");
        client.close().expect("closed");
        prop_assert!(server.join().expect("server") == content);
    }
}

#[test]
fn a_write_that_fails_is_an_error() {
    for how in [Confirm::Simply, Confirm::InAChunk] {
        let (socket, server) = serve_writes(1 << 20, 1, how, 28);
        let mut client = Client::open(socket, "disk", &[], LIMIT).expect("opened");
        let mut writer = client.writer().expect("writer");
        writer.write(4096, &[1; 512]).expect("in flight");
        let error = writer.finish().expect_err("no space").to_string();
        assert_eq!(error, "the NBD server cannot write 512 bytes at 4096");
        let mut writer = client.writer().expect("writer");
        let behind = writer.write((1 << 20) - 1, &[1; 2]);
        assert!(matches!(behind, Err(NbdError::Outside { .. })));
        drop(client);
        server.join().expect("server");
    }
    let (socket, server) = serve(100, |_, _| {});
    let mut client = open(socket);
    assert!(matches!(client.writer(), Err(NbdError::NotWritable)));
    drop(client);
    server.join().expect("server");
}
