//! The bytes of the protocol, without input and output. All numbers are big-endian.

use crate::error::NbdError;

/// The first eight bytes of a server.
pub(crate) const SERVER_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// The next eight, and the first of each option.
pub(crate) const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// The first eight of each reply to an option.
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The first four of a request.
const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The first four of a chunk of a structured reply, the only form of a reply to a block status.
const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// The first four of a simple reply.
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

/// Length of a server's greeting in bytes.
pub(crate) const GREETING_BYTES: usize = 18;
/// Length of the flags with which a client replies to it.
pub(crate) const CLIENT_FLAGS_BYTES: usize = 4;
/// Length of the head of an option in bytes.
pub(crate) const OPTION_BYTES: usize = 16;
/// Length of a request in bytes.
pub(crate) const REQUEST_BYTES: usize = 28;
/// Length of the head of a reply to an option, in bytes.
pub(crate) const OPTION_REPLY_BYTES: usize = 20;
/// Length of the head of a chunk in bytes.
pub(crate) const CHUNK_BYTES: usize = 20;
/// Length of a simple reply in bytes.
pub(crate) const SIMPLE_REPLY_BYTES: usize = 16;

/// Server and client agree on these: the options have replies, and no 124 zeros are sent.
pub(crate) const FIXED_NEWSTYLE: u16 = 1;
pub(crate) const NO_ZEROES: u16 = 2;

pub(crate) const OPTION_EXPORT_NAME: u32 = 1;
pub(crate) const OPTION_ABORT: u32 = 2;
pub(crate) const OPTION_LIST: u32 = 3;
pub(crate) const OPTION_INFO: u32 = 6;
pub(crate) const OPTION_GO: u32 = 7;
pub(crate) const OPTION_STRUCTURED_REPLY: u32 = 8;
pub(crate) const OPTION_LIST_META_CONTEXT: u32 = 9;
pub(crate) const OPTION_SET_META_CONTEXT: u32 = 10;

pub(crate) const REPLY_ACK: u32 = 1;
pub(crate) const REPLY_SERVER: u32 = 2;
pub(crate) const REPLY_INFO: u32 = 3;
pub(crate) const REPLY_META_CONTEXT: u32 = 4;
/// Of all types of errors.
pub(crate) const REPLY_ERROR: u32 = 1 << 31;
pub(crate) const REPLY_ERROR_UNSUPPORTED: u32 = REPLY_ERROR | 1;
pub(crate) const REPLY_ERROR_INVALID: u32 = REPLY_ERROR | 3;
pub(crate) const REPLY_ERROR_UNKNOWN: u32 = REPLY_ERROR | 6;

pub(crate) const INFO_EXPORT: u16 = 0;
pub(crate) const INFO_BLOCK_SIZE: u16 = 3;

/// Of the flags of an export: there are flags; it is for reading only; it takes a flush, and ranges of zeros; several
/// connections see the same content.
pub(crate) const HAS_FLAGS: u16 = 1;
pub(crate) const READ_ONLY: u16 = 1 << 1;
pub(crate) const FLUSHES: u16 = 1 << 2;
pub(crate) const TAKES_ZEROS: u16 = 1 << 6;
pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;

/// Of the flags of a block status: one extent is wanted.
pub(crate) const REQ_ONE: u16 = 1 << 3;

/// The numbers of errors, which are those of Linux.
pub(crate) const EPERM: u32 = 1;
pub(crate) const EIO: u32 = 5;
pub(crate) const EINVAL: u32 = 22;

/// Upper bound on a text in bytes, that of the protocol.
pub(crate) const TEXT_BYTES_MAX: usize = 4096;

/// The metadata context with the flags for holes and zeros.
pub(crate) const BASE_ALLOCATION: &str = "base:allocation";

/// Largest read or write that every server takes, in bytes.
pub(crate) const REQUEST_BYTES_ALWAYS: u32 = 32 << 20;

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Command {
    Read = 0,
    Write = 1,
    Disconnect = 2,
    Flush = 3,
    Trim = 4,
    WriteZeros = 6,
    BlockStatus = 7,
    Resize = 8,
}

