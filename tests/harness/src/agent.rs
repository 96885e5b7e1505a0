//! A guest's agent, spoken to without Stillframe; and one that lies.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::running::PATIENCE;

/// A connection.
#[derive(Debug)]
pub struct Agent {
    stream: BufReader<UnixStream>,
}

impl Agent {
    /// Connects to the agent of a guest, which may only be booting.
    pub fn connect(path: &Path) -> Result<Agent> {
        let stream = UnixStream::connect(path).with_context(|| path.display().to_string())?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        // A guest that does not read yet takes little in.
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut agent = Agent {
            stream: BufReader::new(stream),
        };
        let begin = Instant::now();
        for number in 1.. {
            ensure!(begin.elapsed() < PATIENCE, "no agent answers");
            agent.send(&json!({"execute": "guest-sync", "arguments": {"id": number}}))?;
            if agent.is_answered(number) {
                break;
            }
        }
        agent.stream.get_ref().set_read_timeout(Some(PATIENCE))?;
        Ok(agent)
    }

    /// Whether the agent answers this question in time. Late answers to earlier ones come before.
    fn is_answered(&mut self, number: i32) -> bool {
        while let Ok(answer) = self.receive() {
            if answer["return"] == number {
                return true;
            }
        }
        false
    }

    /// Seconds by which the guest's clock is behind this machine's.
    pub fn behind_s(&mut self) -> Result<f64> {
        let guest = self.execute(&json!({"execute": "guest-get-time"}))?;
        let guest = guest.as_f64().context("no time")? / 1e9;
        Ok(now_s()? - guest)
    }

    /// Sets the guest's clock back by this many seconds.
    pub fn set_behind(&mut self, seconds: f64) -> Result<()> {
        let time = ((now_s()? - seconds) * 1e9) as i64;
        self.execute(&json!({"execute": "guest-set-time", "arguments": {"time": time}}))?;
        Ok(())
    }

    fn execute(&mut self, command: &Value) -> Result<Value> {
        self.send(command)?;
        let mut answer = self.receive()?;
        ensure!(answer.get("return").is_some(), "{command}: {answer}");
        Ok(answer["return"].take())
    }

    fn send(&mut self, command: &Value) -> Result<()> {
        Ok(writeln!(self.stream.get_mut(), "{command}")?)
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line)?;
        Ok(serde_json::from_slice(&line)?)
    }
}

/// What a lying agent does after it has answered the first question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// It sends events without end.
    Events,
    /// It opens a file, and says no more of its flags than the beginning of an answer.
    HalfAnAnswer,
    /// It opens a file, and says that an answer is longer than it is.
    Length,
    /// It opens a file of which every page is free, and sends more of it than an answer may have.
    AllFree,
    /// It has much memory when it is queried first, and none after that.
    Pressure,
    /// The same, and it begins to swap.
    Swaps,
    /// It always has much memory.
    Plenty,
}

/// An agent as a hostile guest may have one.
#[derive(Debug)]
pub struct LyingAgent {
    thread: JoinHandle<Result<usize>>,
}

impl LyingAgent {
    /// Listens at `path`, where QEMU did so for the guest.
    pub fn in_place_of(path: &Path, lie: Lie) -> Result<LyingAgent> {
        std::fs::remove_file(path).with_context(|| path.display().to_string())?;
        let listener = UnixListener::bind(path)?;
        let thread = std::thread::spawn(move || {
            let mut stream = listener.accept()?.0;
            let mut questions = BufReader::new(stream.try_clone()?);
            let received = question(&mut questions)?;
            let answer = json!({ "return": received["arguments"]["id"] });
            stream.write_all(b"\xff")?;
            writeln!(stream, "{answer}")?;
            match lie {
                Lie::Events => flood(stream),
                _ => answer_wrong(lie, questions, stream),
            }
        });
        Ok(LyingAgent { thread })
    }

    /// How many bytes were taken from it until its client had enough.
    pub fn end(self) -> Result<usize> {
        self.thread.join().map_err(|_| anyhow!("it panicked"))?
    }
}

