//! Both ends of a new connection: TCP, TLS, preface. All of it has one deadline.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{AlertDescription, CertificateError, ClientConnection, ServerConnection, StreamOwned};
use thiserror::Error;

use crate::address::Address;
use crate::identity::{self, Identity};
use crate::preface::{self, Answer, Versions};
use crate::stream::{Stream, UntilDeadline};

/// Time for everything until both sides agree.
const LIMIT: Duration = Duration::from_secs(10);
/// The first byte of a TLS handshake (RFC 8446, section 5.1).
const TLS_HANDSHAKE: u8 = 22;

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The network failed.
    #[error("cannot {doing} {peer}")]
    Io {
        /// The action that failed.
        doing: &'static str,
        /// The other side, or the address of one's own.
        peer: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// No bytes came.
    #[error("{peer} has not answered within {LIMIT:?}: it is no Stillframe, or overloaded")]
    Silent {
        /// The other side.
        peer: String,
    },
    /// It ended.
    #[error("{peer} closed the connection before both sides agreed; its own output says why")]
    Closed {
        /// The other side.
        peer: String,
    },
    /// The other side's certificate is not trusted.
    #[error("the certificate of {peer} is refused: {why}")]
    PeerCertificate {
        /// The other side.
        peer: String,
        /// The reason.
        why: String,
    },
    /// The other side does not trust this side's certificate.
    #[error("{peer} refuses this host's certificate: {why}")]
    OwnCertificate {
        /// The other side.
        peer: String,
        /// The reason.
        why: String,
    },
    /// Only the receiving side uses TLS.
    #[error("{peer} wants encryption: leave out --plain-text, or give it to both sides")]
    NeedsTls {
        /// The other side.
        peer: String,
    },
    /// Only the connecting side uses TLS.
    #[error("{peer} does not speak TLS: it is no Stillframe, or one with --plain-text")]
    NoTls {
        /// The other side.
        peer: String,
    },
    /// TLS failed in another way.
    #[error("no encrypted connection to {peer}")]
    Tls {
        /// The other side.
        peer: String,
        /// The library's error.
        #[source]
        source: rustls::Error,
    },
    /// Another program.
    #[error("{peer} is no Stillframe")]
    NotStillframe {
        /// The other side.
        peer: String,
    },
    /// The programs are too far apart.
    #[error(
        "{peer} speaks version {theirs} of the protocol, this program {oldest} to {newest}: update the older one"
    )]
    Version {
        /// The other side.
        peer: String,
        /// Its newest version.
        theirs: u8,
        /// This side's oldest version.
        oldest: u8,
        /// This side's newest version.
        newest: u8,
    },
    /// The receiving side does not let this host in.
    #[error(
        "{peer} does not let this host in: the certificate's name has to be one of its --allow"
    )]
    NotLetIn {
        /// The other side.
        peer: String,
    },
    /// This side does not let the host in.
    #[error(
        "{peer} is not let in: its certificate is for {}",
        names_or_none(names)
    )]
    NotAllowed {
        /// The other side.
        peer: String,
        /// The names of its certificate.
        names: Vec<String>,
    },
}

impl ConnectError {
    /// Whether the other host says that no program listens there.
    pub fn is_refused(&self) -> bool {
        let refused = io::ErrorKind::ConnectionRefused;
        matches!(self, ConnectError::Io { source, .. } if source.kind() == refused)
    }
}

fn names_or_none(names: &[String]) -> String {
    match names {
        [] => "no name".to_owned(),
        names => names.join(", "),
    }
}

/// Whether a connection is encrypted.
#[derive(Debug, Clone)]
pub enum Security {
    /// TLS 1.3; both sides show a certificate.
    Tls(Identity),
    /// No encryption and no authentication. Both sides have to want it.
    PlainText,
}

/// The other end of a connection.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// The host names of its certificate; none in plain text.
    pub names: Vec<String>,
}

/// An established connection. On its stream nothing was sent yet.
#[derive(Debug)]
pub struct Link {
    /// The stream.
    pub stream: Stream,
    /// The agreed version of the protocol.
    pub version: u8,
    /// The other end.
    pub peer: Peer,
}

