//! A client of QEMU's machine protocol (QMP) on a unix socket: commands, replies, events.
//!
//! QEMU handles one client a monitor at a time. A second one can connect, but is not greeted until the first has
//! gone ([`QmpError::Busy`]). The socket is deliberately left in blocking mode, and every call on it requests
//! non-blocking behaviour itself. The reason is that the open file description may be shared with a guardian
//! process that writes whole lines on it. The guardian's replies carry ids that this client never gave, and are
//! skipped.
//!
//! Format: QEMU, `docs/interop/qmp-spec.rst`.

pub(crate) mod inbox;
pub(crate) mod lines;
pub(crate) mod socket;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags};
use serde_json::{Value, json};
use stillframe_sys::fdpass;

pub(crate) use inbox::object;
use inbox::{Inbox, Lookup, Reply};
use lines::Lines;

/// How long [`Client::execute`] waits for a reply, in seconds.
pub const REPLY_LIMIT_SECONDS: u64 = 30;

/// Bytes received with one call.
const RECEIVE_BYTES: usize = 64 << 10;

/// Errors between this client and QEMU.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// No process listens on the path.
    #[error(
        "no QEMU listens on the monitor socket {path}; it may have exited, or was started with \
         another -qmp option"
    )]
    Refused {
        /// The monitor socket.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Connected, but the monitor has another client.
    #[error(
        "the monitor {path} is held by another client (libvirt, for one): end its connection, or start \
         the VM with a second monitor: -qmp unix:PATH,server=on,wait=off"
    )]
    Busy {
        /// The monitor socket.
        path: PathBuf,
    },
    /// The peer does not speak QMP.
    #[error("{path} is no QMP monitor, it greets with {greeting:?}; name the -qmp socket instead")]
    NotQmp {
        /// The monitor socket.
        path: PathBuf,
        /// The first bytes it sent.
        greeting: String,
    },
    /// QEMU closed the connection: it has exited or dropped its monitor.
    #[error("QEMU closed the monitor connection; it has probably exited")]
    Closed,
    /// No reply in time; it may still come and is then skipped.
    #[error("QEMU did not answer {command} within {limit_ms} ms")]
    Timeout {
        /// The command.
        command: String,
        /// The limit in milliseconds.
        limit_ms: u128,
    },
    /// QEMU answered with an error.
    #[error("QEMU refused {command}: {desc} ({class})")]
    Command {
        /// The command.
        command: String,
        /// QEMU's error class, mostly `GenericError`.
        class: String,
        /// QEMU's own words.
        desc: String,
    },
    /// A line that is not a JSON object.
    #[error("the monitor sent something that is not QMP: {start:?}")]
    Garbled {
        /// The first bytes of the line.
        start: String,
    },
    /// A line longer than 16 MiB.
    #[error("the monitor sent a line longer than {limit_bytes} bytes")]
    LineTooLong {
        /// The limit in bytes.
        limit_bytes: usize,
    },
    /// A reply of more values than fit the memory reserved for one.
    #[error("QEMU's answer to {command} cannot be read: {reason}")]
    Unreadable {
        /// The command.
        command: String,
        /// The fault in it.
        reason: String,
    },
    /// The reply was dropped: too many others were kept meanwhile.
    #[error(
        "QEMU's answer to {command} was dropped: no caller waited for it before many others came"
    )]
    Dropped {
        /// The command.
        command: String,
    },
    /// The socket failed.
    #[error("the monitor socket failed")]
    Io(#[from] io::Error),
}

/// A command that was sent and whose reply is awaited with [`Client::wait`].
#[derive(Debug)]
#[must_use = "a reply that no caller waits for takes the place of others"]
pub struct Ticket {
    id: u64,
    command: String,
}

/// A report that QEMU sends on its own. Its other details are not kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// `STOP`, `RESUME`, `SHUTDOWN`, ...
    pub name: String,
    /// QEMU's clock when it happened, since the epoch.
    pub at: Duration,
}

