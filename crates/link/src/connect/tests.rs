//! Both ends on this host: every way in which they do not come together is one clear error on each side.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::SystemTime;

use super::*;
use crate::authority;
use crate::identity::IdentityError;

const VERSIONS: Versions = 3..=4;
const SILENCE_MAX: Duration = Duration::from_secs(20);

/// An authority and its hosts, one folder each.
struct Certificates {
    folder: tempfile::TempDir,
}

impl Certificates {
    fn new() -> Certificates {
        let folder = tempfile::tempdir().unwrap();
        authority::make(&folder.path().join("authority")).unwrap();
        Certificates { folder }
    }

    fn host(&self, names: &[&str]) -> PathBuf {
        let host = self.folder.path().join(names[0]);
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        authority::make_host(&self.folder.path().join("authority"), &host, &names, 9).unwrap();
        host
    }

    /// One whose certificate was valid until a minute ago.
    fn expired_host(&self) -> PathBuf {
        let host = self.folder.path().join("expired");
        let names = ["127.0.0.1".to_owned()];
        let end = SystemTime::now() - Duration::from_secs(60);
        let authority = self.folder.path().join("authority");
        authority::make_host_until(&authority, &host, &names, end.into()).unwrap();
        host
    }

    fn identity(&self, names: &[&str]) -> Security {
        Security::Tls(Identity::load(&self.host(names)).unwrap())
    }
}

/// What becomes of the next host.
fn accept(listener: &Listener) -> Result<Link, ConnectError> {
    let (socket, address) = listener.socket.accept().unwrap();
    listener.let_in(socket, address)
}

fn listener(security: Security, allowed: &[&str]) -> (Listener, Address) {
    let allowed = allowed.iter().map(|&name| name.to_owned()).collect();
    let at = "127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind(&at, security, VERSIONS, allowed, SILENCE_MAX).unwrap();
    let at = listener.local_address().unwrap().to_string();
    (listener, at.parse().unwrap())
}

type Both = (Result<Link, ConnectError>, Result<Link, ConnectError>);

/// What the connecting and the listening side get.
fn both(client: &Security, versions: &Versions, server: Security, allowed: &[&str]) -> Both {
    let (listener, at) = listener(server, allowed);
    let accepting = thread::spawn(move || accept(&listener));
    let connected = connect(&at, client, versions, SILENCE_MAX);
    (connected, accepting.join().unwrap())
}

fn errors((connected, accepted): Both) -> (String, String) {
    let words = |link: Result<Link, ConnectError>| link.map(|_| ()).unwrap_err().to_string();
    (words(connected), words(accepted))
}

#[track_caller]
fn expect_both(both: Both, connecting: &str, accepting: &str) {
    let (connected, accepted) = errors(both);
    assert!(connected.contains(connecting), "connecting: {connected}");
    assert!(accepted.contains(accepting), "accepting: {accepted}");
}

/// More bytes than any buffer between the two, there and back.
fn expect_stream(mut connected: Link, mut accepted: Link) {
    let bytes: Vec<u8> = (0..8 << 20)
        .map(|number: u32| (number % 251) as u8)
        .collect();
    let echo = thread::spawn(move || {
        let mut received = vec![0; 8 << 20];
        accepted.stream.read_exact(&mut received).unwrap();
        accepted.stream.write_all(&received).unwrap();
        accepted.stream.flush().unwrap();
    });
    connected.stream.write_all(&bytes).unwrap();
    connected.stream.flush().unwrap();
    let mut back = vec![0; bytes.len()];
    connected.stream.read_exact(&mut back).unwrap();
    assert!(back == bytes);
    echo.join().unwrap();
}

fn expect_input_is_seen(one: &mut Stream, other: &mut Stream) {
    const SHORT: Duration = Duration::from_millis(20);
    assert!(!one.has_input(SHORT));
    other.write_all(b"abc").unwrap();
    other.flush().unwrap();
    assert!(one.has_input(SILENCE_MAX));
    one.read_exact(&mut [0]).unwrap();
    // It was decrypted with the first byte.
    assert!(one.has_input(SHORT));
    one.read_exact(&mut [0; 2]).unwrap();
    assert!(!one.has_input(SHORT));
}

