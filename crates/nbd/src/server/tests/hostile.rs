//! Clients that lie, stop in the middle, or are silent: an error reply or the end of their connection.

use super::raw::{Raw, Reply, contexts, encode_option, encode_request, info, text};
use super::*;

const INVALID: u32 = 0x8000_0003;
const UNKNOWN: u32 = 0x8000_0006;
const UNSUPPORTED: u32 = 0x8000_0001;
const EPERM: u32 = 1;
const EINVAL: u32 = 22;

fn disk() -> Arc<Disk> {
    Arc::new(Disk::new(&[(100_000, 7), (100_000, 0)]))
}

#[test]
fn options_that_are_wrong_are_refused_and_the_negotiation_goes_on() {
    let (socket, serving) = serve(&disk());
    let mut raw = Raw::greet(socket, 3);
    let huge = u32::MAX.to_be_bytes();
    let long_name = "x".repeat(4097);
    let wrong = [
        // No TLS, no extended headers, and options that do not exist.
        (UNSUPPORTED, 5, vec![]),
        (UNSUPPORTED, 11, vec![]),
        (UNSUPPORTED, 0, vec![1; 65536]),
        (UNSUPPORTED, u32::MAX, vec![]),
        // Data where there is none.
        (INVALID, 3, vec![0]),
        (INVALID, 8, vec![0]),
        // Contexts before structured replies.
        (INVALID, 10, contexts("disk", &[])),
        // A name of 4 GiB, too long, cut off, missing.
        (INVALID, 7, huge.to_vec()),
        (INVALID, 6, [&huge[..], &[0; 60_000]].concat()),
        (INVALID, 7, info(&long_name, &[])),
        (INVALID, 7, vec![0, 0, 0, 5, b'd', b'i']),
        (INVALID, 7, vec![]),
        (INVALID, 7, vec![0, 0]),
        // More information wanted than named, and less.
        (INVALID, 7, [text(b"disk"), vec![0, 2, 0, 3]].concat()),
        (INVALID, 7, [info("disk", &[3]), vec![0]].concat()),
        (INVALID, 9, [text(b"disk"), huge.to_vec()].concat()),
        (INVALID, 9, [contexts("disk", &[b"a"]), vec![0]].concat()),
        (INVALID, 9, text(b"disk")),
        // Exports that are not there, and a name that is not UTF-8.
        (UNKNOWN, 7, info("", &[])),
        (UNKNOWN, 6, info("Disk", &[])),
        (UNKNOWN, 9, contexts("disk\0", &[])),
        (UNKNOWN, 7, [text(&[0xff, 0xfe]), vec![0, 0]].concat()),
    ];
    for (kind, option, data) in wrong {
        assert_eq!(
            raw.outcome(option, &data),
            kind,
            "option {option}: {data:?}"
        );
    }
    assert_eq!(raw.outcome(8, &[]), 1);
    assert_eq!(raw.outcome(10, &contexts("another", &[])), UNKNOWN);
    assert_eq!(raw.outcome(7, &info("disk", &[])), 1);
    // No context was selected.
    raw.request((0, 7), 1, 0, 4096);
    raw.expect_error(1, EINVAL);
    drop(raw);
    assert_eq!(ended(serving).expect("served"), Ended::Closed);
}

/// An export, and queries for its contexts.
type Selection<'s> = (&'s str, &'s [&'s [u8]]);

