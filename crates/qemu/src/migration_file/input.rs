//! The bytes of a migration file, front to back, and the small pieces that it is made of.

use std::io::{ErrorKind, Read, Seek, SeekFrom};

use stillframe_page::GuestPage;

use super::{
    CAPABILITIES, CONFIGURATION, FLAG_CONTINUE, FLAG_EOS, FLAG_PAGE, FLAG_ZERO, FOOTER, FileBlock,
    Form, FoundPage, HEADER, MAPPED_RAM, MAPPED_VERSION, Mapped, MigrationFileError, PAGE,
    PAGE_BYTES, RAM, RAM_VERSION, SECTION_FULL, SECTION_START, SUBSECTION,
};

/// Upper bound on the capabilities; QEMU has fewer.
const CAPABILITIES_MAX: u32 = 64;
/// Longest name of a machine type accepted.
const MACHINE_BYTES_MAX: u32 = 128;
/// Bits of a record's first word that are flags.
pub(super) const FLAGS: u64 = PAGE_BYTES - 1;

pub(super) fn unsupported(what: String, at: u64, remedy: &'static str) -> MigrationFileError {
    MigrationFileError::Unsupported { what, at, remedy }
}

/// The meaning of a record's flags that are not supported here.
pub(super) fn unknown_record(word: u64, at: u64) -> MigrationFileError {
    const PLAIN: &str = "write the file without that capability";
    let what = match word & FLAGS & !FLAG_CONTINUE {
        0x40 => "a page as a difference (xbzrle)",
        0x80 => "a page sent by RDMA",
        0x100 => "a compressed page",
        0x200 => "a page sent through other channels (multifd)",
        flags => {
            return MigrationFileError::Damaged {
                what: format!("a record of RAM with flags {flags:#x}"),
                at,
            };
        }
    };
    unsupported(what.to_owned(), at, PLAIN)
}

/// Counts the bytes read, and knows the end.
#[derive(Debug)]
pub(super) struct Input<R> {
    pub(super) reader: R,
    /// How far it was read.
    pub(super) at: u64,
    /// Its length.
    pub(super) bytes: u64,
}

impl<R: Read + Seek> Input<R> {
    pub(super) fn new(mut reader: R) -> Result<Input<R>, MigrationFileError> {
        let length = reader
            .seek(SeekFrom::End(0))
            .and_then(|bytes| reader.seek(SeekFrom::Start(0)).map(|_| bytes));
        let bytes = length.map_err(|source| MigrationFileError::Read { at: 0, source })?;
        Ok(Input {
            reader,
            at: 0,
            bytes,
        })
    }

    pub(super) fn fill(
        &mut self,
        into: &mut [u8],
        what: &'static str,
    ) -> Result<(), MigrationFileError> {
        let at = self.at;
        self.reader
            .read_exact(into)
            .map_err(|source| match source.kind() {
                ErrorKind::UnexpectedEof => MigrationFileError::Truncated {
                    at: self.bytes,
                    what,
                },
                _ => MigrationFileError::Read { at, source },
            })?;
        self.at += into.len() as u64;
        Ok(())
    }

