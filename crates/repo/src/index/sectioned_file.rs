//! An index file of which only the head is in memory: sections and parts are read when a lookup needs them.

use std::fs::File;
use std::sync::{Arc, Mutex};

use stillframe_page::hash::ContentId;

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::layout::FormatError;
use crate::index::file::{FRONT_BYTES, INDEX_BYTES_MAX, OpenIndex, head_bytes};
use crate::index::layout::{Entry, order, section_of};
use crate::store::local::{Area, LocalStore};
use crate::store::read_exact_at;
use crate::sync::lock;

/// Bytes of the first read of an index file, which nearly always contains all of its head.
const FIRST_READ_BYTES: u64 = 16 << 10;

/// An index file.
pub(crate) struct SectionedFile {
    label: String,
    pub(crate) name: FileHash,
    pub(crate) index: OpenIndex,
    pub(crate) bytes: u64,
    kept: Mutex<Option<Arc<File>>>,
    keep: bool,
    /// The numbers of its first pack, part and section in the on-demand index; the others follow.
    pub(crate) first_pack: u32,
    pub(crate) first_part: u32,
    pub(crate) first_section: u32,
}

impl SectionedFile {
    /// Reads the head of an index file.
    pub(crate) fn open(
        store: &LocalStore,
        keys: &Keys,
        name: FileHash,
    ) -> Result<SectionedFile, RepoError> {
        let text = name.to_string();
        let label = store.label(Area::Index, &text);
        let wrong = |error: FormatError| RepoError::format(&label, &error);
        let file = store.open(Area::Index, &text)?;
        let data = file.metadata();
        let data = data.map_err(|error| RepoError::io("examine", label.as_ref(), error))?;
        let bytes = data.len().min(INDEX_BYTES_MAX);
        let mut front = vec![0; bytes.min(FIRST_READ_BYTES) as usize];
        read_exact_at(&file, &mut front, 0, &label)?;
        let head = head_bytes(&front).map_err(wrong)?;
        let end = FRONT_BYTES + head;
        if end as u64 > bytes {
            return Err(wrong(FormatError::Truncated {
                needed: end as u64,
                left: bytes,
            }));
        }
        let read = front.len().min(end);
        front.resize(end, 0);
        read_exact_at(&file, &mut front[read..], read as u64, &label)?;
        let index = OpenIndex::new(keys, &mut front, data.len()).map_err(wrong)?;
        Ok(SectionedFile {
            label,
            name,
            index,
            bytes,
            kept: Mutex::new(Some(Arc::new(file))),
            keep: true,
            first_pack: 0,
            first_part: 0,
            first_section: 0,
        })
    }

    /// Whether the file stays open between reads.
    pub(crate) fn keep_open(&mut self, keep: bool) {
        self.keep = keep;
        if !keep {
            *lock(&self.kept) = None;
        }
    }

    /// Number of blobs that its sections list.
    pub(crate) fn blobs(&self) -> usize {
        self.index.blobs()
    }

    /// A section of the file, read and authenticated.
    pub(crate) fn read_section(
        &self,
        store: &LocalStore,
        number: u32,
    ) -> Result<Vec<Entry>, RepoError> {
        let mut sealed = self.read(store, self.index.section(number))?;
        let section = self.index.open_section(number, &mut sealed);
        section.map_err(|error| self.wrong(&error))
    }

    /// The section of an id; `None` where the file describes no blobs.
    pub(crate) fn section_number(&self, id: &ContentId) -> Option<u32> {
        let sections = self.index.head.sections.len();
        (sections > 0).then(|| section_of(order(id), sections) as u32)
    }

    pub(crate) fn read(
        &self,
        store: &LocalStore,
        range: std::ops::Range<u32>,
    ) -> Result<Vec<u8>, RepoError> {
        let mut bytes = vec![0; range.len()];
        let kept = lock(&self.kept).clone();
        // If that fails, the open file may be on a file system that is gone.
        if let Some(file) = kept
            && read_exact_at(&file, &mut bytes, range.start.into(), &self.label).is_ok()
        {
            return Ok(bytes);
        }
        let file = Arc::new(store.open(Area::Index, &self.name.to_string())?);
        read_exact_at(&file, &mut bytes, range.start.into(), &self.label)?;
        if self.keep {
            *lock(&self.kept) = Some(file);
        }
        Ok(bytes)
    }

    pub(crate) fn wrong(&self, error: &FormatError) -> RepoError {
        RepoError::format(&self.label, error)
    }
}
