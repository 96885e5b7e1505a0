//! The verb *export*: a checkpoint as a file that other programs read.
//!
//! ```text
//!   manifest ──> page maps ──> [places in a file | one record after the other] ──> renamed when whole
//!                device state ──┘
//! ```
//!
//! Several threads read the pages, in their order in the repository, a window at a time. So memory stays bounded
//! however large the guest is.

mod disk;
mod image;
mod output;
mod pages;
mod physical;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use stillframe_page::{GuestPage, PAGE, PAGE_BYTES};
use stillframe_qemu::arguments::Argument;
use stillframe_qemu::device_state::DeviceStateError;
use stillframe_qemu::migration_file::{
    FileBlock, MigrationFileError, StreamEncoder, mapped_layout,
};
use stillframe_qemu::physical_memory::PhysicalMemoryError;
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{BlockTable, CheckpointId, Manifest, PageMap, RepoError, Repository};
use thiserror::Error;

use crate::ProgressSink;
use crate::restore::{self, Checkpoint, RestoreError};
pub use disk::{DiskReport, export_disk};
use output::Output;
use pages::Walk;

/// In blocks up to this length, in bytes, zero pages are written like others. A QEMU that was just started has put
/// its firmware there. When it loads a mapped file, it does not touch pages that the file does not mention.
const FIRMWARE_BYTES: u64 = 8 << 20;

/// The format of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// A migration file with every page at its place.
    MappedRam,
    /// A migration stream.
    Migration,
    /// Main RAM by physical address.
    Raw,
    /// An ELF core.
    Elf,
}

/// No such format.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("there is no format '{0}': mapped-ram, migration, raw or elf")]
pub struct UnknownFormat(String);

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Format, UnknownFormat> {
        match name {
            "mapped-ram" => Ok(Format::MappedRam),
            "migration" => Ok(Format::Migration),
            "raw" => Ok(Format::Raw),
            "elf" => Ok(Format::Elf),
            _ => Err(UnknownFormat(name.to_owned())),
        }
    }
}

/// Where it goes.
pub enum Destination<'d> {
    /// A file.
    File {
        /// Its path.
        path: PathBuf,
        /// Whether one that is there may be replaced.
        replace: bool,
    },
    /// A pipe; only a stream can be written to it.
    Pipe(&'d mut (dyn Write + Send)),
}

/// The report on a written file.
#[derive(Debug, Clone, Serialize)]
pub struct ExportReport {
    /// The checkpoint.
    pub checkpoint: String,
    /// The VM's name.
    pub vm: String,
    /// The format of the file.
    pub format: Format,
    /// The file; none when it went to a pipe.
    pub file: Option<PathBuf>,
    /// Its length in bytes; zero pages of sparse files are holes in it.
    pub bytes: u64,
    /// Pages with content that were written.
    pub pages: u64,
    /// Pages of zeros.
    pub zero_pages: u64,
    /// How many vCPUs' registers are in it, as far as it has a place for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<usize>,
    /// How many mappings of the guest's kernel are in it, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mappings: Option<usize>,
    /// The command that loads it, and the folder where it is to be given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load: Option<LoadCommand>,
    /// Notes for the user about the file.
    pub notes: Vec<String>,
}

/// How QEMU loads a file.
#[derive(Debug, Clone, Serialize)]
pub struct LoadCommand {
    /// The folder.
    pub cwd: PathBuf,
    /// The program.
    pub exe: PathBuf,
    /// Its arguments, `argv[0]` included.
    pub arguments: Vec<String>,
}

