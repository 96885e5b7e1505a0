//! Messages from QEMU that were not taken yet: replies and events, both bounded in bytes.
//!
//! A line is parsed into the few members that are needed. The reply itself stays text until a caller waits for it.
//! As a [`Value`], text takes up to ninety times its bytes of memory (`{"":0},`). So it is parsed only when the
//! number of values in it is below a limit.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::lines::LINE_BYTES_MAX;
use super::{Deleted, Event, excerpt};

/// Upper bound on the bytes of events kept until they are taken; of more, the oldest are dropped.
pub(crate) const EVENT_BYTES_MAX: usize = 1 << 20;
/// Longest name of an event. QEMU's longest has 32 bytes.
const EVENT_NAME_BYTES_MAX: usize = 128;
/// QEMU's event for a deleted device.
const DEVICE_DELETED: &str = "DEVICE_DELETED";
/// Upper bound on the bytes of the paths of deleted devices kept until they are taken.
const DELETED_BYTES_MAX: usize = 64 << 10;
/// Upper bound on the bytes of replies kept until they are waited for; of more, the oldest are dropped.
pub(crate) const REPLY_BYTES_MAX: usize = LINE_BYTES_MAX;
/// Commands whose replies are awaited at a time; of more, the oldest are given up.
pub(crate) const OUTSTANDING_MAX: usize = 64;
/// Upper bound on the bytes kept of each of the two words of an error.
const ERROR_BYTES_MAX: usize = 4 << 10;
/// Upper bound on the values in one reply; `query-qmp-schema` has some 30,000. About 60 MiB of memory at worst.
const VALUES_MAX: usize = 1 << 18;

/// The answer to one command, as QEMU worded it.
#[derive(Debug)]
pub(crate) enum Reply {
    /// Done, with this JSON text.
    Return(Box<RawValue>),
    /// Refused.
    Error {
        /// QEMU's error class.
        class: String,
        /// QEMU's own words.
        desc: String,
    },
}

impl Reply {
    fn bytes(&self) -> usize {
        match self {
            Reply::Return(text) => text.get().len(),
            Reply::Error { class, desc } => class.len() + desc.len(),
        }
    }
}

/// Where an answer is.
#[derive(Debug)]
pub(crate) enum Lookup {
    /// It came.
    Here(Reply),
    /// It may still come.
    Outstanding,
    /// It was dropped for others, or never requested.
    Dropped,
}

/// A line that is no JSON object of QMP's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotQmp;

/// The members of a line that matter here.
#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    event: Option<Cow<'a, str>>,
    timestamp: Option<Timestamp>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow, rename = "return")]
    done: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Timestamp {
    seconds: i64,
    microseconds: i64,
}

impl Timestamp {
    /// Time since the epoch; QEMU says -1 where it has no clock.
    fn since_epoch(&self) -> Duration {
        let seconds = u64::try_from(self.seconds).unwrap_or(0);
        let micros = u64::try_from(self.microseconds).unwrap_or(0).min(999_999);
        Duration::from_secs(seconds) + Duration::from_micros(micros)
    }
}

/// The members of an event's data that are kept.
#[derive(Deserialize)]
struct EventData<'a> {
    #[serde(borrow)]
    path: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Refusal<'a> {
    #[serde(borrow)]
    class: Option<Cow<'a, str>>,
    #[serde(borrow)]
    desc: Option<Cow<'a, str>>,
}

/// Replies and events, and the commands that wait for one.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    outstanding: BTreeSet<u64>,
    replies: BTreeMap<u64, Reply>,
    reply_bytes: usize,
    events: VecDeque<Event>,
    event_bytes: usize,
    deleted: Deleted,
}

impl Inbox {
    /// A command was sent: its reply is kept when it comes.
    pub(crate) fn expect(&mut self, id: u64) {
        self.outstanding.insert(id);
        while self.outstanding.len() + self.replies.len() > OUTSTANDING_MAX {
            let oldest = self.outstanding.first().copied();
            match (oldest, self.replies.first_key_value()) {
                (Some(sent), Some((&came, _))) if came < sent => self.drop_oldest_reply(),
                (Some(sent), _) => self.forget(sent),
                (None, _) => self.drop_oldest_reply(),
            }
        }
    }

    /// A command's reply is skipped when it comes.
    pub(crate) fn forget(&mut self, id: u64) {
        self.outstanding.remove(&id);
    }

    /// The reply to a command, handed out once.
    pub(crate) fn take(&mut self, id: u64) -> Lookup {
        match self.replies.remove(&id) {
            Some(reply) => {
                self.reply_bytes -= reply.bytes();
                Lookup::Here(reply)
            }
            None if self.outstanding.contains(&id) => Lookup::Outstanding,
            None => Lookup::Dropped,
        }
    }