#[test]
fn input_is_seen_before_it_is_read() {
    let certificates = Certificates::new();
    let a = certificates.identity(&["a.example"]);
    let b = certificates.identity(&["127.0.0.1"]);
    for (client, server) in [(Security::PlainText, Security::PlainText), (a, b)] {
        let (connected, accepted) = both(&client, &VERSIONS, server, &[]);
        let (mut near, mut far) = (connected.unwrap().stream, accepted.unwrap().stream);
        expect_input_is_seen(&mut near, &mut far);
        expect_input_is_seen(&mut far, &mut near);
        drop(far);
        assert!(near.has_input(SILENCE_MAX), "the end is input, too");
        assert!(near.read_exact(&mut [0]).is_err());
    }
}

#[test]
fn two_hosts_of_one_authority_come_together() {
    let certificates = Certificates::new();
    let a = certificates.identity(&["a.example", "10.0.0.1"]);
    let b = certificates.identity(&["b.example", "127.0.0.1"]);
    for (versions, agreed) in [(VERSIONS, 4), (4..=9, 4), (1..=3, 3)] {
        let allowed = ["c.example", "A.EXAMPLE"];
        let (connected, accepted) = both(&a, &versions, b.clone(), &allowed);
        let (connected, accepted) = (connected.unwrap(), accepted.unwrap());
        assert_eq!((connected.version, accepted.version), (agreed, agreed));
        assert_eq!(connected.peer.names, ["b.example"]);
        assert_eq!(accepted.peer.names, ["a.example"]);
        expect_stream(connected, accepted);
    }
}

#[test]
fn plain_text_needs_both_sides() {
    let certificates = Certificates::new();
    let tls = certificates.identity(&["127.0.0.1"]);
    let plain = Security::PlainText;
    let (connected, accepted) = both(&plain, &VERSIONS, plain.clone(), &[]);
    expect_stream(connected.unwrap(), accepted.unwrap());
    let one = both(&plain, &VERSIONS, tls.clone(), &[]);
    expect_both(one, "wants encryption", "does not speak TLS");
    let other = both(&tls, &VERSIONS, plain, &[]);
    expect_both(other, "does not speak TLS", "wants encryption");
}

#[test]
fn only_hosts_that_are_let_in_come_in() {
    let certificates = Certificates::new();
    let a = certificates.identity(&["a.example"]);
    let b = certificates.identity(&["127.0.0.1"]);
    let refused = both(&a, &VERSIONS, b, &["c.example"]);
    expect_both(refused, "does not let this host in", "is for a.example");
}

#[test]
fn versions_too_far_apart_are_refused() {
    for security in [
        Security::PlainText,
        Certificates::new().identity(&["127.0.0.1"]),
    ] {
        let newer = both(&security, &(5..=6), security.clone(), &[]);
        expect_both(newer, "speaks version 4", "speaks version 6");
        let older = both(&security, &(1..=2), security.clone(), &[]);
        expect_both(older, "speaks version 4", "speaks version 2");
    }
}

#[test]
fn strange_certificates_are_refused() {
    let certificates = Certificates::new();
    let good = certificates.identity(&["127.0.0.1"]);
    let other = Certificates::new().identity(&["127.0.0.1"]);
    let stranger = both(&good, &VERSIONS, other.clone(), &[]);
    expect_both(stranger, "another authority", "another authority");
    let elsewhere = certificates.identity(&["b.example"]);
    let (connected, _) = errors(both(&good, &VERSIONS, elsewhere, &[]));
    assert!(connected.contains("it is for"), "{connected}");
    assert!(connected.contains("b.example"), "{connected}");
    let expired = Identity::load_unchecked(&certificates.expired_host());
    let expired = Security::Tls(expired);
    let there = both(&good, &VERSIONS, expired.clone(), &[]);
    expect_both(there, "it has expired", "it has expired");
    let here = both(&expired, &VERSIONS, good, &[]);
    expect_both(here, "it has expired", "it has expired");
}

