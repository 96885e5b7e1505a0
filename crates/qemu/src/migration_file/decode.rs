//! Reading migration files. Nothing in them is trusted: every length has a bound, every place is compared with the
//! file's length, and an unknown record is refused by name.

use std::io::{Read, Seek};

use super::input::{FLAGS, Input, unknown_record, unsupported};
use stillframe_page::GuestPage;

use super::{
    COMMAND, FLAG_EOS, FLAG_MEM_SIZE, FileBlock, Form, FoundPage, HEADER, Mapped,
    MigrationFileError, PAGE, PAGE_BYTES, SECTION_END, SECTION_FULL, SECTION_PART,
};
use crate::device_state;

/// Upper bound on the blocks; no VM has as many.
const BLOCKS_MAX: usize = 4096;
/// Upper bound on the bytes of a block: 4 TiB.
const BLOCK_BYTES_MAX: u64 = 1 << 42;
/// The only command that is known: RAM is complete, the device state comes.
const SWITCHOVER_START: u16 = 0x0b;
/// Words of a mapped block's bitmap that are held at a time.
const BITMAP_WORDS: u64 = 1 << 13;

/// A migration file being read: its head, then its pages, then the device state.
#[derive(Debug)]
pub struct MigrationFile<R> {
    input: Input<R>,
    form: Form,
    machine: String,
    section: u32,
    blocks: Vec<FileBlock>,
    mapped: Vec<Mapped>,
    /// The block of the last record; it holds on from one section to the next.
    last_block: Option<usize>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The reader is at a bit of a mapped block's bitmap.
    Bitmap(Bits),
    /// Between two sections.
    Between { ram_is_complete: bool },
    /// In one of RAM's.
    Records { is_last: bool },
    /// The reader is at the first section of a device.
    Devices,
}

/// A place in the bitmaps.
#[derive(Debug, Default)]
struct Bits {
    block: usize,
    page: u64,
    words: Vec<u64>,
    first: u64,
}

impl<R: Read + Seek> MigrationFile<R> {
    /// Reads the head of a file.
    ///
    /// # Errors
    /// When it is none, or one that is not understood.
    pub fn open(reader: R) -> Result<MigrationFile<R>, MigrationFileError> {
        let mut input = Input::new(reader)?;
        input.header()?;
        let machine = input.machine()?;
        let (form, next) = input.configuration_subsections()?;
        let section = input.ram_start(next)?;
        let mut file = MigrationFile {
            input,
            form,
            machine,
            section,
            blocks: Vec::new(),
            mapped: Vec::new(),
            last_block: None,
            state: State::Between {
                ram_is_complete: false,
            },
        };
        file.setup()?;
        if form == Form::Mapped {
            file.state = State::Bitmap(Bits::default());
        }
        Ok(file)
    }

    /// How the RAM lies in it.
    pub fn form(&self) -> Form {
        self.form
    }

    /// The versioned machine type.
    pub fn machine(&self) -> &str {
        &self.machine
    }

    /// The RAM blocks, in the file's order.
    pub fn blocks(&self) -> &[FileBlock] {
        &self.blocks
    }

    /// Bytes of the file, and those already read.
    pub fn progress(&self) -> (u64, u64) {
        (self.input.at, self.input.bytes)
    }

    /// The list of blocks, and for each of a mapped file where it lies.
    fn setup(&mut self) -> Result<(), MigrationFileError> {
        let at = self.input.at;
        let word = self.input.u64("the size of RAM")?;
        if word & FLAGS != FLAG_MEM_SIZE {
            return Err(unknown_record(word, at));
        }
        let mut left = word & !FLAGS;
        while left > 0 {
            let at = self.input.at;
            let name = self.input.name("a RAM block's name")?;
            let used_bytes = self.input.u64("a RAM block's size")?;
            let wrong = |what: &str| MigrationFileError::Damaged {
                what: format!("RAM block {name:?} of {used_bytes} bytes {what}"),
                at,
            };
            if used_bytes == 0 || used_bytes > BLOCK_BYTES_MAX || used_bytes % PAGE_BYTES != 0 {
                return Err(wrong("has no size that a block can have"));
            }
            if self.blocks.iter().any(|block| block.name == name) {
                return Err(wrong("is named twice"));
            }
            if self.blocks.len() == BLOCKS_MAX {
                return Err(wrong("is one too many"));
            }
            left = left
                .checked_sub(used_bytes)
                .ok_or_else(|| wrong("is larger than what the file says of all of them"))?;
            let block = FileBlock { name, used_bytes };
            if self.form == Form::Mapped {
                let mapped = self.input.mapped_block(&block)?;
                self.mapped.push(mapped);
            }
            self.blocks.push(block);
        }
        let at = self.input.at;
        match self.input.u64("the end of the list of RAM blocks")? {
            FLAG_EOS => self.input.footer(self.section),
            word => Err(unknown_record(word, at)),
        }
    }

