//! The client against peers of every kind, over real unix sockets.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

use super::*;

const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;
const SHORT: Duration = Duration::from_millis(150);
const LONG: Duration = Duration::from_secs(20);

/// A listening socket and a thread that plays `part` with the first client.
struct Peer {
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
    _directory: tempfile::TempDir,
}

impl Peer {
    fn playing(part: impl FnOnce(UnixStream) + Send + 'static) -> Peer {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("qmp");
        let listener = UnixListener::bind(&path).expect("bound");
        let thread = std::thread::spawn(move || {
            let (stream, _) = listener.accept().expect("accepted");
            part(stream);
        });
        Peer {
            path,
            thread: Some(thread),
            _directory: directory,
        }
    }

    fn connect(&self) -> Result<Client, QmpError> {
        Client::connect(&self.path, LONG)
    }

    fn join(mut self) {
        let thread = self.thread.take().expect("joined once");
        thread.join().expect("the peer played its part");
    }
}

fn say(mut stream: &UnixStream, text: &str) {
    stream.write_all(text.as_bytes()).expect("written");
}

fn hear(reader: &mut BufReader<UnixStream>) -> Value {
    loop {
        let mut line = String::new();
        assert_ne!(reader.read_line(&mut line).expect("read"), 0, "closed");
        if !line.trim().is_empty() {
            return serde_json::from_str(&line).expect("the client speaks JSON");
        }
    }
}

/// Greets, answers the negotiation, and leaves the rest to `part`.
fn greeted(part: impl FnOnce(&UnixStream, &mut BufReader<UnixStream>) + Send + 'static) -> Peer {
    Peer::playing(move |stream| {
        let mut reader = BufReader::new(stream.try_clone().expect("cloned"));
        say(&stream, &format!("{GREETING}\r\n"));
        let negotiation = hear(&mut reader);
        assert_eq!(negotiation["execute"], "qmp_capabilities");
        assert_eq!(negotiation["arguments"], json!({ "enable": ["oob"] }));
        say(
            &stream,
            &format!("{{\"return\": {{}}, \"id\": {}}}\r\n", negotiation["id"]),
        );
        part(&stream, &mut reader);
    })
}

#[test]
fn a_reply_between_events_and_other_replies() {
    let peer = greeted(|stream, reader| {
        let command = hear(reader);
        assert_eq!(command["execute"], "query-x");
        assert_eq!(command["arguments"]["a"], 1);
        let id = &command["id"];
        say(
            stream,
            &format!(
                "{{\"event\": \"STOP\", \"timestamp\": {{\"seconds\": 7, \"microseconds\": 8}}}}\r\n\
                 {{\"return\": \"not yours\", \"id\": \"guardian\"}}\r\n\
                 {{\"return\": \"nor this\"}}\r\n\
                 {{\"return\": \"nor this\", \"id\": 4711}}\r\n\
                 \r\n\
                 {{\"return\": \"yours\", \"id\": {id}}}\r\n\
                 {{\"event\": \"RESUME\", \"data\": {{\"b\": 2}}}}\r\n"
            ),
        );
        hear_end(reader);
    });
    let mut client = peer.connect().expect("connected");
    let reply = client.execute("query-x", json!({ "a": 1 }));
    assert_eq!(reply.expect("answered"), "yours");
    let mut events = Vec::new();
    while events.len() < 2 {
        events.extend(client.take_events().expect("events"));
    }
    assert_eq!(events[0].name, "STOP");
    assert_eq!(events[0].at, Duration::new(7, 8000));
    assert_eq!(events[1].name, "RESUME");
    drop(client);
    peer.join();
}

/// QEMU refuses to enable a capability that it did not offer.
#[test]
fn nothing_is_enabled_that_is_not_offered() {
    for capabilities in [json!([]), json!(["later"]), Value::Null] {
        let greeting = json!({ "QMP": { "version": {}, "capabilities": capabilities } });
        assert_eq!(to_enable(&greeting), Value::Null);
    }
}