    pub(super) fn go_to(&mut self, at: u64) -> Result<(), MigrationFileError> {
        if at != self.at {
            self.reader
                .seek(SeekFrom::Start(at))
                .map_err(|source| MigrationFileError::Read { at, source })?;
            self.at = at;
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], MigrationFileError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, MigrationFileError> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(super) fn u16(&mut self, what: &'static str) -> Result<u16, MigrationFileError> {
        Ok(u16::from_be_bytes(self.array(what)?))
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, MigrationFileError> {
        Ok(u32::from_be_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, MigrationFileError> {
        Ok(u64::from_be_bytes(self.array(what)?))
    }

    fn text(&mut self, bytes: usize, what: &'static str) -> Result<String, MigrationFileError> {
        let at = self.at;
        let mut text = vec![0; bytes];
        self.fill(&mut text, what)?;
        let text = String::from_utf8(text).ok();
        text.filter(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()))
            .ok_or_else(|| MigrationFileError::Damaged {
                what: format!("{what} is no name"),
                at,
            })
    }

    pub(super) fn name(&mut self, what: &'static str) -> Result<String, MigrationFileError> {
        let bytes = self.u8(what)?;
        self.text(bytes.into(), what)
    }

    pub(super) fn header(&mut self) -> Result<(), MigrationFileError> {
        let mut start = Vec::new();
        let read = (&mut self.reader).take(16).read_to_end(&mut start);
        read.map_err(|source| MigrationFileError::Read { at: 0, source })?;
        if !start.starts_with(&HEADER) {
            let hint = match () {
                () if start.starts_with(b"LibvirtQemudSave") => {
                    "; it is a save file of libvirt, which has a head of its own before QEMU's"
                }
                () if start.starts_with(b"QEVM") => "; the stream has another version",
                () if start.starts_with(b"MVEQ") => "; its bytes are in the other order",
                () => "",
            };
            return Err(MigrationFileError::Foreign { start, hint });
        }
        self.at = start.len() as u64;
        self.go_to(HEADER.len() as u64)
    }

    pub(super) fn machine(&mut self) -> Result<String, MigrationFileError> {
        const WHAT: &str = "the configuration section";
        let at = self.at;
        if self.u8(WHAT)? != CONFIGURATION {
            return Err(unsupported(
                "a file without configuration section".to_owned(),
                at,
                "write it with a machine type of QEMU 2.4 or newer",
            ));
        }
        let bytes = self.u32(WHAT)?;
        if bytes > MACHINE_BYTES_MAX {
            return Err(MigrationFileError::Damaged {
                what: format!("a machine type of {bytes} bytes"),
                at,
            });
        }
        self.text(bytes as usize, "the machine type")
    }

    /// The subsections of the configuration: how RAM lies in the file, and the type of what comes next.
    pub(super) fn configuration_subsections(&mut self) -> Result<(Form, u8), MigrationFileError> {
        const WHAT: &str = "the configuration section";
        let mut form = Form::Stream;
        loop {
            let at = self.at;
            let kind = self.u8(WHAT)?;
            if kind != SUBSECTION {
                return Ok((form, kind));
            }
            let name = self.name("a subsection's name")?;
            self.u32(WHAT)?;
            match name.as_str() {
                CAPABILITIES => form = self.capabilities()?,
                "configuration/uuid" => drop(self.array::<16>(WHAT)?),
                "configuration/target-page-bits" if self.u32(WHAT)? == PAGE_BYTES.ilog2() => {}
                _ => {
                    return Err(unsupported(
                        format!("configuration {name:?}"),
                        at,
                        "only files of x86_64 guests of stock QEMU can be read",
                    ));
                }
            }
        }
    }

    fn capabilities(&mut self) -> Result<Form, MigrationFileError> {
        let at = self.at;
        let count = self.u32("the capabilities")?;
        if count > CAPABILITIES_MAX {
            return Err(MigrationFileError::Damaged {
                what: format!("{count} capabilities"),
                at,
            });
        }
        let mut form = Form::Stream;
        for _ in 0..count {
            let at = self.at;
            let name = self.name("a capability")?;
            if name != MAPPED_RAM {
                return Err(unsupported(
                    format!("migration capability {name:?}"),
                    at,
                    "write the file without that capability",
                ));
            }
            form = Form::Mapped;
        }
        Ok(form)
    }

    /// RAM's first section, whose type was read already. Its number.
    pub(super) fn ram_start(&mut self, kind: u8) -> Result<u32, MigrationFileError> {
        let at = self.at - 1;
        if kind != SECTION_START && kind != SECTION_FULL {
            return Err(MigrationFileError::Damaged {
                what: format!("a section of type {kind:#04x} where RAM was to begin"),
                at,
            });
        }
        let number = self.u32("RAM's section")?;
        let name = self.name("a section's name")?;
        let (_, version) = (self.u32("RAM's section")?, self.u32("RAM's section")?);
        if kind != SECTION_START || name != RAM || version != RAM_VERSION {
            return Err(unsupported(
                format!("section {name:?} of version {version}, before RAM,"),
                at,
                "detach the device that it belongs to before writing the file",
            ));
        }
        Ok(number)
    }

    /// Where a mapped block lies; goes to what comes behind it.
    pub(super) fn mapped_block(&mut self, block: &FileBlock) -> Result<Mapped, MigrationFileError> {
        const WHAT: &str = "a mapped RAM block's header";
        let at = self.at;
        let version = self.u32(WHAT)?;
        let page_bytes = self.u64(WHAT)?;
        let (bitmap_at, pages_at) = (self.u64(WHAT)?, self.u64(WHAT)?);
        if version != MAPPED_VERSION || page_bytes != PAGE_BYTES {
            return Err(unsupported(
                format!(
                    "RAM block {:?} mapped in version {version} with pages of {page_bytes} bytes",
                    block.name
                ),
                at,
                "only version 1 with pages of 4096 bytes is known",
            ));
        }
        let bitmap_end = bitmap_at.checked_add(block.pages().div_ceil(64) * 8);
        let pages_end = pages_at.checked_add(block.used_bytes);
        let (Some(bitmap_end), Some(pages_end)) = (bitmap_end, pages_end) else {
            return Err(MigrationFileError::Damaged {
                what: format!("RAM block {:?} lies beyond all files", block.name),
                at,
            });
        };
        if bitmap_at < self.at || bitmap_end > pages_at {
            return Err(MigrationFileError::Damaged {
                what: format!("the parts of RAM block {:?} overlap", block.name),
                at,
            });
        }
        if pages_end > self.bytes {
            return Err(MigrationFileError::Truncated {
                at: self.bytes,
                what: "a RAM block",
            });
        }
        self.go_to(pages_end)?;
        Ok(Mapped {
            bitmap_at,
            pages_at,
        })
    }

    pub(super) fn footer(&mut self, section: u32) -> Result<(), MigrationFileError> {
        let at = self.at;
        let kind = self.u8("a section's end")?;
        if kind != FOOTER || self.u32("a section's end")? != section {
            return Err(MigrationFileError::Damaged {
                what: "a section of RAM does not end where it should".to_owned(),
                at,
            });
        }
        Ok(())
    }

    /// The next page in a section of RAM; `None` at the section's end.
    pub(super) fn record(
        &mut self,
        last: Option<usize>,
        blocks: &[FileBlock],
        bytes: &mut [u8; PAGE],
    ) -> Result<Option<FoundPage>, MigrationFileError> {
        let at = self.at;
        let word = self.u64("RAM")?;
        if word == FLAG_EOS {
            return Ok(None);
        }
        let flags = word & FLAGS;
        if flags & !FLAG_CONTINUE != FLAG_ZERO && flags & !FLAG_CONTINUE != FLAG_PAGE {
            return Err(unknown_record(word, at));
        }
        let wrong = |what: String| MigrationFileError::Damaged { what, at };
        let block = match flags & FLAG_CONTINUE {
            0 => {
                let name = self.name("a RAM block's name")?;
                let known = blocks.iter().position(|block| block.name == name);
                known.ok_or_else(|| {
                    wrong(format!(
                        "a page of RAM block {name:?}, which is not in the list"
                    ))
                })?
            }
            _ => last.ok_or_else(|| wrong("a page of no RAM block".to_owned()))?,
        };
        let page = word / PAGE_BYTES;
        if page >= blocks[block].pages() {
            let name = &blocks[block].name;
            return Err(wrong(format!(
                "page {page} is beyond the end of RAM block {name:?}"
            )));
        }
        let is_zero = flags & FLAG_ZERO != 0;
        if !is_zero {
            self.fill(bytes, "a page")?;
        } else if self.u8("a page")? != 0 {
            return Err(wrong(
                "a page filled with a byte other than zero".to_owned(),
            ));
        }
        let page = GuestPage { block, page };
        Ok(Some(FoundPage { page, is_zero }))
    }
}
