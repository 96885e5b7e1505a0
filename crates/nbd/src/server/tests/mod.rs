//! The server with our own client, and with a client that sends what a test wants.

mod hostile;
mod raw;

use std::sync::{Condvar, mpsc};
use std::thread::JoinHandle;

use proptest::prelude::*;

use super::*;
use crate::client::Client;
use raw::{Raw, Reply, contexts, info};

const LIMIT: Duration = Duration::from_secs(20);
const READ: (u16, u16) = (0, 0);
const DISCONNECT: (u16, u16) = (0, 2);
const EIO: u32 = 5;

/// Runs of a byte; a run of zeros is a hole.
struct Disk {
    runs: Vec<(u64, u8)>,
    /// Bytes that cannot be read.
    bad: Range<u64>,
    /// Reads of the first byte wait for this.
    gate: Gate,
}

#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn close(&self) {
        *self.closed.lock().expect("lock") = true;
    }

    fn open(&self) {
        *self.closed.lock().expect("lock") = false;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let closed = self.closed.lock().expect("lock");
        drop(self.opened.wait_while(closed, |closed| *closed));
    }
}

impl Disk {
    fn new(runs: &[(u64, u8)]) -> Disk {
        Disk {
            runs: runs.to_vec(),
            bad: 0..0,
            gate: Gate::default(),
        }
    }

    /// The runs in this range, with their bytes.
    fn runs(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, u8)> {
        let mut at = 0;
        self.runs.iter().filter_map(move |&(length, byte)| {
            let run = at..at + length;
            at = run.end;
            let run = run.start.max(range.start)..run.end.min(range.end);
            (run.start < run.end).then_some((run, byte))
        })
    }

    fn content(&self, range: Range<u64>) -> Vec<u8> {
        let runs = self.runs(range);
        runs.flat_map(|(run, byte)| std::iter::repeat_n(byte, run.count()))
            .collect()
    }

    /// What the client should say of a range.
    fn extents(&self, range: Range<u64>) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        for (bytes, byte) in self.runs(range) {
            let flags = if byte == 0 { 3 } else { 0 };
            match extents.last_mut() {
                Some(last) if last.flags == flags => last.bytes.end = bytes.end,
                _ => extents.push(Extent { bytes, flags }),
            }
        }
        extents
    }
}

impl Export for Disk {
    fn bytes(&self) -> u64 {
        self.runs.iter().map(|(length, _)| length).sum()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if offset == 0 {
            self.gate.pass();
        }
        let range = offset..offset + into.len() as u64;
        if self.bad.start < range.end && range.start < self.bad.end {
            return Err(io::Error::other("a bad block"));
        }
        into.copy_from_slice(&self.content(range));
        Ok(())
    }

    fn allocation(&self, range: Range<u64>) -> io::Result<Vec<Extent>> {
        if self.bad.contains(&range.start) {
            return Err(io::Error::other("a bad block"));
        }
        // Several with the same flags, and the last one behind the range.
        let runs = self.runs(range.start..self.bytes());
        let runs = runs.take_while(|(run, _)| run.start < range.end).take(5);
        Ok(runs
            .map(|(bytes, byte)| Extent {
                bytes,
                flags: if byte == 0 { 3 } else { 0 },
            })
            .collect())
    }
}

type Serving = JoinHandle<Result<Ended, NbdError>>;

/// Serves one connection to `export` in a thread.
fn serve(export: &Arc<impl Export + 'static>) -> (UnixStream, Serving) {
    serve_within(export, NEGOTIATION_LIMIT)
}

fn serve_within(export: &Arc<impl Export + 'static>, limit: Duration) -> (UnixStream, Serving) {
    let export: Arc<dyn Export> = Arc::clone(export) as _;
    let server = Server::new(BTreeMap::from([("disk".to_owned(), export)]));
    let server = server.negotiation_limit(limit);
    let (near, far) = UnixStream::pair().expect("pair");
    (near, thread::spawn(move || server.serve(far)))
}

fn ended(serving: Serving) -> Result<Ended, NbdError> {
    serving.join().expect("no panic")
}