#[test]
fn the_listener_outlives_noise_and_ends() {
    let certificates = Certificates::new();
    let tls = certificates.identity(&["127.0.0.1"]);
    for security in [Security::PlainText, tls] {
        let (listener, at) = listener(security.clone(), &[]);
        let noise = |bytes: &'static [u8]| {
            let address = listener.local_address().unwrap();
            let mut socket = TcpStream::connect(address).unwrap();
            socket.write_all(bytes).unwrap();
            // Held open, so that the end of the stream is no help.
            let error = accept(&listener).unwrap_err();
            drop(socket);
            error
        };
        for bytes in [
            &b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"[..],
            &[22; 400],
            &[0; 9000],
        ] {
            let error = noise(bytes);
            assert!(!matches!(error, ConnectError::Io { .. }), "{error}");
        }
        let address = listener.local_address().unwrap();
        drop(TcpStream::connect(address).unwrap());
        let error = accept(&listener).unwrap_err();
        assert!(matches!(error, ConnectError::Closed { .. }), "{error}");
        let accepting = thread::spawn(move || {
            let mut refused = 0;
            listener.wait(|_| refused += 1).map(|_| refused)
        });
        drop(TcpStream::connect(address).unwrap());
        connect(&at, &security, &VERSIONS, SILENCE_MAX).unwrap();
        assert_eq!(accepting.join().unwrap().unwrap(), 1);
    }
}

/// A byte every second is as good as silence.
#[test]
fn a_side_that_stalls_is_left() {
    let listening = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listening.local_addr().unwrap().to_string();
    let stalling = thread::spawn(move || {
        let (mut socket, _) = listening.accept().unwrap();
        while socket.write_all(b"s").is_ok() {
            thread::sleep(Duration::from_secs(1));
        }
    });
    let socket = TcpStream::connect(&at).unwrap();
    let deadline = Instant::now() + Duration::from_millis(2500);
    let at = at.parse().unwrap();
    let error = ask_to_come_in(&socket, deadline, &at, &Security::PlainText, &VERSIONS);
    drop(socket);
    let error = error.unwrap_err();
    assert!(matches!(error, ConnectError::Silent { .. }), "{error}");
    stalling.join().unwrap();
}

#[test]
fn no_listener_and_no_such_host_are_errors() {
    let (listener, at) = listener(Security::PlainText, &[]);
    drop(listener);
    for (at, words) in [
        (at, "cannot connect to 127.0.0.1"),
        (
            "nowhere.invalid".parse().unwrap(),
            "cannot find the address of nowhere.invalid",
        ),
    ] {
        let error = connect(&at, &Security::PlainText, &VERSIONS, SILENCE_MAX).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn files_that_are_no_identity_are_refused() {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    let certificates = Certificates::new();
    let refused = |folder: &Path| Identity::load(folder).unwrap_err();
    let host = certificates.host(&["a.example"]);
    let key = host.join(identity::KEY);
    fs::set_permissions(&key, Permissions::from_mode(0o640)).unwrap();
    assert!(matches!(
        refused(&host),
        IdentityError::Exposed { mode: 0o640, .. }
    ));
    fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    assert!(Identity::load(&host).is_ok());
    let other = certificates.host(&["b.example"]);
    fs::copy(other.join(identity::KEY), &key).unwrap();
    assert!(matches!(refused(&host), IdentityError::Mismatch { .. }));
    fs::write(host.join(identity::CERTIFICATE), "none").unwrap();
    assert!(matches!(refused(&host), IdentityError::Pem { .. }));
    fs::remove_file(host.join(identity::CERTIFICATE)).unwrap();
    assert!(matches!(refused(&host), IdentityError::Read { .. }));
    let expired = refused(&certificates.expired_host()).to_string();
    assert!(expired.contains("it has expired"), "{expired}");
    let others = Certificates::new();
    let stranger = others.host(&["a.example"]);
    let authority = identity::AUTHORITY_CERTIFICATE;
    fs::copy(other.join(authority), stranger.join(authority)).unwrap();
    let words = refused(&stranger).to_string();
    assert!(words.contains("another authority has signed it"), "{words}");
}

#[test]
fn certificates_are_not_written_over() {
    let certificates = Certificates::new();
    let authority = certificates.folder.path().join("authority");
    assert!(authority::make(&authority).is_err());
    let host = certificates.host(&["a.example"]);
    let names = ["b.example".to_owned()];
    assert!(authority::make_host(&authority, &host, &names, 9).is_err());
    let nothing = certificates.folder.path().join("nothing");
    assert!(authority::make_host(&nothing, &nothing, &names, 9).is_err());
    assert!(authority::make_host(&authority, &nothing, &[], 9).is_err());
    assert!(!nothing.exists());
}
