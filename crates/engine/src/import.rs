//! The verb *import*: a migration file that QEMU wrote becomes a checkpoint.
//!
//! ```text
//!   head of the file ── QEMU, started with the command line, never runs ── do they agree? ── pages ── commit
//! ```
//!
//! A migration file contains RAM and device state, and of the machine little more than its name. A QEMU provides
//! all else that a checkpoint needs. It is started with the given command line as a restore would start it. It is
//! queried for its RAM blocks, disks and version, and ended without having run. The contents of the disks when the
//! file was written are unknown; a restore needs the user's word about them.
//!
//! Nothing in the file is trusted. It is decoded with bounds, RAM blocks may be no larger than those of that QEMU,
//! and nothing is committed before its end was reached.

mod machine;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::Serialize;
use stillframe_page::{GuestPage, PAGE, PAGE_BYTES};
use stillframe_qemu::device_state::{self, DeviceStateError};
use stillframe_qemu::launch::LaunchError;
use stillframe_qemu::migration_file::{
    FileBlock, Form, FoundPage, MigrationFile, MigrationFileError,
};
use stillframe_qemu::monitor::MonitorError;
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{Manifest, PageCounts, RepoError, Repository, Tags, Writer};
use thiserror::Error;

use crate::capture::device_state::BYTES_MAX;
use crate::capture::downtime::us;
use crate::checkpoint::DEVICE_STATE;
use crate::encoding::delta_cache::DeltaCache;
use crate::encoding::page_encoder::PageEncoder;
use crate::guardian::GuardianError;
use crate::memory::BlockShape;
use crate::memory::Page;
use crate::sink::page_stream::{BATCH_PAGES, PageStream};
use crate::sink::repository::RepositoryPages;
use crate::{Progress, ProgressSink};

/// Read at once from the file.
const BUFFER_BYTES: usize = 1 << 20;

/// Options of an import: the file, and the checkpoint to make of it.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// The migration file.
    pub file: PathBuf,
    /// The VM's label; else as its command line says.
    pub vm: Option<String>,
    /// The command line of the QEMU that wrote the file, program first.
    pub command: Vec<String>,
    /// The folder that relative paths in it refer to.
    pub cwd: PathBuf,
    /// A folder of our own, for the monitor and the log of the QEMU that is queried.
    pub scratch: PathBuf,
    /// How long to wait for another process' exclusive lock on the repository.
    pub lock_wait: Duration,
}

/// The report on an import.
#[derive(Debug, Clone, Serialize)]
pub struct ImportReport {
    /// The checkpoint.
    pub checkpoint: String,
    /// The VM's name.
    pub vm: String,
    /// When the file was last written: about when the VM was stopped for it.
    pub time: Timestamp,
    /// The file.
    pub file: PathBuf,
    /// How RAM lay in it: `mapped-ram` or `migration`.
    pub format: &'static str,
    /// The versioned machine type.
    pub machine: String,
    /// The version of the QEMU that will restore it.
    pub qemu_version: String,
    /// Counts of the pages by their encoding.
    pub pages: PageCounts,
    /// Bytes the repository grew by.
    pub bytes_stored: u64,
    /// How long it took, in microseconds.
    pub total_us: u64,
    /// Notes for the user about the checkpoint.
    pub notes: Vec<String>,
}