fn open(socket: UnixStream) -> Client {
    Client::open(socket, "disk", &["base:allocation"], LIMIT).expect("opened")
}

fn read(client: &mut Client, range: Range<u64>) -> Result<Vec<u8>, NbdError> {
    let mut content = Vec::new();
    client.read([range], &mut |_, bytes: &[u8]| {
        content.extend(bytes);
        Ok::<(), NbdError>(())
    })?;
    Ok(content)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// What two clients read and learn at once is the content and the extents of the disk.
    #[test]
    fn clients_see_the_disk(
        runs in prop::collection::vec((1u64..300_000, 0u8..3), 1..12),
        wanted in prop::collection::vec((0.0f64..1.0, 0.0f64..1.0), 1..12),
    ) {
        let disk = Arc::new(Disk::new(&runs));
        let bytes = disk.bytes();
        let ranges = wanted.iter().map(|&(from, share)| {
            let start = (from * bytes as f64) as u64;
            start..start + (share * (bytes - start) as f64) as u64
        });
        let ranges = ranges.collect::<Vec<_>>();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let (socket, serving) = serve(&disk);
                    let mut client = open(socket);
                    assert_eq!(client.bytes(), bytes);
                    for range in &ranges {
                        let content = read(&mut client, range.clone()).expect("read");
                        assert!(content == disk.content(range.clone()), "{range:?}");
                        let extents = client.extents(0, range.clone()).expect("extents");
                        assert_eq!(extents, disk.extents(range.clone()));
                    }
                    client.close().expect("closed");
                    assert_eq!(ended(serving).expect("served"), Ended::Disconnected);
                });
            }
        });
    }
}

#[test]
fn a_hole_is_sent_as_one() {
    let disk = Arc::new(Disk::new(&[(256 << 10, 7), (256 << 10, 0), (100, 7)]));
    let (socket, serving) = serve(&disk);
    let mut raw = Raw::open(socket, true);
    raw.request(READ, 9, (256 << 10) - 1, (256 << 10) + 2);
    let place = |offset: u64| offset.to_be_bytes().to_vec();
    let chunk = |kind, done, payload: Vec<u8>| Reply::Chunk {
        kind,
        done,
        cookie: 9,
        payload,
    };
    let data = |at| [place(at), vec![7]].concat();
    assert_eq!(raw.reply(), chunk(1, false, data((256 << 10) - 1)));
    let hole = [place(256 << 10), (256u32 << 10).to_be_bytes().to_vec()].concat();
    assert_eq!(raw.reply(), chunk(2, false, hole));
    assert_eq!(raw.reply(), chunk(1, true, data(512 << 10)));
    drop(raw);
    assert_eq!(ended(serving).expect("served"), Ended::Closed);
}

#[test]
fn a_read_that_fails_is_an_error_and_the_connection_goes_on() {
    let mut disk = Disk::new(&[(1 << 20, 7)]);
    disk.bad = 700_000..700_001;
    let disk = Arc::new(disk);
    let (socket, serving) = serve(&disk);
    let mut client = open(socket);
    let error = read(&mut client, 600_000..800_000).expect_err("bad");
    let text = error.to_string();
    assert!(text.ends_with("(a bad block)"), "{text}");
    drop(client);
    ended(serving).expect("served");
    for structured in [false, true] {
        let (socket, serving) = serve(&disk);
        let mut raw = Raw::open(socket, structured);
        // The first pieces of a structured reply are on their way when the bad one is met.
        raw.request(READ, 1, 0, 1 << 20);
        if structured {
            for _ in 0..2 {
                let reply = raw.reply();
                assert!(matches!(
                    reply,
                    Reply::Chunk {
                        kind: 1,
                        done: false,
                        ..
                    }
                ));
            }
        }
        raw.expect_error(1, EIO);
        if structured {
            raw.request((0, 7), 2, 700_000, 1);
            raw.expect_error(2, EIO);
        }
        raw.request(READ, 3, 700_001, 5);
        match raw.reply() {
            Reply::Simple { error, cookie } => {
                assert_eq!((error, cookie, structured), (0, 3, false));
                assert_eq!(raw.bytes(5), [7; 5]);
            }
            Reply::Chunk {
                cookie, payload, ..
            } => {
                assert_eq!((cookie, &payload[8..], structured), (3, &[7; 5][..], true));
            }
        }
        raw.request(DISCONNECT, 4, 0, 0);
        assert_eq!(raw.rest(), []);
        assert_eq!(ended(serving).expect("served"), Ended::Disconnected);
    }
}

