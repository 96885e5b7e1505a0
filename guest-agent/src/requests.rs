//! Commands of the host, and the answers to them: JSON in lines, as QEMU's agent has them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::lines::SENTINEL;
use crate::{clock, free_pages, memory};

/// A command.
#[derive(Debug, Deserialize)]
#[serde(tag = "execute", content = "arguments", rename_all = "kebab-case")]
enum Command {
    /// The answer has this number.
    GuestSync { id: u64 },
    /// And begins with [`SENTINEL`].
    GuestSyncDelimited { id: u64 },
    /// Nanoseconds since 1970.
    GuestGetTime,
    /// Sets the clock to these nanoseconds since 1970.
    GuestSetTime { time: i64 },
    /// The free ones among these page frames, a bit each.
    StillframeFreePages { first: u64, count: u64 },
    /// `/proc/meminfo`.
    StillframeMemory,
}

/// A line of the host.
#[derive(Debug, Deserialize)]
struct Message {
    /// Returned with the answer.
    id: Option<Value>,
    #[serde(flatten)]
    command: Command,
}

/// Carries out a line of the host, and returns the line of the answer.
pub fn answer(line: &[u8]) -> Vec<u8> {
    let Message { id, command } = match serde_json::from_slice(line) {
        Ok(message) => message,
        Err(error) => return words(refused(format!("this is no command: {error}")), None),
    };
    let begin: &[u8] = match command {
        Command::GuestSyncDelimited { .. } => &[SENTINEL],
        _ => &[],
    };
    let answer = match perform(command) {
        Ok(done) => json!({ "return": done }),
        Err(why) => refused(why),
    };
    [begin, &words(answer, id)].concat()
}

fn perform(command: Command) -> Result<Value, String> {
    match command {
        Command::GuestSync { id } | Command::GuestSyncDelimited { id } => Ok(json!(id)),
        Command::GuestGetTime => Ok(json!(clock::time_ns())),
        Command::GuestSetTime { time } => match clock::set_ns(time) {
            Ok(()) => Ok(json!({})),
            Err(error) => Err(format!("cannot set the clock: {error}")),
        },
        Command::StillframeFreePages { first, count } => {
            let bits = free_pages::free(first, count).map_err(|error| error.to_string())?;
            Ok(json!({ "count": bits.len(), "buf-b64": STANDARD.encode(bits) }))
        }
        Command::StillframeMemory => {
            let text =
                memory::text().map_err(|error| format!("cannot read memory's use: {error}"))?;
            Ok(json!({ "count": text.len(), "buf-b64": STANDARD.encode(text) }))
        }
    }
}

fn refused(why: String) -> Value {
    json!({ "error": { "class": "GenericError", "desc": why } })
}

fn words(mut message: Value, id: Option<Value>) -> Vec<u8> {
    if let Some(id) = id {
        message["id"] = id;
    }
    format!("{message}\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(line: &str) -> String {
        String::from_utf8_lossy(&answer(line.as_bytes())).into_owned()
    }

    #[test]
    fn a_host_that_begins_finds_its_answer() {
        let line = r#"{"execute": "guest-sync-delimited", "arguments": {"id": 7}}"#;
        assert_eq!(answer(line.as_bytes()), b"\xff{\"return\":7}\n");
    }

    #[test]
    fn an_answer_has_the_number_of_its_command() {
        let line = r#"{"execute": "guest-get-time", "id": 9}"#;
        let answer: Value = serde_json::from_str(&said(line)).unwrap();
        assert_eq!(answer["id"], 9);
        assert!(answer["return"].as_i64() > Some(1_700_000_000_000_000_000));
        let line = r#"{"execute": "stillframe-memory", "id": "a"}"#;
        let answer: Value = serde_json::from_str(&said(line)).unwrap();
        assert_eq!(answer["id"], "a");
        let text = STANDARD.decode(answer["return"]["buf-b64"].as_str().unwrap());
        let text = text.unwrap();
        assert!(text.starts_with(b"MemTotal:"));
        assert_eq!(answer["return"]["count"], text.len());
    }

    #[test]
    fn anything_else_is_refused() {
        for line in [
            "",
            "{}",
            "[]",
            "\u{0}",
            r#"{"execute": "guest-exec", "arguments": {"path": "/bin/sh"}}"#,
            r#"{"execute": "guest-file-open", "arguments": {"path": "/etc/shadow"}}"#,
            r#"{"execute": "stillframe-free-pages"}"#,
            r#"{"execute": "stillframe-free-pages", "arguments": {"first": -8, "count": 8}}"#,
            r#"{"execute": "stillframe-free-pages", "arguments": {"first": 1, "count": 8}, "id": 3}"#,
        ] {
            let said = said(line);
            assert!(
                said.starts_with(r#"{"error":{"#) && said.ends_with('\n'),
                "{said}"
            );
        }
    }
}