/// Connects to a listening Stillframe. `silence_max` is the timeout of each later read and write.
///
/// # Errors
/// No route, no listener, no trust, no version that both speak; or the other side does not let this host in.
pub fn connect(
    to: &Address,
    security: &Security,
    versions: &Versions,
    silence_max: Duration,
) -> Result<Link, ConnectError> {
    let deadline = Instant::now() + LIMIT;
    let socket = reach(to, deadline)?;
    let failed = |error| failed(&to.to_string(), error);
    let address = socket.peer_addr().map_err(failed)?;
    let (tls, version) = ask_to_come_in(&socket, deadline, to, security, versions)?;
    settle(&socket, silence_max).map_err(failed)?;
    let certificates = tls.as_ref().and_then(|tls| tls.peer_certificates());
    let names = names_of(certificates);
    Ok(Link {
        stream: match tls {
            Some(tls) => Stream::Client(Box::new(StreamOwned::new(tls, socket))),
            None => Stream::Plain(socket),
        },
        version,
        peer: Peer { address, names },
    })
}

/// The session of TLS, if the connection is encrypted, and the agreed version.
fn ask_to_come_in(
    socket: &TcpStream,
    deadline: Instant,
    to: &Address,
    security: &Security,
    versions: &Versions,
) -> Result<(Option<ClientConnection>, u8), ConnectError> {
    let peer = to.to_string();
    let failed = |error| failed(&peer, error);
    socket.set_nodelay(true).map_err(failed)?;
    let mut timed = UntilDeadline { socket, deadline };
    let (tls, answer) = match security {
        Security::PlainText => (None, ask(&mut timed, versions).map_err(failed)?),
        Security::Tls(identity) => {
            let mut tls = client(identity, &to.host, &peer)?;
            let mut stream = rustls::Stream::new(&mut tls, &mut timed);
            let answer = ask(&mut stream, versions).map_err(failed)?;
            (Some(tls), answer)
        }
    };
    Ok((tls, accepted(answer, versions, peer)?))
}

/// Tries each address of the host in turn.
fn reach(to: &Address, deadline: Instant) -> Result<TcpStream, ConnectError> {
    let failed = |doing| {
        move |source| ConnectError::Io {
            doing,
            peer: to.to_string(),
            source,
        }
    };
    let addresses = (to.host.as_str(), to.port).to_socket_addrs();
    let mut last = io::Error::from(ErrorKind::NotFound);
    for address in addresses.map_err(failed("find the address of"))? {
        let left = deadline.saturating_duration_since(Instant::now());
        // Zero is refused as an argument.
        match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1))) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(failed("connect to")(last))
}

fn client(identity: &Identity, host: &str, peer: &str) -> Result<ClientConnection, ConnectError> {
    let tls = ServerName::try_from(host.to_owned())
        .map_err(|error| rustls::Error::General(error.to_string()))
        .and_then(|name| ClientConnection::new(identity.client.clone(), name));
    tls.map_err(|source| ConnectError::Tls {
        peer: peer.to_owned(),
        source,
    })
}

fn ask(stream: &mut (impl Read + Write), versions: &Versions) -> io::Result<Option<Answer>> {
    stream.write_all(&preface::hello(versions))?;
    stream.flush()?;
    let mut answer = [0; preface::BYTES];
    stream.read_exact(&mut answer)?;
    Ok(Answer::read(&answer))
}

fn accepted(answer: Option<Answer>, versions: &Versions, peer: String) -> Result<u8, ConnectError> {
    match answer {
        Some(Answer::Accepted { version }) if versions.contains(&version) => Ok(version),
        Some(Answer::NoVersion { newest }) => Err(other_version(peer, versions, newest)),
        Some(Answer::NotAllowed) => Err(ConnectError::NotLetIn { peer }),
        Some(Answer::NeedsTls) => Err(ConnectError::NeedsTls { peer }),
        _ => Err(ConnectError::NotStillframe { peer }),
    }
}

/// Waits for hosts that connect.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    security: Security,
    versions: Versions,
    allowed: Vec<String>,
    silence_max: Duration,
}

impl Listener {
    /// Listens at an address. Only hosts whose certificate has one of the names in `allowed` are let in; all that have
    /// a certificate of the authority if it is empty. `silence_max` is the timeout of each later read and write.
    ///
    /// # Errors
    /// The address is not one of this host's, or in use.
    pub fn bind(
        at: &Address,
        security: Security,
        versions: Versions,
        allowed: Vec<String>,
        silence_max: Duration,
    ) -> Result<Listener, ConnectError> {
        let socket = TcpListener::bind((at.host.as_str(), at.port));
        let socket = socket.map_err(|source| ConnectError::Io {
            doing: "listen on",
            peer: at.to_string(),
            source,
        })?;
        Ok(Listener {
            socket,
            security,
            versions,
            allowed,
            silence_max,
        })
    }

