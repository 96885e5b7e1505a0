//! Both seams over a connection, without a VM: what arrives is compared with a model of the memory.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread;

use proptest::prelude::*;
use stillframe_link::Frame;
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::encoding::{Decoder, Kind as PageKind};
use stillframe_page::hash::ContentId;
use stillframe_page::{GuestPage, PAGE, PageRequest, ReadOrder};

use super::batch::{Batch, BatchWriter};
use super::compression::CompressionChoice;
use super::framing::Kind;
use super::message::{Control, Message};
use super::{Connection, ConnectionError};
use crate::encoding::delta_cache::DeltaCache;
use crate::encoding::page_encoder::PageEncoder;
use crate::fakes::source::FakeSource;
use crate::memory::{BlockShape, Page};
use crate::sink::connection::{ConnectionPages, transfer_hasher};
use crate::sink::page_stream::PageStream;
use crate::source::based::BasedBlock;
use crate::source::connection::{FetchSession, Lane};
use crate::source::{PageFetcher, PageSource, SourceError};

const PAGES: u64 = 300;

type Content = Box<[u8; PAGE]>;
type Memory = BTreeMap<u64, Content>;

fn shapes() -> Vec<BlockShape> {
    let shape = |name: &str, pages| BlockShape {
        name: name.to_owned(),
        pages,
    };
    vec![shape("first", 4), shape("second", PAGES)]
}

/// Zeros, or noise of which the first bytes depend on the version.
fn content(page: u64, version: u8) -> Content {
    let mut bytes = Box::new([0; PAGE]);
    if version.is_multiple_of(5) {
        return bytes;
    }
    let mut word = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for chunk in bytes.as_chunks_mut::<8>().0 {
        word ^= word << 13;
        word ^= word >> 7;
        *chunk = word.to_le_bytes();
    }
    bytes[..usize::from(version)].fill(version);
    bytes
}