    /// The next page. Its bytes are put into `bytes` unless it is zero. A page may come several times;
    /// the last time counts. Pages that do not come are zero.
    ///
    /// # Errors
    /// When the file is damaged, or contains something that is not understood.
    pub fn next_page(
        &mut self,
        bytes: &mut [u8; PAGE],
    ) -> Result<Option<FoundPage>, MigrationFileError> {
        loop {
            match &mut self.state {
                State::Bitmap(bits) => {
                    let (blocks, mapped) = (&self.blocks, &self.mapped);
                    if let Some(found) = bits.next(&mut self.input, blocks, mapped)? {
                        let GuestPage { block, page } = found.page;
                        let at = mapped[block].pages_at + page * PAGE_BYTES;
                        self.input.go_to(at)?;
                        self.input.fill(bytes, "a page")?;
                        return Ok(Some(found));
                    }
                    let behind = blocks.iter().zip(mapped).next_back();
                    let behind = behind.map(|(block, place)| place.pages_at + block.used_bytes);
                    // The end of the list of blocks was read already.
                    let end = behind.unwrap_or(self.input.at) + RAM_END_BYTES;
                    self.input.go_to(end)?;
                    self.state = State::Between {
                        ram_is_complete: false,
                    };
                }
                State::Records { is_last } => {
                    let ram_is_complete = *is_last;
                    let last = self.last_block;
                    if let Some(found) = self.input.record(last, &self.blocks, bytes)? {
                        self.last_block = Some(found.page.block);
                        return Ok(Some(found));
                    }
                    self.input.footer(self.section)?;
                    self.state = State::Between { ram_is_complete };
                }
                State::Between { ram_is_complete } => {
                    let ram_is_complete = *ram_is_complete;
                    self.state = self.between(ram_is_complete)?;
                }
                State::Devices => return Ok(None),
            }
        }
    }

    /// Reads the part between two sections, and finds which section begins.
    fn between(&mut self, ram_is_complete: bool) -> Result<State, MigrationFileError> {
        let at = self.input.at;
        let kind = self.input.u8("the sections of RAM")?;
        match (kind, ram_is_complete) {
            (SECTION_PART | SECTION_END, false) => {
                let number = self.input.u32("a section's number")?;
                if number != self.section {
                    return Err(unsupported(
                        format!("section {number}, which is sent in parts and is not RAM,"),
                        at,
                        "only RAM may be sent in parts: detach what else is (disks' dirty bitmaps, VFIO)",
                    ));
                }
                let is_last = kind == SECTION_END;
                Ok(State::Records { is_last })
            }
            (COMMAND, _) => {
                let command = self.input.u16("a command")?;
                let bytes = self.input.u16("a command")?;
                match (command, bytes) {
                    (SWITCHOVER_START, 0) => Ok(State::Between { ram_is_complete }),
                    _ => Err(unsupported(
                        format!("command {command:#x} of {bytes} bytes"),
                        at,
                        "write the file without postcopy, return path and other extras",
                    )),
                }
            }
            (SECTION_FULL, true) => Ok(State::Devices),
            _ => Err(MigrationFileError::Damaged {
                what: format!(
                    "a section of type {kind:#04x} where {} was to come",
                    if ram_is_complete {
                        "the device state"
                    } else {
                        "RAM"
                    }
                ),
                at,
            }),
        }
    }

    /// The device state, in the form that [`device_state::validate`] takes. To be called when there is no
    /// page left.
    ///
    /// # Errors
    /// When it is not whole, or longer than `limit_bytes`.
    pub fn device_state(self, limit_bytes: u64) -> Result<Vec<u8>, MigrationFileError> {
        let at = self.input.at - 1;
        let bytes = self.input.bytes - at;
        if bytes > limit_bytes {
            return Err(MigrationFileError::DeviceStateTooLong {
                bytes,
                limit: limit_bytes,
            });
        }
        let mut raw = HEADER.to_vec();
        raw.push(SECTION_FULL);
        let mut rest = self.input.reader.take(limit_bytes);
        let read = rest.read_to_end(&mut raw);
        read.map_err(|source| MigrationFileError::Read { at, source })?;
        device_state::unwrap(raw).map_err(|source| MigrationFileError::DeviceState { at, source })
    }
}

/// The end of the list of blocks: a word and a footer.
const RAM_END_BYTES: u64 = 8 + 5;

impl Bits {
    /// The next page whose bit is set.
    fn next<R: Read + Seek>(
        &mut self,
        input: &mut Input<R>,
        blocks: &[FileBlock],
        mapped: &[Mapped],
    ) -> Result<Option<FoundPage>, MigrationFileError> {
        while let (Some(block), Some(place)) = (blocks.get(self.block), mapped.get(self.block)) {
            while self.page < block.pages() {
                let word = self.page / 64;
                if word < self.first || word >= self.first + self.words.len() as u64 {
                    let end = block.pages().div_ceil(64).min(word + BITMAP_WORDS);
                    input.go_to(place.bitmap_at + word * 8)?;
                    self.words.clear();
                    for _ in word..end {
                        let mut bytes = [0; 8];
                        input.fill(&mut bytes, "a bitmap")?;
                        self.words.push(u64::from_le_bytes(bytes));
                    }
                    self.first = word;
                    self.expect_inside(block, place.bitmap_at)?;
                }
                let rest = self.words[(word - self.first) as usize] >> (self.page % 64);
                if rest == 0 {
                    self.page = (word + 1) * 64;
                    continue;
                }
                let page = self.page + u64::from(rest.trailing_zeros());
                self.page = page + 1;
                return Ok(Some(FoundPage {
                    page: GuestPage::new(self.block, page),
                    is_zero: false,
                }));
            }
            *self = Bits {
                block: self.block + 1,
                ..Bits::default()
            };
        }
        Ok(None)
    }

    /// The last word may have bits to spare; they must not be set.
    fn expect_inside(&self, block: &FileBlock, bitmap_at: u64) -> Result<(), MigrationFileError> {
        let number = block.pages() / 64;
        let last = number.checked_sub(self.first);
        let last = last.and_then(|index| self.words.get(index as usize));
        let spare = last.map_or(0, |word| word >> (block.pages() % 64));
        if spare == 0 {
            return Ok(());
        }
        let page = block.pages() + u64::from(spare.trailing_zeros());
        Err(MigrationFileError::Damaged {
            what: format!(
                "page {page} is beyond the end of RAM block {:?}",
                block.name
            ),
            at: bitmap_at + number * 8,
        })
    }
}