impl Command {
    /// The command with this number.
    pub(crate) fn of(number: u16) -> Option<Command> {
        use Command::{BlockStatus, Disconnect, Flush, Read, Resize, Trim, Write, WriteZeros};
        let all = [
            Read,
            Write,
            Disconnect,
            Flush,
            Trim,
            WriteZeros,
            BlockStatus,
            Resize,
        ];
        all.into_iter().find(|command| *command as u16 == number)
    }
}

/// A request of the transmission phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) flags: u16,
    /// The number of a [`Command`], if the client keeps to those.
    pub(crate) command: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

impl Request {
    pub(crate) fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = [0; REQUEST_BYTES];
        out[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.to_be_bytes());
        out[6..8].copy_from_slice(&self.command.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..].copy_from_slice(&self.length.to_be_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Request, NbdError> {
        let mut fields = Fields(bytes);
        let magic = fields.u32()?;
        if magic != REQUEST_MAGIC {
            return Err(NbdError::protocol(format!(
                "a request that begins {magic:#x}"
            )));
        }
        Ok(Request {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset: fields.u64()?,
            length: fields.u32()?,
        })
    }
}

/// What a server sends first.
pub(crate) fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[..8].copy_from_slice(&SERVER_MAGIC.to_be_bytes());
    greeting[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    greeting[16..].copy_from_slice(&(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    greeting
}

/// An option of the negotiation with its data.
pub(crate) fn encode_option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut out = OPTION_MAGIC.to_be_bytes().to_vec();
    out.extend(option.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}

/// The number of an option and the length of its data, from its head.
pub(crate) fn decode_option(head: &[u8; OPTION_BYTES]) -> Result<(u32, u32), NbdError> {
    let mut fields = Fields(head);
    match fields.u64()? {
        OPTION_MAGIC => Ok((fields.u32()?, fields.u32()?)),
        magic => Err(NbdError::protocol(format!(
            "an option that begins {magic:#x}"
        ))),
    }
}

/// Appends a reply to an option: its type and its data.
pub(crate) fn encode_option_reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// A text with its length before it.
pub(crate) fn encode_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_be_bytes());
    out.extend(text.as_bytes());
}

/// What a chunk of a structured reply has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum ChunkKind {
    /// Nothing.
    None = 0,
    /// Bytes of the disk.
    Data = 1,
    /// A range of zeros.
    Hole = 2,
    /// The status of ranges.
    BlockStatus = 5,
    /// An error.
    Error = CHUNK_ERROR | 1,
}

/// Of all types of errors.
const CHUNK_ERROR: u16 = 1 << 15;
/// Of the flags of a chunk: it is the last of its reply.
const CHUNK_DONE: u16 = 1;

/// The head of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) kind: ChunkKind,
    /// Whether it is the last of its reply.
    pub(crate) done: bool,
    pub(crate) cookie: u64,
    /// Bytes that follow.
    pub(crate) length: u32,
}

impl Chunk {
    pub(crate) fn encode(&self) -> [u8; CHUNK_BYTES] {
        let flags = if self.done { CHUNK_DONE } else { 0 };
        let mut out = [0; CHUNK_BYTES];
        out[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&flags.to_be_bytes());
        out[6..8].copy_from_slice(&(self.kind as u16).to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..].copy_from_slice(&self.length.to_be_bytes());
        out
    }

    /// Decodes the head.
    pub(crate) fn decode(bytes: &[u8; CHUNK_BYTES]) -> Result<Chunk, NbdError> {
        use ChunkKind::{BlockStatus, Data, Error, Hole, None};
        let mut fields = Fields(bytes);
        let magic = fields.u32()?;
        if magic != CHUNK_MAGIC {
            return Err(NbdError::protocol(format!(
                "a reply that begins {magic:#x}"
            )));
        }
        let (flags, number) = (fields.u16()?, fields.u16()?);
        let mut kinds = [None, Data, Hole, BlockStatus].into_iter();
        let kind = match kinds.find(|kind| *kind as u16 == number) {
            Some(kind) => kind,
            _ if number & CHUNK_ERROR != 0 => Error,
            _ => return Err(NbdError::protocol(format!("a chunk of type {number}"))),
        };
        Ok(Chunk {
            kind,
            done: flags & CHUNK_DONE != 0,
            cookie: fields.u64()?,
            length: fields.u32()?,
        })
    }
}

