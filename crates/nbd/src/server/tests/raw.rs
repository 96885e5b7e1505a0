//! A client that sends what a test wants, with the numbers of the protocol's text.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A reply of the transmission phase.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Simple {
        error: u32,
        cookie: u64,
    },
    Chunk {
        kind: u16,
        done: bool,
        cookie: u64,
        payload: Vec<u8>,
    },
}

/// A client whose socket has a time limit, so that a test fails instead of waiting.
pub(super) struct Raw(pub(super) UnixStream);

impl Raw {
    /// Takes the greeting and sends these flags.
    pub(super) fn greet(socket: UnixStream, flags: u32) -> Raw {
        let limit = Some(Duration::from_secs(20));
        socket.set_read_timeout(limit).expect("limit");
        socket.set_write_timeout(limit).expect("limit");
        let mut raw = Raw(socket);
        let greeting = raw.bytes(18);
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(greeting[16..], [0, 3]);
        raw.send(&flags.to_be_bytes());
        raw
    }

    /// The same, up to the transmission phase.
    pub(super) fn open(socket: UnixStream, structured: bool) -> Raw {
        let mut raw = Raw::greet(socket, 3);
        if structured {
            assert_eq!(raw.option(8, &[]), [(1, vec![])]);
            let replies = raw.option(10, &contexts("disk", &[b"base:allocation"]));
            assert_eq!(replies.len(), 2);
        }
        let replies = raw.option(7, &info("disk", &[]));
        assert_eq!(replies.last(), Some(&(1, vec![])));
        raw
    }

    /// Sends bytes. The server may have closed the connection.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    pub(super) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes).expect("the server sends it");
        bytes
    }

    /// All that the server sends until it closes the connection.
    pub(super) fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.0.read_to_end(&mut bytes).expect("closed");
        bytes
    }

    pub(super) fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes(2).try_into().expect("2"))
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes(4).try_into().expect("4"))
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes(8).try_into().expect("8"))
    }

    /// Sends an option, and takes all replies: type and data.
    pub(super) fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send(&encode_option(option, data));
        let mut replies = Vec::new();
        loop {
            assert_eq!(self.u64(), 0x0003_e889_0455_65a9);
            assert_eq!(self.u32(), option);
            let (kind, length) = (self.u32(), self.u32());
            let data = self.bytes(length as usize);
            replies.push((kind, data));
            if kind == 1 || kind >> 31 == 1 {
                return replies;
            }
        }
    }

    /// Sends an option, and takes the type of the last reply.
    pub(super) fn outcome(&mut self, option: u32, data: &[u8]) -> u32 {
        self.option(option, data).last().expect("a reply").0
    }

    /// Sends a request: flags and command, cookie, offset and length.
    pub(super) fn request(&mut self, command: (u16, u16), cookie: u64, offset: u64, length: u32) {
        self.send(&encode_request(command, cookie, offset, length));
    }

    /// The next reply. Of a simple one the data is still to come.
    pub(super) fn reply(&mut self) -> Reply {
        match self.u32() {
            0x6744_6698 => Reply::Simple {
                error: self.u32(),
                cookie: self.u64(),
            },
            0x668e_33ef => {
                let (flags, kind, cookie, length) =
                    (self.u16(), self.u16(), self.u64(), self.u32());
                Reply::Chunk {
                    kind,
                    done: flags == 1,
                    cookie,
                    payload: self.bytes(length as usize),
                }
            }
            magic => panic!("a reply that begins {magic:#x}"),
        }
    }

    /// Expects an error for this cookie as the next reply.
    pub(super) fn expect_error(&mut self, cookie: u64, number: u32) {
        match self.reply() {
            Reply::Simple { error, cookie: of } => assert_eq!((of, error), (cookie, number)),
            Reply::Chunk {
                kind,
                done,
                cookie: of,
                payload,
            } => {
                assert_eq!((of, kind, done), (cookie, 0x8001, true));
                assert_eq!(payload[..4], number.to_be_bytes());
            }
        }
    }
}

pub(super) fn encode_option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut out = b"IHAVEOPT".to_vec();
    out.extend(option.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}

pub(super) fn encode_request(
    (flags, command): (u16, u16),
    cookie: u64,
    offset: u64,
    length: u32,
) -> Vec<u8> {
    let mut out = 0x2560_9513u32.to_be_bytes().to_vec();
    out.extend(flags.to_be_bytes());
    out.extend(command.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend(offset.to_be_bytes());
    out.extend(length.to_be_bytes());
    out
}

/// The data of an option for information, or to open an export.
pub(super) fn info(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut out = text(name.as_bytes());
    out.extend((wanted.len() as u16).to_be_bytes());
    out.extend(wanted.iter().flat_map(|number| number.to_be_bytes()));
    out
}

/// The data of an option for metadata contexts.
pub(super) fn contexts(name: &str, queries: &[&[u8]]) -> Vec<u8> {
    let mut out = text(name.as_bytes());
    out.extend((queries.len() as u32).to_be_bytes());
    out.extend(queries.iter().flat_map(|query| text(query)));
    out
}

pub(super) fn text(bytes: &[u8]) -> Vec<u8> {
    let mut out = (bytes.len() as u32).to_be_bytes().to_vec();
    out.extend(bytes);
    out
}
