//! A minimal QMP client of the tests' own (QEMU docs/interop/qmp-spec).

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// One connection to a monitor.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    events: Vec<Value>,
}

impl Qmp {
    /// Connects, waiting for QEMU to open the socket.
    pub fn connect(path: &Path) -> Result<Qmp> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => {
                    return Err(error).with_context(|| format!("no monitor at {}", path.display()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        let mut qmp = Qmp {
            reader: BufReader::new(stream),
            events: Vec::new(),
        };
        let mut greeting = qmp.line()?;
        // QEMU may say something to a client before that has left.
        while greeting.get("event").is_some() {
            greeting = qmp.line()?;
        }
        if greeting.get("QMP").is_none() {
            bail!("{} did not greet as QMP: {greeting}", path.display());
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs one command and returns what it returns.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut text = json!({"execute": command, "arguments": arguments}).to_string();
        text.push('\n');
        self.reader.get_mut().write_all(text.as_bytes())?;
        loop {
            let mut line = self.line()?;
            if line.get("event").is_some() {
                self.events.push(line);
            } else if let Some(error) = line.get("error") {
                bail!("{command}: {error}");
            } else if line.get("return").is_some() {
                return Ok(line["return"].take());
            }
        }
    }

    /// A command of the human monitor.
    pub fn human(&mut self, line: &str) -> Result<String> {
        let answer = self.execute("human-monitor-command", json!({"command-line": line}))?;
        Ok(answer.as_str().unwrap_or_default().to_owned())
    }

    /// `running`, `paused` and so on.
    pub fn status(&mut self) -> Result<String> {
        let status = self.execute("query-status", json!({}))?;
        Ok(status["status"].as_str().unwrap_or_default().to_owned())
    }

    /// The state that a VM reports within `limit`; none where QEMU does not answer, because its main thread waits
    /// for something.
    pub fn status_within(path: &Path, limit: Duration) -> Result<Option<String>> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(limit))?;
        let mut qmp = Qmp {
            reader: BufReader::new(stream),
            events: Vec::new(),
        };
        let asked = qmp.line().and_then(|_| {
            qmp.execute("qmp_capabilities", json!({}))?;
            qmp.status()
        });
        match asked {
            Ok(status) => Ok(Some(status)),
            Err(error) if is_late(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The next event of this name, or an error after `limit`.
    pub fn wait_event(&mut self, name: &str, limit: Duration) -> Result<Value> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(at) = self.events.iter().position(|event| event["event"] == name) {
                return Ok(self.events.remove(at));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("no event {name} within {limit:?}");
            }
            self.reader.get_ref().set_read_timeout(Some(left))?;
            let line = self.line();
            self.reader
                .get_ref()
                .set_read_timeout(Some(Duration::from_secs(120)))?;
            let line = line?;
            if line.get("event").is_some() {
                self.events.push(line);
            }
        }
    }

    /// Events seen so far; forgets them.
    pub fn take_events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events)
    }

    /// Forgets all events so far, also those that QEMU has sent and that were not read.
    pub fn forget_events(&mut self) -> Result<()> {
        // Events and answers come in one order.
        self.status()?;
        self.take_events();
        Ok(())
    }

    fn line(&mut self) -> Result<Value> {
        let mut text = String::new();
        if self.reader.read_line(&mut text)? == 0 {
            bail!("QEMU closed the monitor");
        }
        Ok(serde_json::from_str(&text)?)
    }
}

fn is_late(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    // A read on a socket that takes too long ends with this.
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

/// Seconds since the epoch of an event.
pub fn event_time_s(event: &Value) -> f64 {
    let stamp = &event["timestamp"];
    stamp["seconds"].as_f64().unwrap_or(0.0) + stamp["microseconds"].as_f64().unwrap_or(0.0) / 1e6
}
