//! The server's half of the negotiation: from the greeting to the export that the client opens.

use std::io::{Read, Write};
use std::sync::Arc;

use super::input::read_head;
use super::{Export, Exports};
use crate::error::NbdError;
use crate::wire::{
    BASE_ALLOCATION, CAN_MULTI_CONN, CLIENT_FLAGS_BYTES, FIXED_NEWSTYLE, FLUSHES, Fields,
    HAS_FLAGS, INFO_BLOCK_SIZE, INFO_EXPORT, NO_ZEROES, OPTION_ABORT, OPTION_BYTES,
    OPTION_EXPORT_NAME, OPTION_GO, OPTION_INFO, OPTION_LIST, OPTION_LIST_META_CONTEXT,
    OPTION_SET_META_CONTEXT, OPTION_STRUCTURED_REPLY, READ_ONLY, REPLY_ACK, REPLY_ERROR_INVALID,
    REPLY_ERROR_UNKNOWN, REPLY_ERROR_UNSUPPORTED, REPLY_INFO, REPLY_META_CONTEXT, REPLY_SERVER,
    REQUEST_BYTES_ALWAYS, TEXT_BYTES_MAX, decode_option, encode_option_reply, encode_text,
    greeting,
};

/// Upper bound on the data of an option in bytes: a name, and some metadata contexts.
const OPTION_BYTES_MAX: u32 = 64 << 10;
/// Upper bound on the options of one client. QEMU sends about five.
const OPTIONS_MAX: usize = 256;

/// What the server says of each export. A flush has nothing to do, and each connection sees the same content.
const EXPORT_FLAGS: u16 = HAS_FLAGS | READ_ONLY | FLUSHES | CAN_MULTI_CONN;
/// The smallest and the preferred request in bytes.
const BLOCK_BYTES_MIN: u32 = 1;
const BLOCK_BYTES_PREFERRED: u32 = 4096;
/// Zeros at the end of the reply to a client of before [`NO_ZEROES`].
const ZEROES_BYTES: usize = 124;

/// The id of `base:allocation` in block status.
pub(crate) const ALLOCATION_ID: u32 = 1;

/// What a client has opened.
pub(crate) struct Session<'e> {
    pub(crate) export: Arc<dyn Export + 'e>,
    /// Length of the export in bytes.
    pub(crate) bytes: u64,
    /// Whether replies are structured.
    pub(crate) structured: bool,
    /// Whether the client has selected `base:allocation`.
    pub(crate) allocation: bool,
}

/// Negotiates with a client. Returns nothing if it leaves without an export, or opens one that is not there in the way
/// that has no reply.
///
/// # Errors
/// The connection failed, or the client speaks another protocol.
pub(crate) fn negotiate<'e>(
    stream: &mut (impl Read + Write),
    exports: &Exports<'e>,
) -> Result<Option<Session<'e>>, NbdError> {
    stream.write_all(&greeting())?;
    let mut flags = [0; CLIENT_FLAGS_BYTES];
    if !read_head(stream, &mut flags)? {
        return Ok(None);
    }
    let mut negotiation = Negotiation::new(exports, u32::from_be_bytes(flags))?;
    for _ in 0..OPTIONS_MAX {
        let mut head = [0; OPTION_BYTES];
        if !read_head(stream, &mut head)? {
            return Ok(None);
        }
        let (option, length) = decode_option(&head)?;
        if length > OPTION_BYTES_MAX {
            return Err(NbdError::protocol(format!("an option of {length} bytes")));
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        let mut reply = Vec::new();
        let next = negotiation.option(option, &data, &mut reply);
        stream.write_all(&reply)?;
        match next {
            Next::Option => {}
            Next::Open(session) => return Ok(Some(session)),
            Next::End => return Ok(None),
        }
    }
    Err(NbdError::protocol(format!(
        "more than {OPTIONS_MAX} options"
    )))
}

/// What comes after an option.
enum Next<'e> {
    /// Another one.
    Option,
    /// The transmission phase.
    Open(Session<'e>),
    /// The end of the connection.
    End,
}

