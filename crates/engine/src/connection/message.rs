//! The messages of two engines while a VM migrates, in this order.
//!
//! ```text
//!   source                                        destination
//!     Hello {session, mode, connections,   -->      plans, starts QEMU
//!            lanes, copied, base, images, vm, blocks}
//!                                          <--    Begun {seeded, based, images}
//!                                          <--    Alive, each second; Ids, if it has a checkpoint of the VM, when QEMU has its pages
//!     Join {session, number}, first on each connection for pages
//!                                          <--    Accepted {no_post_copy}, when QEMU has started
//!
//!   where disks are copied:
//!     Join {session, number}, two for each -->
//!     Disk, on both of them                <-->   Disk
//!     Last, on both of them, in the pause  <-->   Last
//!   and on the first one:
//!     Alive, each second                   -->
//!     Copied, when only new writes are left  -->
//!
//!   pre-copy, on each connection for pages, before *Accepted* already:
//!     Pages, ImagePages, as often as needed  -->
//!     Sync, after each round               <-->   Differs, for pages that no image has; Synced
//!     Pages, while it is stopped           -->
//!     Last                                 -->
//!   and on the first one, each second:
//!     Alive                                -->
//!   post-copy, after Last on all of these:
//!     PagesLater                           -->
//!     Join {session, number}, on each lane -->
//!     Content, Outdated                    -->      discards what it may not use
//!     Sync, before the VM is stopped       <-->   Synced
//!     Outdated, Last, after that           -->
//!   stop-copy:
//!     Join {session, number}, on each lane -->
//!     Content                              -->
//!                                          <--    Fetched
//!   on each lane, from when the VM is stopped:
//!     Pages                                <-->   Fetch, as often as needed
//!
//!     Ids (if verified)                    -->
//!     DeviceState, as QEMU saves it        -->      loads it as it comes
//!     Complete {vm}                        -->
//!   rehearsal, as post-copy while the VM runs on:
//!                                          <--    Fetched, when the state is loaded
//!                                          <--    Rehearsed, and that is all
//!     Word                                 <-->   Word, as the hand-over needs (docs/protocol.md)
//!                                          <--    Alive, each second in which the VM lacks pages
//!
//!   after a cut while the VM runs at the source, on new connections: as at first, with the same session
//!   after a later one, on a new connection:
//!     Again {session, lanes}               -->
//!     Join {session, number}, on each lane -->
//!     Word                                 <-->   Word
//! ```

use std::io::{Read, Write};

use serde::{Deserialize, Serialize};
use stillframe_link::{Frame, Versions};
use stillframe_page::encoding::{Compression, Decoder, Encoder};
use stillframe_page::hash::ContentId;
use stillframe_qemu::record::VmRecord;
use stillframe_repo::CheckpointId;

use super::framing::{Connection, Kind};
use super::word::{Session, Word};
use super::{ConnectionError, malformed};
use crate::memory::BlockShape;
use crate::memory::ranges::PageRanges;

/// The versions of the messages that this program speaks.
pub const VERSIONS: Versions = 1..=1;
/// Ids of one frame.
pub const IDS_MAX: usize = 16 << 10;
/// A device state, before compression. Those of usual machines take 200 KB.
pub const STATE_BYTES_MAX: usize = 256 << 20;
/// How a device state is compressed: half of it is zeros, and the VM is stopped meanwhile.
const STATE_COMPRESSION: Compression = Compression::Zstd(1);
/// Ranges of one [`Control::Content`].
const RANGES_MAX: usize = 64 << 10;

/// When the pages of the VM move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// While it runs at the source; the rest while it is stopped.
    PreCopy,
    /// While it runs at the source; the rest while it runs at the destination.
    Hybrid,
    /// While it runs at the destination.
    PostCopy,
    /// All of them while it is stopped: the destination fetches them.
    StopCopy,
    /// Never: the destination loads an early device state into a QEMU that it ends again, and fetches what that takes.
    Rehearsal,
}

/// A checkpoint of the VM that both hosts may reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// The id of the repository.
    pub repository: String,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
}

