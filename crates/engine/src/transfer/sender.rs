//! The sending side: the VM runs here until the other side has all of it.

use std::io::{Read, Write};
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use stillframe_page::{GuestPage, PAGE};
use stillframe_qemu::monitor::{Monitor, MonitorError};
use stillframe_qemu::record::VmRecord;
use thiserror::Error;

use super::{Mode, SendReport};
use crate::ProgressSink;
use crate::attach::Vm;
use crate::capture::convergence::Convergence;
use crate::capture::device_state::{StateError, StateStream};
use crate::capture::devices::DevicesError;
use crate::capture::downtime::us;
use crate::capture::paused_vm::{HandedOver, PausedError, PausedVm};
use crate::checkpoint::{Captured, CheckpointError, CheckpointOptions};
use crate::connection::batch::{BatchWriter, PAGES_MAX};
use crate::connection::framing::Kind;
use crate::connection::message::{Control, Message, RANGES_MAX};
use crate::connection::{Connection, ConnectionError};
use crate::encoding::delta_cache::DeltaCache;
use crate::encoding::page_encoder::PageEncoder;
use crate::guardian::GuardianError;
use crate::memory::block::{Block, BlockError, Guest};
use crate::memory::{BlockShape, Page};
use crate::sink::connection::{ConnectionPages, transfer_hasher};
use crate::sink::page_stream::{BATCH_PAGES, PageStream};
use crate::streaming::{Iteration, StreamingError};
use crate::tracking::error::TrackerError;
use crate::tracking::tracker::Tracker;
use crate::verify::Image;

/// Time for QEMU to save its device state while it is stopped.
const SAVE_LIMIT: Duration = Duration::from_secs(30);

/// How to send.
#[derive(Debug, Clone)]
pub struct SendOptions {
    /// What happens to the VM here.
    pub mode: Mode,
    /// Send the content ids of all pages too, made in the pause; the other side compares them.
    pub verify: bool,
    /// The watchdog resumes the VM here when it is stopped for longer; a hand-over fails then.
    pub pause_limit: Duration,
    /// The bandwidth of the connection, in bytes per second.
    pub bytes_per_s: NonZeroU64,
    /// How long the VM may be stopped for its remaining pages.
    pub downtime: Duration,
    /// Upper bound on captured pages in memory, and on the delta cache, in bytes.
    pub copy_buffer_bytes: u64,
}

