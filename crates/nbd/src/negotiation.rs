//! The negotiation: from the server's greeting to the export with its metadata contexts.

use std::io::{Read, Write};

use crate::error::NbdError;
use crate::wire::{
    FIXED_NEWSTYLE, FLUSHES, Fields, GREETING_BYTES, INFO_BLOCK_SIZE, INFO_EXPORT, NO_ZEROES,
    OPTION_GO, OPTION_MAGIC, OPTION_REPLY_BYTES, OPTION_REPLY_MAGIC, OPTION_SET_META_CONTEXT,
    OPTION_STRUCTURED_REPLY, READ_ONLY, REPLY_ACK, REPLY_ERROR, REPLY_INFO, REPLY_META_CONTEXT,
    REQUEST_BYTES_ALWAYS, SERVER_MAGIC, TAKES_ZEROS, encode_option, encode_text,
};

/// Upper bound on the data of a reply to an option, in bytes: names have at most 4096.
const REPLY_BYTES_MAX: u32 = 64 << 10;
/// Upper bound on the replies to one option.
const REPLIES_MAX: usize = 64;

/// What the negotiation has brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Negotiated {
    /// Length of the disk in bytes.
    pub(crate) bytes: u64,
    /// Largest read or write in bytes.
    pub(crate) request_bytes_max: u32,
    /// What the server allows.
    flags: u16,
    /// The ids of the metadata contexts, in the order in which they were named.
    pub(crate) contexts: Vec<u32>,
}

impl Negotiated {
    /// Whether it can be written, zeros included, and flushed.
    pub(crate) fn is_writable(&self) -> bool {
        self.flags & (READ_ONLY | FLUSHES | TAKES_ZEROS) == FLUSHES | TAKES_ZEROS
    }
}

/// Negotiates this export with these metadata contexts.
///
/// # Errors
/// The server refuses one of them, or speaks another protocol.
pub(crate) fn negotiate(
    stream: &mut (impl Read + Write),
    export: &str,
    contexts: &[&str],
) -> Result<Negotiated, NbdError> {
    greet(stream)?;
    negotiate_option(
        stream,
        OPTION_STRUCTURED_REPLY,
        "structured replies",
        &[],
        &mut |_, _| Ok(()),
    )?;
    let ids = select_contexts(stream, export, contexts)?;
    Ok(Negotiated {
        contexts: ids,
        ..go(stream, export)?
    })
}

fn greet(stream: &mut (impl Read + Write)) -> Result<(), NbdError> {
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting)?;
    let mut fields = Fields(&greeting);
    if (fields.u64()?, fields.u64()?) != (SERVER_MAGIC, OPTION_MAGIC) {
        return Err(NbdError::protocol("it greets with something else"));
    }
    let flags = fields.u16()?;
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(NbdError::protocol("it has an old way to negotiate"));
    }
    let flags = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
    stream.write_all(&flags.to_be_bytes())?;
    Ok(())
}

/// Takes a reply to an option: its type and its data.
type TakeReply<'t> = &'t mut dyn FnMut(u32, &[u8]) -> Result<(), NbdError>;

/// Sends an option, and hands each reply before the last to `take`, with its type.
fn negotiate_option(
    stream: &mut (impl Read + Write),
    option: u32,
    words: &'static str,
    data: &[u8],
    take: TakeReply<'_>,
) -> Result<(), NbdError> {
    stream.write_all(&encode_option(option, data))?;
    for _ in 0..REPLIES_MAX {
        let mut head = [0; OPTION_REPLY_BYTES];
        stream.read_exact(&mut head)?;
        let mut fields = Fields(&head);
        if (fields.u64()?, fields.u32()?) != (OPTION_REPLY_MAGIC, option) {
            return Err(NbdError::protocol(format!(
                "it does not reply to {words}, but sends something else"
            )));
        }
        let (kind, length) = (fields.u32()?, fields.u32()?);
        if length > REPLY_BYTES_MAX {
            return Err(NbdError::protocol(format!(
                "a reply of {length} bytes to {words}"
            )));
        }
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload)?;
        match kind {
            REPLY_ACK => return Ok(()),
            kind if kind & REPLY_ERROR != 0 => {
                let text = Fields(&payload).text();
                let reason = match text.is_empty() {
                    true => format!("error {}", kind & !REPLY_ERROR),
                    false => text,
                };
                return Err(NbdError::Refused {
                    option: words,
                    reason,
                });
            }
            kind => take(kind, &payload)?,
        }
    }
    Err(NbdError::protocol(format!(
        "more than {REPLIES_MAX} replies to {words}"
    )))
}

fn select_contexts(
    stream: &mut (impl Read + Write),
    export: &str,
    contexts: &[&str],
) -> Result<Vec<u32>, NbdError> {
    if contexts.is_empty() {
        return Ok(Vec::new());
    }
    let mut data = Vec::new();
    encode_text(&mut data, export);
    data.extend((contexts.len() as u32).to_be_bytes());
    for context in contexts {
        encode_text(&mut data, context);
    }
    let mut ids: Vec<Option<u32>> = vec![None; contexts.len()];
    let words = "the metadata contexts";
    negotiate_option(
        stream,
        OPTION_SET_META_CONTEXT,
        words,
        &data,
        &mut |kind, payload| {
            if kind != REPLY_META_CONTEXT {
                return Ok(());
            }
            let mut fields = Fields(payload);
            let id = fields.u32()?;
            let name = fields.text();
            if let Some(at) = contexts.iter().position(|context| *context == name) {
                ids[at] = Some(id);
            }
            Ok(())
        },
    )?;
    let named = contexts.iter().zip(ids).map(|(context, id)| {
        id.ok_or_else(|| NbdError::NoContext {
            export: export.to_owned(),
            context: (*context).to_owned(),
        })
    });
    named.collect()
}

/// Opens the export.
fn go(stream: &mut (impl Read + Write), export: &str) -> Result<Negotiated, NbdError> {
    let mut data = Vec::new();
    encode_text(&mut data, export);
    data.extend(1u16.to_be_bytes());
    data.extend(INFO_BLOCK_SIZE.to_be_bytes());
    let (mut opened, mut request_bytes_max) = (None, REQUEST_BYTES_ALWAYS);
    negotiate_option(
        stream,
        OPTION_GO,
        "the export",
        &data,
        &mut |kind, payload| {
            if kind != REPLY_INFO {
                return Ok(());
            }
            let mut fields = Fields(payload);
            match fields.u16()? {
                INFO_EXPORT => opened = Some((fields.u64()?, fields.u16()?)),
                INFO_BLOCK_SIZE => {
                    let (_smallest, _preferred) = (fields.u32()?, fields.u32()?);
                    request_bytes_max = request_bytes_max.min(fields.u32()?);
                }
                _ => {}
            }
            Ok(())
        },
    )?;
    match (opened, request_bytes_max) {
        (None, _) => Err(NbdError::protocol("it does not say how long the export is")),
        (_, 0) => Err(NbdError::protocol("it takes requests of no length only")),
        (Some((bytes, flags)), max) => Ok(Negotiated {
            bytes,
            request_bytes_max: max,
            flags,
            contexts: Vec::new(),
        }),
    }
}
