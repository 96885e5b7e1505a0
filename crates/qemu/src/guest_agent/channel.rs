//! The channel of a guest agent. The guest controls everything that comes from its other end.
//!
//! The guest is not authenticated, so only the answer to the last command is read, and every other line is skipped.
//! A command fails when its answer does not come within a time and a number of bytes. An answer is parsed into the
//! members that are needed, never into a tree of values.
//!
//! Format: QEMU, `docs/interop/qemu-ga-ref` (`guest-sync-delimited`).

use std::borrow::Cow;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::qmp::lines::{LineTooLong, Lines};
use crate::qmp::socket::{self, Ready};
use crate::qmp::{QmpError, deadline_after, object};

/// A byte that is in no text. It ends what the agent has half read, and begins the answer to
/// `guest-sync-delimited`.
const SENTINEL: u8 = 0xff;
const SYNC: &str = "guest-sync-delimited";
/// Longest line that is parsed, in bytes; longer ones are skipped.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Upper bound on the bytes received for one command.
const COMMAND_BYTES_MAX: usize = 1 << 20;
/// Bytes received with one call.
const RECEIVE_BYTES: usize = 16 << 10;
/// Upper bound on the characters of an agent's own words that are shown.
const WORDS_MAX: usize = 200;

/// The reason why a guest agent did not carry out a command.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The VM has no channel to an agent.
    #[error(
        "the VM has no channel to a guest agent (virtserialport org.qemu.guest_agent.0 or org.stillframe.agent.0 on a unix socket)"
    )]
    NoChannel,
    /// No process listens on the path.
    #[error("no QEMU listens on the channel {path} of the guest agent")]
    Refused {
        /// The channel.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// No answer in time: there is no agent in the guest, or it has another client.
    #[error("the guest agent did not answer {command} within {limit_ms} ms")]
    Timeout {
        /// The command.
        command: &'static str,
        /// The limit in milliseconds.
        limit_ms: u128,
    },
    /// It sent more than any answer needs; nothing more is read from it.
    #[error(
        "the guest agent sent more than {limit_bytes} bytes, and no answer to {command} in them"
    )]
    TooMuch {
        /// The command.
        command: &'static str,
        /// The limit in bytes.
        limit_bytes: usize,
    },
    /// It answered with an error.
    #[error("the guest agent refused {command}: {desc}")]
    Command {
        /// The command.
        command: &'static str,
        /// Its own words, without control characters.
        desc: String,
    },
    /// The answer is not of the kind that belongs to the command.
    #[error("the guest agent's answer to {command} is none: {start:?}")]
    Garbled {
        /// The command.
        command: &'static str,
        /// The first bytes of it.
        start: String,
    },
    /// QEMU closed the channel.
    #[error("QEMU closed the channel of the guest agent")]
    Closed,
    /// The socket failed.
    #[error("the channel of the guest agent failed")]
    Io(#[from] io::Error),
}

impl AgentError {
    /// An answer that is not understood begins with `text`.
    pub(super) fn garbled(command: &'static str, text: &[u8]) -> AgentError {
        AgentError::Garbled {
            command,
            start: shown(&String::from_utf8_lossy(text)),
        }
    }

    /// Why a guest did not say what it was queried for, in words for the user.
    pub fn in_words(&self) -> String {
        match self {
            AgentError::Timeout { .. } => "the guest's agent does not answer".to_owned(),
            AgentError::Command { command, desc } => {
                format!("the guest's agent refused {command}: {desc}")
            }
            error => error.to_string(),
        }
    }

    /// Whether asking again makes no sense: the channel is lost, or its other end talks without end.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            AgentError::TooMuch { .. } | AgentError::Closed | AgentError::Io(_)
        )
    }
}

/// The members of an answer that matter here.
#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow, rename = "return")]
    done: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Refusal<'a> {
    #[serde(borrow)]
    desc: Option<Cow<'a, str>>,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Channel {
    socket: UnixStream,
    lines: Lines,
    next_id: u64,
}

impl Channel {
    /// Connects to `path` and makes sure that an agent answers, all of it within `limit`.
    pub(super) fn connect(path: &Path, limit: Duration) -> Result<Channel, AgentError> {
        let deadline = deadline_after(limit);
        let socket = socket::connect(path, deadline).map_err(|error| match error {
            QmpError::Refused { path, source } => AgentError::Refused { path, source },
            QmpError::Io(source) => AgentError::Io(source),
            _ => timeout(SYNC, limit),
        })?;
        let mut channel = Channel {
            socket,
            lines: Lines::new(LINE_BYTES_MAX),
            next_id: 1,
        };
        // None that another client may have chosen before.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let token = now.map_or(1, |time| time.as_nanos() as u64 >> 1);
        let line = json!({ "execute": SYNC, "arguments": { "id": token } });
        let line = [&[SENTINEL], line.to_string().as_bytes(), b"\n"].concat();
        channel.transmit(&line, SYNC, limit, deadline)?;
        channel.await_answer(SYNC, limit, deadline, |line| {
            let at = line.iter().rposition(|&byte| byte == SENTINEL)?;
            let answer = object::<Answer<'_>>(&line[at + 1..]).ok()?;
            (number(answer.done?) == Some(token)).then_some(())
        })?;
        Ok(channel)
    }

