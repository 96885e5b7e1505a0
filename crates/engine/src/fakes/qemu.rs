//! A QEMU without a guest: the commands of its monitor that pause, resume and rewind a VM, over a real socket.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use stillframe_qemu::monitor::Monitor;
use stillframe_sys::fdpass;
use tempfile::TempDir;

use super::guest_memory::this_process;

const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;
/// Far longer than an answer takes.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Of a dump of one page: the page, and the headers of the file.
const DUMP_BYTES: usize = 4096 + 4096;

/// Called when a command comes, before it is carried out.
type Observer = Box<dyn FnMut(&str, &mut State) + Send>;

/// The state of the VM, and how it answers.
pub(crate) struct State {
    pub(crate) running: bool,
    /// The commands that came, but for queries.
    pub(crate) commands: Vec<String>,
    /// Loading a device state fails with these words, one load after the other; `None` succeeds.
    pub(crate) loads: VecDeque<Option<&'static str>>,
    /// Commands that are refused.
    pub(crate) refused: Vec<&'static str>,
    /// Its devices with an id.
    pub(crate) devices: Vec<&'static str>,
    /// Another client resumes the VM while a device state is loaded, in spite of all.
    pub(crate) resumed_in_load: bool,
    /// Events to send before the next answer.
    events: Vec<&'static str>,
    socket: Option<UnixStream>,
    dumping: bool,
    given: BTreeMap<String, OwnedFd>,
    pub(crate) job: Option<Value>,
}

/// The monitor of a VM that runs in no process.
pub(crate) struct FakeQemu {
    state: Arc<Mutex<State>>,
    folder: TempDir,
}

impl FakeQemu {
    pub(crate) fn start() -> (FakeQemu, Monitor) {
        FakeQemu::observed(|_, _| ())
    }

    /// The same, with a view of each command before it is carried out.
    pub(crate) fn observed(
        observer: impl FnMut(&str, &mut State) + Send + 'static,
    ) -> (FakeQemu, Monitor) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let state = Arc::new(Mutex::new(State {
            running: true,
            commands: Vec::new(),
            loads: VecDeque::new(),
            refused: Vec::new(),
            devices: Vec::new(),
            resumed_in_load: false,
            events: Vec::new(),
            socket: None,
            dumping: false,
            given: BTreeMap::new(),
            job: None,
        }));
        let session = Session {
            state: state.clone(),
            observer: Box::new(observer),
        };
        // It ends with the connection.
        thread::spawn(move || {
            let (socket, _) = listener.accept().unwrap();
            session.state.lock().unwrap().socket = Some(socket.try_clone().unwrap());
            session.serve(&socket);
        });
        let reached = Monitor::reach(&path, this_process().pid(), ANSWER_LIMIT);
        let monitor = reached.unwrap().negotiate(ANSWER_LIMIT).unwrap();
        (FakeQemu { state, folder }, monitor)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another client of a monitor stops or resumes the VM.
    pub(crate) fn another_client_sets_running(&self, running: bool) {
        let mut state = self.state();
        state.set_running(running);
        let events = state.take_events();
        let mut socket = state.socket.as_ref().unwrap();
        socket.write_all(events.as_bytes()).unwrap();
    }

    /// The path of the monitor.
    pub(crate) fn qmp(&self) -> std::path::PathBuf {
        self.folder.path().join("qmp")
    }
}

struct Session {
    state: Arc<Mutex<State>>,
    observer: Observer,
}

impl Session {
    fn serve(mut self, mut socket: &UnixStream) {
        writeln!(socket, "{GREETING}").unwrap();
        let mut received = Vec::new();
        let mut descriptors = VecDeque::new();
        let mut piece = [0; 4096];
        loop {
            let (bytes, fds) = fdpass::receive(socket, &mut piece).unwrap_or_default();
            if bytes == 0 {
                return;
            }
            received.extend(&piece[..bytes]);
            descriptors.extend(fds);
            while let Some(end) = received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = received.drain(..=end).collect();
                let command: Value = serde_json::from_slice(&line).unwrap();
                let answer = self.answer(&command, &mut descriptors);
                // Both as one message, so that no event comes behind the answer that it belongs before.
                if socket.write_all(answer.as_bytes()).is_err() {
                    return;
                }
            }
        }
    }

    /// The events and the answer.
    fn answer(&mut self, command: &Value, descriptors: &mut VecDeque<OwnedFd>) -> String {
        let name = command["execute"].as_str().unwrap();
        let mut state = self.state.lock().unwrap();
        if !name.starts_with("query-") {
            state.commands.push(name.to_owned());
        }
        (self.observer)(name, &mut state);
        let done = match state.refused.contains(&name) {
            true => Err("refused".to_owned()),
            false => state.execute(name, &command["arguments"], descriptors, &self.state),
        };
        let events = state.take_events();
        let id = &command["id"];
        let answer = match done {
            Ok(reply) => json!({ "return": reply, "id": id }),
            Err(why) => json!({ "error": { "class": "GenericError", "desc": why }, "id": id }),
        };
        format!("{events}{answer}\n")
    }
}

