//! The in-memory index: the pack and frame of each blob.
//!
//! It holds about 24 bytes a blob ([`crate::index::blob_table`], [`crate::index::locations`]), 100 a pack, and
//! nothing else that grows. It remembers the index files that it was made from, so a refresh reads only new files. Writers do without it
//! ([`crate::index::writer_index`]).

use std::collections::{HashMap, HashSet};

use hashbrown::HashTable;
use stillframe_page::hash::ContentId;

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::index::blob_table::BlobTable;
use crate::index::file::{IndexFile, read_index_file};
use crate::index::locations::{BlobLocations, Location, PackInfo};
use crate::index::mark_bitmaps::{Mark, Marks};
use crate::index::missing_packs::MissingPackDetector;
use crate::pack::IndexedPack;
use crate::pack::place::FrameInfo;
use crate::pack::place::Place;
use crate::pack::{Directory, PREAMBLE_BYTES};
use crate::store::local::{Area, LocalStore};

/// Blobs have 32-bit numbers; each copy of a blob has a number of its own.
pub(crate) const BLOBS_MAX: u64 = u32::MAX as u64;

/// An existing index file.
#[derive(Debug)]
pub(crate) struct SeenFile {
    /// The packs that it describes.
    pub(crate) packs: Box<[u32]>,
    pub(crate) bytes: u64,
}

/// The index.
#[derive(Default)]
pub(crate) struct Index {
    blobs: BlobTable,
    locations: BlobLocations,
    marks: Marks,
    packs: Vec<PackInfo>,
    pack_numbers: HashTable<u32>,
    seen: HashMap<FileHash, SeenFile>,
    /// Superseded index files that still exist.
    superseded: HashSet<FileHash>,
    missing_packs: MissingPackDetector,
}

impl Index {
    pub(crate) fn get(&self, id: &ContentId) -> Option<Location> {
        self.blobs.find(id).map(|blob| self.locations.locate(blob))
    }

    /// As [`Index::get`], in the form that the index reader returns.
    pub(crate) fn place(&self, id: &ContentId) -> Option<Place> {
        let at = self.get(id)?;
        let (pack, info) = self.frame(at);
        Some(Place {
            pack: self.pack_of(at),
            frame: pack.frame_number(at),
            info,
            offset: at.offset,
            bytes: at.bytes,
            part: 0,
        })
    }

    /// Whether there is a blob of this id in a pack that is not missing.
    #[cfg(test)]
    pub(crate) fn contains(&self, id: &ContentId) -> bool {
        let pack = self.get(id).map(|at| self.pack_of(at));
        pack.is_some_and(|pack| !self.packs[pack as usize].missing)
    }

    /// Number of different blobs.
    pub(crate) fn blobs(&self) -> u64 {
        self.blobs.different() as u64
    }

    /// The locations of the different blobs, ascending.
    pub(crate) fn locations(&self) -> impl Iterator<Item = Location> {
        self.blobs.found().map(|blob| self.locations.locate(blob))
    }

    /// Marks a blob. Returns its location, and whether the mark is new.
    pub(crate) fn mark(&mut self, id: &ContentId, mark: Mark) -> Option<(Location, bool)> {
        let location = self.get(id)?;
        let new = self.marks.set(location.blob, mark);
        Some((location, new))
    }

    /// Whether the blob at a location has a mark.
    pub(crate) fn has(&self, at: Location, mark: Mark) -> bool {
        self.marks.has(at.blob, mark)
    }

    pub(crate) fn clear_marks(&mut self) {
        self.marks = Marks::default();
    }

    pub(crate) fn packs(&self) -> &[PackInfo] {
        &self.packs
    }

    /// The number of the pack of a location.
    pub(crate) fn pack_of(&self, at: Location) -> u32 {
        self.locations.pack(at.frame)
    }

    /// The pack and frame of a location made by this index.
    pub(crate) fn frame(&self, at: Location) -> (&PackInfo, FrameInfo) {
        let pack = &self.packs[self.pack_of(at) as usize];
        (pack, self.locations.frame(at.frame))
    }

