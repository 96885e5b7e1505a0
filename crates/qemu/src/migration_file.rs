//! QEMU's own migration files: a VM's RAM and device state in one file. A stock QEMU writes it with `migrate` and
//! loads it with `-incoming`. It has two forms, the stream and the mapped one:

mod decode;
mod encode;
mod input;
#[cfg(test)]
mod tests;

pub use decode::MigrationFile;
pub use encode::{MappedLayout, StreamEncoder, mapped_layout};

use std::io;

use stillframe_page::{GuestPage, PAGE, PAGE_BYTES};

use crate::device_state::DeviceStateError;

/// Where a mapped block's pages begin: a multiple of this, in bytes.
const MAPPED_ALIGNMENT: u64 = 1 << 20;
/// Version of a mapped block's header.
const MAPPED_VERSION: u32 = 1;
/// Bytes of a mapped block's header.
const MAPPED_HEADER_BYTES: u64 = 28;

const HEADER: [u8; 8] = *b"QEVM\0\0\0\x03";

const SECTION_START: u8 = 0x01;
const SECTION_PART: u8 = 0x02;
const SECTION_END: u8 = 0x03;
const SECTION_FULL: u8 = 0x04;
const SUBSECTION: u8 = 0x05;
const CONFIGURATION: u8 = 0x07;
const COMMAND: u8 = 0x08;
const FOOTER: u8 = 0x7e;

const RAM: &str = "ram";
const RAM_VERSION: u32 = 4;

/// Flags in the low bits of a record's first word.
const FLAG_ZERO: u64 = 0x02;
const FLAG_MEM_SIZE: u64 = 0x04;
const FLAG_PAGE: u64 = 0x08;
const FLAG_EOS: u64 = 0x10;
const FLAG_CONTINUE: u64 = 0x20;

const CAPABILITIES: &str = "configuration/capabilities";
const MAPPED_RAM: &str = "mapped-ram";

/// How the RAM lies in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One page after the other as it was sent.
    Stream,
    /// Every page at its place (`mapped-ram`).
    Mapped,
}

/// A page of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundPage {
    /// Which one; blocks are numbered in the file's order.
    pub page: GuestPage,
    /// Whether it is said to be zero; else its bytes are in the buffer.
    pub is_zero: bool,
}

/// Where a mapped block's parts are.
#[derive(Debug, Clone, Copy)]
struct Mapped {
    bitmap_at: u64,
    pages_at: u64,
}

/// A RAM block of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileBlock {
    /// QEMU's name of it.
    pub name: String,
    /// Its length in use, in bytes; for tables that QEMU may enlarge less than it may become.
    pub used_bytes: u64,
}

impl FileBlock {
    /// Its length in pages.
    pub fn pages(&self) -> u64 {
        self.used_bytes / PAGE_BYTES
    }
}

/// Why a migration file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum MigrationFileError {
    /// The file cannot be read.
    #[error("cannot read the file at byte {at}")]
    Read {
        /// Where.
        at: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It cannot be written.
    #[error("cannot write the migration file")]
    Write(#[source] io::Error),
    /// It ends too soon.
    #[error(
        "the file ends at byte {at}, in the middle of {what}: it is cut off; write or copy it again"
    )]
    Truncated {
        /// Where it ends.
        at: u64,
        /// The part that was being read.
        what: &'static str,
    },
    /// It is something else.
    #[error(
        "it is no migration file of QEMU: it begins with {start:02x?}, not with \"QEVM\" and version 3{hint}"
    )]
    Foreign {
        /// Its first bytes.
        start: Vec<u8>,
        /// The format that it may have instead.
        hint: &'static str,
    },
    /// It is one, and holds what this program does not understand.
    #[error("{what} at byte {at} is not understood; {remedy}")]
    Unsupported {
        /// The unsupported feature.
        what: String,
        /// Where.
        at: u64,
        /// The remedy.
        remedy: &'static str,
    },
    /// It contradicts itself.
    #[error("the file is damaged at byte {at}: {what}")]
    Damaged {
        /// The fault in it.
        what: String,
        /// Where.
        at: u64,
    },
    /// The data after RAM is no device state.
    #[error("the device state in the file, from byte {at} on, cannot be used")]
    DeviceState {
        /// Where it begins.
        at: u64,
        /// The fault in it.
        #[source]
        source: DeviceStateError,
    },
    /// The file has more device state than any VM has.
    #[error("there are {bytes} bytes behind the RAM where {limit} are allowed for device state")]
    DeviceStateTooLong {
        /// How many.
        bytes: u64,
        /// How many may be.
        limit: u64,
    },
    /// A name cannot be written.
    #[error("{name:?} cannot be written into a migration file: it has more than 255 bytes")]
    Name {
        /// The name.
        name: String,
    },
}