#[test]
fn a_simple_reply_is_whole_at_every_offset() {
    let disk = Arc::new(Disk::new(&[(33 << 20, 7), (1 << 20, 0), (32 << 20, 8)]));
    let (socket, serving) = serve(&disk);
    let mut raw = Raw::open(socket, false);
    for offset in [0, 1, (32 << 20) - 4096] {
        raw.request(READ, offset, offset, 32 << 20);
        let head = Reply::Simple {
            error: 0,
            cookie: offset,
        };
        assert_eq!(raw.reply(), head);
        let content = raw.bytes(32 << 20);
        assert!(content == disk.content(offset..offset + (32 << 20)));
    }
    raw.request(DISCONNECT, 0, 0, 0);
    assert_eq!(raw.rest(), []);
    ended(serving).expect("served");
}

#[test]
fn reads_that_wait_hold_up_no_others() {
    let disk = Arc::new(Disk::new(&[(1 << 20, 7)]));
    disk.gate.close();
    let (socket, serving) = serve(&disk);
    let mut raw = Raw::open(socket, true);
    for cookie in 0..3 {
        raw.request(READ, cookie, 0, 1);
    }
    for cookie in 3..100 {
        raw.request(READ, cookie, cookie, 1);
        let reply = raw.reply();
        assert!(matches!(reply, Reply::Chunk { cookie: of, .. } if of == cookie));
    }
    // The client disconnects, and still gets all replies.
    raw.request(DISCONNECT, 0, 0, 0);
    disk.gate.open();
    let mut cookies = [(); 3].map(|()| match raw.reply() {
        Reply::Chunk { cookie, .. } => cookie,
        reply => panic!("{reply:?}"),
    });
    cookies.sort_unstable();
    assert_eq!(cookies, [0, 1, 2]);
    assert_eq!(raw.rest(), []);
    assert_eq!(ended(serving).expect("served"), Ended::Disconnected);
}

#[test]
fn more_requests_than_the_queue_takes_stay_in_the_socket() {
    let disk = Arc::new(Disk::new(&[(1 << 20, 7)]));
    disk.gate.close();
    let (socket, serving) = serve(&disk);
    let mut raw = Raw::open(socket, true);
    let soon = Some(Duration::from_millis(100));
    raw.0.set_write_timeout(soon).expect("limit");
    let mut sent = 0;
    // A request is one message to the kernel, which takes it whole or not at all.
    while (&raw.0)
        .write(&raw::encode_request(READ, sent, 0, 1))
        .is_ok()
    {
        sent += 1;
        assert!(sent < 100_000, "the server takes any number of requests");
    }
    disk.gate.open();
    let mut cookies = (0..sent).map(|_| match raw.reply() {
        Reply::Chunk { cookie, .. } => cookie,
        reply => panic!("{reply:?}"),
    });
    let mut cookies = cookies.by_ref().collect::<Vec<_>>();
    cookies.sort_unstable();
    assert!(cookies.into_iter().eq(0..sent), "one reply to each");
    drop(raw);
    assert_eq!(ended(serving).expect("served"), Ended::Closed);
}