/// What a receiver has after these frames.
fn received(bytes: &[u8]) -> Memory {
    let mut connection = Connection::new(Cursor::new(bytes));
    let (mut decoder, mut buffer) = (Decoder::new().unwrap(), Vec::new());
    let mut memory = Memory::new();
    while let Ok(message) = connection.receive_message() {
        let Message::Pages(payload) = message else {
            panic!("{}", message.what());
        };
        let shapes = shapes();
        let batch = Batch::decode(&payload, &shapes).unwrap();
        assert_eq!(batch.block, 1);
        for (first, bytes) in batch.runs(&mut decoder, &mut buffer).unwrap() {
            for (page, bytes) in (first..).zip(bytes.as_chunks::<PAGE>().0) {
                memory.insert(page, Box::new(*bytes));
            }
        }
        for delta in &batch.deltas {
            for (index, page) in delta.pages().enumerate() {
                delta.apply(index, memory.get_mut(&page.into()).unwrap());
            }
        }
    }
    memory
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any number of iterations, pages that change much, little and not at all, a cache that forgets.
    #[test]
    fn the_last_version_of_each_page_arrives(
        iterations in prop::collection::vec(prop::collection::btree_map(0..PAGES, any::<u8>(), 0..80), 1..6),
        budget in prop_oneof![Just(0u64), Just(40 << 12), Just(1 << 30)],
    ) {
        let mut bytes = Vec::new();
        let mut sink = ConnectionPages::new(Connection::new(&mut bytes), CompressionChoice::Auto).unwrap();
        let mut stream = PageStream::new(&shapes());
        stream.pages_may_come_twice(&shapes());
        let mut encoder = PageEncoder::default();
        let mut cache = DeltaCache::default();
        cache.set_budget(budget);
        let mut expected = Memory::new();
        for versions in &iterations {
            let contents: Memory = versions.iter().map(|(&page, &version)| (page, content(page, version))).collect();
            let pages: Vec<Page<'_>> = contents.iter().map(|(&number, bytes)| Page { number, bytes }).collect();
            stream.put(&mut sink, &mut encoder, &cache, 1, &pages).unwrap();
            for &Page { number, bytes } in &pages {
                cache.put(GuestPage::new(1, number), bytes);
            }
            expected.extend(contents);
        }
        drop(sink);
        prop_assert_eq!(stream.counts.captured, expected.len() as u64);
        prop_assert!(received(&bytes) == expected);
    }

    /// Every page comes as it is at the sender, known zeros are never requested, and each way to fetch agrees.
    #[test]
    fn fetched_pages_are_those_of_the_sender(
        versions in prop::collection::btree_map(0..PAGES, any::<u8>(), 1..60),
        wanted in prop::collection::btree_set(0..PAGES, 1..40),
    ) {
        let memory: Memory = versions.iter().map(|(&page, &version)| (page, content(page, version))).collect();
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let server = scope.spawn(|| serve(theirs, &memory));
            let (second, their_second) = UnixStream::pair().unwrap();
            let other_server = scope.spawn(|| serve(their_second, &memory));
            let session = Arc::new(FetchSession::new(&shapes()));
            session.add(Lane::Demand, Connection::new(ours)).unwrap();
            session.add(Lane::Bulk, Connection::new(second)).unwrap();
            let mut content = DirtyBitmap::new(PAGES);
            for &page in memory.keys() {
                content.set(page);
            }
            let source = session.source(1, content, Vec::new());
            let wanted: Vec<u64> = wanted.iter().copied().filter(|&page| !source.is_known_zero(page)).collect();
            let expected: Memory = wanted.iter().map(|&page| (page, memory[&page].clone())).collect();
            let found = Mutex::new(Memory::new());
            let take = |first: u64, bytes: &[u8]| {
                for (page, bytes) in (first..).zip(bytes.as_chunks::<PAGE>().0) {
                    found.lock().unwrap().insert(page, Box::new(*bytes));
                }
                Ok::<(), SourceError>(())
            };
            source.fetch_many(wanted.clone(), 4, &|_| true, &take).unwrap();
            assert!(std::mem::take(&mut *found.lock().unwrap()) == expected);
            if let Some((&page, neighbours)) = wanted.split_first() {
                let mut fetcher = source.fetcher().unwrap();
                for order in [ReadOrder::RequestedFirst, ReadOrder::Ascending] {
                    let request = PageRequest { page, neighbours, order };
                    fetcher.fetch(&source, request, &mut |first, bytes| take(first, bytes)).unwrap();
                    assert!(std::mem::take(&mut *found.lock().unwrap()) == expected);
                }
            }
            drop(source);
            drop(session);
            server.join().unwrap();
            other_server.join().unwrap();
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// A page is the sender's if that may have content of it, else the checkpoint's; and it has the id of the pause.
    #[test]
    fn pages_come_from_where_they_are(
        versions in prop::collection::btree_map(0..PAGES, any::<u8>(), 0..60),
        fillings in prop::collection::vec(0..4u8, PAGES as usize),
        wrong in 0..PAGES,
    ) {
        let memory: Memory = versions.iter().map(|(&page, &version)| (page, content(page, version))).collect();
        let stored = |page: u64| Box::new([fillings[page as usize]; PAGE]);
        let there = |page: u64| memory.get(&page).cloned().unwrap_or_else(|| stored(page));
        let all: Memory = (0..PAGES).map(|page| (page, there(page))).collect();
        let ids = |wrong: Option<u64>| {
            let of = |(&page, bytes): (&u64, &Content)| match wrong == Some(page) {
                true => Some(ContentId([7; 32])),
                false => (**bytes != [0; PAGE]).then(|| transfer_hasher().id(&bytes[..])),
            };
            vec![vec![None; 4], all.iter().map(of).collect()]
        };
        for wrong in [None, Some(wrong)] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (second, their_second) = UnixStream::pair().unwrap();
            thread::scope(|scope| {
                scope.spawn(|| serve(theirs, &memory));
                scope.spawn(|| serve(their_second, &memory));
                let session = Arc::new(FetchSession::new(&shapes()));
                session.add(Lane::Demand, Connection::new(ours)).unwrap();
                session.add(Lane::Bulk, Connection::new(second)).unwrap();
                session.expect(ids(wrong));
                let mut content = DirtyBitmap::new(PAGES);
                memory.keys().for_each(|&page| _ = content.set(page));
                let base = FakeSource { fillings: fillings.clone(), failing: None };
                let source = BasedBlock::new(session.source(1, content, Vec::new()), Some(base));
                let found = Mutex::new(Memory::new());
                let take = |first: u64, bytes: &[u8]| {
                    for (page, bytes) in (first..).zip(bytes.as_chunks::<PAGE>().0) {
                        found.lock().unwrap().insert(page, Box::new(*bytes));
                    }
                    Ok::<(), SourceError>(())
                };
                let others: Result<Vec<u64>, SourceError> = (0..PAGES)
                    .filter_map(|page| match source.is_zero(page) {
                        Ok(true) => None,
                        Ok(false) => Some(Ok(page)),
                        Err(error) => Some(Err(error)),
                    })
                    .collect();
                let fetched = others.and_then(|pages| {
                    let fetched = source.fetch_many(pages.clone(), 4, &|_| true, &take);
                    fetched.map(|()| pages)
                });
                assert_eq!(fetched.is_err(), wrong.is_some(), "one page is not that of the pause");
                let Ok(pages) = fetched else { return };
                let expected: Memory = pages.iter().map(|&page| (page, all[&page].clone())).collect();
                assert!(*found.lock().unwrap() == expected);
                assert!((0..PAGES).all(|page| pages.contains(&page) || *all[&page] == [0; PAGE]));
                let mut fetcher = source.fetcher().unwrap();
                for (index, &page) in pages.iter().enumerate().step_by(16) {
                    found.lock().unwrap().clear();
                    let neighbours = &pages[index + 1..pages.len().min(index + 9)];
                    let request = PageRequest { page, neighbours, order: ReadOrder::Ascending };
                    fetcher.fetch(&source, request, &mut |first, bytes| take(first, bytes)).unwrap();
                    let came = found.lock().unwrap();
                    assert!(came.contains_key(&page));
                    assert!(came.iter().all(|(page, bytes)| all[page] == *bytes));
                }
            });
        }
    }
}