/// A simple reply. After that to a read without an error come its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SimpleReply {
    /// 0, or what went wrong.
    pub(crate) error: u32,
    pub(crate) cookie: u64,
}

/// Whether a reply that begins with these bytes is a simple one.
pub(crate) fn is_simple_reply(head: &[u8; SIMPLE_REPLY_BYTES]) -> bool {
    head.starts_with(&SIMPLE_REPLY_MAGIC.to_be_bytes())
}

impl SimpleReply {
    pub(crate) fn encode(&self) -> [u8; SIMPLE_REPLY_BYTES] {
        let mut out = [0; SIMPLE_REPLY_BYTES];
        out[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        out[4..8].copy_from_slice(&self.error.to_be_bytes());
        out[8..].copy_from_slice(&self.cookie.to_be_bytes());
        out
    }

    pub(crate) fn decode(head: &[u8; SIMPLE_REPLY_BYTES]) -> Result<SimpleReply, NbdError> {
        let mut fields = Fields(&head[4..]);
        Ok(SimpleReply {
            error: fields.u32()?,
            cookie: fields.u64()?,
        })
    }
}

/// The numbers and texts of a message, one after the other.
pub(crate) struct Fields<'b>(pub(crate) &'b [u8]);

impl<'b> Fields<'b> {
    pub(crate) fn take(&mut self, bytes: usize) -> Result<&'b [u8], NbdError> {
        let (taken, rest) = self
            .0
            .split_at_checked(bytes)
            .ok_or_else(|| NbdError::protocol("a message that is too short"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], NbdError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, NbdError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, NbdError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, NbdError> {
        self.array().map(u64::from_be_bytes)
    }

    /// The rest as a text; what is not UTF-8 is replaced.
    pub(crate) fn text(self) -> String {
        String::from_utf8_lossy(self.0).into_owned()
    }
}

/// The payload of an error chunk. The text is cut to [`TEXT_BYTES_MAX`].
pub(crate) fn encode_error(number: u32, text: &str) -> Vec<u8> {
    let text = &text[..text.floor_char_boundary(TEXT_BYTES_MAX)];
    let mut out = number.to_be_bytes().to_vec();
    out.extend((text.len() as u16).to_be_bytes());
    out.extend(text.as_bytes());
    out
}

/// The error number and the words of an error chunk.
pub(crate) fn decode_error(payload: &[u8]) -> Result<(u32, Option<String>), NbdError> {
    let mut fields = Fields(payload);
    let (number, length) = (fields.u32()?, fields.u16()?);
    let text = Fields(fields.take(length.into())?).text();
    Ok((number, (!text.is_empty()).then_some(text)))
}

/// The payload of a block-status chunk.
pub(crate) fn encode_status(context: u32, ranges: &[(u32, u32)]) -> Vec<u8> {
    let mut out = context.to_be_bytes().to_vec();
    for (length, flags) in ranges {
        out.extend(length.to_be_bytes());
        out.extend(flags.to_be_bytes());
    }
    out
}

/// The ranges of a block-status chunk: the context, then the length and flags of each.
pub(crate) fn decode_status(payload: &[u8]) -> Result<(u32, Vec<(u32, u32)>), NbdError> {
    let mut fields = Fields(payload);
    let context = fields.u32()?;
    let mut ranges = Vec::with_capacity(fields.0.len() / 8);
    while !fields.0.is_empty() {
        ranges.push((fields.u32()?, fields.u32()?));
    }
    Ok((context, ranges))
}