/// Why nothing was written.
#[derive(Debug, Error)]
pub enum ExportError {
    /// The repository failed.
    #[error(transparent)]
    Repo(#[from] RepoError),
    /// The checkpoint is not as it must be.
    #[error(transparent)]
    Checkpoint(#[from] RestoreError),
    /// The file exists.
    #[error("{file} exists already; name another file, or replace it with --force")]
    Exists {
        /// The file.
        file: PathBuf,
    },
    /// Something is there that is no file.
    #[error("{file} is no file that could be replaced; name another one")]
    NoFile {
        /// The named file.
        file: PathBuf,
    },
    /// It cannot be written.
    #[error("cannot write {file}; nothing of it was left")]
    Write {
        /// The file.
        file: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// No process reads it, or its disk is full.
    #[error("cannot write to standard output; the stream is incomplete")]
    Pipe(#[source] io::Error),
    /// There is no such disk.
    #[error("disk '{disk}' is not in the checkpoint, which has {there}")]
    NoDisk {
        /// The named disk.
        disk: String,
        /// Those that there are.
        there: String,
    },
    /// No socket for `qemu-img`.
    #[error("cannot make a socket at which qemu-img reads the disk")]
    Serve {
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// `qemu-img` failed.
    #[error("cannot write {file} in format {format}: {why}; nothing of it was left")]
    Converted {
        /// The file.
        file: PathBuf,
        /// The format.
        format: String,
        /// What it says.
        why: String,
    },
    /// Only a stream goes to a pipe.
    #[error("only the format migration can be written to standard output; name a file")]
    NoPipe,
    /// It cannot be encoded.
    #[error(transparent)]
    File(#[from] MigrationFileError),
    /// The device state is none.
    #[error("the checkpoint's device state cannot be read")]
    DeviceState(#[from] DeviceStateError),
    /// It is not known where memory lies.
    #[error(transparent)]
    Layout(#[from] PhysicalMemoryError),
}

/// A checkpoint being exported.
struct Job<'a> {
    id: &'a CheckpointId,
    manifest: &'a Manifest,
    record: VmRecord,
    blocks: Vec<FileBlock>,
    device_state: Vec<u8>,
    walk: Walk<'a>,
}

/// The additions of a format to the report.
#[derive(Default)]
struct Written {
    file: Option<PathBuf>,
    bytes: u64,
    pages: u64,
    zero_pages: u64,
    cpus: Option<usize>,
    mappings: Option<usize>,
    notes: Vec<String>,
}

/// Writes a checkpoint in this format.
///
/// # Errors
/// [`ExportError`]; a file of that name is as it was then.
pub fn export(
    repository: &mut Repository,
    Checkpoint { id, manifest }: Checkpoint<'_>,
    format: Format,
    to: Destination<'_>,
    lock_wait: Duration,
    progress: ProgressSink<'_>,
) -> Result<ExportReport, ExportError> {
    let record = restore::vm_record(id, manifest)?;
    // Refused before anything is read.
    let to = match to {
        Destination::File { path, replace } => Ok(Output::create(&path, replace)?),
        Destination::Pipe(pipe) if format == Format::Migration => Err(pipe),
        Destination::Pipe(_) => return Err(ExportError::NoPipe),
    };
    let reader = repository.reader(lock_wait)?;
    let maps = manifest
        .ram
        .iter()
        .map(|table| PageMap::open(&reader, table));
    let mut job = Job {
        id,
        manifest,
        record,
        blocks: manifest.ram.iter().map(file_block).collect(),
        device_state: restore::raw_device_state(id, manifest, &reader)?,
        walk: Walk::new(maps.collect::<Result<_, _>>()?, progress),
    };
    let written = match (format, to) {
        (Format::MappedRam, Ok(output)) => job.mapped(output)?,
        (Format::Raw, Ok(output)) => job.raw(output)?,
        (Format::Elf, Ok(output)) => job.elf(output)?,
        (_, Ok(output)) => {
            let bytes = job.stream(&mut output.buffered(), Some(output.path()))?;
            job.finish(output, bytes)?
        }
        (_, Err(pipe)) => {
            let bytes = job.stream(pipe, None)?;
            job.written(None, bytes)
        }
    };
    Ok(job.report(format, written))
}

fn file_block(table: &BlockTable) -> FileBlock {
    FileBlock {
        name: table.name.clone(),
        used_bytes: table.pages * u64::from(table.page_bytes),
    }
}

impl Job<'_> {
    fn machine(&self) -> &str {
        &self.record.identity.machine
    }

    fn mapped(&mut self, output: Output) -> Result<Written, ExportError> {
        let layout = mapped_layout(self.machine(), &self.blocks, &self.device_state)?;
        output.set_length(layout.file_bytes)?;
        for (at, piece) in &layout.pieces {
            output.put(piece, *at)?;
        }
        for (number, place) in layout.blocks.iter().enumerate() {
            let pages = self.blocks[number].pages();
            let with_zeros = self.blocks[number].used_bytes <= FIRMWARE_BYTES;
            let mut bitmap = vec![0u64; pages.div_ceil(64) as usize];
            let mut mention = |page: u64, is_zero: bool| {
                if !is_zero || with_zeros {
                    bitmap[(page / 64) as usize] |= 1 << (page % 64);
                }
                Ok(())
            };
            let sink = |page: u64, bytes: &[u8]| {
                let put = output.put_io(bytes, place.pages_at + page * PAGE_BYTES);
                put.map_err(|source| MigrationFileError::Write(source).into())
            };
            let walked = self.walk.block(number, &mut mention, &sink);
            walked.map_err(|error| output.blame(error))?;
            let bytes: Vec<u8> = bitmap.iter().flat_map(|word| word.to_le_bytes()).collect();
            output.put(&bytes, place.bitmap_at)?;
        }
        self.finish(output, layout.file_bytes)
    }

    /// Its length in bytes.
    fn stream(
        &mut self,
        mut out: &mut (dyn Write + Send),
        name: Option<&std::path::Path>,
    ) -> Result<u64, ExportError> {
        let blame = |error: ExportError| output::blame(name, error);
        let (machine, state) = (self.record.identity.machine.clone(), &self.device_state);
        let encoder = StreamEncoder::begin(&mut out, &machine, &self.blocks, state);
        let encoder = Mutex::new(encoder.map_err(|error| blame(error.into()))?);
        let lock = || encoder.lock().unwrap_or_else(PoisonError::into_inner);
        for number in 0..self.blocks.len() {
            let mut mention = |page: u64, is_zero: bool| match is_zero {
                true => Ok(lock().zero(GuestPage::new(number, page))?),
                false => Ok(()),
            };
            let sink = |first: u64, bytes: &[u8]| {
                let (pages, _) = bytes.as_chunks::<PAGE>();
                let mut encoder = lock();
                for (page, bytes) in (first..).zip(pages) {
                    encoder.page(GuestPage::new(number, page), bytes)?;
                }
                Ok(())
            };
            self.walk
                .block(number, &mut mention, &sink)
                .map_err(blame)?;
        }
        let encoder = encoder.into_inner().unwrap_or_else(PoisonError::into_inner);
        let done = encoder.finish(&self.device_state);
        let (_, bytes) = done.map_err(|error| blame(error.into()))?;
        Ok(bytes)
    }

    fn finish(&mut self, output: Output, bytes: u64) -> Result<Written, ExportError> {
        let path = output.finish()?;
        Ok(self.written(Some(path), bytes))
    }

    fn written(&self, file: Option<PathBuf>, bytes: u64) -> Written {
        Written {
            file,
            bytes,
            pages: self.walk.pages,
            zero_pages: self.walk.zero_pages,
            ..Written::default()
        }
    }

    fn report(self, format: Format, written: Written) -> ExportReport {
        let load = load_command(&self.record, format, written.file.as_deref());
        let mut notes = written.notes;
        if load.is_some() && !self.record.disks.is_empty() {
            notes.push(
                "the file holds no disks: before QEMU runs the VM they must be what they were at the checkpoint"
                    .to_owned(),
            );
        }
        ExportReport {
            checkpoint: self.id.to_string(),
            vm: self.manifest.vm.clone(),
            format,
            file: written.file,
            bytes: written.bytes,
            pages: written.pages,
            zero_pages: written.zero_pages,
            cpus: written.cpus,
            mappings: written.mappings,
            load,
            notes,
        }
    }
}

/// The recorded command line, with which QEMU loads the file. A stream that went to a pipe is read from
/// one.
fn load_command(
    record: &VmRecord,
    format: Format,
    file: Option<&std::path::Path>,
) -> Option<LoadCommand> {
    const OTHER_SOURCES: [&str; 2] = ["incoming", "loadvm"];
    if !matches!(format, Format::MappedRam | Format::Migration) {
        return None;
    }
    let mut line = record.command_line();
    let is_other = |option: &Argument| OTHER_SOURCES.iter().any(|name| option.is(name));
    line.options.retain(|option| !is_other(option));
    if format == Format::MappedRam {
        line.options
            .push(Argument::new("global", "migration.mapped-ram=on"));
    }
    let source = match file {
        Some(file) => format!("file:{}", file.display()),
        None => "fd:0".to_owned(),
    };
    line.options.push(Argument::new("incoming", source));
    Some(LoadCommand {
        cwd: record.cwd.clone(),
        exe: record.exe.clone(),
        arguments: line.to_argv(),
    })
}
