//! Writing migration files.

use std::io::Write;

use stillframe_page::GuestPage;

use super::{
    CAPABILITIES, CONFIGURATION, FLAG_CONTINUE, FLAG_EOS, FLAG_MEM_SIZE, FLAG_PAGE, FLAG_ZERO,
    FOOTER, FileBlock, HEADER, MAPPED_ALIGNMENT, MAPPED_HEADER_BYTES, MAPPED_RAM, MAPPED_VERSION,
    MigrationFileError, PAGE, PAGE_BYTES, RAM, RAM_VERSION, SECTION_END, SECTION_START, SUBSECTION,
};
use crate::device_state::{self, DESCRIPTION};

/// A name with its length before it.
fn put_name(out: &mut Vec<u8>, name: &str) -> Result<(), MigrationFileError> {
    let bytes = u8::try_from(name.len()).map_err(|_| MigrationFileError::Name {
        name: name.to_owned(),
    })?;
    out.push(bytes);
    out.extend_from_slice(name.as_bytes());
    Ok(())
}

fn put_footer(out: &mut Vec<u8>, section: u32) {
    out.extend_from_slice(&FLAG_EOS.to_be_bytes());
    out.push(FOOTER);
    out.extend_from_slice(&section.to_be_bytes());
}

/// Everything before the list of RAM blocks.
fn head(
    machine: &str,
    is_mapped: bool,
    blocks: &[FileBlock],
    section: u32,
) -> Result<Vec<u8>, MigrationFileError> {
    let mut out = HEADER.to_vec();
    out.push(CONFIGURATION);
    let machine_bytes = u32::try_from(machine.len()).map_err(|_| MigrationFileError::Name {
        name: machine.to_owned(),
    })?;
    out.extend_from_slice(&machine_bytes.to_be_bytes());
    out.extend_from_slice(machine.as_bytes());
    if is_mapped {
        out.push(SUBSECTION);
        put_name(&mut out, CAPABILITIES)?;
        // Its version, and how many capabilities follow.
        out.extend_from_slice(&1u32.to_be_bytes());
        out.extend_from_slice(&1u32.to_be_bytes());
        put_name(&mut out, MAPPED_RAM)?;
    }
    out.push(SECTION_START);
    out.extend_from_slice(&section.to_be_bytes());
    put_name(&mut out, RAM)?;
    out.extend_from_slice(&0u32.to_be_bytes());
    out.extend_from_slice(&RAM_VERSION.to_be_bytes());
    let in_all: u64 = blocks.iter().map(|block| block.used_bytes).sum();
    out.extend_from_slice(&(in_all | FLAG_MEM_SIZE).to_be_bytes());
    Ok(out)
}

fn put_block(out: &mut Vec<u8>, block: &FileBlock) -> Result<(), MigrationFileError> {
    put_name(out, &block.name)?;
    out.extend_from_slice(&block.used_bytes.to_be_bytes());
    Ok(())
}

/// A number that no section of the device state has.
fn free_section(raw: &[u8]) -> Result<u32, MigrationFileError> {
    let sections = device_state::sections(raw).map_err(broken)?;
    let is_used = |number: &u32| sections.iter().any(|section| section.number == *number);
    Ok((0..).find(|number| !is_used(number)).unwrap_or_default())
}

fn broken(source: device_state::DeviceStateError) -> MigrationFileError {
    MigrationFileError::DeviceState { at: 0, source }
}

/// The device state as it follows RAM.
fn put_devices(out: &mut Vec<u8>, raw: &[u8]) {
    out.extend_from_slice(&raw[HEADER.len()..]);
    out.extend_from_slice(DESCRIPTION);
}

/// Where everything lies in a mapped file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedLayout {
    /// The bytes to write and their positions, without bitmaps and pages.
    pub pieces: Vec<(u64, Vec<u8>)>,
    /// The blocks, in their order.
    pub blocks: Vec<MappedBlock>,
    /// Length of the file in bytes.
    pub file_bytes: u64,
}

/// Where a block lies in a mapped file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedBlock {
    /// Where its bitmap begins: little-endian words of 64 bits.
    pub bitmap_at: u64,
    /// Where its first page begins.
    pub pages_at: u64,
}