    /// Whether the reply to a command may still come.
    pub(crate) fn is_outstanding(&self, id: u64) -> bool {
        self.outstanding.contains(&id)
    }

    /// Whether an event of this name is kept.
    pub(crate) fn has_event(&self, name: &str) -> bool {
        self.events.iter().any(|event| event.name == name)
    }

    /// Devices deleted since the last call.
    pub(crate) fn take_deleted(&mut self) -> Deleted {
        std::mem::take(&mut self.deleted)
    }

    /// All events kept, the oldest first.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        self.event_bytes = 0;
        self.events.drain(..).collect()
    }

    /// Keeps the message of `line` if a caller waits for it.
    pub(crate) fn sort_in(&mut self, line: &[u8]) -> Result<(), NotQmp> {
        let line: Line<'_> = object(line)?;
        if let Some(name) = line.event {
            let at = line.timestamp.map_or(Duration::ZERO, |at| at.since_epoch());
            match &*name {
                DEVICE_DELETED => self.keep_deleted(line.data),
                _ => self.keep_event(&name, at),
            }
            return Ok(());
        }
        // A guardian's ids are words; this client's are numbers.
        let id = line.id.and_then(|id| id.get().parse::<u64>().ok());
        let Some(id) = id.filter(|id| self.outstanding.remove(id)) else {
            return Ok(());
        };
        let reply = match line.error {
            Some(error) => refusal(error),
            None => Reply::Return(line.done.unwrap_or(RawValue::NULL).to_owned()),
        };
        self.reply_bytes += reply.bytes();
        self.replies.insert(id, reply);
        while self.reply_bytes > REPLY_BYTES_MAX && self.replies.len() > 1 {
            self.drop_oldest_reply();
        }
        Ok(())
    }

    fn drop_oldest_reply(&mut self) {
        if let Some((_, reply)) = self.replies.pop_first() {
            self.reply_bytes -= reply.bytes();
        }
    }

    fn keep_deleted(&mut self, data: Option<&RawValue>) {
        let data = data.map(RawValue::get).unwrap_or_default();
        let path = serde_json::from_str::<EventData<'_>>(data).ok();
        let path = path.and_then(|data| data.path).unwrap_or_default();
        let kept: usize = self.deleted.paths.iter().map(path_bytes).sum();
        if kept + path_bytes(&path) <= DELETED_BYTES_MAX {
            self.deleted.paths.push(path.into_owned());
        } else {
            self.deleted.more = true;
        }
    }

    fn keep_event(&mut self, name: &str, at: Duration) {
        if name.len() > EVENT_NAME_BYTES_MAX {
            return;
        }
        let event = Event {
            name: name.to_owned(),
            at,
        };
        self.event_bytes += event_bytes(&event);
        self.events.push_back(event);
        while self.event_bytes > EVENT_BYTES_MAX
            && let Some(dropped) = self.events.pop_front()
        {
            self.event_bytes -= event_bytes(&dropped);
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn kept_bytes(&self) -> (usize, usize) {
        let events = self.events.iter().map(event_bytes);
        let replies = self.replies.values().map(Reply::bytes);
        assert_eq!(self.event_bytes, events.sum::<usize>());
        assert_eq!(self.reply_bytes, replies.sum::<usize>());
        (self.event_bytes, self.reply_bytes)
    }
}

fn event_bytes(event: &Event) -> usize {
    size_of::<Event>() + event.name.len()
}

fn path_bytes(path: impl AsRef<str>) -> usize {
    size_of::<String>() + path.as_ref().len()
}

fn refusal(error: &RawValue) -> Reply {
    let words = object::<Refusal<'_>>(error.get().as_bytes()).ok();
    let (class, desc) = words.map_or((None, None), |words| (words.class, words.desc));
    let kept = |word: Option<Cow<'_, str>>| match word {
        Some(word) => word[..word.floor_char_boundary(ERROR_BYTES_MAX)].to_owned(),
        None => "unspecified".to_owned(),
    };
    Reply::Error {
        class: kept(class),
        desc: kept(desc),
    }
}

/// Reads a JSON object. A list would do for a struct otherwise.
pub(crate) fn object<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, NotQmp> {
    match text.trim_ascii_start().first() {
        Some(b'{') => serde_json::from_slice(text).map_err(|_| NotQmp),
        _ => Err(NotQmp),
    }
}

/// The value of `text`, if it is JSON of a bounded number of values.
pub(crate) fn value(text: &[u8]) -> Result<Value, String> {
    if values(text) > VALUES_MAX {
        return Err(format!("more than {VALUES_MAX} values"));
    }
    serde_json::from_slice(text).map_err(|_| excerpt(text))
}