impl State {
    fn execute(
        &mut self,
        name: &str,
        arguments: &Value,
        descriptors: &mut VecDeque<OwnedFd>,
        this: &Arc<Mutex<State>>,
    ) -> Result<Value, String> {
        let text = |key: &str| arguments[key].as_str().unwrap_or_default().to_owned();
        match name {
            "qmp_capabilities" | "announce-self" | "closefd" | "remove-fd" | "blockdev-add"
            | "blockdev-del" => {}
            "query-named-block-nodes" => return Ok(json!([])),
            "query-status" => return Ok(self.run_state()),
            "query-dump" => {
                let status = if self.dumping { "active" } else { "none" };
                return Ok(json!({ "status": status, "completed": 0, "total": 0 }));
            }
            "qom-list" if text("path") == "/machine/peripheral" => {
                let member = |name: &&str| json!({ "name": name, "type": "child<device>" });
                return Ok(self.devices.iter().map(member).collect());
            }
            "qom-list" => return Ok(json!([])),
            "human-monitor-command" => return Ok(json!("")),
            "query-migrate" => {}
            "query-jobs" => return Ok(self.job.iter().cloned().collect()),
            "stop" => self.set_running(false),
            "cont" if self.dumping => return Err("there's a dump in process".to_owned()),
            "cont" => self.set_running(true),
            "getfd" => {
                self.given
                    .insert(text("fdname"), descriptors.pop_front().unwrap());
            }
            "add-fd" => {
                descriptors.pop_front().unwrap();
                return Ok(json!({ "fdset-id": 1, "fd": 1 }));
            }
            "dump-guest-memory" => self.dump(&text("protocol"), this),
            "snapshot-load" => {
                if self.resumed_in_load {
                    self.set_running(true);
                }
                let error = self.loads.pop_front().flatten();
                let id = text("job-id");
                self.job = Some(json!({ "id": id, "status": "concluded", "error": error }));
            }
            "job-dismiss" => {
                let job = self.job.take();
                return job.map_or(Err("no such job".to_owned()), |_| Ok(json!({})));
            }
            _ => return Err(format!("{name} is unknown")),
        }
        Ok(json!({}))
    }

    /// The events that are to be sent, as lines.
    fn take_events(&mut self) -> String {
        let line = |event: &str| {
            let timestamp = json!({ "seconds": 1, "microseconds": 0 });
            format!("{}\n", json!({ "event": event, "timestamp": timestamp }))
        };
        self.events.drain(..).map(line).collect()
    }

    fn run_state(&self) -> Value {
        let status = if self.running { "running" } else { "paused" };
        json!({ "running": self.running, "status": status })
    }

    fn set_running(&mut self, running: bool) {
        if self.running != running {
            self.events.push(if running { "RESUME" } else { "STOP" });
        }
        self.running = running;
    }

    /// Writes a dump into the descriptor of this protocol (`fd:NAME`), as fast as it is read.
    fn dump(&mut self, protocol: &str, this: &Arc<Mutex<State>>) {
        let name = protocol.strip_prefix("fd:").unwrap();
        let mut into = File::from(self.given.remove(name).unwrap());
        self.dumping = true;
        let this = this.clone();
        thread::spawn(move || {
            // An error is the end of the test.
            let _ = into.write_all(&[1; DUMP_BYTES]);
            this.lock().unwrap_or_else(PoisonError::into_inner).dumping = false;
        });
    }
}

/// Whether `cont` is blocked is seen by the pipe that was given: a full one stays so.
#[test]
fn cont_is_refused_until_the_dump_was_read() {
    let (qemu, mut monitor) = FakeQemu::start();
    let (mut read, write) = std::io::pipe().unwrap();
    let filled = rustix::pipe::fcntl_setpipe_size(&write, 4096).unwrap();
    (&write).write_all(&vec![0; filled]).unwrap();
    monitor.stop().unwrap();
    monitor
        .give("into", std::os::fd::AsFd::as_fd(&write))
        .unwrap();
    drop(write);
    monitor.begin_dump("into").unwrap();
    assert!(monitor.is_dumping().unwrap());
    monitor.cont().unwrap_err();
    assert!(!qemu.state().running);
    let mut all = Vec::new();
    read.read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), filled + DUMP_BYTES);
    while monitor.is_dumping().unwrap() {}
    monitor.cont().unwrap();
    assert!(qemu.state().running);
    assert_eq!(
        qemu.state().commands.join(" "),
        "qmp_capabilities stop getfd dump-guest-memory cont cont"
    );
}
