//! The mark phase: it marks in the index everything that the manifests refer to.
//!
//! A root or segment is read once, however many checkpoints share it. Of a checkpoint whose parent exists, too,
//! only the newest layer is read. So the cost grows with the size of the repository, not with the sum of its
//! checkpoints.

use std::collections::HashSet;

use stillframe_page::PAGE;
use stillframe_page::hash::ContentId;

use crate::error::RepoError;
use crate::format::manifest::{BlockTable, CheckpointId, Manifest};
use crate::index::mark_bitmaps::Mark;
use crate::maintenance::problem::Problem;
use crate::page_table::overlay::Overlay;
use crate::page_table::table::{
    PageRef, SEGMENT_PAGES, bad_blob, decode_root, decode_segment, segment_pages,
};
use crate::progress::{Phase, Progress};
use crate::repository::Repository;
use crate::store::local::Area;

/// Number of segments read at once.
const BATCH: usize = 256;

/// Called for each reference that cannot be followed: records it, or returns the error that ends the walk.
pub(crate) type OnProblem<'a> = &'a mut dyn FnMut(Problem) -> Result<(), RepoError>;

/// Marks every blob in use. The index must be up to date and without marks. Returns the number of checkpoints.
pub(crate) fn mark_used(
    repository: &mut Repository,
    on_problem: OnProblem<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<u64, RepoError> {
    let ids = repository.checkpoint_ids()?;
    let chains = chains(repository, &ids)?;
    for (done, id) in (0..).zip(&ids) {
        progress(Progress {
            phase: Phase::Checkpoints,
            done,
            total: ids.len() as u64,
        });
        match repository.read_manifest(id) {
            Ok(Some(manifest)) => Walk {
                repository,
                on_problem,
                chains: &chains,
                file: label(id),
            }
            .manifest(&manifest)?,
            // Forgotten since it was listed.
            Ok(None) => {}
            Err(error) => on_problem(Problem::from_error(label(id), &error))?,
        }
    }
    Ok(ids.len() as u64)
}

/// The chain of each table that has layers, of all checkpoints.
fn chains(repository: &Repository, ids: &[CheckpointId]) -> Result<HashSet<Chain>, RepoError> {
    let mut chains = HashSet::new();
    for id in ids {
        // The walk itself reports manifests that cannot be read.
        if let Ok(Some(manifest)) = repository.read_manifest(id) {
            let tables = manifest.tables().map(|(_, table)| table);
            let layered = tables.filter(|table| !table.layers.is_empty());
            chains.extend(layered.map(|table| chain(table, table.layers.len())));
        }
    }
    Ok(chains)
}

/// A table and the first `layers` layers over it, by their hash.
type Chain = [u8; 32];

fn chain(table: &BlockTable, layers: usize) -> Chain {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&table.root.0);
    for layer in &table.layers[..layers] {
        hasher.update(&layer.id.0);
    }
    *hasher.finalize().as_bytes()
}

fn label(id: &CheckpointId) -> String {
    format!("{}/{id}", Area::Manifests.folder())
}

/// A table and the words for the block or disk that it describes.
struct Named<'t> {
    words: String,
    table: &'t BlockTable,
}

struct Walk<'a, 'b> {
    repository: &'a mut Repository,
    on_problem: &'a mut (dyn FnMut(Problem) -> Result<(), RepoError> + 'b),
    chains: &'a HashSet<Chain>,
    /// The manifest of this walk, for which problems are reported.
    file: String,
}

impl Walk<'_, '_> {
    fn manifest(&mut self, manifest: &Manifest) -> Result<(), RepoError> {
        for (subject, table) in manifest.tables() {
            let named = Named {
                words: subject.named(table),
                table,
            };
            self.table(&named)?;
            self.layers(&named)?;
        }
        for (name, stream) in &manifest.streams {
            let mut bytes = 0;
            for piece in &stream.pieces {
                bytes += self
                    .used(piece, &format!("a piece of stream '{name}'"))?
                    .map_or(0, u64::from);
            }
            if bytes != stream.bytes {
                self.problem(format!(
                    "stream '{name}' has {bytes} bytes instead of {}",
                    stream.bytes
                ))?;
            }
        }
        Ok(())
    }

    fn table(&mut self, of: &Named<'_>) -> Result<(), RepoError> {
        let table = of.table;
        let Some(root) = self.node(&table.root, of)? else {
            return Ok(());
        };
        let segments = match decode_root(&root, table.pages) {
            Ok(segments) => segments,
            Err(error) => return self.unreadable(&bad_blob(&table.root, &error)),
        };
        let mut batch = Vec::with_capacity(BATCH);
        for (number, segment) in (0..).zip(segments) {
            let PageRef::Stored(id) = segment else {
                continue;
            };
            if self.visit(&id, of)? {
                batch.push((number, id));
            }
            if batch.len() == BATCH {
                self.segments(std::mem::take(&mut batch), of)?;
            }
        }
        self.segments(batch, of)
    }

