//! Storing captures on a thread of its own, one after the other, while the guest runs and others are captured.
//!
//! ```text
//!   pipeline ──captures──> [ in flight ] ──> store, commit ──completions──> pipeline
//! ```

use std::io;
use std::panic;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::environment::{CaptureSink, Completion, PipelineVm, StoreQueue};
use crate::placement;

/// How long the sink expects another capture.
const EXPECTED: Duration = Duration::from_millis(50);

/// The thread, and the way to it.
pub struct ThreadQueue<V: PipelineVm, S> {
    captures: Sender<V::Capture>,
    completions: Receiver<Completion<V>>,
    thread: JoinHandle<S>,
}

impl<V, S> ThreadQueue<V, S>
where
    V: PipelineVm + 'static,
    V::Capture: Send,
    V::Stored: Send,
    S: CaptureSink<V> + Send + 'static,
{
    /// Starts the thread.
    ///
    /// # Errors
    /// That of the system.
    pub fn start(sink: S) -> io::Result<ThreadQueue<V, S>> {
        let (captures, from) = channel();
        let (to, completions) = channel();
        let work = move || store_all(sink, &from, &to);
        let thread = thread::Builder::new()
            .name("store".to_owned())
            .spawn(work)?;
        Ok(ThreadQueue {
            captures,
            completions,
            thread,
        })
    }
}

impl<V: PipelineVm, S> StoreQueue<V, S> for ThreadQueue<V, S> {
    fn push(&mut self, capture: V::Capture) {
        // That the thread is gone shows where its completion is awaited.
        let _ = self.captures.send(capture);
    }

    fn complete(&mut self) -> Option<Completion<V>> {
        self.completions.try_recv().ok()
    }

    fn wait(&mut self) -> Option<Completion<V>> {
        self.completions.recv().ok()
    }

    fn finish(self) -> S {
        drop(self.captures);
        let ended = self.thread.join();
        ended.unwrap_or_else(|panic| panic::resume_unwind(panic))
    }
}

fn store_all<V: PipelineVm, S: CaptureSink<V>>(
    mut sink: S,
    captures: &Receiver<V::Capture>,
    completions: &Sender<Completion<V>>,
) -> S {
    placement::lower_priority();
    let mut failed = false;
    while let Some(capture) = next(captures, |more| sink.expect_more(more)) {
        let outcome = (!failed).then(|| sink.store(&capture));
        failed |= !matches!(outcome, Some(Ok(_)));
        // A pipeline that does not want it any more is ending.
        let _ = completions.send(Completion { capture, outcome });
    }
    sink
}

/// Waits for the next capture. While captures come quickly the sink expects more.
fn next<C>(captures: &Receiver<C>, mut expect_more: impl FnMut(bool)) -> Option<C> {
    let capture = match captures.recv_timeout(EXPECTED) {
        Err(RecvTimeoutError::Timeout) => {
            expect_more(false);
            captures.recv().ok()
        }
        soon => soon.ok(),
    };
    expect_more(capture.is_some());
    capture
}
