//! Speaking to a guest agent, which answers as a monitor does but greets nobody, and whose channel may still
//! hold what it told others.
//!
//! Format: QEMU, `docs/interop/qemu-ga-ref` (`guest-sync-delimited`).

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::{Client, QmpError, deadline_after, lines, socket};

/// A byte that is in no text. It ends what the agent has half read, and begins the answer to
/// `guest-sync-delimited`.
const SENTINEL: u8 = 0xff;

impl Client {
    /// Connects to the guest agent whose channel ends at `path`, and makes sure that it answers, all of it
    /// within `timeout`.
    ///
    /// # Errors
    /// [`QmpError::Refused`]; [`QmpError::Timeout`] when nobody answers: there is no agent in the guest, or
    /// somebody else speaks to it.
    pub fn connect_to_agent(path: &Path, timeout: Duration) -> Result<Client, QmpError> {
        const SYNC: &str = "guest-sync-delimited";
        let deadline = deadline_after(timeout);
        let mut client = Client::on(socket::connect(path, deadline)?);
        // None that another client may have chosen before.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let token = now.map_or(1, |time| time.as_nanos() as u64 >> 1);
        let (_, line) = client.compose(SYNC, json!({ "id": token }));
        client.transmit(&[&[SENTINEL], &line[..]].concat())?;
        loop {
            while let Some(answer) = client.next_delimited()? {
                if answer["return"].as_u64() == Some(token) {
                    return Ok(client);
                }
            }
            if !client.receive_until(deadline)? && Instant::now() >= deadline {
                return Err(QmpError::Timeout {
                    command: SYNC.to_owned(),
                    limit_ms: timeout.as_millis(),
                });
            }
        }
    }

    /// What stands behind a sentinel in the next line that has one; null where that is no JSON.
    fn next_delimited(&mut self) -> Result<Option<Value>, QmpError> {
        loop {
            let line = self.lines.next_line().map_err(|_| QmpError::LineTooLong {
                limit_bytes: lines::LINE_BYTES_MAX,
            })?;
            let Some(line) = line else { return Ok(None) };
            if let Some(at) = line.iter().rposition(|&byte| byte == SENTINEL) {
                return Ok(Some(
                    serde_json::from_slice(&line[at + 1..]).unwrap_or_default(),
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    /// What an agent that was asked before may still have to say.
    #[test]
    fn old_answers_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let agent = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let mut asked = [0; 512];
            let read = peer.read(&mut asked).unwrap();
            assert_eq!(asked[0], SENTINEL);
            let asked: Value = serde_json::from_slice(&asked[1..read]).unwrap();
            peer.write_all(b"{\"return\": {}}\n half a l\xff{\"return\": 7}\n")
                .unwrap();
            let answer = json!({ "return": asked["arguments"]["id"] });
            writeln!(peer, "ine").unwrap();
            peer.write_all(&[SENTINEL]).unwrap();
            writeln!(peer, "{answer}").unwrap();
            let mut asked = [0; 512];
            let read = peer.read(&mut asked).unwrap();
            let asked: Value = serde_json::from_slice(&asked[..read]).unwrap();
            writeln!(peer, "{}", json!({ "return": 5, "id": asked["id"] })).unwrap();
        });
        let mut client = Client::connect_to_agent(&path, Duration::from_secs(20)).unwrap();
        assert_eq!(client.execute("guest-get-time", Value::Null).unwrap(), 5);
        agent.join().unwrap();
    }

    #[test]
    fn one_that_does_not_answer_is_not_waited_for_any_longer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let _listener = UnixListener::bind(&path).unwrap();
        let error = Client::connect_to_agent(&path, Duration::from_millis(20)).unwrap_err();
        assert!(matches!(error, QmpError::Timeout { .. }), "{error}");
    }
}