    /// Marks the layers of a table. Content of an older layer that a newer one replaces need not exist any more.
    /// If another checkpoint has all layers but the last, their content is marked for it already.
    fn layers(&mut self, of: &Named<'_>) -> Result<(), RepoError> {
        let Named { words, table } = of;
        let Some((last, below)) = table.layers.split_last() else {
            return Ok(());
        };
        if table.page_bytes as usize != PAGE {
            let bytes = table.page_bytes;
            return self.problem(format!("{words} has layers over pages of {bytes} bytes"));
        }
        let what = format!("a layer of {words}");
        for layer in below {
            self.used(&layer.id, &what)?;
        }
        if self.used(&last.id, &what)?.is_none() {
            return Ok(());
        }
        let newest = match self.chains.contains(&chain(table, below.len())) {
            true => std::slice::from_ref(last),
            false => &table.layers,
        };
        match Overlay::read(self.repository.blobs(), newest, table.pages) {
            Ok(overlay) => self.overlay(&overlay, of),
            Err(error) => self.unreadable(&error),
        }
    }

    fn overlay(&mut self, overlay: &Overlay, of: &Named<'_>) -> Result<(), RepoError> {
        for &(page, content) in &overlay.whole {
            self.page(page.into(), content, of)?;
        }
        let what = format!("the changes of pages of {}", of.words);
        for part in overlay.deltas.parts() {
            self.used(part, &what)?;
        }
        Ok(())
    }

    fn segments(&mut self, batch: Vec<(u64, ContentId)>, of: &Named<'_>) -> Result<(), RepoError> {
        let ids: Vec<ContentId> = batch.iter().map(|(_, id)| *id).collect();
        let read = match self.repository.blobs().read_many(&ids) {
            Ok(read) => read.into_iter().map(Ok).collect(),
            // One bad segment fails the batch, so read them one by one.
            Err(_) => ids
                .iter()
                .map(|id| self.repository.blobs().read(id))
                .collect::<Vec<_>>(),
        };
        for ((number, id), bytes) in batch.into_iter().zip(read) {
            let count = segment_pages(of.table.pages, number);
            let entries = bytes.and_then(|bytes| {
                decode_segment(&bytes, count).map_err(|error| bad_blob(&id, &error))
            });
            match entries {
                Ok(entries) => self.pages(&entries, number * SEGMENT_PAGES, of)?,
                Err(error) => self.unreadable(&error)?,
            }
        }
        Ok(())
    }

    fn pages(&mut self, entries: &[PageRef], first: u64, of: &Named<'_>) -> Result<(), RepoError> {
        for (page, &content) in (first..).zip(entries) {
            self.page(page, content, of)?;
        }
        Ok(())
    }

    fn page(&mut self, page: u64, content: PageRef, of: &Named<'_>) -> Result<(), RepoError> {
        let Named { words, table } = of;
        let PageRef::Stored(id) = content else {
            return Ok(());
        };
        match self.repository.index.mark(&id, Mark::Used) {
            Some((at, _)) if at.bytes == table.page_bytes => Ok(()),
            Some((at, _)) => self.problem(format!(
                "page {page} of {words} has {} bytes instead of {}",
                at.bytes, table.page_bytes
            )),
            None => self.problem(format!(
                "page {page} of {words} (blob {id}) is not in the repository"
            )),
        }
    }

    /// The bytes of a root, unless it has been walked before.
    fn node(&mut self, id: &ContentId, of: &Named<'_>) -> Result<Option<Vec<u8>>, RepoError> {
        if !self.visit(id, of)? {
            return Ok(None);
        }
        match self.repository.blobs().read(id) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) => self.unreadable(&error).map(|()| None),
        }
    }

    /// Marks a root or segment. Returns whether it exists and has not been walked yet.
    fn visit(&mut self, id: &ContentId, of: &Named<'_>) -> Result<bool, RepoError> {
        let what = format!("part of the page table of {}", of.words);
        if self.used(id, &what)?.is_none() {
            return Ok(false);
        }
        let marked = self.repository.index.mark(id, Mark::Walked);
        Ok(marked.is_some_and(|(_, new)| new))
    }

    /// Marks a blob as used. Returns its length in bytes.
    fn used(&mut self, id: &ContentId, what: &str) -> Result<Option<u32>, RepoError> {
        match self.repository.index.mark(id, Mark::Used) {
            Some((at, _)) => Ok(Some(at.bytes)),
            None => {
                self.problem(format!("{what} (blob {id}) is not in the repository"))?;
                Ok(None)
            }
        }
    }

    fn unreadable(&mut self, error: &RepoError) -> Result<(), RepoError> {
        (self.on_problem)(Problem::from_error(self.file.clone(), error))
    }

    fn problem(&mut self, what: String) -> Result<(), RepoError> {
        (self.on_problem)(Problem {
            file: self.file.clone(),
            what,
        })
    }
}