/// Why nothing was imported. The repository has no new checkpoint.
#[derive(Debug, Error)]
pub enum ImportError {
    /// The repository failed.
    #[error(transparent)]
    Repo(#[from] RepoError),
    /// The file cannot be opened.
    #[error("cannot open {file}")]
    Open {
        /// The file.
        file: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// It is something else.
    #[error("{file} is no file; a migration from a pipe or socket has to be put into a file first")]
    NoFile {
        /// The named file.
        file: PathBuf,
    },
    /// It cannot be read.
    #[error("cannot import {file}")]
    File {
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        source: MigrationFileError,
    },
    /// Its device state is none.
    #[error("the device state in {file} cannot be restored")]
    DeviceState {
        /// The file.
        file: PathBuf,
        /// The error in it.
        #[source]
        source: DeviceStateError,
    },
    /// There is no such program.
    #[error("there is no program {program}: name the QEMU that wrote the file, with its path")]
    NoProgram {
        /// The named program.
        program: String,
    },
    /// The command line starts no VM.
    #[error("QEMU cannot be started with this command line to ask it about the VM")]
    Launch(#[from] LaunchError),
    /// It cannot be queried.
    #[error("the QEMU that was started to be asked does not answer")]
    Monitor(#[from] MonitorError),
    /// No guardian.
    #[error(transparent)]
    Guardian(#[from] GuardianError),
    /// Another architecture.
    #[error("{program} runs {architecture} guests; only x86_64 guests are supported")]
    Architecture {
        /// The program.
        program: PathBuf,
        /// The architecture that it emulates.
        architecture: String,
    },
    /// File and command line speak of different machines.
    #[error(
        "the file is of a machine {file}, the command line makes a {command_line}; give the command line of the QEMU \
         that wrote the file, with its versioned machine type (-machine {file},...)"
    )]
    Machine {
        /// The file's machine type.
        file: String,
        /// The command line's.
        command_line: String,
    },
    /// File and command line speak of different RAM.
    #[error(
        "the file's RAM blocks are not those of the command line: {difference}; give the command line of the QEMU that \
         wrote the file, with the same memory, devices and firmware"
    )]
    Blocks {
        /// The difference.
        difference: String,
    },
    /// The record cannot be encoded.
    #[error("cannot write the VM's record")]
    Encode(#[source] serde_json::Error),
}

/// Makes a checkpoint of a migration file.
///
/// # Errors
/// [`ImportError`]; there is no new checkpoint then.
pub fn import(
    repository: &mut Repository,
    options: &ImportOptions,
    progress: ProgressSink<'_>,
) -> Result<ImportReport, ImportError> {
    let source = Source::open(&options.file)?;
    let record = machine::query(options)?;
    source.store(record, repository, options.lock_wait, progress)
}

/// A migration file whose head was read.
struct Source {
    begin: Instant,
    path: PathBuf,
    /// When it was last written.
    time: Timestamp,
    file: MigrationFile<BufReader<File>>,
}

impl Source {
    fn open(path: &Path) -> Result<Source, ImportError> {
        let begin = Instant::now();
        let (file, time) = open(path)?;
        let file = MigrationFile::open(BufReader::with_capacity(BUFFER_BYTES, file));
        Ok(Source {
            begin,
            path: path.to_owned(),
            time,
            file: file.map_err(|source| ImportError::File {
                file: path.to_owned(),
                source,
            })?,
        })
    }

    /// Stores it as a checkpoint of this VM.
    fn store(
        mut self,
        mut record: VmRecord,
        repository: &mut Repository,
        lock_wait: Duration,
        progress: ProgressSink<'_>,
    ) -> Result<ImportReport, ImportError> {
        let wrong = |source| ImportError::File {
            file: self.path.clone(),
            source,
        };
        let unusable = |source| ImportError::DeviceState {
            file: self.path.clone(),
            source,
        };
        let blocks = self.file.blocks().to_vec();
        let (form, machine) = (self.file.form(), self.file.machine().to_owned());
        machine::expect_same(&record, &machine, &blocks)?;
        let mut transaction = Transaction::new(repository.begin(lock_wait)?, &blocks);
        let mut batch = Batch::new();
        while batch.fill(&mut self.file).map_err(wrong)? {
            transaction.put(&batch)?;
            let (done, total) = self.file.progress();
            progress(Progress::Importing {
                done: done / PAGE_BYTES,
                total: total / PAGE_BYTES,
            });
        }
        let raw = self.file.device_state(BYTES_MAX).map_err(wrong)?;
        // As a restore will do it.
        device_state::wrap(&raw, &machine).map_err(unusable)?;
        record.was_running = machine::ran(&raw).map_err(unusable)?;
        let (id, pages, bytes_stored) = transaction.commit(&record, &raw, self.time)?;
        let writable = record.disks.iter().any(|disk| !disk.read_only);
        let note = "what the disks held when the file was written is not known: restore asks for --disks-as-they-are";
        Ok(ImportReport {
            checkpoint: id,
            vm: record.label,
            time: self.time,
            file: self.path,
            format: match form {
                Form::Stream => "migration",
                Form::Mapped => "mapped-ram",
            },
            machine,
            qemu_version: record.identity.qemu_version,
            pages,
            bytes_stored,
            total_us: us(self.begin),
            notes: writable.then(|| note.to_owned()).into_iter().collect(),
        })
    }
}

/// The file, and when it was last written: never later than now, or it would be the latest checkpoint for
/// ever.
fn open(path: &Path) -> Result<(File, Timestamp), ImportError> {
    let wrong = |source| ImportError::Open {
        file: path.to_owned(),
        source,
    };
    // A pipe would be waited for.
    let metadata = std::fs::metadata(path).map_err(wrong)?;
    if !metadata.is_file() {
        return Err(ImportError::NoFile {
            file: path.to_owned(),
        });
    }
    let now = Timestamp::now();
    let modified = metadata.modified().map_err(wrong)?;
    let time = Timestamp::try_from(modified).map_or(now, |time| time.min(now));
    Ok((File::open(path).map_err(wrong)?, time))
}

/// Pages on their way from the file into the repository.
struct Batch {
    bytes: Vec<[u8; PAGE]>,
    pages: Vec<BatchPage>,
}

/// A page of a batch.
#[derive(Clone, Copy)]
struct BatchPage {
    page: GuestPage,
    /// The index of its bytes.
    slot: usize,
}

impl Batch {
    fn new() -> Batch {
        Batch {
            bytes: vec![[0; PAGE]; BATCH_PAGES],
            pages: Vec::with_capacity(BATCH_PAGES),
        }
    }

    /// Takes the next pages, sorted, each once. Whether there were any.
    fn fill(
        &mut self,
        file: &mut MigrationFile<BufReader<File>>,
    ) -> Result<bool, MigrationFileError> {
        self.pages.clear();
        for (slot, bytes) in self.bytes.iter_mut().enumerate() {
            let Some(FoundPage { page, is_zero }) = file.next_page(bytes)? else {
                break;
            };
            if is_zero {
                bytes.fill(0);
            }
            self.pages.push(BatchPage { page, slot });
        }
        // Of a page that came several times the last counts: it is in the highest slot.
        self.pages
            .sort_unstable_by_key(|found| (found.page, Reverse(found.slot)));
        self.pages.dedup_by_key(|found| found.page);
        Ok(!self.pages.is_empty())
    }
}

/// A checkpoint being written.
struct Transaction<'r> {
    sink: RepositoryPages<'r>,
    stream: PageStream,
    shapes: Vec<BlockShape>,
    encoder: PageEncoder,
    nothing: DeltaCache,
}

impl Transaction<'_> {
    fn new<'r>(writer: Writer<'r>, blocks: &[FileBlock]) -> Transaction<'r> {
        let shape = |block: &FileBlock| BlockShape {
            name: block.name.clone(),
            pages: block.pages(),
        };
        let shapes: Vec<BlockShape> = blocks.iter().map(shape).collect();
        let mut stream = PageStream::new(&shapes);
        stream.pages_may_come_twice(&shapes);
        Transaction {
            sink: RepositoryPages::first(writer, &shapes, true),
            stream,
            shapes,
            encoder: PageEncoder::default(),
            nothing: DeltaCache::default(),
        }
    }

    fn put(&mut self, batch: &Batch) -> Result<(), RepoError> {
        for of_block in (batch.pages).chunk_by(|one, other| one.page.block == other.page.block) {
            let page = |found: &BatchPage| Page {
                number: found.page.page,
                bytes: &batch.bytes[found.slot],
            };
            let pages: Vec<Page<'_>> = of_block.iter().map(page).collect();
            let block = of_block[0].page.block;
            let encoder = &mut self.encoder;
            self.stream
                .put(&mut self.sink, encoder, &self.nothing, block, &pages)?;
        }
        Ok(())
    }

    /// Its id, the counts of its pages, and by how many bytes the repository grew.
    fn commit(
        mut self,
        record: &VmRecord,
        raw: &[u8],
        time: Timestamp,
    ) -> Result<(String, PageCounts, u64), ImportError> {
        let ram = self.sink.finish(&self.shapes)?;
        let stream = self.sink.writer.put_whole_stream(raw)?;
        let counts = PageCounts::from(self.stream.counts);
        let committed = self.sink.writer.commit(Manifest {
            vm: record.label.clone(),
            time,
            parent: None,
            tags: Tags::default(),
            note: None,
            ram,
            disks: Vec::new(),
            images: BTreeSet::new(),
            streams: BTreeMap::from([(DEVICE_STATE.to_owned(), stream)]),
            pages: counts,
            bytes_stored: 0,
            vm_record: serde_json::to_value(record).map_err(ImportError::Encode)?,
            // The pause was not measured.
            downtime_us: serde_json::json!({}),
        })?;
        Ok((committed.id.to_string(), counts, committed.bytes_stored))
    }
}