#[test]
fn an_event_is_awaited_before_the_reply_and_the_reply_where_there_is_none() {
    let (go, gone_on) = std::sync::mpsc::channel();
    let peer = greeted(move |stream, reader| {
        let first = hear(reader);
        say(stream, "{\"event\": \"RESUME\"}\n{\"event\": \"STOP\"}\n");
        gone_on.recv().expect("the event was seen first");
        say(
            stream,
            &format!("{{\"return\": 1, \"id\": {}}}\n", first["id"]),
        );
        let second = hear(reader);
        let refusal =
            json!({ "error": { "class": "GenericError", "desc": "no" }, "id": second["id"] });
        say(stream, &format!("{refusal}\n"));
        hear(reader);
        hear_end(reader);
    });
    let mut client = peer.connect().expect("connected");
    let ticket = client.send("stop", Value::Null).expect("sent");
    client.await_event("STOP", &ticket, LONG).expect("an event");
    go.send(()).expect("the peer waits");
    assert_eq!(client.wait(ticket, LONG).expect("answered"), 1);
    let names: Vec<String> = client
        .take_events()
        .expect("events")
        .into_iter()
        .map(|event| event.name)
        .collect();
    assert_eq!(names, ["RESUME", "STOP"]);

    let ticket = client.send("stop", Value::Null).expect("sent");
    client
        .await_event("STOP", &ticket, LONG)
        .expect("a refusal");
    assert!(matches!(
        client.wait(ticket, LONG),
        Err(QmpError::Command { .. })
    ));

    let ticket = client.send("stop", Value::Null).expect("sent");
    assert!(matches!(
        client.await_event("STOP", &ticket, SHORT),
        Err(QmpError::Timeout { .. })
    ));
    drop(client);
    drop(ticket);
    peer.join();
}

/// Waits until the client has closed its end.
fn hear_end(reader: &mut BufReader<UnixStream>) {
    let mut line = String::new();
    assert_eq!(reader.read_line(&mut line).expect("read"), 0, "{line}");
}

#[test]
fn tickets_can_be_waited_for_in_any_order() {
    let peer = greeted(|stream, reader| {
        let (first, second) = (hear(reader), hear(reader));
        for command in [first, second] {
            let name = &command["execute"];
            say(
                stream,
                &format!("{{\"return\": {name}, \"id\": {}}}\n", command["id"]),
            );
        }
    });
    let mut client = peer.connect().expect("connected");
    let one = client.send("one", Value::Null).expect("sent");
    let two = client.send("two", Value::Null).expect("sent");
    assert_eq!(client.wait(two, LONG).expect("answered"), "two");
    assert_eq!(client.wait(one, LONG).expect("answered"), "one");
    peer.join();
}

#[test]
fn errors_of_qemu_are_passed_on() {
    let peer = greeted(|stream, reader| {
        let id = hear(reader)["id"].clone();
        say(
            stream,
            &format!(
                "{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"no\"}}, \"id\": {id}}}\n"
            ),
        );
    });
    let mut client = peer.connect().expect("connected");
    assert!(matches!(
        client.execute("query-x", Value::Null),
        Err(QmpError::Command { command, class, desc })
            if command == "query-x" && class == "GenericError" && desc == "no"
    ));
    peer.join();
}

#[test]
fn a_late_reply_is_skipped() {
    let peer = greeted(|stream, reader| {
        let slow = hear(reader);
        let fast = hear(reader);
        for command in [slow, fast] {
            let (name, id) = (&command["execute"], &command["id"]);
            say(stream, &format!("{{\"return\": {name}, \"id\": {id}}}\n"));
        }
    });
    let mut client = peer.connect().expect("connected");
    let slow = client.send("slow", Value::Null).expect("sent");
    assert!(matches!(
        client.wait(slow, SHORT),
        Err(QmpError::Timeout { command, limit_ms: 150 }) if command == "slow"
    ));
    assert_eq!(
        client.execute("fast", Value::Null).expect("answered"),
        "fast"
    );
    assert_eq!(client.inbox.kept_bytes(), (0, 0));
    peer.join();
}

#[test]
fn a_line_in_many_pieces() {
    let peer = greeted(|stream, reader| {
        let id = hear(reader)["id"].clone();
        let line = format!("{{\"return\": \"pieces\", \"id\": {id}}}\r\n");
        for byte in line.chars() {
            say(stream, &byte.to_string());
        }
    });
    let mut client = peer.connect().expect("connected");
    assert_eq!(
        client.execute("x", Value::Null).expect("answered"),
        "pieces"
    );
    peer.join();
}

#[test]
fn no_process_listens() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let path = directory.path().join("qmp");
    assert!(matches!(
        Client::connect(&path, SHORT),
        Err(QmpError::Refused { .. })
    ));
    drop(UnixListener::bind(&path).expect("bound"));
    assert!(matches!(
        Client::connect(&path, SHORT),
        Err(QmpError::Refused { .. })
    ));
}