    /// The address that it listens at, with the port that the kernel chose for port 0.
    ///
    /// # Errors
    /// The kernel's.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Waits until a host is let in. `refused` gets the errors of the others, one at a time.
    ///
    /// # Errors
    /// The listening socket fails.
    pub fn wait(&self, mut refused: impl FnMut(ConnectError)) -> Result<Link, ConnectError> {
        loop {
            let (socket, address) = self.socket.accept().map_err(not_accepted)?;
            match self.let_in(socket, address) {
                Ok(link) => return Ok(link),
                Err(error) => refused(error),
            }
        }
    }

    /// The same for at most `limit`; `None` if no host was let in. One that connects late may take longer.
    ///
    /// # Errors
    /// The listening socket fails.
    pub fn wait_for(
        &self,
        limit: Duration,
        mut refused: impl FnMut(ConnectError),
    ) -> Result<Option<Link>, ConnectError> {
        let deadline = Instant::now() + limit;
        while self.connects_by(deadline).map_err(not_accepted)? {
            let (socket, address) = self.socket.accept().map_err(not_accepted)?;
            match self.let_in(socket, address) {
                Ok(link) => return Ok(Some(link)),
                Err(error) => refused(error),
            }
        }
        Ok(None)
    }

    /// Whether a host connects before the deadline.
    fn connects_by(&self, deadline: Instant) -> io::Result<bool> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut waited = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut waited, Some(&timeout)) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn let_in(&self, socket: TcpStream, address: SocketAddr) -> Result<Link, ConnectError> {
        let (tls, version, names) = self.establish(&socket, address)?;
        Ok(Link {
            stream: match tls {
                Some(tls) => Stream::Server(Box::new(StreamOwned::new(tls, socket))),
                None => Stream::Plain(socket),
            },
            version,
            peer: Peer { address, names },
        })
    }

    fn establish(
        &self,
        socket: &TcpStream,
        address: SocketAddr,
    ) -> Result<(Option<ServerConnection>, u8, Vec<String>), ConnectError> {
        let deadline = Instant::now() + LIMIT;
        let peer = address.to_string();
        let failed = |error| failed(&peer, error);
        socket.set_nodelay(true).map_err(failed)?;
        let mut timed = UntilDeadline { socket, deadline };
        let is_tls = starts_with_tls(&timed).map_err(failed)?;
        let (tls, names, version) = match (&self.security, is_tls) {
            (Security::PlainText, false) => {
                let version = self.answer(&mut timed, &peer, &[])?;
                (None, Vec::new(), version)
            }
            (Security::Tls(identity), true) => {
                let tls = ServerConnection::new(identity.server.clone());
                let mut tls = tls.map_err(|source| ConnectError::Tls {
                    peer: peer.clone(),
                    source,
                })?;
                tls.complete_io(&mut timed).map_err(failed)?;
                let names = names_of(tls.peer_certificates());
                let mut stream = rustls::Stream::new(&mut tls, &mut timed);
                let version = self.answer(&mut stream, &peer, &names)?;
                (Some(tls), names, version)
            }
            (security, _) => {
                // Readable by a Stillframe on the other side, in either case.
                let _ = timed.write_all(&Answer::NeedsTls.write());
                return Err(match security {
                    Security::PlainText => ConnectError::NeedsTls { peer },
                    Security::Tls(_) => ConnectError::NoTls { peer },
                });
            }
        };
        settle(socket, self.silence_max).map_err(failed)?;
        Ok((tls, version, names))
    }

    /// Reads the preface of a host with a trusted certificate, and answers it.
    fn answer(
        &self,
        stream: &mut (impl Read + Write),
        peer: &str,
        names: &[String],
    ) -> Result<u8, ConnectError> {
        let mut hello = [0; preface::BYTES];
        let read = stream.read_exact(&mut hello);
        read.map_err(|error| failed(peer, error))?;
        let peer = peer.to_owned();
        let Some(theirs) = preface::read_hello(&hello) else {
            return Err(ConnectError::NotStillframe { peer });
        };
        let (answer, outcome) = if !self.lets_in(names) {
            let names = names.to_vec();
            let refusal = ConnectError::NotAllowed {
                peer: peer.clone(),
                names,
            };
            (Answer::NotAllowed, Err(refusal))
        } else if let Some(version) = preface::agree(&self.versions, &theirs) {
            (Answer::Accepted { version }, Ok(version))
        } else {
            let newest = *self.versions.end();
            let refusal = other_version(peer.clone(), &self.versions, *theirs.end());
            (Answer::NoVersion { newest }, Err(refusal))
        };
        let written = stream.write_all(&answer.write());
        let written = written.and_then(|()| stream.flush());
        written.map_err(|error| failed(&peer, error))?;
        outcome
    }

    /// Plain text has no names, and `allowed` no meaning.
    fn lets_in(&self, names: &[String]) -> bool {
        let is_allowed =
            |name: &String| self.allowed.iter().any(|it| it.eq_ignore_ascii_case(name));
        self.allowed.is_empty() || names.iter().any(is_allowed)
    }
}

