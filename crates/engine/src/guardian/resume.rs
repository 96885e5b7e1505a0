//! Resuming a VM that the engine paused: by reading the pipe that holds QEMU ([`WayBack::Stream`]), or on a copy of
//! the engine's QMP connection ([`WayBack::Command`]).
//!
//! The pipe may be read whatever the engine does. A command needs a check: only a VM that `query-status` calls
//! paused is resumed. A VM that is `postmigrate` has gone on elsewhere, and a `cont` would make it two. QEMU has no
//! command that does both in one step, so there is a gap of a fraction of a millisecond between its answer and
//! `cont`.
//!
//! **After the engine's death** the connection is the guardian's alone: it sends the query, reads the answer,
//! resumes.
//!
//! **While the engine lives** both have the same socket, and each byte can be read only once. So the guardian only
//! *peeks*: the answer stays for the engine, which skips answers with an id that it never gave. An engine that
//! hangs or copies leaves the answer there, and the guardian sees it. An engine that reads at that very time may
//! take the answer first. Then the guardian knows nothing, does nothing, and repeats the query a second later.
//! Nothing is lost by that: such an engine waits for QEMU itself, which would carry out a `cont` no sooner. The
//! engine continues with its pause when QEMU answers.
//!
//! Stopping the engine during the query would be certain. But a shell takes a stopped command for one that the user
//! sent to the background. Killing the engine would end a watch because of one slow disk.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags};
use serde_json::{Value, json};

use stillframe_qemu::monitor::EndCommands;
use stillframe_qemu::qmp::HELD_CONNECTION;

use super::wire::WayBack;

/// Resets QEMU's JSON lexer, in case the engine died in the middle of a command (qmp-spec 3.4:
/// a 0xFF byte flushes the parser).
const LEXER_RESET: &[u8] = b"\xff\n";
/// A QEMU that is completing a migration is queried again at this interval.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// Upper bound on the bytes to peek at: more than a Unix socket holds unread.
const UNREAD_BYTES_MAX: usize = 512 << 10;

/// States that the engine leaves a VM in: `stop` the first, saving the devices of a suspended guest the other.
const OURS: [&str; 2] = ["paused", "save-vm"];

/// How often the guardian looks for the answer of a QEMU that it shares with a living engine.
const LOOK: Duration = Duration::from_millis(20);
/// An answer that was not seen by then was read by the engine.
const TAKEN_AFTER: Duration = Duration::from_secs(1);

/// The guardian's copy of the engine's connection.
pub(super) struct Connection {
    socket: UnixStream,
    /// Commands sent; each has an id of its own.
    sent: u64,
}

impl Connection {
    pub(super) fn new(socket: UnixStream) -> Connection {
        Connection { socket, sent: 0 }
    }

    /// A command as a line, and its id: a string, where the engine gives numbers.
    fn line(&mut self, command: &str, arguments: Option<Value>) -> (String, String) {
        let id = self.next_id();
        let mut line = json!({ "execute": command, "id": id });
        if let Some(arguments) = arguments {
            line["arguments"] = arguments;
        }
        (format!("{line}\n"), id)
    }

    fn next_id(&mut self) -> String {
        self.sent += 1;
        format!("guardian-{}", self.sent)
    }