#[test]
fn a_monitor_that_does_not_greet_is_busy() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).expect("bound");
    // One after the other fills the queue of waiting clients; the last cannot even connect.
    rustix::net::listen(&listener, 1).expect("short queue");
    let mut waiting = Vec::new();
    for _ in 0..4 {
        assert!(matches!(
            Client::connect(&path, SHORT),
            Err(QmpError::Busy { .. })
        ));
        // Keeps a place in the queue, as long as there are any.
        waiting.push(socket::connect(&path, Instant::now()).ok());
    }
}

#[test]
fn peers_that_are_no_qmp_monitor() {
    let not_qmp = [
        "QEMU 10.0.2 monitor - type 'help' for more information\r\n(qemu) ",
        "{\"hello\": 1}\n",
        "[1, 2]\n",
        "\u{fffd}\u{0}\u{1}\n",
    ];
    for greeting in not_qmp {
        let peer = Peer::playing(move |stream| {
            say(&stream, greeting);
            hear_end(&mut BufReader::new(stream));
        });
        let result = peer.connect();
        assert!(
            matches!(result, Err(QmpError::NotQmp { .. })),
            "{greeting:?}: {result:?}"
        );
        drop(result);
        peer.join();
    }
}

/// What QEMU says to a client that was killed, as it said it to the next one.
const TO_ANOTHER: &str = "{\"timestamp\": {\"seconds\": 1, \"microseconds\": 2}, \"event\": \"STOP\"}\r\n\
     {\"return\": {}, \"id\": 1}\r\n{\"error\": {\"class\": \"GenericError\", \"desc\": \"late\"}}\r\n";

#[test]
fn words_to_another_client_before_the_greeting() {
    let peer = Peer::playing(|stream| {
        let mut reader = BufReader::new(stream.try_clone().expect("cloned"));
        say(&stream, &format!("{TO_ANOTHER}{GREETING}\r\n"));
        let id = &hear(&mut reader)["id"];
        say(&stream, &format!("{{\"return\": {{}}, \"id\": {id}}}\r\n"));
        hear_end(&mut reader);
    });
    let mut client = peer.connect().expect("connected");
    assert!(client.take_events().expect("none").is_empty());
    drop(client);
    peer.join();
}

#[test]
fn words_to_another_client_and_no_greeting() {
    let peer = Peer::playing(|stream| {
        say(&stream, TO_ANOTHER);
        hear_end(&mut BufReader::new(stream));
    });
    let result = Client::connect(&peer.path, SHORT);
    assert!(matches!(result, Err(QmpError::NotQmp { .. })), "{result:?}");
    drop(result);
    peer.join();
}

#[test]
fn half_a_greeting() {
    let peer = Peer::playing(|stream| {
        say(&stream, "{\"QMP\": ");
        hear_end(&mut BufReader::new(stream));
    });
    let result = Client::connect(&peer.path, SHORT);
    assert!(matches!(result, Err(QmpError::NotQmp { .. })), "{result:?}");
    drop(result);
    peer.join();
}

#[test]
fn peers_that_close() {
    let peer = Peer::playing(drop);
    assert!(matches!(peer.connect(), Err(QmpError::Closed)));
    peer.join();

    let peer = greeted(|stream, reader| {
        hear(reader);
        say(stream, "{\"event\": \"SHUTDOWN\"}\n{\"return\": ");
    });
    let mut client = peer.connect().expect("connected");
    let ticket = client.send("quit", Value::Null).expect("sent");
    assert!(matches!(client.wait(ticket, LONG), Err(QmpError::Closed)));
    // The last event is still handed out, then the end is reported again.
    assert_eq!(client.take_events().expect("events")[0].name, "SHUTDOWN");
    assert!(matches!(client.take_events(), Err(QmpError::Closed)));
    assert!(matches!(
        client.execute("query-status", Value::Null),
        Err(QmpError::Closed)
    ));
    peer.join();
}

#[test]
fn garbage_instead_of_a_reply() {
    let peer = greeted(|stream, reader| {
        hear(reader);
        say(stream, "}{ garbage\n");
        let id = hear(reader)["id"].clone();
        say(stream, &format!("{{\"return\": 1, \"id\": {id}}}\n"));
    });
    let mut client = peer.connect().expect("connected");
    assert!(matches!(
        client.execute("x", Value::Null),
        Err(QmpError::Garbled { start }) if start == "}{ garbage"
    ));
    assert_eq!(client.execute("y", Value::Null).expect("answered"), 1);
    peer.join();
}

