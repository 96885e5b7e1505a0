//! The destination's connections for pages. Each has a thread that writes what comes into memory, and before there is
//! memory keeps it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use stillframe_link::Closer;
use stillframe_page::PAGE;

use super::error::ReceiveError;
use super::image_files::ImageFiles;
use super::{ANSWER_LIMIT, Awaited, LANES_MAX, Listen, NO_PAGES_MAX, Wire};
use crate::connection::ConnectionError;
use crate::connection::image_pages::ImagePages;
use crate::connection::message::{Control, Message};
use crate::connection::word::{Session, Word};
use crate::memory::ranges::runs;
use crate::populate::streamed::{Received, StreamWriter, StreamedMemory};

/// Time for the source to open its connections.
const OPEN_LIMIT: Duration = Duration::from_secs(60);

/// Bytes of pages that are kept until there is memory for them: what a fast network carries while QEMU starts.
const EARLY_BYTES_MAX: usize = 128 << 20;

/// Connections that are read while QEMU starts. Dropped, they are closed.
pub(super) struct Early {
    threads: Vec<JoinHandle<Begun>>,
    closers: Vec<Closer>,
    stop: Arc<AtomicBool>,
}

/// A connection, and what came over it so far.
pub(super) struct Begun {
    wire: Wire,
    messages: Vec<Result<Message, ConnectionError>>,
}

impl Early {
    /// Begins to read.
    pub fn start(wires: Vec<Wire>) -> Result<Early, ReceiveError> {
        let mut early = Early {
            threads: Vec::new(),
            closers: Vec::new(),
            stop: Arc::default(),
        };
        let bytes_max = EARLY_BYTES_MAX / wires.len().max(1);
        for wire in wires {
            early
                .closers
                .push(wire.closer().map_err(ReceiveError::Socket)?);
            let stop = Arc::clone(&early.stop);
            let thread = thread::Builder::new().name("early".to_owned());
            let thread = thread.spawn(move || Begun::read(wire, &stop, bytes_max));
            early.threads.push(thread.map_err(ReceiveError::Thread)?);
        }
        Ok(early)
    }