/// A file that both hosts may reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedImage {
    /// Its path at the source.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// A message in JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Control {
    /// The source begins.
    Hello {
        /// The name of this migration.
        session: Session,
        /// When the pages move.
        mode: Mode,
        /// Connections for pages that follow.
        connections: usize,
        /// Connections that follow these, over which the destination fetches pages.
        lanes: usize,
        /// The devices whose disks are copied: two connections for each follow the lanes.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        copied: Vec<String>,
        /// The source sends only what was written since this checkpoint, if the destination can read it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base: Option<Base>,
        /// Of pages with content of these, only the place is sent, if the destination has them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        images: Vec<SharedImage>,
        /// The VM.
        vm: Box<VmRecord>,
        /// Its RAM blocks, in the order of their numbers.
        blocks: Vec<BlockShape>,
    },
    /// Another connection of a migration: pages come over it.
    Join {
        /// The name of the migration.
        session: Session,
        /// Its number, from 0.
        number: usize,
    },
    /// The source goes on with a migration on a new connection.
    Again {
        /// The name of the migration.
        session: Session,
        /// Lanes that follow.
        lanes: usize,
    },
    /// The source, which has lost its connection, does not go on with a migration.
    Over {
        /// The name of the migration.
        session: Session,
        /// The reason, for the user of the other side.
        why: String,
    },
    /// The destination takes the VM.
    Begun {
        /// Whether it has a checkpoint, or what came before a cut, and sends the ids of its pages.
        seeded: bool,
        /// Whether it reads from the base what the source does not send.
        #[serde(default)]
        based: bool,
        /// Which of the images it has.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        images: Vec<bool>,
    },
    /// The destination has started a QEMU that waits for memory.
    Accepted {
        /// Why the VM cannot run there before it has all pages; none: it can.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        no_post_copy: Option<String>,
    },
    /// No pages are sent any more: the destination fetches those that it lacks when the VM is stopped.
    PagesLater {
        /// Whether it may use those that it has, unless it hears otherwise.
        some_sent: bool,
    },
    /// What the destination has of these pages may not be used. Those that are named last were written last.
    Outdated {
        /// The number of the block.
        block: usize,
        /// The ranges.
        ranges: Vec<(u64, u64)>,
    },
    /// Pages of a block that may have content: `(first, end)`. All others are zero.
    Content {
        /// The number of the block.
        block: usize,
        /// The ranges.
        ranges: Vec<(u64, u64)>,
    },
    /// The destination wants pages, which come as one batch.
    Fetch {
        /// The number of the block.
        block: usize,
        /// Their numbers, ascending.
        pages: Vec<u32>,
    },
    /// The destination has loaded the device state of a rehearsal, and ended that QEMU.
    Rehearsed,
    /// The disks are copied, but for what the guest still writes.
    Copied,
    /// The destination has all pages.
    Fetched,
    /// A round ends: what was sent so far is to be populated first.
    Sync,
    /// It is, but for pages whose content was not found in an image: they are to be sent.
    Differs {
        /// The number of the block.
        block: usize,
        /// The ranges.
        ranges: Vec<(u64, u64)>,
    },
    /// It is.
    Synced,
    /// No more pages come over this connection; on the first one, no more lists of outdated ones.
    Last,
    /// The source lives, while its pages go over other connections.
    Alive,
    /// The source has sent everything.
    Complete {
        /// The VM as of the pause.
        vm: Box<VmRecord>,
    },
    /// Who runs the VM.
    Word {
        /// The word.
        word: Word,
        /// The reason, for the user of the other side.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
}

/// A message.
#[derive(Debug)]
pub enum Message {
    /// One in JSON.
    Control(Control),
    /// The payload of a [`super::batch::Batch`].
    Pages(Vec<u8>),
    /// The payload of [`super::image_pages::ImagePages`].
    ImagePages(Vec<u8>),
    /// Bytes of one QEMU for the other; none, each second, say that the connection lives.
    Disk(Vec<u8>),
    /// A piece of the device state as QEMU saves it; none of it, that it is whole.
    DeviceState(Vec<u8>),
    /// The content ids of the next pages of all blocks, in their order; `None` is a zero page.
    Ids(Vec<Option<ContentId>>),
}