/// What a receiver makes of these bytes as the payload of a device state.
fn device_state(payload: Vec<u8>) -> Result<Vec<u8>, ConnectionError> {
    let kind = Kind::DeviceState;
    match Message::decode(Frame { kind, payload })? {
        Message::DeviceState(state) => Ok(state),
        other => panic!("{}", other.what()),
    }
}

proptest! {
    #[test]
    fn a_device_state_comes_as_it_was(zeros in 0..5000usize, rest in prop::collection::vec(any::<u8>(), 0..300), cut in any::<prop::sample::Index>()) {
        let state = [vec![0; zeros], rest].concat();
        let mut bytes = Vec::new();
        Connection::new(&mut bytes).send_device_state(&state).unwrap();
        let frame = Connection::new(Cursor::new(&bytes)).receive().unwrap();
        let mut payload = frame.payload;
        prop_assert!(device_state(payload.clone()).unwrap() == state);
        // Zeros take no payload.
        let all_zero = state.iter().all(|&byte| byte == 0);
        payload.truncate(cut.index(payload.len()));
        prop_assert!(all_zero && payload.len() >= 5 || device_state(payload).is_err());
    }
}

#[test]
fn a_device_state_that_grows_beyond_all_bounds_is_refused() {
    let zeros = |length: u32| [&length.to_le_bytes()[..], &[PageKind::Zero.number()]].concat();
    assert_eq!(device_state(zeros(9)).unwrap(), [0; 9]);
    assert!(device_state(zeros(u32::MAX)).is_err());
}

/// Answers requests until the other side has gone.
fn serve(stream: UnixStream, memory: &Memory) {
    let mut connection = Connection::new(stream);
    let mut writer = BatchWriter::new(CompressionChoice::Auto).unwrap();
    while let Ok(Message::Control(Control::Fetch { block, pages })) = connection.receive_message() {
        writer.begin(block);
        for page in pages {
            writer.page(page.into(), &memory[&page.into()]).unwrap();
        }
        // It goes in the middle where a page is not that of the pause.
        if connection
            .send_parts(Kind::Pages, &writer.finish().unwrap())
            .is_err()
        {
            break;
        }
    }
}

/// A sender that answers with another page than the requested one is refused.
#[test]
fn other_pages_than_were_asked_for_are_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        let mut connection = Connection::new(theirs);
        connection.receive_message().unwrap();
        let mut writer = BatchWriter::new(CompressionChoice::Auto).unwrap();
        writer.begin(1);
        writer.page(8, &content(8, 1)).unwrap();
        connection
            .send_parts(Kind::Pages, &writer.finish().unwrap())
            .unwrap();
    });
    let session = Arc::new(FetchSession::new(&shapes()));
    session.add(Lane::Bulk, Connection::new(ours)).unwrap();
    let mut content = DirtyBitmap::new(PAGES);
    content.set_range(0..PAGES);
    let source = session.source(1, content, Vec::new());
    let fetched = source.fetch_many(vec![7], 1, &|_| true, &|_, _| Ok::<(), SourceError>(()));
    assert!(matches!(
        fetched,
        Err(SourceError::Connection(ConnectionError::Malformed { .. }))
    ));
    assert_eq!(session.count(), 0, "it is of no more use");
    server.join().unwrap();
}