/// Deleted devices (`DEVICE_DELETED`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Deleted {
    /// QOM paths in the order of deletion, including those of child objects.
    pub paths: Vec<String>,
    /// Whether further paths were dropped because of the limit.
    pub more: bool,
}

/// One connection to one monitor.
#[derive(Debug)]
pub struct Client {
    socket: UnixStream,
    lines: Lines,
    next_id: u64,
    inbox: Inbox,
}

impl Client {
    /// Connects to the monitor at `path` and negotiates, all of it within `timeout`.
    ///
    /// # Errors
    /// [`QmpError::Refused`], [`QmpError::Busy`] when nothing comes, [`QmpError::NotQmp`] when no greeting does.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Client, QmpError> {
        let deadline = deadline_after(timeout);
        Client::on(socket::connect(path, deadline)?).negotiated(path, deadline)
    }

    /// Connects without negotiating ([`Client::negotiate`]).
    ///
    /// # Errors
    /// The errors of [`Client::connect`].
    pub fn reach(path: &Path, timeout: Duration) -> Result<Client, QmpError> {
        Ok(Client::on(socket::connect(path, deadline_after(timeout))?))
    }

    /// Negotiates over a connection of [`Client::reach`].
    ///
    /// # Errors
    /// The errors of [`Client::connect`].
    pub fn negotiate(self, path: &Path, timeout: Duration) -> Result<Client, QmpError> {
        self.negotiated(path, deadline_after(timeout))
    }

    /// Negotiates over a connection that is there already, all of it within `timeout`.
    ///
    /// # Errors
    /// The errors of [`Client::connect`]; [`QmpError::Closed`] when the other end is closed.
    pub fn over(socket: UnixStream, timeout: Duration) -> Result<Client, QmpError> {
        Client::on(socket).negotiated(Path::new("of our own"), deadline_after(timeout))
    }

    fn negotiated(mut self, path: &Path, deadline: Instant) -> Result<Client, QmpError> {
        let greeting = self.await_greeting(path, deadline)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let ticket = self.send("qmp_capabilities", to_enable(&greeting))?;
        self.wait(ticket, left)?;
        Ok(self)
    }

    fn on(socket: UnixStream) -> Client {
        Client {
            socket,
            lines: Lines::new(lines::LINE_BYTES_MAX),
            next_id: 1,
            inbox: Inbox::default(),
        }
    }

    /// Runs a command and waits up to [`REPLY_LIMIT_SECONDS`] for its reply. `arguments` is an
    /// object, or null when there are none.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let ticket = self.send(command, arguments)?;
        self.wait(ticket, Duration::from_secs(REPLY_LIMIT_SECONDS))
    }

    /// Sends a command without waiting, so that the caller can work while QEMU does. QEMU carries out
    /// commands in the order in which they were sent, and reads the next ones meanwhile.
    pub fn send(&mut self, command: &str, arguments: Value) -> Result<Ticket, QmpError> {
        let (ticket, line) = self.compose(command, arguments);
        self.transmit(&line)?;
        self.inbox.expect(ticket.id);
        Ok(ticket)
    }

    /// Waits for the reply to a command. After [`QmpError::Timeout`] the command may still be
    /// carried out; its late reply is skipped.
    pub fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Value, QmpError> {
        let deadline = deadline_after(timeout);
        // A reply that came counts, whatever came after it.
        let mut received = self.drain();
        loop {
            match self.inbox.take(ticket.id) {
                Lookup::Here(reply) => return read_reply(reply, ticket.command),
                Lookup::Outstanding => {}
                Lookup::Dropped => {
                    return Err(QmpError::Dropped {
                        command: ticket.command,
                    });
                }
            }
            received?;
            if Instant::now() >= deadline {
                self.inbox.forget(ticket.id);
                return Err(QmpError::Timeout {
                    command: ticket.command,
                    limit_ms: timeout.as_millis(),
                });
            }
            received = match self.receive_until(deadline) {
                Ok(true) => self.sort_in_lines(),
                Ok(false) => Ok(()),
                Err(error) => Err(error),
            };
        }
    }

    /// Waits for the first of these: an event of this name that was not taken yet, or the reply to this command,
    /// good or bad. Takes neither.
    ///
    /// # Errors
    /// [`QmpError::Timeout`] when neither came; the reply may still come, and can be waited for.
    pub fn await_event(
        &mut self,
        name: &str,
        ticket: &Ticket,
        timeout: Duration,
    ) -> Result<(), QmpError> {
        let deadline = deadline_after(timeout);
        self.drain()?;
        while self.inbox.is_outstanding(ticket.id) && !self.has_event(name) {
            if Instant::now() >= deadline {
                return Err(QmpError::Timeout {
                    command: ticket.command.clone(),
                    limit_ms: timeout.as_millis(),
                });
            }
            if self.receive_until(deadline)? {
                self.sort_in_lines()?;
            }
        }
        Ok(())
    }

    /// Whether the reply to this command has come, good or bad. Waits for nothing.
    ///
    /// # Errors
    /// The errors of the connection, unless the reply came before.
    pub fn has_reply(&mut self, ticket: &Ticket) -> Result<bool, QmpError> {
        let drained = self.drain();
        match self.inbox.is_outstanding(ticket.id) {
            false => Ok(true),
            true => drained.map(|()| false),
        }
    }

    /// Whether an event of this name has come that was not taken yet. Unread bytes in the socket do not count.
    pub fn has_event(&self, name: &str) -> bool {
        self.inbox.has_event(name)
    }

    /// Devices deleted since the last call (`DEVICE_DELETED`), including events still in the socket.
    /// [`Client::take_events`] does not return these events, so a search for other events cannot lose them.
    pub fn take_deleted(&mut self) -> Result<Deleted, QmpError> {
        self.drain()?;
        Ok(self.inbox.take_deleted())
    }

    /// Runs a command that takes a file descriptor (`add-fd`, `getfd`). Nothing may be sent until it has its reply: see
    /// [`Client::send_surviving`].
    pub fn execute_with_fd(
        &mut self,
        command: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        let (ticket, line) = self.compose(command, arguments);
        fdpass::send(&self.socket, &line, &[fd]).map_err(closed_or_io)?;
        self.inbox.expect(ticket.id);
        self.wait(ticket, Duration::from_secs(REPLY_LIMIT_SECONDS))
    }

    /// Sends commands in one piece, after this connection itself, which QEMU keeps until it has carried them out. So it
    /// does so even if no other process has the connection any more: otherwise it would forget the commands that wait
    /// (`monitor_qmp_event` in its monitor/qmp.c).
    ///
    /// The connection goes first, alone. QEMU 10.0 may end by a segmentation fault if it reads on while it takes a descriptor:
    /// its thread that reads goes through descriptors that its main thread takes away (`tcp_chr_recv` and
    /// `tcp_get_msgfds` in its chardev/char-socket.c).
    pub(crate) fn send_surviving(
        &mut self,
        commands: Vec<(&'static str, Value)>,
    ) -> Result<Vec<Ticket>, QmpError> {
        self.keep_connection()?;
        self.send_kept(commands)
    }

    /// The first half of [`Client::send_surviving`], which takes a round trip: QEMU has the connection.
    pub(crate) fn keep_connection(&mut self) -> Result<(), QmpError> {
        let keep = json!({ "fdname": HELD_CONNECTION });
        let connection = self.socket.as_fd().try_clone_to_owned()?;
        self.execute_with_fd("getfd", keep, connection.as_fd())?;
        Ok(())
    }

    /// The second half: sends the commands, after which QEMU gives the connection up.
    pub(crate) fn send_kept(
        &mut self,
        commands: Vec<(&'static str, Value)>,
    ) -> Result<Vec<Ticket>, QmpError> {
        let keep = json!({ "fdname": HELD_CONNECTION });
        let mut tickets = Vec::with_capacity(commands.len());
        let mut lines = Vec::new();
        for (command, arguments) in commands {
            let (ticket, line) = self.compose(command, arguments);
            lines.extend_from_slice(&line);
            tickets.push(ticket);
        }
        // Its reply is skipped.
        let (_, line) = self.compose("closefd", keep);
        lines.extend_from_slice(&line);
        for ticket in &tickets {
            self.inbox.expect(ticket.id);
        }
        self.transmit(&lines)?;
        Ok(tickets)
    }

    /// All events since the last call, those included that still lie in the socket. When QEMU has
    /// gone, its last events are handed out first and [`QmpError::Closed`] with the next call.
    pub fn take_events(&mut self) -> Result<Vec<Event>, QmpError> {
        let drained = self.drain();
        let events = self.inbox.take_events();
        match drained {
            Err(error) if events.is_empty() => Err(error),
            _ => Ok(events),
        }
    }

    /// The socket itself, for a process that must be able to resume the VM if this one dies. Such a process writes
    /// whole lines on it, with ids that are no numbers.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The process that listens on the monitor's socket (SO_PEERCRED, unix(7)): QEMU, or a manager
    /// that made the socket for it.
    pub fn peer_pid(&self) -> Result<i32, QmpError> {
        let peer = rustix::net::sockopt::socket_peercred(&self.socket).map_err(io::Error::from)?;
        Ok(peer.pid.as_raw_nonzero().get())
    }

    fn compose(&mut self, command: &str, arguments: Value) -> (Ticket, Vec<u8>) {
        let id = self.next_id;
        self.next_id += 1;
        let mut message = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        let command = command.to_owned();
        (Ticket { id, command }, line)
    }

    fn transmit(&mut self, mut line: &[u8]) -> Result<(), QmpError> {
        let limit = Duration::from_secs(REPLY_LIMIT_SECONDS);
        let deadline = deadline_after(limit);
        while !line.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, line, flags) {
                Ok(sent) => line = &line[sent..],
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    if !socket::wait_ready(&self.socket, socket::Ready::Write, deadline)? {
                        return Err(QmpError::Timeout {
                            command: "to a full socket".to_owned(),
                            limit_ms: limit.as_millis(),
                        });
                    }
                }
                Err(errno) => return Err(closed_or_io(errno.into())),
            }
        }
        Ok(())
    }

    fn await_greeting(&mut self, path: &Path, deadline: Instant) -> Result<Value, QmpError> {
        let not_qmp = |greeting: &str| QmpError::NotQmp {
            path: path.to_owned(),
            greeting: greeting.to_owned(),
        };
        let mut to_another = None;
        loop {
            if let Some(line) = next_line(&mut self.lines)? {
                let said = inbox::value(line).unwrap_or_default();
                if said.get("QMP").is_some() {
                    return Ok(said);
                }
                if !is_to_another_client(&said) {
                    return Err(not_qmp(&excerpt(line)));
                }
                to_another = Some(excerpt(line));
                continue;
            }
            if !self.receive_until(deadline)? {
                if Instant::now() < deadline {
                    continue;
                }
                return Err(match to_another {
                    Some(line) => not_qmp(&line),
                    None if self.lines.has_partial_line() => not_qmp("an unfinished line"),
                    None => QmpError::Busy {
                        path: path.to_owned(),
                    },
                });
            }
        }
    }

    /// Takes in what can be had without waiting, bounded for a peer that never stops talking.
    fn drain(&mut self) -> Result<(), QmpError> {
        const RECEIVES_MAX: usize = 1024;
        self.sort_in_lines()?;
        for _ in 0..RECEIVES_MAX {
            if !self.receive_now()? {
                break;
            }
            self.sort_in_lines()?;
        }
        Ok(())
    }

    fn sort_in_lines(&mut self) -> Result<(), QmpError> {
        while let Some(line) = next_line(&mut self.lines)? {
            self.inbox.sort_in(line).map_err(|_| QmpError::Garbled {
                start: excerpt(line),
            })?;
        }
        Ok(())
    }

    /// Receives some bytes, waiting for them until `deadline`; false when none came in time.
    fn receive_until(&mut self, deadline: Instant) -> Result<bool, QmpError> {
        if Instant::now() >= deadline
            || !socket::wait_ready(&self.socket, socket::Ready::Read, deadline)?
        {
            return Ok(false);
        }
        self.receive_now()
    }

    fn receive_now(&mut self) -> Result<bool, QmpError> {
        let mut bytes = vec![0; RECEIVE_BYTES];
        loop {
            match rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(QmpError::Closed),
                Ok((received, _)) => {
                    self.lines.push(&bytes[..received]);
                    return Ok(true);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(closed_or_io(errno.into())),
            }
        }
    }
}