/// What was negotiated so far.
struct Negotiation<'n, 'e> {
    exports: &'n Exports<'e>,
    no_zeroes: bool,
    structured: bool,
    /// The export that `base:allocation` is selected for.
    allocation: Option<&'n str>,
}

impl<'n, 'e> Negotiation<'n, 'e> {
    /// Begins with the flags of a client.
    fn new(exports: &'n Exports<'e>, flags: u32) -> Result<Negotiation<'n, 'e>, NbdError> {
        if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
            return Err(NbdError::protocol(format!("the client flags {flags:#x}")));
        }
        Ok(Negotiation {
            exports,
            no_zeroes: flags & u32::from(NO_ZEROES) != 0,
            structured: false,
            allocation: None,
        })
    }

    /// Carries out an option, and appends what is replied.
    fn option(&mut self, option: u32, data: &[u8], reply: &mut Vec<u8>) -> Next<'e> {
        let outcome = match option {
            OPTION_EXPORT_NAME => return self.export_name(data, reply),
            OPTION_ABORT => {
                encode_option_reply(reply, option, REPLY_ACK, &[]);
                return Next::End;
            }
            OPTION_LIST => self.list(data, reply),
            OPTION_INFO | OPTION_GO => match self.info(option, data, reply) {
                Ok(name) if option == OPTION_GO => {
                    encode_option_reply(reply, option, REPLY_ACK, &[]);
                    return Next::Open(self.session(name));
                }
                outcome => outcome.map(drop),
            },
            OPTION_STRUCTURED_REPLY => self.structured_reply(data),
            OPTION_LIST_META_CONTEXT => self.list_contexts(data, reply),
            OPTION_SET_META_CONTEXT => self.set_contexts(data, reply),
            _ => Err(Refusal {
                kind: REPLY_ERROR_UNSUPPORTED,
                why: "this option is not supported",
            }),
        };
        match outcome {
            Ok(()) => encode_option_reply(reply, option, REPLY_ACK, &[]),
            Err(Refusal { kind, why }) => encode_option_reply(reply, option, kind, why.as_bytes()),
        }
        Next::Option
    }

    /// The oldest way to open an export. An error has no reply in it: the connection ends.
    fn export_name(&self, name: &[u8], reply: &mut Vec<u8>) -> Next<'e> {
        let Ok(found) = self.find(name) else {
            return Next::End;
        };
        reply.extend(found.1.bytes().to_be_bytes());
        reply.extend(EXPORT_FLAGS.to_be_bytes());
        if !self.no_zeroes {
            reply.extend([0; ZEROES_BYTES]);
        }
        Next::Open(self.session(found))
    }

    fn list(&self, data: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        expect_no_data(data)?;
        for name in self.exports.keys() {
            let mut entry = Vec::new();
            encode_text(&mut entry, name);
            encode_option_reply(reply, OPTION_LIST, REPLY_SERVER, &entry);
        }
        Ok(())
    }

    /// Describes an export, and returns it.
    fn info(
        &self,
        option: u32,
        data: &[u8],
        reply: &mut Vec<u8>,
    ) -> Result<Named<'n, 'e>, Refusal> {
        let (name, wanted) = decode_info(data)?;
        let found = self.find(name)?;
        let mut info = INFO_EXPORT.to_be_bytes().to_vec();
        info.extend(found.1.bytes().to_be_bytes());
        info.extend(EXPORT_FLAGS.to_be_bytes());
        encode_option_reply(reply, option, REPLY_INFO, &info);
        if wanted.contains(&INFO_BLOCK_SIZE) {
            let mut info = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
            for bytes in [BLOCK_BYTES_MIN, BLOCK_BYTES_PREFERRED, REQUEST_BYTES_ALWAYS] {
                info.extend(bytes.to_be_bytes());
            }
            encode_option_reply(reply, option, REPLY_INFO, &info);
        }
        Ok(found)
    }

    fn structured_reply(&mut self, data: &[u8]) -> Result<(), Refusal> {
        expect_no_data(data)?;
        self.structured = true;
        Ok(())
    }

    /// Lists the contexts that a query is for: all without a query, those of a namespace for its name.
    fn list_contexts(&self, data: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let (name, queries) = decode_contexts(data)?;
        self.find(name)?;
        let matches = |query: &&[u8]| [b"base:", BASE_ALLOCATION.as_bytes()].contains(query);
        if queries.is_empty() || queries.iter().any(matches) {
            // A list has no ids.
            encode_context(reply, OPTION_LIST_META_CONTEXT, 0);
        }
        Ok(())
    }

    /// Selects contexts, instead of those that were selected before.
    fn set_contexts(&mut self, data: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        self.allocation = None;
        if !self.structured {
            return Err(Refusal::invalid("structured replies come first"));
        }
        let (name, queries) = decode_contexts(data)?;
        let (name, _) = self.find(name)?;
        if queries.contains(&BASE_ALLOCATION.as_bytes()) {
            self.allocation = Some(name);
            encode_context(reply, OPTION_SET_META_CONTEXT, ALLOCATION_ID);
        }
        Ok(())
    }

    fn find(&self, name: &[u8]) -> Result<Named<'n, 'e>, Refusal> {
        let name = std::str::from_utf8(name).ok();
        let found = name.and_then(|name| self.exports.get_key_value(name));
        let (name, export) = found.ok_or(Refusal {
            kind: REPLY_ERROR_UNKNOWN,
            why: "there is no such export",
        })?;
        Ok((name, export))
    }

    fn session(&self, (name, export): Named<'n, 'e>) -> Session<'e> {
        Session {
            export: Arc::clone(export),
            bytes: export.bytes(),
            structured: self.structured,
            allocation: self.allocation == Some(name),
        }
    }
}

