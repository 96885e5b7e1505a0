//! The channel against agents of every kind, honest and lying, over real unix sockets.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

use proptest::prelude::*;

use super::*;
use crate::guest_agent::{AgentChannels, Kind};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(100);
const TIME: &str = "guest-get-time";

/// An agent played by a thread.
struct Peer {
    path: PathBuf,
    thread: JoinHandle<()>,
    _folder: tempfile::TempDir,
}

impl Peer {
    fn playing(part: impl FnOnce(UnixStream) + Send + 'static) -> Peer {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || part(listener.accept().unwrap().0));
        Peer {
            path,
            thread,
            _folder: folder,
        }
    }

    /// Answers the first question, as an agent does; the rest is for `part`.
    fn in_step(
        part: impl FnOnce(&mut UnixStream, &mut dyn FnMut() -> Value) + Send + 'static,
    ) -> Peer {
        Peer::playing(move |mut stream| {
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut hear = move || {
                let mut line = Vec::new();
                reader.read_until(b'\n', &mut line).unwrap();
                let text = line.strip_prefix(&[SENTINEL]).unwrap_or(&line);
                serde_json::from_slice::<Value>(text).unwrap()
            };
            let token = hear()["arguments"]["id"].clone();
            stream.write_all(&[SENTINEL]).unwrap();
            writeln!(stream, "{}", json!({ "return": token })).unwrap();
            part(&mut stream, &mut hear);
        })
    }

    fn connect(&self) -> Channel {
        Channel::connect(&self.path, LONG).unwrap()
    }
}

fn ask_time(channel: &mut Channel, limit: Duration) -> Result<i64, AgentError> {
    channel.execute(TIME, &Value::Null, limit)
}

/// The late answer of an agent to an earlier command.
#[test]
fn old_answers_are_passed_over() {
    let peer = Peer::playing(|mut stream| {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut asked = Vec::new();
        reader.read_until(b'\n', &mut asked).unwrap();
        assert_eq!(asked[0], SENTINEL);
        let asked: Value = serde_json::from_slice(&asked[1..]).unwrap();
        stream
            .write_all(b"{\"return\": {}}\n half a l\xff{\"return\": 7}\nine\n")
            .unwrap();
        stream.write_all(&[SENTINEL]).unwrap();
        writeln!(stream, "{}", json!({ "return": asked["arguments"]["id"] })).unwrap();
        let mut asked = Vec::new();
        reader.read_until(b'\n', &mut asked).unwrap();
        let asked: Value = serde_json::from_slice(&asked).unwrap();
        writeln!(stream, "{}", json!({ "return": 4, "id": "others" })).unwrap();
        writeln!(stream, "{}", json!({ "return": 5, "id": asked["id"] })).unwrap();
    });
    assert_eq!(ask_time(&mut peer.connect(), LONG).unwrap(), 5);
    peer.thread.join().unwrap();
}

#[test]
fn one_that_does_not_answer_is_not_waited_for_any_longer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent");
    let refused = Channel::connect(&path, SHORT).unwrap_err();
    assert!(matches!(refused, AgentError::Refused { .. }), "{refused}");
    let _listener = UnixListener::bind(&path).unwrap();
    let error = Channel::connect(&path, SHORT).unwrap_err();
    assert!(matches!(error, AgentError::Timeout { .. }), "{error}");

    let peer = Peer::in_step(|_, hear| {
        hear();
        hear();
    });
    let mut channel = peer.connect();
    let error = ask_time(&mut channel, SHORT).unwrap_err();
    assert!(matches!(error, AgentError::Timeout { .. }) && !error.is_final());
    let _ = ask_time(&mut channel, SHORT);
    peer.thread.join().unwrap();
}

