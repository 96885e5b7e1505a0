//! Working sets: the pages that restored VMs accessed first, in that order. A lazy restore records them,
//! and the next one of the same checkpoint populates them first.
//!
//! A working set is a hint next to its checkpoint; nothing depends on it. Its file is named like the manifest. A
//! restore that finds more pages replaces the file as a whole; it is removed with the checkpoint.
//!
//! ```text
//! body   | varint pages | for each: varint number of its RAM block in the manifest, varint number there |
//! ```

use stillframe_page::{GuestPage, varint};

use crate::crypto::sealed_file::{open_file, seal_file};
use crate::error::RepoError;
use crate::format::layout::{Cursor, FileKind, FormatError};
use crate::format::manifest::CheckpointId;
use crate::repository::{Reader, Repository};
use crate::store::local::Area;

/// Maximum number of pages of a working set. Pages of the same frame need not be in it: fault-around reads them.
pub const PAGES_MAX: usize = 1 << 16;

/// Maximum length in bytes of a file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Pages in access order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// The pages; blocks are numbered as in the manifest.
    pub pages: Vec<GuestPage>,
}

impl WorkingSet {
    /// Encodes the plain body; pages beyond [`PAGES_MAX`] are left out.
    pub fn encode(&self) -> Vec<u8> {
        let pages = &self.pages[..self.pages.len().min(PAGES_MAX)];
        let mut out = Vec::new();
        varint::put(&mut out, pages.len() as u32);
        for &GuestPage { block, page } in pages {
            // A VM has few blocks, each of less than 2^30 pages.
            varint::put(&mut out, block as u32);
            varint::put(&mut out, page as u32);
        }
        out
    }

    /// Decodes the plain body.
    pub fn decode(body: &[u8]) -> Result<WorkingSet, FormatError> {
        let mut cursor = Cursor::new(body);
        let count = cursor.varint()? as usize;
        if count > PAGES_MAX {
            return Err(FormatError::invalid("it has more pages than allowed"));
        }
        let mut pages = Vec::new();
        for _ in 0..count {
            let (block, page) = (cursor.varint()? as usize, cursor.varint()?.into());
            pages.push(GuestPage { block, page });
        }
        cursor.finish()?;
        Ok(WorkingSet { pages })
    }
}

impl Repository {
    /// The working set of a checkpoint, if one was recorded.
    pub fn working_set(&self, id: &CheckpointId) -> Result<Option<WorkingSet>, RepoError> {
        let name = id.to_hex();
        let mut bytes = match self.store.read(Area::WorkingSets, &name, FILE_BYTES_MAX) {
            Err(error) if error.is_absent() => return Ok(None),
            other => other?,
        };
        open_file(FileKind::WorkingSet, &self.keys, &mut bytes)
            .and_then(WorkingSet::decode)
            .map(Some)
            .map_err(|error| RepoError::format(self.store.label(Area::WorkingSets, &name), &error))
    }

    /// Removes the working sets of checkpoints that are gone. Requires the exclusive lock.
    pub(crate) fn remove_orphaned_working_sets(&self) -> Result<(), RepoError> {
        for name in self.store.names(Area::WorkingSets)? {
            let manifest = self.store.length(Area::Manifests, &name)?;
            if manifest.is_none() {
                self.store.remove(Area::WorkingSets, &name)?;
            }
        }
        Ok(())
    }
}

impl Reader<'_> {
    /// Records the working set of a checkpoint, in place of an earlier one. Returns whether it was recorded: not
    /// if it is empty, or the checkpoint is gone. Of two concurrent calls the last one counts.
    pub fn record_working_set(
        &self,
        id: &CheckpointId,
        set: &WorkingSet,
    ) -> Result<bool, RepoError> {
        let repository = self.repository();
        let name = id.to_hex();
        if set.pages.is_empty() || !repository.has_manifest(id)? {
            return Ok(false);
        }
        let file = seal_file(FileKind::WorkingSet, &repository.keys, set.encode())?;
        repository.store.create(Area::WorkingSets, &name, &file)?;
        Ok(true)
    }
}