    /// Sends a command, and returns its id. Does not wait for a QEMU that does not read: the engine may have
    /// a request at any time.
    fn send(&mut self, command: &str, arguments: Option<Value>) -> io::Result<String> {
        let (line, id) = self.line(command, arguments);
        self.write(line.as_bytes())?;
        Ok(id)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::send(&self.socket, bytes, flags)? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Waits until QEMU reads (`OUT`) or has written (`IN`), and reads its bytes from the pipe; `None` at
    /// the deadline.
    fn wait(
        &self,
        flags: PollFlags,
        stream: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Option<()> {
        let mut waited = vec![PollFd::new(&self.socket, flags)];
        waited.extend(stream.map(|stream| PollFd::from_borrowed_fd(stream, PollFlags::IN)));
        loop {
            let left = deadline.checked_duration_since(Instant::now())?;
            let timeout = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            match poll(&mut waited, Some(&timeout)) {
                Ok(1..) | Err(rustix::io::Errno::INTR) => {}
                _ => return None,
            }
            if !waited[0].revents().is_empty() {
                return Some(());
            }
            let Some(stream) = stream else { continue };
            drain(stream);
            if waited[1].revents().contains(PollFlags::HUP) {
                // No process can write any more.
                waited.truncate(1);
            }
        }
    }

    /// The unread bytes in the connection, which stay there.
    fn unread(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; UNREAD_BYTES_MAX];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let (read, _) = rustix::net::recv(&self.socket, &mut bytes[..], flags)?;
        bytes.truncate(read);
        Ok(bytes)
    }

    /// Has the VM run again; the engine is dead.
    pub(super) fn resume_alone(
        &mut self,
        way_back: WayBack,
        stream: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) {
        while let Some(answer) = self.ask_alone("query-status", stream, deadline) {
            // QEMU answers when it is no longer held; a VM that it left paused was paused by another client.
            if way_back == WayBack::Stream {
                return;
            }
            match answer["return"]["status"].as_str() {
                Some(status) if OURS.contains(&status) => {
                    self.ask_alone("cont", stream, deadline);
                    return;
                }
                // The migration may fail yet, and leave the VM paused.
                Some("finish-migrate") => std::thread::sleep(ASK_AGAIN_AFTER),
                _ => return,
            }
        }
    }

    /// Takes the connection back that QEMU may hold itself, if the engine died before it sent what was to survive it. QEMU
    /// carries out first what came before.
    pub(super) fn let_go_alone(&mut self, deadline: Instant) {
        let arguments = json!({ "fdname": HELD_CONNECTION });
        self.command_alone("closefd", arguments, deadline);
    }

    /// Has the balloon leave the guest this much memory, in bytes; the engine lives, and skips the answer.
    pub(super) fn give_back_memory(&mut self, bytes: u64) -> io::Result<()> {
        self.send("balloon", Some(json!({ "value": bytes })))
            .map(drop)
    }

    /// Has the balloon leave the guest this much memory, in bytes; the engine is dead.
    pub(super) fn give_back_memory_alone(&mut self, bytes: u64, deadline: Instant) {
        self.command_alone("balloon", json!({ "value": bytes }), deadline);
    }

    /// Stops the VM; the engine is dead.
    pub(super) fn stop_alone(&mut self, deadline: Instant) {
        self.ask_alone("stop", None, deadline);
    }

    /// Has the node fail that a copy of a disk is written to, for good; the engine is dead.
    pub(super) fn yank_alone(&mut self, name: &str, deadline: Instant) {
        let node = json!({ "type": "block-node", "node-name": name });
        let arguments = json!({ "instances": [node] });
        // Out of band, where QEMU does that: its main thread may wait for the copy.
        let id = self.next_id();
        let line = json!({ "exec-oob": "yank", "arguments": arguments, "id": id });
        let answer = self.answer_alone((&format!("{line}\n"), &id), None, deadline);
        if answer.is_some_and(|answer| answer.get("error").is_some()) {
            self.command_alone("yank", arguments, deadline);
        }
    }

    /// Ends the job that copies a disk, if there is one, and removes its node; the engine is dead.
    pub(super) fn end_copy_alone(&mut self, name: &str, deadline: Instant) {
        // As the engine does it (`Monitor::remove_jobs_and_nodes`): beside a write of the guest the end of the job may kill QEMU.
        let status = self.ask_alone("query-status", None, deadline);
        let runs = status.is_some_and(|status| status["return"]["running"] == true);
        if runs {
            self.ask_alone("stop", None, deadline);
        }
        self.command_alone(
            "block-job-cancel",
            json!({ "device": name, "force": true }),
            deadline,
        );
        if runs {
            self.ask_alone("cont", None, deadline);
        }
        while let Some(jobs) = self.ask_alone("query-jobs", None, deadline) {
            let mut jobs = jobs["return"].as_array().into_iter().flatten();
            let Some(job) = jobs.find(|job| job["id"] == name) else {
                break;
            };
            match job["status"] == "concluded" {
                true => drop(self.command_alone("job-dismiss", json!({ "id": name }), deadline)),
                false => std::thread::sleep(ASK_AGAIN_AFTER),
            }
        }
        self.command_alone("blockdev-del", json!({ "node-name": name }), deadline);
    }

    /// Takes snapshots of disks away; the engine is dead. Whatever it had sent comes before, on this same connection.
    pub(super) fn end_snapshots_alone(&mut self, commands: EndCommands, deadline: Instant) {
        let EndCommands {
            first,
            filters,
            last,
        } = commands;
        for (command, arguments) in first {
            self.command_alone(&command, arguments, deadline);
        }
        let drives = match filters.is_empty() {
            true => None,
            false => self.ask_alone("query-block", None, deadline),
        };
        let in_use = |filter: &str| {
            let drives = drives
                .iter()
                .filter_map(|drives| drives["return"].as_array());
            let mut nodes = drives
                .flatten()
                .map(|drive| &drive["inserted"]["node-name"]);
            nodes.any(|node| node == filter)
        };
        let filters = filters.into_iter().filter(|(filter, _)| in_use(filter));
        let commands: Vec<(String, Value)> = filters.map(|(_, set)| set).chain(last).collect();
        for (command, arguments) in commands {
            self.command_alone(&command, arguments, deadline);
        }
    }

    /// Sends a command, and waits for its answer; the engine is dead.
    fn command_alone(
        &mut self,
        command: &str,
        arguments: Value,
        deadline: Instant,
    ) -> Option<Value> {
        let (line, id) = self.line(command, Some(arguments));
        self.answer_alone((&line, &id), None, deadline)
    }

    /// Closes the connection for all processes that have a copy. So the monitor is free again, though the engine's
    /// copies may stay open until its last thread has ended.
    pub(super) fn shut_down(&self) {
        // Not connected any more: as well.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// Sends a command and reads up to its answer. None: QEMU is gone or does not answer, and nothing more can
    /// be done. The answer is awaited because closing the connection could lose a command unread.
    fn ask_alone(
        &mut self,
        command: &str,
        stream: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Option<Value> {
        let (line, id) = self.line(command, None);
        self.answer_alone((&line, &id), stream, deadline)
    }

    fn answer_alone(
        &mut self,
        (line, id): (&str, &str),
        stream: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Option<Value> {
        let line = [LEXER_RESET, line.as_bytes()].concat();
        while let Err(error) = self.write(&line) {
            if error.kind() != io::ErrorKind::WouldBlock {
                return None;
            }
            self.wait(PollFlags::OUT, stream, deadline)?;
        }
        let mut seen = Vec::new();
        let mut piece = [0; 4096];
        loop {
            self.wait(PollFlags::IN, stream, deadline)?;
            match rustix::net::recv(&self.socket, &mut piece[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return None,
                Ok((read, _)) => seen.extend_from_slice(&piece[..read]),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
                Err(_) => return None,
            }
            if let Some(answer) = answer_to(id, &seen) {
                return Some(answer);
            }
        }
    }
}

/// Reads what lies in a pipe, which does not block, and discards it.
pub(super) fn drain(pipe: BorrowedFd<'_>) {
    let mut piece = [0; 4096];
    while rustix::io::read(pipe, &mut piece).is_ok_and(|read| read > 0) {}
}

/// The answer with this id, of the whole lines in `bytes`.
fn answer_to(id: &str, bytes: &[u8]) -> Option<Value> {
    let whole = bytes.iter().rposition(|&byte| byte == b'\n')?;
    let lines = bytes[..whole].split(|&byte| byte == b'\n');
    lines
        .filter_map(|line| serde_json::from_slice::<Value>(line).ok())
        .find(|line| line["id"] == id && line.get("event").is_none())
}

/// A pause that the engine announced, while the engine lives.
pub(super) struct Pause {
    limit: Duration,
    way_back: WayBack,
    /// When there is something to be done; never, with a limit beyond all times.
    due: Option<Instant>,
    /// The last query to QEMU, and when it was sent.
    query: Option<(String, Instant)>,
    resumed: bool,
}

impl Pause {
    pub(super) fn new(limit: Duration, way_back: WayBack) -> Pause {
        Pause {
            limit,
            way_back,
            due: Instant::now().checked_add(limit),
            query: None,
            resumed: false,
        }
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    pub(super) fn way_back(&self) -> WayBack {
        self.way_back
    }

    /// Whether the VM had to be resumed.
    pub(super) fn was_resumed(&self) -> bool {
        self.resumed
    }

    /// The limit has passed, or there may be an answer. Armed again each time, because the engine may send
    /// its `stop` after any of them.
    pub(super) fn look(&mut self, connection: &mut Connection) {
        if self.way_back == WayBack::Stream {
            // The pipe is read from here on, and QEMU writes into nothing else.
            self.resumed = true;
            self.due = None;
            return;
        }
        let now = Instant::now();
        let Some((id, at)) = self.query.take() else {
            return self.ask(connection, now);
        };
        let answer = connection
            .unread()
            .ok()
            .and_then(|unread| answer_to(&id, &unread));
        match answer {
            Some(answer) => {
                let status = answer["return"]["status"].as_str();
                if status.is_some_and(|status| OURS.contains(&status)) {
                    self.resumed |= connection.send("cont", None).is_ok();
                }
                self.due = now.checked_add(self.limit);
            }
            None if now.duration_since(at) > TAKEN_AFTER => self.ask(connection, now),
            None => {
                self.query = Some((id, at));
                self.due = Some(now + LOOK);
            }
        }
    }

    fn ask(&mut self, connection: &mut Connection, now: Instant) {
        // A query that cannot be sent now is sent later.
        self.query = connection
            .send("query-status", None)
            .ok()
            .map(|id| (id, now));
        self.due = Some(now + LOOK);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::fd::AsFd;

    use super::*;

    /// The other end: answers each `query-status` with the next of these.
    fn answer(far: UnixStream, statuses: &'static [&'static str]) -> Vec<String> {
        let mut statuses = statuses.iter();
        let mut commands = Vec::new();
        far.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let mut reader = BufReader::new(far.try_clone().unwrap());
        let mut line = Vec::new();
        while let Ok(1..) = reader.read_until(b'\n', &mut line) {
            let Ok(command) = serde_json::from_slice::<Value>(&line) else {
                line.clear();
                continue;
            };
            line.clear();
            let name = command["execute"].as_str().unwrap().to_owned();
            let answer = match name.as_str() {
                "query-status" => {
                    serde_json::json!({ "status": statuses.next().unwrap() })
                }
                _ => serde_json::json!({}),
            };
            commands.push(name);
            let answer = serde_json::json!({ "return": answer, "id": command["id"] });
            let event = "{\"event\":\"X\",\"id\":\"guardian-1\"}";
            // The last answer may find no reader.
            if writeln!(&far, "{event}\n{answer}").is_err() {
                break;
            }
        }
        commands
    }

    fn after_death(statuses: &'static [&'static str]) -> Vec<String> {
        let (near, far) = UnixStream::pair().unwrap();
        let qemu = std::thread::spawn(move || answer(far, statuses));
        let mut connection = Connection::new(near);
        let deadline = Instant::now() + Duration::from_secs(20);
        connection.resume_alone(WayBack::Command, None, deadline);
        drop(connection);
        qemu.join().unwrap()
    }

    #[test]
    fn only_what_is_paused_is_resumed() {
        assert_eq!(after_death(&["paused"]), ["query-status", "cont"]);
        let migrating = ["query-status", "query-status", "cont"];
        assert_eq!(after_death(&["finish-migrate", "paused"]), migrating);
        for other in [
            &["running"],
            &["postmigrate"],
            &["shutdown"],
            &["guest-panicked"],
            &["io-error"],
        ] {
            assert_eq!(after_death(other), ["query-status"], "{other:?}");
        }
    }

    /// A QEMU that is held by a full pipe answers when the pipe was read.
    #[test]
    fn a_qemu_that_is_held_goes_on() {
        let (near, far) = UnixStream::pair().unwrap();
        let (reader, mut writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        let qemu = std::thread::spawn(move || {
            writer.write_all(&vec![1; 1 << 20]).unwrap();
            answer(far, &["running"])
        });
        let mut connection = Connection::new(near);
        let deadline = Instant::now() + Duration::from_secs(20);
        connection.resume_alone(WayBack::Stream, Some(reader.as_fd()), deadline);
        assert!(Instant::now() < deadline);
        drop(connection);
        assert_eq!(qemu.join().unwrap(), ["query-status"]);
    }

    /// With an engine that lives, unread bytes stay for it, and the limit is armed again.
    #[test]
    fn a_living_engine_loses_no_answer() {
        let (near, far) = UnixStream::pair().unwrap();
        writeln!(&far, "{{\"return\":{{}},\"id\":7}}").unwrap();
        let engine = near.try_clone().unwrap();
        let mut connection = Connection::new(near);
        let mut pause = Pause::new(Duration::from_millis(1), WayBack::Command);
        pause.look(&mut connection);
        pause.look(&mut connection);
        assert!(!pause.was_resumed(), "nothing was answered yet");
        let qemu = std::thread::spawn(move || answer(far, &["running", "paused"]));
        let mut looks = 0;
        while !pause.was_resumed() && looks < 500 {
            std::thread::sleep(Duration::from_millis(5));
            pause.look(&mut connection);
            looks += 1;
        }
        assert!(pause.was_resumed() && pause.due().is_some());
        let mut reader = BufReader::new(engine);
        let mut first = String::new();
        reader.read_line(&mut first).unwrap();
        assert_eq!(first.trim(), "{\"return\":{},\"id\":7}");
        drop((connection, reader));
        let commands = qemu.join().unwrap();
        assert_eq!(commands[commands.len() - 1], "cont");
    }
}