/// The next line that is not empty; empty lines end a half line of a guardian.
fn next_line(lines: &mut Lines) -> Result<Option<&[u8]>, QmpError> {
    loop {
        match lines.next_line() {
            Ok(Some(range)) if lines.at(&range).trim_ascii().is_empty() => {}
            Ok(found) => return Ok(found.map(|range| lines.at(&range))),
            Err(lines::LineTooLong) => {
                return Err(QmpError::LineTooLong {
                    limit_bytes: lines::LINE_BYTES_MAX,
                });
            }
        }
    }
}

fn read_reply(reply: Reply, command: String) -> Result<Value, QmpError> {
    match reply {
        Reply::Return(text) => inbox::value(text.get().as_bytes())
            .map_err(|reason| QmpError::Unreadable { command, reason }),
        Reply::Error { class, desc } => Err(QmpError::Command {
            command,
            class,
            desc,
        }),
    }
}

/// QEMU's name for a connection that it holds itself: see [`Client::send_surviving`]. Who ends for an engine that died takes
/// it back (`closefd`), or the monitor stays taken.
pub const HELD_CONNECTION: &str = "stillframe-connection";

/// Whether QEMU says this to a client that has left. A new one may get it before its greeting: QEMU greets on the monitor's
/// thread, and reports events and ends commands on its main one (`monitor/qmp.c`).
fn is_to_another_client(said: &Value) -> bool {
    ["event", "return", "error"]
        .iter()
        .any(|member| said.get(member).is_some())
}

/// The arguments of `qmp_capabilities`. With "oob" QEMU reads further commands while it carries out one,
/// without it only afterwards (QEMU: monitor/qmp.c); reading one takes it 0.2 ms or more.
fn to_enable(greeting: &Value) -> Value {
    let offered = greeting["QMP"]["capabilities"].as_array();
    match offered.is_some_and(|offered| offered.iter().any(|one| one == "oob")) {
        true => json!({ "enable": ["oob"] }),
        false => Value::Null,
    }
}

/// `Instant::now() + limit`, however large the limit.
pub(crate) fn deadline_after(limit: Duration) -> Instant {
    const FAR_AWAY_SECONDS: u64 = 100 * 365 * 24 * 3600;
    let now = Instant::now();
    now.checked_add(limit)
        .unwrap_or_else(|| now + Duration::from_secs(FAR_AWAY_SECONDS))
}

fn closed_or_io(error: io::Error) -> QmpError {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => QmpError::Closed,
        _ => QmpError::Io(error),
    }
}

/// The first bytes of a line, fit for a message.
fn excerpt(line: &[u8]) -> String {
    const EXCERPT_BYTES: usize = 80;
    String::from_utf8_lossy(&line[..line.len().min(EXCERPT_BYTES)]).into_owned()
}