#[test]
fn contexts_are_of_the_last_selection_and_of_its_export() {
    let one: Arc<dyn Export> = disk();
    let other = Arc::clone(&one);
    let exports = [("disk".to_owned(), one), ("other".to_owned(), other)];
    let server = Arc::new(Server::new(BTreeMap::from(exports)));
    let base: &[&[u8]] = &[b"base:allocation"];
    let selections: [&[Selection<'_>]; 4] = [
        &[("disk", base), ("disk", &[])],
        &[("other", base)],
        &[("disk", base), ("nothing", base)],
        &[("disk", &[b"base:", b"base:allocation2"])],
    ];
    for selection in selections {
        let (near, far) = UnixStream::pair().expect("pair");
        let server = Arc::clone(&server);
        let serving = thread::spawn(move || server.serve(far));
        let mut raw = Raw::greet(near, 3);
        raw.option(8, &[]);
        for (name, queries) in selection {
            raw.option(10, &contexts(name, queries));
        }
        assert_eq!(raw.outcome(7, &info("disk", &[])), 1);
        raw.request((0, 7), 1, 0, 4096);
        raw.expect_error(1, EINVAL);
        drop(raw);
        ended(serving).expect("served");
    }
}

#[test]
fn what_is_no_message_ends_the_connection() {
    type Send = fn(&mut Raw);
    let sent: [(&str, bool, Send); 6] = [
        ("client flags", false, |_| ()),
        ("an option that begins", true, |raw| raw.send(&[b'X'; 16])),
        ("an option of 4294967295 bytes", true, |raw| {
            raw.send(&[b"IHAVEOPT", &7u32.to_be_bytes()[..], &[0xff; 4]].concat());
        }),
        ("more than 256 options", true, |raw| {
            raw.send(&encode_option(77, &[]).repeat(256));
        }),
        ("a request that begins", true, |raw| {
            raw.send(&encode_option(7, &info("disk", &[])));
            raw.send(&[0x25; 28]);
        }),
        ("a write of 33554433 bytes", true, |raw| {
            raw.send(&encode_option(7, &info("disk", &[])));
            raw.request((0, 1), 1, 0, (32 << 20) + 1);
        }),
    ];
    for (words, flags, send) in sent {
        let (socket, serving) = serve(&disk());
        let mut raw = Raw::greet(socket, if flags { 3 } else { 4 });
        send(&mut raw);
        let error = ended(serving).expect_err(words).to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn requests_that_are_wrong_are_refused_and_the_connection_goes_on() {
    for structured in [false, true] {
        let (socket, serving) = serve(&disk());
        let mut raw = Raw::open(socket, structured);
        let refused: [(u32, (u16, u16), u64, u32); 16] = [
            // Of bytes that are not on the disk.
            (EINVAL, READ, 200_000, 1),
            (EINVAL, READ, 199_999, 2),
            (EINVAL, READ, u64::MAX, u32::MAX),
            (EINVAL, READ, u64::MAX - 4, 4),
            (EINVAL, READ, 0, u32::MAX),
            (EINVAL, (0, 7), 0, 200_001),
            (EINVAL, (0, 7), u64::MAX, u32::MAX),
            (EINVAL, (0, 7), 0, 0),
            // With flags that are not offered.
            (EINVAL, (4, 0), 0, 1),
            (EINVAL, (1, 7), 0, 1),
            // No such commands.
            (EINVAL, (0, 5), 0, 1),
            (EINVAL, (0, 0xffff), 0, 1),
            // Changes.
            (EPERM, (0, 4), 0, 1),
            (EPERM, (0, 6), 0, u32::MAX),
            (EPERM, (0, 8), u64::MAX, 0),
            (EPERM, (1, 4), 0, 1),
        ];
        for (cookie, (error, command, offset, length)) in (0..).zip(refused) {
            raw.request(command, cookie, offset, length);
            raw.expect_error(cookie, error);
        }
        // The payload of a write is no request, wherever its bytes arrive.
        let mut write = encode_request((0, 1), 50, 0, 100_000);
        write.extend(encode_request(DISCONNECT, 51, 0, 0).repeat(4000));
        write.truncate(28 + 100_000);
        raw.send(&write);
        raw.expect_error(50, EPERM);
        // Nothing is read, and nothing is flushed.
        for command in [READ, (0, 3)] {
            raw.request(command, 52, 200_000, 0);
            let done = match structured {
                true => Reply::Chunk {
                    kind: 0,
                    done: true,
                    cookie: 52,
                    payload: vec![],
                },
                false => Reply::Simple {
                    error: 0,
                    cookie: 52,
                },
            };
            assert_eq!(raw.reply(), done);
        }
        raw.request(DISCONNECT, 53, 0, 0);
        assert_eq!(raw.rest(), []);
        assert_eq!(ended(serving).expect("served"), Ended::Disconnected);
    }
}

#[test]
fn a_read_is_limited_also_on_a_large_disk() {
    let (socket, serving) = serve(&Arc::new(Disk::new(&[(1 << 40, 0)])));
    let mut raw = Raw::open(socket, true);
    raw.request(READ, 1, 0, (32 << 20) + 1);
    raw.expect_error(1, EINVAL);
    raw.request((8, 7), 2, 1, u32::MAX);
    let payload = [1, u32::MAX, 3].map(u32::to_be_bytes).concat();
    let reply = Reply::Chunk {
        kind: 5,
        done: true,
        cookie: 2,
        payload,
    };
    assert_eq!(raw.reply(), reply);
    drop(raw);
    ended(serving).expect("served");
}

/// The error of a negotiation that took longer than 200 ms.
fn expect_too_slow(serving: Serving) {
    let NbdError::Io(error) = ended(serving).expect_err("too slow") else {
        panic!("another error");
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(error.to_string(), "no export was opened within 200ms");
}

#[test]
fn silence_and_slow_bytes_end_the_negotiation() {
    let limit = Duration::from_millis(200);
    let begin = Instant::now();
    let (silent, serving) = serve_within(&disk(), limit);
    let (slow, serving_slow) = serve_within(&disk(), limit);
    let dripping = thread::spawn(move || {
        let raw = Raw::greet(slow, 3);
        // Each byte comes soon after the last one, and the option has 60,000.
        for byte in encode_option(77, &[1; 60_000]) {
            if (&raw.0).write_all(&[byte]).is_err() {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        raw
    });
    expect_too_slow(serving);
    expect_too_slow(serving_slow);
    assert!(begin.elapsed() < LIMIT / 2);
    drop((silent, dripping.join().expect("no panic")));
}

#[test]
fn a_client_that_takes_no_replies_ends_the_negotiation() {
    let export: Arc<dyn Export> = disk();
    let server = Server::new(BTreeMap::from([("x".repeat(4000), export)]));
    let server = server.negotiation_limit(Duration::from_millis(200));
    let (near, far) = UnixStream::pair().expect("pair");
    let serving = thread::spawn(move || server.serve(far));
    let mut raw = Raw::greet(near, 3);
    raw.send(&encode_option(3, &[]).repeat(256));
    expect_too_slow(serving);
}

#[test]
fn no_time_limit_is_left_after_the_negotiation() {
    let (socket, serving) = serve_within(&disk(), Duration::from_millis(300));
    let mut raw = Raw::open(socket, true);
    thread::sleep(Duration::from_millis(400));
    raw.request(READ, 1, 0, 1);
    assert!(matches!(raw.reply(), Reply::Chunk { done: true, .. }));
    drop(raw);
    assert_eq!(ended(serving).expect("served"), Ended::Closed);
}

#[test]
fn a_client_may_stop_at_every_byte() {
    let mut session = 3u32.to_be_bytes().to_vec();
    session.extend(encode_option(8, &[]));
    session.extend(encode_option(10, &contexts("disk", &[b"base:allocation"])));
    session.extend(encode_option(7, &info("disk", &[3])));
    session.extend(encode_request(READ, 1, 0, 200_000));
    session.extend(encode_request((0, 7), 2, 0, 200_000));
    session.extend(encode_request((0, 1), 3, 0, 10));
    session.extend([0; 10]);
    session.extend(encode_request(DISCONNECT, 4, 0, 0));
    for length in 0..session.len() {
        let (socket, serving) = serve(&disk());
        let mut raw = Raw(socket);
        raw.send(&session[..length]);
        drop(raw);
        // How it ends depends on how far the replies have come.
        let end = ended(serving);
        assert!(!matches!(end, Ok(Ended::Disconnected)), "{length}: {end:?}");
    }
}

#[test]
fn replies_that_nobody_takes_do_not_keep_a_connection() {
    // The client dies, or sends what is no request, while all workers wait to send.
    for dies in [true, false] {
        let (socket, serving) = serve(&Arc::new(Disk::new(&[(64 << 20, 7)])));
        let mut raw = Raw::open(socket, true);
        for cookie in 0..8 {
            raw.request(READ, cookie, cookie << 20, 32 << 20);
        }
        assert!(matches!(raw.reply(), Reply::Chunk { done: false, .. }));
        if dies {
            drop(raw);
            assert_eq!(ended(serving).expect("served"), Ended::Closed);
        } else {
            raw.send(&[0x25; 28]);
            let error = ended(serving).expect_err("no request").to_string();
            assert!(error.contains("a request that begins"), "{error}");
        }
    }
}