    /// Number of frames.
    pub(crate) fn frames(&self) -> u64 {
        self.locations.frames().into()
    }

    /// The frames of a pack.
    pub(crate) fn frames_of(&self, pack: u32) -> impl Iterator<Item = FrameInfo> {
        let first = |pack: u32| self.packs.get(pack as usize).map(|pack| pack.first_frame);
        let end = first(pack + 1).unwrap_or(self.locations.frames());
        let frames = first(pack).unwrap_or(end)..end;
        frames.map(|frame| self.locations.frame(frame))
    }

    pub(crate) fn pack_number(&self, name: &FileHash) -> Option<u32> {
        let is_it = |&number: &u32| self.packs[number as usize].name == *name;
        self.pack_numbers.find(name.short(), is_it).copied()
    }

    /// The existing index files, superseded ones included.
    pub(crate) fn files(&self) -> &HashMap<FileHash, SeenFile> {
        &self.seen
    }

    /// The live index files: those that no other one supersedes.
    pub(crate) fn live_files(&self) -> impl Iterator<Item = (&FileHash, &SeenFile)> {
        self.seen
            .iter()
            .filter(|(name, _)| !self.superseded.contains(*name))
    }

    /// The superseded index files that still exist.
    pub(crate) fn superseded_files(&self) -> impl Iterator<Item = FileHash> {
        self.superseded
            .iter()
            .filter(|name| self.seen.contains_key(*name))
            .copied()
    }

    /// Brings the index up to date with the existing files.
    pub(crate) fn refresh(&mut self, store: &LocalStore, keys: &Keys) -> Result<(), RepoError> {
        self.refresh_despite(store, keys, &mut |_, error| Err(error))
    }

    /// As [`Index::refresh`]. For a file that cannot be read, `on_damage` decides whether to continue without it.
    /// A file that vanishes between listing and reading was merged into a new one by another writer, so the
    /// folder is listed again.
    pub(crate) fn refresh_despite(
        &mut self,
        store: &LocalStore,
        keys: &Keys,
        on_damage: &mut dyn FnMut(FileHash, RepoError) -> Result<(), RepoError>,
    ) -> Result<(), RepoError> {
        const TRIES: usize = 16;
        for _ in 0..TRIES {
            if self.try_refresh(store, keys, on_damage)? {
                return Ok(());
            }
        }
        Err(RepoError::Damaged {
            file: Area::Index.folder().into(),
            what: "its files vanish faster than they can be read".into(),
        })
    }

    fn try_refresh(
        &mut self,
        store: &LocalStore,
        keys: &Keys,
        on_damage: &mut dyn FnMut(FileHash, RepoError) -> Result<(), RepoError>,
    ) -> Result<bool, RepoError> {
        let names = store.names(Area::Index)?;
        let present: HashSet<FileHash> = names
            .iter()
            .filter_map(|name| FileHash::from_name(name))
            .collect();
        let mut fresh: Vec<FileHash> = present
            .iter()
            .filter(|name| !self.seen.contains_key(name))
            .copied()
            .collect();
        let vanished = self.seen.len() + fresh.len() > present.len();
        if fresh.is_empty() && !vanished {
            return self.inspect_packs(store);
        }
        // A fixed order, so that every process finds the same one of two copies of a blob first.
        fresh.sort_unstable();
        for name in fresh {
            match read_index_file(store, keys, name) {
                Ok((file, bytes)) => self.add_file(name, &file, bytes)?,
                Err(error) if error.is_absent() => return Ok(false),
                Err(error) => {
                    on_damage(name, error)?;
                    self.add_file(name, &IndexFile::default(), 0)?;
                }
            }
        }
        self.seen.retain(|name, _| present.contains(name));
        self.superseded.retain(|name| present.contains(name));
        if self.has_dead_packs() {
            // A prune ran, or was killed. Other packs may have copies of the blobs of dead packs, so start over;
            // the superseded files are known this time.
            self.start_over();
            return Ok(false);
        }
        self.inspect_packs(store)
    }