/// An export with its name.
type Named<'n, 'e> = (&'n str, &'n Arc<dyn Export + 'e>);

/// Why an option is not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Refusal {
    /// The type of the reply.
    kind: u32,
    /// The text of the reply.
    why: &'static str,
}

impl Refusal {
    fn invalid(why: &'static str) -> Refusal {
        Refusal {
            kind: REPLY_ERROR_INVALID,
            why,
        }
    }
}

impl From<NbdError> for Refusal {
    /// Decoding fails in one way only: data is missing.
    fn from(_: NbdError) -> Refusal {
        Refusal::invalid("the data of the option is too short")
    }
}

fn expect_no_data(data: &[u8]) -> Result<(), Refusal> {
    match data.is_empty() {
        true => Ok(()),
        false => Err(Refusal::invalid("this option has no data")),
    }
}

/// The name of an export, and the numbers of the wanted information.
fn decode_info(data: &[u8]) -> Result<(&[u8], Vec<u16>), Refusal> {
    let mut fields = Fields(data);
    let name = decode_text(&mut fields)?;
    let count = fields.u16()?;
    let wanted = (0..count)
        .map(|_| fields.u16())
        .collect::<Result<_, NbdError>>()?;
    expect_end(&fields)?;
    Ok((name, wanted))
}

/// The name of an export, and queries for metadata contexts.
fn decode_contexts(data: &[u8]) -> Result<(&[u8], Vec<&[u8]>), Refusal> {
    let mut fields = Fields(data);
    let name = decode_text(&mut fields)?;
    let count = fields.u32()?;
    let mut queries = Vec::new();
    // The count is not a capacity: the data ends before it does, if it is a lie.
    for _ in 0..count {
        queries.push(decode_text(&mut fields)?);
    }
    expect_end(&fields)?;
    Ok((name, queries))
}

fn decode_text<'d>(fields: &mut Fields<'d>) -> Result<&'d [u8], Refusal> {
    let length = fields.u32()? as usize;
    match length <= TEXT_BYTES_MAX {
        true => Ok(fields.take(length)?),
        false => Err(Refusal::invalid("a text of more than 4096 bytes")),
    }
}

fn expect_end(fields: &Fields<'_>) -> Result<(), Refusal> {
    match fields.0.is_empty() {
        true => Ok(()),
        false => Err(Refusal::invalid("the data of the option is too long")),
    }
}

fn encode_context(reply: &mut Vec<u8>, option: u32, id: u32) {
    let mut context = id.to_be_bytes().to_vec();
    context.extend(BASE_ALLOCATION.as_bytes());
    encode_option_reply(reply, option, REPLY_META_CONTEXT, &context);
}