    /// Has the agent carry out `command`. The returned value is a number, where `T` is one, or anything.
    pub(super) fn execute<T: FromAnswer>(
        &mut self,
        command: &'static str,
        arguments: &Value,
        limit: Duration,
    ) -> Result<T, AgentError> {
        let deadline = deadline_after(limit);
        let id = self.next_id;
        self.next_id += 1;
        let mut message = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            message["arguments"] = arguments.clone();
        }
        let line = [message.to_string().as_bytes(), b"\n"].concat();
        self.transmit(&line, command, limit, deadline)?;
        self.await_answer(command, limit, deadline, |line| {
            read_answer(line, id, command)
        })?
    }

    fn transmit(
        &mut self,
        mut line: &[u8],
        command: &'static str,
        limit: Duration,
        deadline: Instant,
    ) -> Result<(), AgentError> {
        while !line.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, line, flags) {
                Ok(sent) => line = &line[sent..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait_ready(Ready::Write, command, limit, deadline)?,
                Err(errno) => return Err(closed_or_io(errno)),
            }
        }
        Ok(())
    }

    /// Receives until `reads` knows a line.
    fn await_answer<T>(
        &mut self,
        command: &'static str,
        limit: Duration,
        deadline: Instant,
        reads: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<T, AgentError> {
        let mut bytes = vec![0; RECEIVE_BYTES];
        let mut received_bytes = 0;
        loop {
            if Instant::now() >= deadline {
                return Err(timeout(command, limit));
            }
            match rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(AgentError::Closed),
                Ok((received, _)) => {
                    received_bytes += received;
                    self.lines.push(&bytes[..received]);
                }
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    self.wait_ready(Ready::Read, command, limit, deadline)?;
                    continue;
                }
                Err(errno) => return Err(closed_or_io(errno)),
            }
            loop {
                match self.lines.next_line() {
                    Ok(Some(line)) => {
                        if let Some(answer) = reads(self.lines.at(&line)) {
                            return Ok(answer);
                        }
                    }
                    Ok(None) => break,
                    Err(LineTooLong) => self.lines.skip_long(),
                }
            }
            if received_bytes > COMMAND_BYTES_MAX {
                return Err(AgentError::TooMuch {
                    command,
                    limit_bytes: COMMAND_BYTES_MAX,
                });
            }
        }
    }

    fn wait_ready(
        &self,
        ready: Ready,
        command: &'static str,
        limit: Duration,
        deadline: Instant,
    ) -> Result<(), AgentError> {
        match socket::wait_ready(&self.socket, ready, deadline) {
            Ok(true) => Ok(()),
            Ok(false) => Err(timeout(command, limit)),
            Err(QmpError::Io(source)) => Err(AgentError::Io(source)),
            Err(_) => Err(AgentError::Closed),
        }
    }
}

/// A value made of the member `return` of an answer.
pub(crate) trait FromAnswer: Sized {
    fn from_answer(done: &RawValue) -> Option<Self>;
}

impl FromAnswer for () {
    fn from_answer(_: &RawValue) -> Option<()> {
        Some(())
    }
}

impl FromAnswer for i64 {
    fn from_answer(done: &RawValue) -> Option<i64> {
        done.get().parse().ok()
    }
}

/// The value in `line`, if it is the answer to command number `id`.
pub(crate) fn read_answer<T: FromAnswer>(
    line: &[u8],
    id: u64,
    command: &'static str,
) -> Option<Result<T, AgentError>> {
    let answer = object::<Answer<'_>>(line).ok()?;
    if number(answer.id?) != Some(id) {
        return None;
    }
    if let Some(error) = answer.error {
        let refusal = object::<Refusal<'_>>(error.get().as_bytes()).ok();
        let desc = refusal.and_then(|refusal| refusal.desc);
        return Some(Err(AgentError::Command {
            command,
            desc: shown(desc.as_deref().unwrap_or("unspecified")),
        }));
    }
    let done = answer.done.unwrap_or(RawValue::NULL);
    Some(T::from_answer(done).ok_or_else(|| AgentError::garbled(command, done.get().as_bytes())))
}

fn number(text: &RawValue) -> Option<u64> {
    text.get().parse().ok()
}

/// Words of a guest, fit for a terminal: no control characters, and not many.
fn shown(words: &str) -> String {
    let plain = |letter: char| match letter.is_control() {
        true => ' ',
        false => letter,
    };
    words.chars().take(WORDS_MAX).map(plain).collect()
}

fn timeout(command: &'static str, limit: Duration) -> AgentError {
    AgentError::Timeout {
        command,
        limit_ms: limit.as_millis(),
    }
}

fn closed_or_io(errno: Errno) -> AgentError {
    match errno {
        Errno::PIPE | Errno::CONNRESET => AgentError::Closed,
        errno => AgentError::Io(errno.into()),
    }
}

#[cfg(test)]
mod tests;