#[test]
fn an_export_that_panics_closes_the_connection() {
    struct Broken;
    impl Export for Broken {
        fn bytes(&self) -> u64 {
            1 << 20
        }
        fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            panic!("a fault of the export, wanted by this test");
        }
        fn allocation(&self, _: Range<u64>) -> io::Result<Vec<Extent>> {
            Ok(Vec::new())
        }
    }
    let (socket, serving) = serve(&Arc::new(Broken));
    let mut raw = Raw::open(socket, true);
    // Its extents are none, which is an error.
    raw.request((0, 7), 1, 0, 1);
    raw.expect_error(1, EIO);
    for cookie in 0..100 {
        raw.request(READ, cookie, 0, 1);
    }
    let mut end = Vec::new();
    // The kernel reports a reset if requests were not read.
    let _ = io::Read::read_to_end(&mut raw.0, &mut end);
    assert_eq!(end, []);
    assert!(serving.join().is_err(), "the fault is the caller's");
}

#[test]
fn an_export_is_described_and_opened_in_each_way() {
    let disk = Arc::new(Disk::new(&[(12345, 7)]));
    let (socket, serving) = serve(&disk);
    let mut raw = Raw::greet(socket, 1);
    // Its length, and flags: there are some, read-only, flush, several connections.
    let described = [&[0, 0][..], &12345u64.to_be_bytes(), &[1, 7]].concat();
    let block_size = [&[0, 3, 0, 0, 0, 1, 0, 0, 16, 0][..], &[2, 0, 0, 0]].concat();
    let expected = [(3, described.clone()), (3, block_size), (1, vec![])];
    assert_eq!(raw.option(6, &info("disk", &[3, 1])), expected);
    let listed = raw.option(3, &[]);
    assert_eq!(listed, [(2, raw::text(b"disk")), (1, vec![])]);
    let context = [&[0, 0, 0, 0][..], b"base:allocation"].concat();
    let all: [&[&[u8]]; 3] = [&[], &[b"base:"], &[b"x:", b"base:allocation"]];
    for queries in all {
        let listed = raw.option(9, &contexts("disk", queries));
        assert_eq!(listed, [(4, context.clone()), (1, vec![])]);
    }
    assert_eq!(raw.option(9, &contexts("disk", &[b"x:y"])).len(), 1);
    // The oldest way, with its zeros.
    raw.send(&raw::encode_option(1, b"disk"));
    assert_eq!(raw.bytes(10), described[2..]);
    assert_eq!(raw.bytes(124), [0; 124]);
    raw.request((0, 3), 5, 0, 0);
    let done = Reply::Simple {
        error: 0,
        cookie: 5,
    };
    assert_eq!(raw.reply(), done);
    drop(raw);
    assert_eq!(ended(serving).expect("served"), Ended::Closed);
}

#[test]
fn a_client_may_leave_before_it_opens_an_export() {
    let disk = Arc::new(Disk::new(&[(1, 7)]));
    let leave: [fn(UnixStream); 4] = [
        drop,
        |socket| drop(Raw::greet(socket, 3)),
        |socket| {
            let mut raw = Raw::greet(socket, 3);
            assert_eq!(raw.option(2, &[]), [(1, vec![])]);
            assert_eq!(raw.rest(), []);
        },
        |socket| {
            let mut raw = Raw::greet(socket, 3);
            raw.send(&raw::encode_option(1, b"another"));
            assert_eq!(raw.rest(), []);
        },
    ];
    for leave in leave {
        let (socket, serving) = serve(&disk);
        leave(socket);
        assert_eq!(ended(serving).expect("served"), Ended::Unopened);
    }
}

#[test]
fn a_caller_ends_a_connection_by_a_clone_of_its_socket() {
    let disk: Arc<dyn Export> = Arc::new(Disk::new(&[(1, 7)]));
    let server = Server::new(BTreeMap::from([("disk".to_owned(), disk)]));
    let (near, far) = UnixStream::pair().expect("pair");
    let clone = far.try_clone().expect("clone");
    let (outcome, outcomes) = mpsc::channel();
    thread::spawn(move || outcome.send(server.serve(far)));
    let mut raw = Raw::open(near, true);
    clone.shutdown(Shutdown::Both).expect("shut down");
    let outcome = outcomes.recv_timeout(LIMIT).expect("it ends");
    assert_eq!(outcome.expect("served"), Ended::Closed);
    assert_eq!(raw.rest(), []);
}