/// Why nothing was sent. The VM runs on here, unless the error says otherwise.
#[derive(Debug, Error)]
pub enum SendError {
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The capture failed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The VM cannot be paused.
    #[error(transparent)]
    Paused(#[from] PausedError),
    /// QEMU failed a command.
    #[error("QEMU failed a command")]
    Monitor(#[from] MonitorError),
    /// Tracking failed.
    #[error("cannot see which pages of the VM have content")]
    Tracker(#[from] TrackerError),
    /// Reading memory failed.
    #[error("cannot read the VM's memory")]
    Block(#[from] BlockError),
    /// No device state.
    #[error(transparent)]
    State(#[from] StateError),
    /// Devices came or went.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// The guardian is gone.
    #[error("no pause without a guardian")]
    Guardian(#[from] GuardianError),
    /// Another client sent `cont` in the pause.
    #[error("another client resumed the VM while it was handed over; it runs here")]
    ResumedByOthers,
    /// The other side may run it.
    #[error(
        "the other side was instructed to run the VM, and has not said whether it does. The VM is paused here: if it does not run there, `cont` on its monitor resumes it; if it does, end it here with `quit`. It must never run on both sides"
    )]
    InDoubt(#[source] ConnectionError),
    /// It runs there, and is still here.
    #[error(
        "the VM runs at the other side, but this QEMU, which is paused, does not end: end it by hand, never resume it"
    )]
    NotEnded(#[source] MonitorError),
}

impl<E: Into<SendError>> From<StreamingError<E>> for SendError {
    fn from(error: StreamingError<E>) -> SendError {
        match error {
            StreamingError::Monitor(error) => error.into(),
            StreamingError::Tracker(error) => error.into(),
            StreamingError::Block(error) => error.into(),
            StreamingError::Sink(error) => error.into(),
        }
    }
}

/// Totals of the data sent of a VM.
struct Sent {
    streamed: u64,
    last: u64,
    downtime_us: u64,
}

impl Vm {
    /// Sends the VM over a connection on which nothing was sent yet. After an error the reason is sent to the other
    /// side, where that is possible, and the other side ends the QEMU that it has started.
    ///
    /// # Errors
    /// The VM runs on here, unless the error says otherwise.
    pub fn send<S: Read + Write>(
        &mut self,
        connection: &mut Connection<S>,
        options: &SendOptions,
        progress: ProgressSink<'_>,
    ) -> Result<SendReport, SendError> {
        let begin = Instant::now();
        let vm = self.record()?;
        let label = vm.label.clone();
        let sent = match options.mode {
            Mode::Copy => self.send_copy(vm, connection, options, progress),
            Mode::HandOver => self.send_stopped(vm, connection, options),
        };
        let sent = sent.inspect_err(|error| {
            // If it cannot be informed any more, it sees that the connection ends.
            let why = crate::in_words(error);
            let _ = connection.send_control(&Control::Failed { why });
        })?;
        Ok(SendReport {
            vm: label,
            mode: options.mode,
            streamed: sent.streamed,
            last: sent.last,
            bytes_sent: connection.bytes_sent(),
            downtime_us: sent.downtime_us,
            total_us: us(begin),
        })
    }

    fn greet<S: Read + Write>(
        &self,
        connection: &mut Connection<S>,
        mode: Mode,
        vm: VmRecord,
    ) -> Result<(), ConnectionError> {
        connection.send_control(&Control::Hello {
            mode,
            vm: Box::new(vm),
            blocks: self.tracker.shape(),
        })?;
        expect(connection, |control| matches!(control, Control::Accepted))
    }

    /// Streams pages while the guest runs, captures the rest in a pause, sends the rest while it runs on.
    fn send_copy<S: Read + Write>(
        &mut self,
        vm: VmRecord,
        connection: &mut Connection<S>,
        options: &SendOptions,
        progress: ProgressSink<'_>,
    ) -> Result<Sent, SendError> {
        self.greet(connection, Mode::Copy, vm)?;
        let mut sink = ConnectionPages::new(connection)?;
        let mut pages = SentPages::new(&self.tracker.shape(), options);
        let convergence = Convergence::Link {
            bytes_per_s: options.bytes_per_s,
            downtime: options.downtime,
        };
        let mut take = |_, block, batch: &[Page<'_>]| pages.put(&mut sink, block, batch);
        let streamed = self.stream(Iteration::Bulk, convergence, &mut take, progress)?;
        let capture = CheckpointOptions {
            pause_limit: options.pause_limit,
            verify: options.verify,
            copy_buffer_bytes: options.copy_buffer_bytes,
            ..CheckpointOptions::default()
        };
        let captured = self.capture(&transfer_hasher(), &capture)?;
        let sent = pages.put_captured(&mut sink, &captured).and_then(|()| {
            let (state, image) = (&captured.device_state, captured.image.as_ref());
            complete(connection, captured.record.clone(), state, image)?;
            commit(connection)
        });
        let sent = sent.map(|()| Sent {
            streamed,
            last: captured.staging.pages(),
            downtime_us: captured.downtime.total,
        });
        self.discard(captured);
        Ok(sent?)
    }

    /// Stops the VM, serves its pages, hands it over, and ends this QEMU.
    fn send_stopped<S: Read + Write>(
        &mut self,
        mut vm: VmRecord,
        connection: &mut Connection<S>,
        options: &SendOptions,
    ) -> Result<Sent, SendError> {
        self.greet(connection, Mode::HandOver, vm.clone())?;
        let run_state = self.monitor.run_state()?;
        let runs = run_state.running || run_state.is_suspended();
        let begin = Instant::now();
        let Vm {
            monitor,
            guardian,
            tracker,
            state,
            target,
            devices,
            ..
        } = self;
        let mut paused = PausedVm::stop(monitor, guardian, options.pause_limit, runs)?;
        let events = paused.monitor().client().take_events();
        events.map_err(MonitorError::from)?;
        let last = serve(connection, tracker, paused.monitor())?;
        let stream = StateStream::lent(state, paused.monitor(), &target.process, guardian)?;
        let device_state = stream.save(paused.monitor(), SAVE_LIMIT)?;
        devices.check(paused.monitor(), &device_state)?;
        vm.look_at_disks_again();
        (vm.was_running, vm.was_suspended) = (run_state.running, run_state.is_suspended());
        let image = match options.verify {
            true => Some(Image::take(blocks(tracker), &transfer_hasher())?),
            false => None,
        };
        complete(connection, vm, &device_state, image.as_ref())?;
        let mut vm = paused.hand_over()?;
        // From here on only another client can resume it.
        let events = vm.monitor().client().take_events();
        let events = events.map_err(MonitorError::from)?;
        if events.iter().any(|event| event.name == "RESUME") {
            return Err(SendError::ResumedByOthers);
        }
        give_up(connection, vm)?;
        Ok(Sent {
            streamed: 0,
            last,
            downtime_us: us(begin),
        })
    }
}

/// The other side may run the VM from here on; ends this QEMU when it does.
fn give_up<S: Read + Write>(
    connection: &mut Connection<S>,
    vm: HandedOver<'_>,
) -> Result<(), SendError> {
    match commit(connection) {
        Ok(()) => vm.end().map_err(SendError::NotEnded),
        // It has ended its QEMU before it said this.
        Err(error @ ConnectionError::GaveUp { .. }) => {
            vm.take_back()?.resume()?;
            Err(error.into())
        }
        Err(error) => Err(SendError::InDoubt(error)),
    }
}

/// Pages on their way, with the means to encode them.
struct SentPages {
    stream: PageStream,
    encoder: PageEncoder,
    /// The content of each page as last sent.
    cache: DeltaCache,
}

impl SentPages {
    fn new(blocks: &[BlockShape], options: &SendOptions) -> SentPages {
        let mut stream = PageStream::new(blocks);
        stream.pages_may_come_twice(blocks);
        let mut cache = DeltaCache::default();
        cache.set_budget(options.copy_buffer_bytes / 2);
        SentPages {
            stream,
            encoder: PageEncoder::default(),
            cache,
        }
    }

    fn put<S: Write>(
        &mut self,
        sink: &mut ConnectionPages<'_, S>,
        block: usize,
        pages: &[Page<'_>],
    ) -> Result<(), ConnectionError> {
        self.stream
            .put(sink, &mut self.encoder, &self.cache, block, pages)?;
        for &Page { number, bytes } in pages {
            self.cache.put(GuestPage::new(block, number), bytes);
        }
        Ok(())
    }

    fn put_captured<S: Write>(
        &mut self,
        sink: &mut ConnectionPages<'_, S>,
        captured: &Captured,
    ) -> Result<(), ConnectionError> {
        for block in 0..captured.blocks.len() {
            let mut pages = captured.staging.pages_of(block).peekable();
            while pages.peek().is_some() {
                let batch: Vec<Page<'_>> = pages.by_ref().take(BATCH_PAGES).collect();
                self.put(sink, block, &batch)?;
            }
        }
        Ok(())
    }
}

fn blocks(tracker: &Tracker) -> impl Iterator<Item = &Block> {
    tracker.blocks().iter().map(|tracked| &*tracked.block)
}

/// Answers requests for pages of the stopped VM until the other side has all. Returns how many pages it was sent.
fn serve<S: Read + Write>(
    connection: &mut Connection<S>,
    tracker: &Tracker,
    monitor: &mut Monitor,
) -> Result<u64, SendError> {
    let content = tracker.populated()?.drained(monitor)?;
    for (block, ranges) in content.written.iter().enumerate() {
        for ranges in ranges.chunks(RANGES_MAX) {
            let ranges = ranges.iter().map(|range| (range.start, range.end));
            let ranges = ranges.collect();
            connection.send_control(&Control::Content { block, ranges })?;
        }
    }
    // No block has this number: the list has ended.
    let end = Control::Content {
        block: content.written.len(),
        ranges: Vec::new(),
    };
    connection.send_control(&end)?;
    let mut writer = BatchWriter::new()?;
    let mut buffer = vec![0; PAGES_MAX * PAGE];
    let mut sent = 0;
    loop {
        let (block, pages) = match connection.receive_message()? {
            Message::Control(Control::Fetch { block, pages }) => (block, pages),
            Message::Control(Control::Fetched) => return Ok(sent),
            other => return Err(other.unexpected().into()),
        };
        let tracked = tracker.blocks().get(block).map(|tracked| &tracked.block);
        let known = tracked.filter(|block| {
            let inside = |&page: &u32| u64::from(page) < block.pages();
            pages.len() <= PAGES_MAX && pages.is_sorted_by(|a, b| a < b) && pages.iter().all(inside)
        });
        let Some(memory) = known else {
            let what = "a request for pages that the VM does not have".to_owned();
            return Err(ConnectionError::Malformed { what }.into());
        };
        let bytes = &mut buffer[..pages.len() * PAGE];
        let ranges: Vec<_> = pages
            .iter()
            .map(|&page| page.into()..u64::from(page) + 1)
            .collect();
        let mut into: Vec<&mut [u8]> = bytes.chunks_mut(PAGE).collect();
        memory.read(Guest::Stopped, &mut into, &ranges)?;
        writer.begin(block);
        for (&page, bytes) in pages.iter().zip(bytes.as_chunks().0) {
            writer.page(page.into(), bytes)?;
        }
        connection.send(Kind::Pages, writer.finish())?;
        sent += pages.len() as u64;
    }
}

/// Sends what else belongs to the VM; returns when the other side is ready.
fn complete<S: Read + Write>(
    connection: &mut Connection<S>,
    vm: VmRecord,
    device_state: &[u8],
    image: Option<&Image>,
) -> Result<(), ConnectionError> {
    connection.send(Kind::DeviceState, device_state)?;
    for ids in image.iter().flat_map(|image| image.ids()) {
        connection.send_ids(ids)?;
    }
    connection.send_control(&Control::Complete { vm: Box::new(vm) })?;
    expect(connection, |control| matches!(control, Control::Ready))
}

/// Lets the other side run the VM; returns when it does.
fn commit<S: Read + Write>(connection: &mut Connection<S>) -> Result<(), ConnectionError> {
    connection.send_control(&Control::Commit)?;
    expect(connection, |control| matches!(control, Control::Running))
}

fn expect<S: Read>(
    connection: &mut Connection<S>,
    is_it: impl FnOnce(&Control) -> bool,
) -> Result<(), ConnectionError> {
    match connection.receive_message()? {
        Message::Control(control) if is_it(&control) => Ok(()),
        other => Err(other.unexpected()),
    }
}