/// Upper bound on the values in JSON text: every one but the first follows one of these.
fn values(text: &[u8]) -> usize {
    let (mut count, mut in_string, mut escaped) = (1, false, false);
    for byte in text {
        match (in_string, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => in_string = !in_string,
            (false, b',' | b':' | b'[' | b'{') => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn events_are_bounded_in_bytes_and_the_newest_stay() {
        let mut inbox = Inbox::default();
        for number in 0..100_000 {
            let line = format!("{{\"event\": \"E{number}\", \"data\": [[], []]}}");
            inbox.sort_in(line.as_bytes()).expect("an event");
        }
        let (kept, _) = inbox.kept_bytes();
        assert!(kept <= EVENT_BYTES_MAX && kept > EVENT_BYTES_MAX / 2);
        assert!(inbox.has_event("E99999") && !inbox.has_event("E0"));
        let long = format!("{{\"event\": \"{}\"}}", "E".repeat(10_000_000));
        inbox.sort_in(long.as_bytes()).expect("an event");
        assert_eq!(inbox.kept_bytes().0, kept);
        assert!(!inbox.take_events().is_empty());
        assert_eq!(inbox.kept_bytes(), (0, 0));
    }

    /// A guest can make QEMU emit some events at any rate; they must not evict a `DEVICE_DELETED`.
    #[test]
    fn deleted_devices_outlast_all_other_events() {
        let deleted = |inbox: &mut Inbox, path: &str| {
            let line =
                format!("{{\"event\": \"DEVICE_DELETED\", \"data\": {{\"path\": \"{path}\"}}}}");
            inbox.sort_in(line.as_bytes()).expect("an event");
        };
        let mut inbox = Inbox::default();
        deleted(&mut inbox, "/machine/peripheral/hot");
        for _ in 0..100_000 {
            inbox.sort_in(b"{\"event\": \"NOISE\"}").expect("an event");
        }
        inbox.take_events();
        let gone = inbox.take_deleted();
        assert_eq!(gone.paths, ["/machine/peripheral/hot"]);
        assert!(!gone.more && inbox.take_deleted().paths.is_empty());
        for number in 0..10_000 {
            deleted(&mut inbox, &format!("/machine/peripheral/{number}"));
        }
        let gone = inbox.take_deleted();
        assert!(gone.more && gone.paths.len() > 100);
        assert!(gone.paths.iter().map(path_bytes).sum::<usize>() <= DELETED_BYTES_MAX);
    }

    #[test]
    fn replies_that_no_caller_takes_are_bounded() {
        let mut inbox = Inbox::default();
        let long = "x".repeat(1 << 20);
        for id in 0..40 {
            inbox.expect(id);
            let line = format!("{{\"return\": \"{long}\", \"id\": {id}}}");
            inbox.sort_in(line.as_bytes()).expect("a reply");
            assert!(inbox.kept_bytes().1 <= REPLY_BYTES_MAX);
        }
        assert!(matches!(inbox.take(0), Lookup::Dropped));
        assert!(matches!(inbox.take(39), Lookup::Here(Reply::Return(_))));
        for id in 100..1000 {
            inbox.expect(id);
        }
        assert!(inbox.outstanding.len() + inbox.replies.len() <= OUTSTANDING_MAX);
        assert!(inbox.is_outstanding(999));
        assert!(matches!(inbox.take(100), Lookup::Dropped));
    }

    /// The longest reply of today has some 30,000 values.
    #[test]
    fn a_reply_of_too_many_values_is_refused() {
        let list = |values: usize| format!("[{}]", vec!["{\"\":0}"; values].join(","));
        assert!(value(list(VALUES_MAX / 3 - 1).as_bytes()).is_ok());
        assert!(value(list(VALUES_MAX / 3 + 2).as_bytes()).is_err());
        // A long text is one value, whatever is in it.
        let text = format!("\"{}\"", "[,{:\\\"\\\\".repeat(VALUES_MAX));
        assert!(value(text.as_bytes()).is_ok());
        assert!(value("[".repeat(200).as_bytes()).is_err());
    }

    fn count(value: &Value) -> usize {
        match value {
            Value::Array(list) => 1 + list.iter().map(count).sum::<usize>(),
            Value::Object(map) => 1 + map.values().map(count).sum::<usize>(),
            _ => 1,
        }
    }

    proptest! {
        /// The bound holds for every text that is JSON.
        #[test]
        fn values_are_never_undercounted(text in "[\\[\\]{}:,\"\\\\ a0]{0,40}") {
            if let Ok(value) = serde_json::from_str::<Value>(&text) {
                prop_assert!(count(&value) <= values(text.as_bytes()), "{text}");
            }
        }

        #[test]
        fn noise_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Inbox::default().sort_in(&noise);
        }
    }
}