/// Events, answers to others and garbage without end: in lines, and in one line.
#[test]
fn one_that_talks_without_end_is_not_listened_to_for_long() {
    let long_line = format!(
        "{{\"event\":\"x\",\"data\":[{}[]]}}\n",
        "[],".repeat(1 << 19)
    );
    let deep = "{\"return\":".repeat(1 << 16);
    for noise in [
        "{\"event\":\"x\",\"data\":[[],[],[],{}]}\n".to_owned(),
        "{\"return\":5,\"id\":4711}\n".to_owned(),
        "{\"return\":5}\n\n}{\n".to_owned(),
        long_line,
        deep,
        "x".to_owned(),
    ] {
        let piece = noise.repeat((1 << 16) / noise.len() + 1);
        let peer = Peer::in_step(move |stream, hear| {
            hear();
            while stream.write_all(piece.as_bytes()).is_ok() {}
        });
        let mut channel = peer.connect();
        let error = ask_time(&mut channel, LONG).unwrap_err();
        assert!(matches!(error, AgentError::TooMuch { .. }), "{error}");
        assert!(error.is_final());
        assert!(channel.lines.kept_bytes() <= LINE_BYTES_MAX + RECEIVE_BYTES);
        drop(channel);
        peer.thread.join().unwrap();
    }
}

#[test]
fn an_answer_after_noise_is_found() {
    let peer = Peer::in_step(|stream, hear| {
        let id = hear()["id"].clone();
        let long = "x".repeat(LINE_BYTES_MAX + 1);
        write!(stream, "{long}\n[]\n\"{id}\"\n{{\"event\":\"x\"}}\n").unwrap();
        writeln!(stream, "{{\"id\":{id},\"more\":[[{{}}]],\"return\":-9}}").unwrap();
        let id = hear()["id"].clone();
        writeln!(stream, "{}", json!({ "return": "soon", "id": id })).unwrap();
        let id = hear()["id"].clone();
        let desc = format!("\u{1b}[2Jno\n{}", "!".repeat(1000));
        let refusal = json!({ "error": { "class": "X", "desc": desc }, "id": id });
        writeln!(stream, "{refusal}").unwrap();
        hear();
    });
    let mut channel = peer.connect();
    assert_eq!(ask_time(&mut channel, LONG).unwrap(), -9);
    let error = ask_time(&mut channel, LONG).unwrap_err();
    assert!(matches!(error, AgentError::Garbled { .. }), "{error}");
    let AgentError::Command { desc, .. } = ask_time(&mut channel, LONG).unwrap_err() else {
        panic!("a refusal");
    };
    assert!(desc.starts_with(" [2Jno !!!") && desc.len() == WORDS_MAX);
    let gone = ask_time(&mut channel, LONG).unwrap_err();
    assert!(matches!(gone, AgentError::Closed), "{gone}");
    peer.thread.join().unwrap();
}

proptest! {
    #[test]
    fn noise_is_no_answer(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(read_answer::<i64>(&noise, 1, TIME).is_none());
    }
}

#[test]
fn where_ours_does_not_answer_qemus_is_spoken_to() {
    let silent = Peer::playing(|stream| {
        BufReader::new(stream).split(b'\n').for_each(drop);
    });
    let peer = Peer::in_step(|_, _| {});
    let channels = AgentChannels {
        qemu: Some(peer.path.clone()),
        own: Some(silent.path.clone()),
    };
    let agent = channels.connect(2 * SHORT).unwrap();
    assert_eq!(agent.kind, Kind::Qemu);
    drop(agent);
    for peer in [silent, peer] {
        peer.thread.join().unwrap();
    }
}

#[test]
fn ours_is_spoken_to_where_it_answers() {
    let peer = Peer::in_step(|stream, hear| {
        let question = hear();
        assert_eq!(question["execute"], "stillframe-free-pages");
        assert_eq!(
            question["arguments"],
            json!({ "first": 0, "count": 1 << 18 })
        );
        let done = json!({ "count": 3, "buf-b64": "//7/" });
        writeln!(
            stream,
            "{}",
            json!({ "return": done, "id": question["id"] })
        )
        .unwrap();
    });
    let channels = AgentChannels {
        qemu: Some("/nowhere".into()),
        own: Some(peer.path.clone()),
    };
    let mut agent = channels.connect(LONG).unwrap();
    assert_eq!((agent.kind, agent.frames_max()), (Kind::Own, None));
    // The answer is short: there are no more page frames.
    let named = agent.free_pages(&[5..6, 1 << 18..1 << 19], deadline_after(LONG));
    assert_eq!(named.frames, [0..8, 16..24]);
    assert!(named.error.is_none());
    peer.thread.join().unwrap();
}
