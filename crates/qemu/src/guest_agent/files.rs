//! Files of the guest, read by its agent.
//!
//! Format: QEMU, `docs/interop/qemu-ga-ref` (`guest-file-open`, `-read`, `-seek`, `-close`).

use std::borrow::Cow;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::GuestAgent;
use super::channel::{AgentError, FromAnswer};
use crate::qmp::object;

/// Upper bound on the time for one answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// The same for a file's end, once there is no time left: the agent has the command then, and nothing else is wanted of it.
const END_LIMIT: Duration = Duration::from_millis(10);

/// The answer to `guest-file-read`, and to commands of our own agent.
#[derive(Debug)]
pub(crate) struct FileRead(pub(crate) Vec<u8>);

impl FromAnswer for FileRead {
    fn from_answer(done: &RawValue) -> Option<FileRead> {
        #[derive(Deserialize)]
        struct Done<'a> {
            count: u64,
            #[serde(borrow, rename = "buf-b64")]
            text: Cow<'a, str>,
        }
        let done: Done<'_> = object(done.get().as_bytes()).ok()?;
        let bytes = STANDARD.decode(&*done.text).ok()?;
        (bytes.len() as u64 == done.count).then_some(FileRead(bytes))
    }
}

/// An open file.
pub(super) struct GuestFile<'a> {
    agent: &'a mut GuestAgent,
    handle: i64,
    deadline: Instant,
    /// Where the next read begins, in bytes.
    at: u64,
}

impl GuestAgent {
    /// Opens a file, has `read` read it until `deadline`, and closes it.
    pub(super) fn read_file<T>(
        &mut self,
        path: &str,
        deadline: Instant,
        read: impl FnOnce(&mut GuestFile<'_>) -> Result<T, AgentError>,
    ) -> Result<T, AgentError> {
        let open = json!({ "path": path, "mode": "r" });
        let limit = left(deadline, "guest-file-open")?;
        let handle: i64 = self.channel.execute("guest-file-open", &open, limit)?;
        let done = read(&mut GuestFile {
            agent: self,
            handle,
            deadline,
            at: 0,
        });
        // The agent would keep it open.
        let close = json!({ "handle": handle });
        let limit = left(deadline, "guest-file-close").unwrap_or(END_LIMIT);
        let closed = match &done {
            Err(error) if error.is_final() => Ok(()),
            _ => self.channel.execute("guest-file-close", &close, limit),
        };
        let done = done?;
        closed.map(|()| done)
    }
}

impl GuestFile<'_> {
    /// Up to `bytes` bytes from `offset` on; fewer at the end of the file.
    pub(super) fn read_at(&mut self, offset: u64, bytes: u64) -> Result<Vec<u8>, AgentError> {
        if self.at != offset {
            let seek = json!({ "handle": self.handle, "offset": offset, "whence": "set" });
            let limit = left(self.deadline, "guest-file-seek")?;
            let channel = &mut self.agent.channel;
            channel.execute::<()>("guest-file-seek", &seek, limit)?;
        }
        let read = json!({ "handle": self.handle, "count": bytes });
        let limit = left(self.deadline, "guest-file-read")?;
        let channel = &mut self.agent.channel;
        let FileRead(mut read) = channel.execute("guest-file-read", &read, limit)?;
        read.truncate(bytes as usize);
        self.at = offset + read.len() as u64;
        Ok(read)
    }
}

/// Time for the next answer.
pub(super) fn left(deadline: Instant, command: &'static str) -> Result<Duration, AgentError> {
    let left = deadline.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(AgentError::Timeout {
            command,
            limit_ms: 0,
        }),
        false => Ok(left.min(ANSWER_LIMIT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Then the file is closed all the same.
    #[test]
    fn no_time_left_is_not_the_end_of_the_channel() {
        let late = left(Instant::now(), "guest-file-read").expect_err("no time");
        assert!(!late.is_final(), "{late}");
        let soon = Instant::now() + Duration::from_secs(60);
        assert_eq!(left(soon, "guest-file-read").expect("time"), ANSWER_LIMIT);
    }

    #[test]
    fn an_answer_is_as_long_as_it_says() {
        let read = |text: &str| {
            let raw = RawValue::from_string(text.to_owned()).expect("JSON");
            FileRead::from_answer(&raw).map(|read| read.0)
        };
        assert_eq!(
            read(r#"{"count": 3, "buf-b64": "AAEC", "eof": false}"#),
            Some(vec![0, 1, 2])
        );
        for wrong in [
            r#"{"count": 4, "buf-b64": "AAEC"}"#,
            r#"{"count": 3, "buf-b64": "AAE!"}"#,
            r#"{"count": 3}"#,
            r#"{"count": -3, "buf-b64": "AAEC"}"#,
            r#"[3, "AAEC"]"#,
            "3",
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