    /// There is memory now.
    pub fn stop(mut self) -> Vec<Begun> {
        self.stop.store(true, Ordering::Relaxed);
        self.closers.clear();
        let threads = std::mem::take(&mut self.threads);
        let joined = threads.into_iter().map(JoinHandle::join);
        joined
            .map(|begun| begun.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        self.closers.drain(..).for_each(|closer| closer.close());
    }
}

impl Begun {
    /// Reads until there is memory, which is seen at the next message: the source ends each round with one that it
    /// expects an answer to.
    fn read(mut wire: Wire, stop: &AtomicBool, bytes_max: usize) -> Begun {
        let (mut messages, mut bytes) = (Vec::new(), 0);
        loop {
            let message = wire.receive_message();
            let pages = match &message {
                Ok(Message::Pages(payload) | Message::ImagePages(payload)) => Some(payload.len()),
                _ => None,
            };
            bytes += pages.unwrap_or(0);
            messages.push(message);
            if pages.is_none() || bytes > bytes_max || stop.load(Ordering::Relaxed) {
                return Begun { wire, messages };
            }
        }
    }
}

/// All that came.
pub(super) struct Arrived<R> {
    /// The pages, by connection.
    pub pages: Vec<Received>,
    /// What came over the first connection.
    pub rest: R,
}

/// A source that comes back, or the end of the wait for it.
pub(super) struct Back {
    /// The connection.
    pub wire: Wire,
    /// The lanes that it has opened.
    pub lanes: Vec<Wire>,
}

/// Waits for the source of this migration to connect again. Another one has to wait until this destination is free.
pub(super) fn await_source(
    listen: Listen<'_>,
    session: &Session,
    (awaited, limit): (Awaited, Duration),
) -> Option<Back> {
    let mut came = None;
    loop {
        let (wire, lanes) = match came.take() {
            Some(came) => came,
            None => {
                let mut wire = listen(awaited, limit)?;
                wire.limit_silence(ANSWER_LIMIT);
                match wire.receive_message() {
                    Ok(Message::Control(Control::Again {
                        session: its,
                        lanes,
                    })) if its == *session => (wire, lanes),
                    message => {
                        turn_away(wire, message, session);
                        continue;
                    }
                }
            }
        };
        match joined(listen, session, 0..lanes.min(LANES_MAX), ANSWER_LIMIT) {
            Joined::All(lanes) => return Some(Back { wire, lanes }),
            Joined::Again(wire, lanes) => came = Some((wire, lanes)),
            // It connects again.
            Joined::TooFew(_) => {}
        }
    }
}

/// Accepts the connections of this migration with these numbers.
pub(super) fn accept(
    listen: Listen<'_>,
    session: &Session,
    numbers: Range<usize>,
) -> Result<Vec<Wire>, ReceiveError> {
    let wanted = numbers.len();
    match joined(listen, session, numbers, OPEN_LIMIT) {
        Joined::All(wires) => Ok(wires),
        Joined::TooFew(came) => Err(ReceiveError::TooFewConnections { came, wanted }),
        // It has given up this attempt.
        Joined::Again(..) => Err(ReceiveError::TooFewConnections { came: 0, wanted }),
    }
}

/// The connections that a source has opened.
enum Joined {
    /// All of them.
    All(Vec<Wire>),
    /// This number of them, and no more within the limit.
    TooFew(usize),
    /// It begins anew, on this connection and with this number of lanes.
    Again(Wire, usize),
}

fn joined(listen: Listen<'_>, session: &Session, numbers: Range<usize>, limit: Duration) -> Joined {
    let mut wires: Vec<Wire> = Vec::new();
    while wires.len() < numbers.len() {
        let came = wires.len();
        let Some(mut wire) = listen(Awaited::Pages, limit) else {
            return Joined::TooFew(came);
        };
        // A stranger that says nothing must not keep the source away.
        wire.limit_silence(ANSWER_LIMIT);
        match wire.receive_message() {
            Ok(Message::Control(Control::Join {
                session: its,
                number,
            })) if its == *session && number == numbers.start + came => {
                wire.limit_silence(NO_PAGES_MAX);
                wires.push(wire);
            }
            Ok(Message::Control(Control::Again {
                session: its,
                lanes,
            })) if its == *session => return Joined::Again(wire, lanes),
            // It was cancelled.
            Ok(Message::Control(Control::Over { session: its, .. })) if its == *session => {
                return Joined::TooFew(came);
            }
            message => turn_away(wire, message, session),
        }
    }
    Joined::All(wires)
}

/// Answers a source of another migration, which has to wait. To that of this one nothing is said here: only the states of
/// the hand-over know what became of its VM, and it connects again.
pub(super) fn turn_away(mut wire: Wire, message: Result<Message, ConnectionError>, ours: &Session) {
    let word = match message {
        Ok(Message::Control(Control::Hello { .. })) => Word::Never,
        // Nothing is known here of another VM.
        Ok(Message::Control(Control::Again { session, .. })) if session != *ours => Word::Unclear,
        _ => return,
    };
    let why = Some("this destination is busy with another migration".to_owned());
    let _ = wire.send_control(&Control::Word { word, why });
}

/// Writes all pages that come, while `rest` receives what comes over the first connection.
pub(super) fn pages<R>(
    connections: Vec<Begun>,
    into: (&StreamedMemory<'_>, &ImageFiles),
    rest: impl FnOnce() -> Result<R, ReceiveError>,
) -> Result<Arrived<R>, ReceiveError> {
    let closers = connections.iter().map(|begun| begun.wire.closer());
    let closers = closers.collect::<Result<Vec<_>, _>>();
    let closers = closers.map_err(ReceiveError::Socket)?;
    thread::scope(|scope| {
        let threads: Vec<_> = connections
            .into_iter()
            .map(|begun| scope.spawn(move || receive(begun, into)))
            .collect();
        let rest = rest();
        if rest.is_err() {
            // Their threads would wait for pages that do not come.
            closers.iter().for_each(Closer::close);
        }
        let ends: Vec<_> = threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect();
        let mut pages = Vec::with_capacity(ends.len());
        for end in ends {
            match (end, &rest) {
                (Ok(received), _) => pages.push(received),
                // A connection that was closed is not the reason.
                (Err(ReceiveError::Connection(_)), Err(_)) => {}
                (Err(error), _) => return Err(error),
            }
        }
        Ok(Arrived { pages, rest: rest? })
    })
}

/// Writes the pages of one connection, until there are no more.
fn receive(
    begun: Begun,
    (memory, images): (&StreamedMemory<'_>, &ImageFiles),
) -> Result<Received, ReceiveError> {
    let Begun { mut wire, messages } = begun;
    let done = memory.writer().map_err(ReceiveError::from);
    let done = done.and_then(|writer| take(&mut wire, messages, (writer, images)));
    if let Err(error) = &done {
        let why = Some(crate::in_words(error));
        let word = Word::Never;
        let _ = wire.send_control(&Control::Word { word, why });
        // The source hears it when it has sent its round.
        while wire.receive().is_ok() {}
    }
    done
}

fn take(
    wire: &mut Wire,
    early: Vec<Result<Message, ConnectionError>>,
    (mut writer, images): (StreamWriter<'_>, &ImageFiles),
) -> Result<Received, ReceiveError> {
    let mut early = early.into_iter();
    let mut differing = writer.no_pages();
    loop {
        let message = early.next().unwrap_or_else(|| wire.receive_message());
        match message? {
            Message::Pages(payload) => {
                writer.take(&payload)?;
                wire.give_back(payload);
            }
            Message::ImagePages(payload) => {
                let (block, pages) = take_from_images(&payload, &mut writer, images)?;
                differing[block].extend(runs(&pages));
                wire.give_back(payload);
            }
            Message::Control(Control::Sync) => {
                let differing = std::mem::replace(&mut differing, writer.no_pages());
                let message = |block, ranges| Control::Differs { block, ranges };
                wire.send_ranges(&differing, message)?;
                wire.send_control(&Control::Synced)?;
            }
            Message::Control(Control::Last) => return Ok(writer.received()),
            other => return Err(other.unexpected().into()),
        }
    }
}

/// Writes pages that are in an image of this host. Returns the number of their block, and those that are not.
fn take_from_images(
    payload: &[u8],
    writer: &mut StreamWriter<'_>,
    images: &ImageFiles,
) -> Result<(usize, Vec<u64>), ReceiveError> {
    let ImagePages { block, pages } = ImagePages::decode(payload, writer.shapes())?;
    let (mut found, mut contents, mut differing) = (Vec::new(), Vec::new(), Vec::new());
    let mut content = [0; PAGE];
    for page in &pages {
        match images.read(page, &mut content)? {
            true => {
                found.push(page.page);
                contents.extend_from_slice(&content);
            }
            false => differing.push(page.page),
        }
    }
    writer.write(block, &found, &mut contents)?;
    Ok((block, differing))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::io::{self, Cursor, Write};
    use std::rc::Rc;
    use std::sync::OnceLock;

    use proptest::prelude::*;
    use stillframe_sys::affinity::of_this_thread;

    use super::*;
    use crate::connection::Connection;
    use crate::connection::compression::CompressionChoice;
    use crate::connection::message::SharedImage;
    use crate::fakes::FakeMemory;
    use crate::memory::{BlockShape, Page};
    use crate::migration::image_blocks::SharedFiles;
    use crate::migration::image_files::LocalImage;
    use crate::migration::pages::{SentPages, There};
    use crate::sink::connection::ConnectionPages;

    const PAGES: u64 = 24;

    /// What was sent so far.
    #[derive(Clone, Default)]
    struct SentBytes(Rc<RefCell<Vec<u8>>>);

    impl Write for SentBytes {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.borrow_mut().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Writes what came after the first `seen` messages. The pages that are in no image.
    fn arrive(
        bytes: &[u8],
        seen: &mut usize,
        writer: &mut StreamWriter<'_>,
        files: &ImageFiles,
    ) -> Vec<u64> {
        let mut connection = Connection::new(Cursor::new(bytes));
        let (mut number, mut differing) = (0, Vec::new());
        while let Ok(message) = connection.receive_message() {
            number += 1;
            match message {
                _ if number <= *seen => {}
                Message::Pages(payload) => writer.take(&payload).unwrap(),
                Message::ImagePages(payload) => {
                    let (block, pages) = take_from_images(&payload, writer, files).unwrap();
                    assert_eq!(block, 0);
                    differing.extend(pages);
                }
                other => panic!("{}", other.what()),
            }
        }
        *seen = number;
        differing
    }

    fn page(filling: &u8) -> [u8; PAGE] {
        [*filling; PAGE]
    }

    /// The source's image, and the destination's, in which these blocks are others.
    fn images(
        folder: &std::path::Path,
        fillings: &[u8],
        spoilt: &[bool],
    ) -> [std::path::PathBuf; 2] {
        let paths = ["there", "here"].map(|name| folder.join(name));
        let content = fillings.iter().flat_map(page).collect::<Vec<u8>>();
        std::fs::write(&paths[0], content).unwrap();
        let spoilt = fillings
            .iter()
            .zip(spoilt)
            .map(|(filling, spoilt)| match spoilt {
                true => 255,
                false => *filling,
            });
        let content = spoilt
            .flat_map(|filling| page(&filling))
            .collect::<Vec<u8>>();
        std::fs::write(&paths[1], content).unwrap();
        paths
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever the destination has in its file: after each round, its memory is that of the source.
        #[test]
        fn memory_is_equal_after_each_round_whatever_the_images_are(
            blocks in prop::collection::vec((0..16u8, any::<bool>()), 0..20),
            rounds in prop::collection::vec((prop::collection::btree_map(0..PAGES, 0..24u8, 0..24), any::<bool>()), 1..5),
            budget in prop_oneof![Just(0u64), Just(6 << 12), Just(1 << 20)],
        ) {
            let folder = tempfile::tempdir().unwrap();
            let (fillings, spoilt): (Vec<u8>, Vec<bool>) = blocks.into_iter().unzip();
            let [there, here] = images(folder.path(), &fillings, &spoilt);
            let shared = SharedFiles::open(&[there]).unwrap();
            let named: Vec<SharedImage> = shared.named();
            let local = LocalImage { name: named[0].name.clone(), path: here };
            let files = ImageFiles::open(&named, &[local]);
            prop_assert_eq!(files.there(), [true]);
            let finder = shared.read(&[true], &of_this_thread(), &AtomicBool::new(false)).unwrap();

            let shapes = [BlockShape { name: "block".to_owned(), pages: PAGES }];
            let memory = FakeMemory::new("block", &[0; PAGES as usize]);
            let memory_blocks = [memory.block()];
            let streamed = StreamedMemory::seeded(&memory_blocks, &shapes);
            let mut writer = streamed.writer().unwrap();
            let there = There {
                seeds: Arc::default(),
                base: Default::default(),
                images: Arc::new(OnceLock::from(finder)),
            };
            let mut pages = SentPages::new(&shapes, budget, 1, None, there);
            let bytes = SentBytes::default();
            let mut sink = ConnectionPages::new(Connection::new(bytes.clone()), CompressionChoice::Auto).unwrap();
            let (mut source, mut seen) = (vec![0u8; PAGES as usize], 0);
            let (mut in_image, mut not_found) = (0, 0);
            for (writes, remembered) in rounds {
                source.iter_mut().zip(0..).for_each(|(filling, number)| *filling = *writes.get(&number).unwrap_or(filling));
                let contents: BTreeMap<u64, [u8; PAGE]> = writes.iter().map(|(&number, filling)| (number, page(filling))).collect();
                let batch = contents.iter().map(|(&number, bytes)| Page { number, bytes }).collect();
                pages.put(&mut sink, (0, batch), remembered).unwrap();
                let sent: Vec<u8> = bytes.0.borrow().clone();
                let differing = arrive(&sent, &mut seen, &mut writer, &files);
                prop_assert!(differing.is_empty() || pages.take_awaited());
                let again: Vec<Page<'_>> = differing.iter().map(|number| Page { number: *number, bytes: &contents[number] }).collect();
                pages.put_again(&mut sink, (0, &again)).unwrap();
                let sent: Vec<u8> = bytes.0.borrow().clone();
                prop_assert_eq!(arrive(&sent, &mut seen, &mut writer, &files), [0; 0]);
                prop_assert!(memory.bytes() == source.iter().flat_map(page).collect::<Vec<u8>>());
                not_found += differing.len() as u64;
                in_image = pages.counts().in_image;
            }
            prop_assert_eq!(pages.counts().not_in_image, not_found);
            prop_assert!(in_image >= not_found);
        }
    }
}