fn question(questions: &mut impl BufRead) -> Result<Value> {
    let mut line = Vec::new();
    questions.read_until(b'\n', &mut line)?;
    let text = line.strip_prefix(b"\xff").unwrap_or(&line);
    Ok(serde_json::from_slice(text)?)
}

fn flood(mut stream: UnixStream) -> Result<usize> {
    let event = format!(
        "{{\"event\":\"x\",\"data\":[{}[]]}}\n",
        "[],".repeat(700_000)
    );
    let mut taken = 0;
    // Ends with an error when the client closes.
    while let Ok(bytes) = stream.write(&event.as_bytes()[taken % event.len()..]) {
        taken += bytes;
    }
    Ok(taken)
}

/// Answers questions about a file until the client closes.
fn answer_wrong(lie: Lie, mut questions: impl BufRead, mut stream: UnixStream) -> Result<usize> {
    let (mut taken, mut reads) = (0, 0);
    while let Ok(received) = question(&mut questions) {
        let id = &received["id"];
        reads += u32::from(received["execute"] == "guest-file-read");
        let answer = match (received["execute"].as_str(), lie) {
            (Some("guest-file-read"), Lie::HalfAnAnswer) => {
                format!("{{\"id\": {id}, \"return\": {{\"buf-b64\": \"AAQAAAAA")
            }
            (Some("guest-file-read"), Lie::Length) => {
                let wrong = json!({ "count": 1u64 << 40, "buf-b64": "AAQAAAAAAAA=", "eof": false });
                json!({ "id": id, "return": wrong }).to_string() + "\n"
            }
            (Some("guest-file-read"), Lie::Pressure | Lie::Swaps | Lie::Plenty) => {
                let text = meminfo(lie, reads);
                let all =
                    json!({ "count": text.len(), "buf-b64": STANDARD.encode(text), "eof": true });
                json!({ "id": id, "return": all }).to_string() + "\n"
            }
            (Some("guest-file-read"), _) => {
                // Three bytes of flags are four letters: 32 KiB and one group more.
                let text = "AAQAAAAAAAAABAAAAAAAAAAEAAAAAAAA".repeat(1368);
                let all = json!({ "count": 1368 * 24, "buf-b64": text, "eof": false });
                json!({ "id": id, "return": all }).to_string() + "\n"
            }
            _ => json!({ "id": id, "return": 1000 }).to_string() + "\n",
        };
        if stream.write_all(answer.as_bytes()).is_err() {
            break;
        }
        taken += answer.len();
    }
    Ok(taken)
}

/// What the file says the first time, and later. All that follows from the first is that the guest needs next to nothing.
fn meminfo(lie: Lie, reads: u32) -> String {
    let (available, swap_free) = match (lie, reads) {
        (Lie::Plenty, _) | (_, 1) => ("9999999", 1000),
        (Lie::Swaps, _) => ("9999999", 990),
        _ => ("1", 1000),
    };
    format!(
        "MemTotal: 9999999 kB\nMemAvailable: {available} kB\nSwapTotal: 1000 kB\nSwapFree: {swap_free} kB\nCommitted_AS: 0 kB\n"
    )
}

fn now_s() -> Result<f64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As an agent of a guest on a busy machine.
    #[test]
    fn an_agent_that_answers_late_is_heard() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let agent = std::thread::spawn(move || {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            let mut asked = String::new();
            let mut questions = 0;
            while stream.read_line(&mut asked).unwrap() > 0 {
                questions += 1;
                if questions == 1 {
                    std::thread::sleep(Duration::from_millis(1200));
                }
                let question: Value = serde_json::from_str(&asked).unwrap();
                let answer = json!({ "return": question["arguments"]["id"] });
                writeln!(stream.get_mut(), "{answer}").unwrap();
                asked.clear();
            }
            questions
        });
        drop(Agent::connect(&path).unwrap());
        let questions = agent.join().unwrap();
        assert!((2..10).contains(&questions), "{questions}");
    }
}