/// Looks at the first byte without taking it.
fn starts_with_tls(timed: &UntilDeadline<'_>) -> io::Result<bool> {
    let mut first = [0];
    match timed.peek(&mut first)? {
        0 => Err(ErrorKind::UnexpectedEof.into()),
        _ => Ok(first[0] == TLS_HANDSHAKE),
    }
}

/// From here on each read and write has a limit of its own.
fn not_accepted(source: io::Error) -> ConnectError {
    ConnectError::Io {
        doing: "accept",
        peer: "a connection".to_owned(),
        source,
    }
}

fn settle(socket: &TcpStream, silence_max: Duration) -> io::Result<()> {
    socket.set_read_timeout(Some(silence_max))?;
    socket.set_write_timeout(Some(silence_max))
}

fn names_of(certificates: Option<&[CertificateDer<'_>]>) -> Vec<String> {
    let own = certificates.and_then(<[_]>::first);
    own.map(identity::names).unwrap_or_default()
}

fn other_version(peer: String, ours: &Versions, theirs: u8) -> ConnectError {
    ConnectError::Version {
        peer,
        theirs,
        oldest: *ours.start(),
        newest: *ours.end(),
    }
}

/// The error of the network or of TLS, in words.
fn failed(peer: &str, error: io::Error) -> ConnectError {
    let peer = peer.to_owned();
    let tls = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match (tls, error.kind()) {
        (Some(rustls::Error::InvalidCertificate(error)), _) => ConnectError::PeerCertificate {
            peer,
            why: certificate_in_words(error),
        },
        (Some(rustls::Error::NoCertificatesPresented), _) => ConnectError::PeerCertificate {
            peer,
            why: "it has none".to_owned(),
        },
        (Some(rustls::Error::AlertReceived(alert)), _) => match alert_in_words(*alert) {
            Some(why) => ConnectError::OwnCertificate {
                peer,
                why: why.to_owned(),
            },
            None => ConnectError::Tls {
                peer,
                source: rustls::Error::AlertReceived(*alert),
            },
        },
        (Some(rustls::Error::InvalidMessage(_)), _) => ConnectError::NoTls { peer },
        (Some(error), _) => ConnectError::Tls {
            peer,
            source: error.clone(),
        },
        (None, ErrorKind::WouldBlock | ErrorKind::TimedOut) => ConnectError::Silent { peer },
        (None, ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
            ConnectError::Closed { peer }
        }
        (None, _) => ConnectError::Io {
            doing: "talk to",
            peer,
            source: error,
        },
    }
}

fn certificate_in_words(error: &CertificateError) -> String {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "it has expired; make it a new one, or correct this host's clock".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not valid yet; correct the clocks of both hosts".to_owned()
        }
        CertificateError::UnknownIssuer => "another authority has signed it".to_owned(),
        CertificateError::NotValidForNameContext {
            expected,
            presented,
        } => {
            let presented = presented.join(", ");
            format!("it is for {presented}, not for {}", expected.to_str())
        }
        other => other.to_string(),
    }
}

/// What the other side has against our certificate.
fn alert_in_words(alert: AlertDescription) -> Option<&'static str> {
    match alert {
        AlertDescription::CertificateExpired => {
            Some("it has expired; make this host a new one, or correct the other host's clock")
        }
        AlertDescription::UnknownCA => Some("another authority has signed it"),
        AlertDescription::BadCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::UnsupportedCertificate => Some("it cannot be used for this"),
        AlertDescription::CertificateRequired => Some("there is none"),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