/// Lays a mapped file out.
///
/// # Errors
/// When a name is too long, or `device_state` is not whole.
pub fn mapped_layout(
    machine: &str,
    blocks: &[FileBlock],
    device_state: &[u8],
) -> Result<MappedLayout, MigrationFileError> {
    let section = free_section(device_state)?;
    let mut piece_at = 0;
    let mut piece = head(machine, true, blocks, section)?;
    let mut pieces = Vec::new();
    let mut places = Vec::new();
    for block in blocks {
        put_block(&mut piece, block)?;
        let bitmap_at = piece_at + piece.len() as u64 + MAPPED_HEADER_BYTES;
        let bitmap_end = bitmap_at + block.pages().div_ceil(64) * 8;
        let pages_at = bitmap_end.next_multiple_of(MAPPED_ALIGNMENT);
        piece.extend_from_slice(&MAPPED_VERSION.to_be_bytes());
        for word in [PAGE_BYTES, bitmap_at, pages_at] {
            piece.extend_from_slice(&word.to_be_bytes());
        }
        pieces.push((piece_at, std::mem::take(&mut piece)));
        places.push(MappedBlock {
            bitmap_at,
            pages_at,
        });
        piece_at = pages_at + block.used_bytes;
    }
    put_footer(&mut piece, section);
    piece.push(SECTION_END);
    piece.extend_from_slice(&section.to_be_bytes());
    put_footer(&mut piece, section);
    put_devices(&mut piece, device_state);
    let file_bytes = piece_at + piece.len() as u64;
    pieces.push((piece_at, piece));
    Ok(MappedLayout {
        pieces,
        blocks: places,
        file_bytes,
    })
}

/// Writes a stream, front to back. Pages may come in any order.
#[derive(Debug)]
pub struct StreamEncoder<W> {
    out: W,
    section: u32,
    blocks: Vec<FileBlock>,
    last: Option<usize>,
    bytes: u64,
}

impl<W: Write> StreamEncoder<W> {
    /// Writes what comes before the pages. `device_state` is the one that comes behind them.
    ///
    /// # Errors
    /// When it cannot be written, a name is too long, or `device_state` is not whole.
    pub fn begin(
        out: W,
        machine: &str,
        blocks: &[FileBlock],
        device_state: &[u8],
    ) -> Result<StreamEncoder<W>, MigrationFileError> {
        let section = free_section(device_state)?;
        let mut start = head(machine, false, blocks, section)?;
        for block in blocks {
            put_block(&mut start, block)?;
        }
        put_footer(&mut start, section);
        start.push(SECTION_END);
        start.extend_from_slice(&section.to_be_bytes());
        let mut encoder = StreamEncoder {
            out,
            section,
            blocks: blocks.to_vec(),
            last: None,
            bytes: 0,
        };
        encoder.put(&start)?;
        Ok(encoder)
    }

    /// Writes a page.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn page(&mut self, page: GuestPage, bytes: &[u8; PAGE]) -> Result<(), MigrationFileError> {
        self.record(page, FLAG_PAGE)?;
        self.put(bytes)
    }

    /// Writes that a page is zero.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn zero(&mut self, page: GuestPage) -> Result<(), MigrationFileError> {
        self.record(page, FLAG_ZERO)?;
        self.put(&[0])
    }

    /// Writes what comes behind the pages. Returns the length of the stream in bytes.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(mut self, device_state: &[u8]) -> Result<(W, u64), MigrationFileError> {
        let mut end = Vec::new();
        put_footer(&mut end, self.section);
        put_devices(&mut end, device_state);
        self.put(&end)?;
        self.out.flush().map_err(MigrationFileError::Write)?;
        Ok((self.out, self.bytes))
    }

    fn record(&mut self, page: GuestPage, flag: u64) -> Result<(), MigrationFileError> {
        let GuestPage { block, page } = page;
        let word = (page * PAGE_BYTES) | flag;
        if self.last == Some(block) {
            return self.put(&(word | FLAG_CONTINUE).to_be_bytes());
        }
        self.last = Some(block);
        let mut head = word.to_be_bytes().to_vec();
        put_name(&mut head, &self.blocks[block].name)?;
        self.put(&head)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), MigrationFileError> {
        self.bytes += bytes.len() as u64;
        self.out.write_all(bytes).map_err(MigrationFileError::Write)
    }
}