    /// Whether the set of missing packs is unchanged. If not, the index starts over, since blobs of a missing
    /// pack may have been stored again in another.
    fn inspect_packs(&mut self, store: &LocalStore) -> Result<bool, RepoError> {
        let changed = self.missing_packs.inspect(store, &self.packs);
        // Also after an error, because the inspection is incomplete.
        if !matches!(changed, Ok(false)) {
            self.start_over();
        }
        changed.map(|changed| !changed)
    }

    /// Clears all but the superseded files and the missing packs.
    fn start_over(&mut self) {
        let mut missing_packs = std::mem::take(&mut self.missing_packs);
        missing_packs.start_over();
        *self = Index {
            superseded: std::mem::take(&mut self.superseded),
            missing_packs,
            ..Index::default()
        };
    }

    /// Whether the index has packs that no live index file describes.
    fn has_dead_packs(&self) -> bool {
        let mut live = vec![false; self.packs.len()];
        for (_, file) in self.live_files() {
            for &pack in &file.packs[..] {
                live[pack as usize] = true;
            }
        }
        live.contains(&false)
    }

    /// Adds the contents of an index file. A superseded file is recorded without packs, so that it is not read
    /// again: the packs that it describes may be gone.
    pub(crate) fn add_file(
        &mut self,
        name: FileHash,
        file: &IndexFile,
        bytes: u64,
    ) -> Result<(), RepoError> {
        let entries = match self.superseded.contains(&name) {
            true => &[],
            false => &file.packs[..],
        };
        self.ensure_room(entries)?;
        let packs = entries
            .iter()
            .map(|entry| self.add_pack(entry.pack, &entry.directory))
            .collect();
        self.superseded.extend(&file.supersedes);
        self.seen.insert(name, SeenFile { packs, bytes });
        Ok(())
    }

    /// An error if the blobs of these packs exceed the 32-bit numbers.
    fn ensure_room(&self, packs: &[IndexedPack]) -> Result<(), RepoError> {
        let unknown = packs
            .iter()
            .filter(|entry| self.pack_number(&entry.pack).is_none());
        let blobs: usize = unknown.map(|entry| entry.directory.blobs()).sum();
        match (self.blobs.len() + blobs) as u64 > BLOBS_MAX {
            true => Err(RepoError::TooManyBlobs { max: BLOBS_MAX }),
            false => Ok(()),
        }
    }

    /// Treats a pack as missing.
    #[cfg(test)]
    pub(crate) fn lose(&mut self, name: FileHash) {
        self.missing_packs.lose(name);
    }

    /// Adds a pack, unless it is known already. Returns its number. [`Index::ensure_room`] must have succeeded.
    fn add_pack(&mut self, name: FileHash, directory: &Directory) -> u32 {
        if let Some(number) = self.pack_number(&name) {
            return number;
        }
        // There are at most as many packs and frames as blobs.
        let number = self.packs.len() as u32;
        let first_frame = self.locations.frames();
        let missing = self.missing_packs.missing().contains(&name);
        let own = directory.image.is_none();
        // A pack is at most 1 GiB long (checked when the directory was read).
        let mut offset = PREAMBLE_BYTES as u32;
        for frame in &directory.frames {
            self.locations.add(number, offset, frame);
            offset += frame.stored_bytes;
            for (id, _) in &frame.blobs {
                let (locations, packs) = (&self.locations, &self.packs);
                self.blobs.add(id, |known| {
                    // A pack may contain a blob twice; it is not in the list yet.
                    let pack = packs.get(locations.pack(locations.frame_of(known)) as usize);
                    // A checkpoint that stored a block itself must not come to need an image for it.
                    let is_worse = |pack: &PackInfo| pack.missing || (own && pack.image.is_some());
                    !missing && pack.is_some_and(is_worse)
                });
            }
        }
        self.packs.push(PackInfo {
            name,
            file_bytes: directory.file_bytes(),
            first_frame,
            image: directory.image,
            missing,
        });
        let packs = &self.packs;
        let hash_of = |&number: &u32| packs[number as usize].name.short();
        self.pack_numbers
            .insert_unique(name.short(), number, hash_of);
        number
    }
}