impl Message {
    /// Reads a frame; trusts nothing of it.
    ///
    /// # Errors
    /// [`ConnectionError::Malformed`].
    pub fn decode(frame: Frame<Kind>) -> Result<Message, ConnectionError> {
        let Frame { kind, payload } = frame;
        match kind {
            Kind::Control => match serde_json::from_slice(&payload) {
                Ok(control) => Ok(Message::Control(control)),
                Err(error) => Err(malformed(format!("a message: {error}"))),
            },
            Kind::Pages => Ok(Message::Pages(payload)),
            Kind::ImagePages => Ok(Message::ImagePages(payload)),
            Kind::Disk => Ok(Message::Disk(payload)),
            Kind::DeviceState => Ok(Message::DeviceState(device_state(&payload)?)),
            Kind::Ids => match payload.as_chunks::<32>() {
                (ids, []) if ids.len() <= IDS_MAX => {
                    let id = |id: &[u8; 32]| (*id != [0; 32]).then_some(ContentId(*id));
                    Ok(Message::Ids(ids.iter().map(id).collect()))
                }
                _ => Err(malformed("ids that are none")),
            },
        }
    }

    /// The name of the message, for an error.
    pub fn what(&self) -> &'static str {
        match self {
            Message::Pages(_) => "pages",
            Message::ImagePages(_) => "places of pages in images",
            Message::Disk(_) => "a part of a disk",
            Message::DeviceState(_) => "a device state",
            Message::Ids(_) => "content ids",
            Message::Control(control) => match control {
                Control::Hello { .. } => "a greeting",
                Control::Join { .. } => "that pages come",
                Control::Again { .. } => "that a migration goes on",
                Control::Over { .. } => "that a migration is over",
                Control::Begun { .. } => "that it takes a VM",
                Control::Accepted { .. } => "that it has started QEMU",
                Control::PagesLater { .. } => "that pages come later",
                Control::Outdated { .. } => "which pages are outdated",
                Control::Content { .. } => "which pages have content",
                Control::Fetch { .. } => "a request for pages",
                Control::Copied => "that its disks are copied",
                Control::Fetched => "that it has all pages",
                Control::Rehearsed => "that the rehearsal is over",
                Control::Sync => "a request for an answer",
                Control::Differs { .. } => "which pages no image has",
                Control::Synced => "that all pages so far are populated",
                Control::Last => "that no more pages come",
                Control::Alive => "that it lives",
                Control::Complete { .. } => "that all is sent",
                Control::Word { .. } => "who is to run the VM",
            },
        }
    }

    /// The error of a message that does not belong here: the other side gave up, or is another program.
    pub fn unexpected(self) -> ConnectionError {
        match self {
            Message::Control(Control::Word {
                word: Word::Never | Word::Settled,
                why: Some(why),
            }) => ConnectionError::GaveUp { why },
            other => malformed(format!("{} out of turn", other.what())),
        }
    }
}

/// Sends a device state, piece by piece as QEMU saves it.
pub struct StateSender<'c, S> {
    connection: &'c mut Connection<S>,
    encoder: Encoder,
}

impl<S: Write> StateSender<'_, S> {
    /// Sends the next piece.
    ///
    /// # Errors
    /// The errors of [`Connection::send`]; it is longer than a state should be.
    pub fn send(&mut self, piece: &[u8]) -> Result<(), ConnectionError> {
        match piece {
            [] => Ok(()),
            piece => self.encode(piece),
        }
    }

    /// The state is whole.
    ///
    /// # Errors
    /// The errors of [`Connection::send`].
    pub fn end(mut self) -> Result<(), ConnectionError> {
        self.encode(&[])
    }

    fn encode(&mut self, piece: &[u8]) -> Result<(), ConnectionError> {
        let length = u32::try_from(piece.len()).ok();
        let length = length.filter(|&length| length as usize <= STATE_BYTES_MAX);
        let length = length.ok_or_else(|| malformed("a device state that is too long"))?;
        let mut payload = [&length.to_le_bytes()[..], &[0]].concat();
        let kind = self.encoder.encode(piece, &mut payload)?;
        payload[4] = kind.number();
        self.connection.send(Kind::DeviceState, &payload)
    }
}