#[test]
fn nesting_without_end_is_garbage() {
    let peer = greeted(|stream, reader| {
        hear(reader);
        say(stream, &format!("{}\n", "{\"a\":".repeat(100_000)));
    });
    let mut client = peer.connect().expect("connected");
    assert!(matches!(
        client.execute("x", Value::Null),
        Err(QmpError::Garbled { .. })
    ));
    peer.join();
}

#[test]
fn a_line_without_end_is_refused() {
    let peer = greeted(|mut stream, reader| {
        hear(reader);
        let piece = vec![b'x'; 1 << 20];
        // Ends with an error when the client has had enough.
        while stream.write_all(&piece).is_ok() {}
    });
    let mut client = peer.connect().expect("connected");
    assert!(matches!(
        client.execute("x", Value::Null),
        Err(QmpError::LineTooLong { .. })
    ));
    drop(client);
    peer.join();
}

#[test]
fn events_without_end_do_not_outlast_the_deadline() {
    let peer = greeted(|mut stream, reader| {
        hear(reader);
        while stream.write_all(b"{\"event\": \"NOISE\"}\n").is_ok() {}
    });
    let mut client = peer.connect().expect("connected");
    let ticket = client.send("x", Value::Null).expect("sent");
    assert!(matches!(
        client.wait(ticket, SHORT),
        Err(QmpError::Timeout { .. })
    ));
    assert!(client.inbox.kept_bytes().0 <= inbox::EVENT_BYTES_MAX);
    drop(client);
    peer.join();
}

/// A lying QEMU: nothing that it sends takes many times its bytes of memory.
#[test]
fn a_reply_of_too_many_values_is_not_read() {
    let peer = greeted(|stream, reader| {
        let id = hear(reader)["id"].clone();
        let many = vec!["{\"\":0}"; 1_000_000].join(",");
        say(stream, &format!("{{\"return\": [{many}], \"id\": {id}}}\n"));
        let id = hear(reader)["id"].clone();
        say(stream, &format!("{{\"return\": 1, \"id\": {id}}}\n"));
    });
    let mut client = peer.connect().expect("connected");
    let refused = client.execute("query-x", Value::Null);
    assert!(
        matches!(&refused, Err(QmpError::Unreadable { command, .. }) if command == "query-x"),
        "{refused:?}"
    );
    assert_eq!(client.execute("y", Value::Null).expect("answered"), 1);
    peer.join();
}

#[test]
fn tickets_of_which_too_many_are_out_are_given_up() {
    let peer = greeted(|stream, reader| {
        for _ in 0..=inbox::OUTSTANDING_MAX {
            let id = hear(reader)["id"].clone();
            say(stream, &format!("{{\"return\": {id}, \"id\": {id}}}\n"));
        }
    });
    let mut client = peer.connect().expect("connected");
    let mut tickets: Vec<Ticket> = (0..=inbox::OUTSTANDING_MAX)
        .map(|_| client.send("x", Value::Null).expect("sent"))
        .collect();
    let last = tickets.pop().expect("one");
    client.wait(last, LONG).expect("answered");
    let first = tickets.swap_remove(0);
    assert!(matches!(
        client.wait(first, LONG),
        Err(QmpError::Dropped { .. })
    ));
    peer.join();
}

#[test]
fn paths_longer_than_a_socket_address() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let deep = directory.path().join("d".repeat(120));
    std::fs::create_dir(&deep).expect("created");
    let path = deep.join("qmp");
    let (address, _guard) = socket::address(&path).expect("address");
    let server = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .expect("socket");
    rustix::net::bind(&server, &address).expect("bound");
    rustix::net::listen(&server, 1).expect("listening");
    assert!(socket::connect(&path, Instant::now() + LONG).is_ok());
}

#[test]
fn a_descriptor_travels_with_its_command() {
    let peer = greeted(|stream, _| {
        let mut bytes = [0; 4096];
        let (count, fds) = fdpass::receive(stream, &mut bytes).expect("received");
        assert_eq!(fds.len(), 1);
        let command: Value = serde_json::from_slice(&bytes[..count]).expect("one line");
        assert_eq!(command["execute"], "add-fd");
        say(
            stream,
            &format!("{{\"return\": {{}}, \"id\": {}}}\n", command["id"]),
        );
    });
    let mut client = peer.connect().expect("connected");
    let file = tempfile::tempfile().expect("temporary file");
    client
        .execute_with_fd("add-fd", json!({}), file.as_fd())
        .expect("answered");
    peer.join();
}
