//! Requests of other processes to migrate the watched VM, over the control socket.
//!
//! ```text
//!   accept ──> a thread for each client: read the request ──> slot ──> the watch takes it between two checkpoints
//!                                        wait for the end of the connection ──> cancel
//! ```
//!
//! The watch does not wait for a client: requests are read on threads, within a limit, and answers have a short limit.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use stillframe_engine::Process;
use stillframe_engine::control_socket::{self, ControlError, ControlListener, Peer, SocketFile};
use stillframe_engine::migration::MigrateEvent;
use thiserror::Error;

use crate::cmd::migrate::cancellation::Cancellation;
use crate::cmd::migrate::message::{
    Answer, MessageError, REQUEST_BYTES_MAX, Receiver, Request, send,
};
use crate::exit::Exit;
use crate::output;

/// Time for a client to send its request.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// Time for a client to take an answer. The VM may be stopped meanwhile.
const ANSWER_LIMIT: Duration = Duration::from_millis(200);
/// Minimum time between two answers that report progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// Clients at the same time; more are not listened to.
const CLIENTS_MAX: usize = 8;

/// Why requests cannot be received.
#[derive(Debug, Error)]
pub enum ListenError {
    /// There is no socket.
    #[error(transparent)]
    Socket(#[from] ControlError),
    /// There is no thread.
    #[error("cannot start a thread for the control socket")]
    Thread(#[source] io::Error),
}

/// Why a request is refused.
#[derive(Debug, Error)]
enum Refusal {
    #[error("cannot read the request to migrate the VM")]
    Unreadable(#[source] MessageError),
    #[error("another `stillframe migrate` of this VM is in progress, requested by process {0}")]
    Busy(i32),
}

/// The requests to one watch.
pub struct Requests {
    slot: Arc<Mutex<Slot>>,
    _file: SocketFile,
}

/// The one request at a time.
#[derive(Default)]
struct Slot {
    /// The client of the request that waits or is performed.
    client: Option<i32>,
    waiting: Option<Job>,
}

/// A migration that was requested. Dropping it ends the connection to the client.
pub struct Job {
    /// The request.
    pub request: Request,
    /// The process that requests it.
    pub client: i32,
    /// Cancels it.
    pub cancellation: Arc<Cancellation>,
    stream: UnixStream,
    /// When progress was reported last.
    progress: Option<Instant>,
    slot: Arc<Mutex<Slot>>,
}

impl Requests {
    /// Listens to clients from now on.
    ///
    /// # Errors
    /// The VM can be watched without.
    pub fn listen(qemu: &Process) -> Result<Requests, ListenError> {
        let (file, listener) = control_socket::listen(qemu)?;
        let slot = Arc::new(Mutex::new(Slot::default()));
        let of_clients = Arc::clone(&slot);
        // It ends with the process.
        thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || accept(&listener, &of_clients))
            .map_err(ListenError::Thread)?;
        Ok(Requests { slot, _file: file })
    }

    /// Whether a migration is requested, and not begun.
    pub fn is_waiting(&self) -> bool {
        locked(&self.slot).waiting.is_some()
    }

    /// The migration that is requested. Until it is dropped, others are refused.
    pub fn take(&self) -> Option<Job> {
        locked(&self.slot).waiting.take()
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // The client migrates the VM itself.
        let waiting = self.take();
        drop(waiting);
    }
}

impl Job {
    /// Sends an answer. A client that does not take it is given up, which cancels the migration.
    pub fn answer(&mut self, answer: &Answer) {
        if is_progress(answer) {
            if self
                .progress
                .is_some_and(|at| at.elapsed() < PROGRESS_EVERY)
            {
                return;
            }
            self.progress = Some(Instant::now());
        }
        if send(&self.stream, answer, ANSWER_LIMIT).is_err() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }

    /// Sends the error that ends the migration.
    pub fn fail(&mut self, error: &anyhow::Error) {
        self.answer(&failure(error));
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        locked(&self.slot).client = None;
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_progress(answer: &Answer) -> bool {
    matches!(
        answer,
        Answer::Event(MigrateEvent::Progress(_) | MigrateEvent::Disks { .. })
    )
}

fn failure(error: &anyhow::Error) -> Answer {
    Answer::Failed {
        error: output::chain(error.chain()),
        exit_code: Exit::of(error).code(),
    }
}

/// Serves each client on a thread.
fn accept(listener: &ControlListener, slot: &Arc<Mutex<Slot>>) {
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok(peer) = listener.accept() else {
            // Such as no descriptor left.
            thread::sleep(ANSWER_LIMIT);
            continue;
        };
        if clients.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
            clients.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (count, of_client) = (Arc::clone(&clients), Arc::clone(slot));
        let serving = thread::Builder::new()
            .name("client".to_owned())
            .spawn(move || {
                serve(peer, &of_client);
                count.fetch_sub(1, Ordering::Relaxed);
            });
        if serving.is_err() {
            clients.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Reads the request of a client, and waits until the client closes the connection.
fn serve(Peer { stream, pid }: Peer, slot: &Arc<Mutex<Slot>>) {
    let Ok(answers) = stream.try_clone() else {
        return;
    };
    let mut receiver = Receiver::new(stream, REQUEST_BYTES_MAX);
    let accepted = match receiver.receive(Some(REQUEST_LIMIT)) {
        Ok(request) => enqueue(request, (&answers, pid), slot),
        Err(error) => Err(Refusal::Unreadable(error)),
    };
    match accepted {
        Ok(cancellation) => {
            receiver.wait_for_end();
            cancellation.cancel();
            // One that waits would be performed otherwise.
            let mut slot = locked(slot);
            let waits = |job: &mut Job| Arc::ptr_eq(&job.cancellation, &cancellation);
            let cancelled = slot.waiting.take_if(waits);
            drop(slot);
            drop(cancelled);
        }
        Err(refusal) => {
            // A client that does not take it is gone.
            let _ = send(&answers, &failure(&refusal.into()), ANSWER_LIMIT);
        }
    }
}

/// Accepts a request, unless another one is in progress.
fn enqueue(
    request: Request,
    (answers, client): (&UnixStream, i32),
    slot: &Arc<Mutex<Slot>>,
) -> Result<Arc<Cancellation>, Refusal> {
    let unreadable = |error| Refusal::Unreadable(MessageError::Io(error));
    let stream = answers.try_clone().map_err(unreadable)?;
    let mut state = locked(slot);
    if let Some(other) = state.client {
        return Err(Refusal::Busy(other));
    }
    // Before the watch sees it: the watch answers next.
    send(&stream, &Answer::Accepted, ANSWER_LIMIT).map_err(unreadable)?;
    let cancellation = Arc::new(Cancellation::default());
    state.client = Some(client);
    state.waiting = Some(Job {
        request,
        client,
        cancellation: Arc::clone(&cancellation),
        stream,
        progress: None,
        slot: Arc::clone(slot),
    });
    Ok(cancellation)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::cmd::migrate::message::ANSWER_BYTES_MAX;
    use crate::cmd::migrate::tests::sample as request;

    const SOON: Option<Duration> = Some(Duration::from_secs(10));

    /// A client that a thread serves.
    fn client(slot: &Arc<Mutex<Slot>>) -> (UnixStream, Receiver) {
        let (ours, stream) = UnixStream::pair().unwrap();
        let slot = Arc::clone(slot);
        thread::spawn(move || serve(Peer { stream, pid: 4711 }, &slot));
        let answers = Receiver::new(ours.try_clone().unwrap(), ANSWER_BYTES_MAX);
        (ours, answers)
    }

    fn refused(answers: &mut Receiver, words: &str) {
        let answer = answers.receive::<Answer>(SOON).unwrap();
        let Answer::Failed { error, exit_code } = answer else {
            panic!("{answer:?}");
        };
        assert!(error.contains(words), "{error}");
        assert_eq!(exit_code, 1);
        let end = answers.receive::<Answer>(SOON);
        assert!(matches!(end, Err(MessageError::Closed)), "{end:?}");
    }

    #[test]
    fn one_request_is_accepted_at_a_time() {
        let slot = Arc::default();
        let (first, mut answers) = client(&slot);
        send(&first, &request(), ANSWER_LIMIT).unwrap();
        assert_eq!(answers.receive::<Answer>(SOON).unwrap(), Answer::Accepted);
        let (second, mut others) = client(&slot);
        send(&second, &request(), ANSWER_LIMIT).unwrap();
        refused(&mut others, "requested by process 4711");
        let mut job = locked(&slot).waiting.take().unwrap();
        assert_eq!(job.request, request());
        let error = anyhow::anyhow!("outer").context("inner");
        job.fail(&error);
        drop(job);
        refused(&mut answers, "inner: outer");
        let (third, mut answers) = client(&slot);
        send(&third, &request(), ANSWER_LIMIT).unwrap();
        assert_eq!(answers.receive::<Answer>(SOON).unwrap(), Answer::Accepted);
    }

    #[test]
    fn garbage_is_refused() {
        let slot = Arc::default();
        for garbage in [
            &b"\n"[..],
            b"{}\n",
            b"[1, 2]\n",
            &[0xff; REQUEST_BYTES_MAX + 1],
        ] {
            let (mut stream, mut answers) = client(&slot);
            stream.write_all(garbage).unwrap();
            refused(&mut answers, "cannot read the request");
        }
        assert!(locked(&slot).client.is_none());
    }

    #[test]
    fn a_client_that_goes_away_cancels_its_request() {
        let slot = Arc::default();
        let (stream, mut answers) = client(&slot);
        send(&stream, &request(), ANSWER_LIMIT).unwrap();
        assert_eq!(answers.receive::<Answer>(SOON).unwrap(), Answer::Accepted);
        drop((stream, answers));
        let deadline = Instant::now() + Duration::from_secs(10);
        while locked(&slot).client.is_some() {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(5));
        }
        assert!(locked(&slot).waiting.is_none());
    }
}