/// `length u32 | kind u8 | payload`, kinds of [`stillframe_page::encoding`].
fn device_state(payload: &[u8]) -> Result<Vec<u8>, ConnectionError> {
    let (head, payload) = payload
        .split_at_checked(5)
        .ok_or_else(|| malformed("a device state that is cut off"))?;
    let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
    if length > STATE_BYTES_MAX {
        return Err(malformed("a device state that is too long"));
    }
    let mut state = Vec::new();
    Decoder::new()?.decode(head[4], payload, length, &mut state)?;
    Ok(state)
}

impl<S: Write> Connection<S> {
    /// Begins to send a device state.
    ///
    /// # Errors
    /// There is no memory for a compressor.
    pub fn device_state(&mut self) -> Result<StateSender<'_, S>, ConnectionError> {
        let encoder = Encoder::new(STATE_COMPRESSION)?;
        Ok(StateSender {
            connection: self,
            encoder,
        })
    }

    /// Sends a device state that is whole already.
    ///
    /// # Errors
    /// The errors of [`Connection::send`]; it is longer than any should be.
    pub fn send_device_state(&mut self, state: &[u8]) -> Result<(), ConnectionError> {
        let mut sender = self.device_state()?;
        sender.send(state)?;
        sender.end()
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The errors of [`Connection::send`].
    pub fn send_control(&mut self, control: &Control) -> Result<(), ConnectionError> {
        let payload = serde_json::to_vec(control).map_err(ConnectionError::Message)?;
        self.send(Kind::Control, &payload)
    }

    /// Names pages of all blocks, with messages that `message` makes of a block and its ranges.
    ///
    /// # Errors
    /// The errors of [`Connection::send`].
    pub fn send_ranges(
        &mut self,
        pages: &PageRanges,
        message: impl Fn(usize, Vec<(u64, u64)>) -> Control,
    ) -> Result<(), ConnectionError> {
        for (block, ranges) in pages.iter().enumerate() {
            for ranges in ranges.chunks(RANGES_MAX) {
                let ranges = ranges.iter().map(|range| (range.start, range.end));
                self.send_control(&message(block, ranges.collect()))?;
            }
        }
        Ok(())
    }

    /// Says which pages may have content.
    ///
    /// # Errors
    /// The errors of [`Connection::send`].
    pub fn send_content(&mut self, pages: &PageRanges) -> Result<(), ConnectionError> {
        self.send_ranges(pages, |block, ranges| Control::Content { block, ranges })?;
        // No block has this number: the list has ended.
        self.send_control(&Control::Content {
            block: pages.len(),
            ranges: Vec::new(),
        })
    }

    /// Sends the content ids of all pages of a block.
    ///
    /// # Errors
    /// The errors of [`Connection::send`].
    pub fn send_ids(&mut self, ids: &[Option<ContentId>]) -> Result<(), ConnectionError> {
        for ids in ids.chunks(IDS_MAX) {
            let bytes = ids.iter().flat_map(|id| id.map_or([0; 32], |id| id.0));
            self.send(Kind::Ids, &bytes.collect::<Vec<u8>>())?;
        }
        Ok(())
    }
}

impl<S: Read> Connection<S> {
    /// Waits for a message.
    ///
    /// # Errors
    /// The errors of [`Connection::receive`] and [`Message::decode`].
    pub fn receive_message(&mut self) -> Result<Message, ConnectionError> {
        Message::decode(self.receive()?)
    }

    /// Waits for this message.
    ///
    /// # Errors
    /// The errors of [`Connection::receive_message`]; it is another one.
    pub fn expect(&mut self, is_it: impl FnOnce(&Control) -> bool) -> Result<(), ConnectionError> {
        match self.receive_message()? {
            Message::Control(control) if is_it(&control) => Ok(()),
            other => Err(other.unexpected()),
        }
    }
}
