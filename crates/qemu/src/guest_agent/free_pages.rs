//! The pages that a Linux guest calls free, read by its agent from `/proc/kpageflags`: eight bytes of flags a page
//! frame, in the order of physical addresses.
//!
//! Format: Linux `Documentation/admin-guide/mm/pagemap.rst` and `fs/proc/page.c`. The kernel takes no lock for an answer.
//! It may see a page frame in the middle of a change, and then the flag of its neighbours. So frames count as free only
//! in aligned groups of [`GROUP`], each of which has the flag of free memory and no other.

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::GuestAgent;
use super::channel::{AgentError, FromAnswer};
use crate::qmp::object;

/// The guest's file of flags.
const FLAGS: &str = "/proc/kpageflags";
/// Bytes of flags for a page frame.
const FLAGS_BYTES: u64 = 8;
/// The flags of free memory: `KPF_BUDDY` alone.
const FREE: u64 = 1 << 10;
/// Page frames that are free together or not at all.
pub const GROUP: u64 = 8;
/// Page frames in one answer: 32 KiB of flags, which are 43 KiB of text.
const ANSWER_FRAMES: u64 = 4096;
/// Upper bound on the time for one answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// What a guest said about its page frames.
#[derive(Debug)]
pub struct NamedFree {
    /// Page frames that it calls free, ascending.
    pub frames: Vec<Range<u64>>,
    /// Why it said no more.
    pub error: Option<AgentError>,
}

/// The answer to `guest-file-read`.
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

impl GuestAgent {
    /// Which page frames of `wanted` (ascending) the guest calls free, until `deadline`. A whole group or answer may be
    /// named beyond what was wanted.
    pub fn free_pages(&mut self, wanted: &[Range<u64>], deadline: Instant) -> NamedFree {
        let mut frames = Vec::new();
        let error = self.read_flags(wanted, deadline, &mut frames).err();
        NamedFree { frames, error }
    }

    fn read_flags(
        &mut self,
        wanted: &[Range<u64>],
        deadline: Instant,
        frames: &mut Vec<Range<u64>>,
    ) -> Result<(), AgentError> {
        let open = json!({ "path": FLAGS, "mode": "r" });
        let limit = left(deadline)?;
        let handle: i64 = self.channel.execute("guest-file-open", &open, limit)?;
        let read = self.read_parts(handle, wanted, deadline, frames);
        // The agent would keep it open.
        let close = json!({ "handle": handle });
        let limit = left(deadline).unwrap_or(ANSWER_LIMIT);
        let closed = match &read {
            Err(error) if error.is_final() => Ok(()),
            _ => self.channel.execute("guest-file-close", &close, limit),
        };
        read.and(closed)
    }

    fn read_parts(
        &mut self,
        handle: i64,
        wanted: &[Range<u64>],
        deadline: Instant,
        frames: &mut Vec<Range<u64>>,
    ) -> Result<(), AgentError> {
        let mut at = 0;
        for part in parts(wanted) {
            if part.start != at {
                let offset = part.start * FLAGS_BYTES;
                let seek = json!({ "handle": handle, "offset": offset, "whence": "set" });
                let limit = left(deadline)?;
                self.channel
                    .execute::<()>("guest-file-seek", &seek, limit)?;
            }
            let bytes = (part.end - part.start) * FLAGS_BYTES;
            let read = json!({ "handle": handle, "count": bytes });
            let limit = left(deadline)?;
            let FileRead(flags) = self.channel.execute("guest-file-read", &read, limit)?;
            let flags = &flags[..flags.len().min(bytes as usize)];
            add_free(part.start, flags, frames);
            // Behind the guest's last page frame there is nothing.
            if (flags.len() as u64) < bytes {
                break;
            }
            at = part.end;
        }
        Ok(())
    }
}

/// The answers that cover `wanted`, none of them twice, each aligned.
fn parts(wanted: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut numbers: Vec<u64> = Vec::new();
    for range in wanted.iter().filter(|range| !range.is_empty()) {
        let first = range.start / ANSWER_FRAMES;
        let next = numbers.last().map_or(first, |last| first.max(last + 1));
        numbers.extend(next..range.end.div_ceil(ANSWER_FRAMES));
    }
    let part = |number: u64| number * ANSWER_FRAMES..(number + 1) * ANSWER_FRAMES;
    numbers.into_iter().map(part).collect()
}

/// Adds the groups that are free by these flags, the first of which are those of page frame `first`, which is aligned.
pub(crate) fn add_free(first: u64, flags: &[u8], frames: &mut Vec<Range<u64>>) {
    let group_bytes = (GROUP * FLAGS_BYTES) as usize;
    for (number, group) in (0..).zip(flags.chunks_exact(group_bytes)) {
        let is_free = |flags: &[u8; 8]| u64::from_le_bytes(*flags) == FREE;
        if !group.as_chunks().0.iter().all(is_free) {
            continue;
        }
        let start = first + number * GROUP;
        match frames.last_mut() {
            Some(last) if last.end == start => last.end += GROUP,
            _ => frames.push(start..start + GROUP),
        }
    }
}

/// Time for the next answer.
fn left(deadline: Instant) -> Result<Duration, AgentError> {
    let left = deadline.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(AgentError::Io(io::ErrorKind::TimedOut.into())),
        false => Ok(left.min(ANSWER_LIMIT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(frames: &[u64]) -> Vec<u8> {
        frames
            .iter()
            .flat_map(|flags| flags.to_le_bytes())
            .collect()
    }

    #[test]
    fn a_group_is_free_whole_or_not_at_all() {
        let mut frames = vec![FREE; 40];
        frames[9] = 0;
        frames[31] = FREE | 1 << 16;
        let mut found = Vec::new();
        add_free(4096, &flags(&frames), &mut found);
        assert_eq!(found, [4096..4104, 4112..4120, 4128..4136]);
        // Half a group at the end of an answer.
        let mut found = Vec::new();
        add_free(0, &flags(&frames[..15])[..119], &mut found);
        assert_eq!(found, std::slice::from_ref(&(0..8)));
    }

    #[test]
    fn parts_cover_what_is_wanted_once() {
        assert_eq!(parts(&[]), []);
        let wanted = [5..6, 4095..4097, 8191..8191, 12288..12289];
        assert_eq!(parts(&wanted), [0..4096, 4096..8192, 12288..16384]);
        assert_eq!(
            parts(std::slice::from_ref(&(0..8192))),
            [0..4096, 4096..8192]
        );
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
