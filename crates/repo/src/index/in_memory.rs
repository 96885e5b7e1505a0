//! The in-memory index: which pack and frame each blob lies in.
//!
//! It holds about 24 bytes a blob ([`crate::index::blob_table`], [`crate::index::locations`]), 100 a pack, and nothing
//! else that grows. It remembers which index files it was made from, so bringing it up to date lists
//! one folder and reads only files it has not seen; the number of those files is kept small by
//! [`crate::index::compact`].

use std::collections::{BTreeSet, HashMap, HashSet};

use hashbrown::HashTable;
use stillframe_page::hash::ContentId;

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::index::blob_table::BlobTable;
use crate::index::file::{IndexFile, read_index_file};
use crate::index::locations::{Location, PackInfo, Places};
use crate::index::mark_bitmaps::{Mark, Marks};
use crate::index::missing_packs::Presence;
use crate::pack::IndexedPack;
use crate::pack::place::FrameInfo;
use crate::pack::place::Place;
use crate::pack::{Directory, PREAMBLE_BYTES};
use crate::store::local::{Area, LocalStore};

/// Blobs are numbered with 32 bits, copies of one in other packs too.
const BLOBS_MAX: u64 = u32::MAX as u64;

/// An index file that is there.
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
    places: Places,
    marks: Marks,
    packs: Vec<PackInfo>,
    pack_numbers: HashTable<u32>,
    any_missing: bool,
    seen: HashMap<FileHash, SeenFile>,
    /// Superseded index files, as far as they are still there.
    superseded: HashSet<FileHash>,
    presence: Presence,
}

impl Index {
    pub(crate) fn get(&self, id: &ContentId) -> Option<Location> {
        self.blobs.find(id).map(|blob| self.places.locate(blob))
    }

    /// As [`Index::get`], in the terms of the index reader.
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

    /// Whether there is a blob of this id, in a pack that is there.
    pub(crate) fn contains(&self, id: &ContentId) -> bool {
        self.blobs.find(id).is_some_and(|blob| {
            let pack = || self.places.pack(self.places.frame_of(blob));
            !self.any_missing || !self.packs[pack() as usize].missing
        })
    }

    /// The packs that the index names and that are not there, or not whole.
    pub(crate) fn missing_packs(&self) -> &BTreeSet<FileHash> {
        self.presence.missing()
    }

    /// How many different blobs there are.
    pub(crate) fn blobs(&self) -> u64 {
        self.blobs.different() as u64
    }

    /// Where the different blobs lie, in that order.
    pub(crate) fn locations(&self) -> impl Iterator<Item = Location> {
        self.blobs.found().map(|blob| self.places.locate(blob))
    }

    /// Marks a blob; its location, and whether it did not have the mark before.
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
        self.places.pack(at.frame)
    }

    /// The pack and frame of a location made by this index.
    pub(crate) fn frame(&self, at: Location) -> (&PackInfo, FrameInfo) {
        let pack = &self.packs[self.pack_of(at) as usize];
        (pack, self.places.frame(at.frame))
    }

    /// How many frames there are.
    pub(crate) fn frames(&self) -> u64 {
        self.places.frames().into()
    }

    /// The frames of a pack.
    pub(crate) fn frames_of(&self, pack: u32) -> impl Iterator<Item = FrameInfo> {
        let first = |pack: u32| self.packs.get(pack as usize).map(|pack| pack.first_frame);
        let end = first(pack + 1).unwrap_or(self.places.frames());
        let frames = first(pack).unwrap_or(end)..end;
        frames.map(|frame| self.places.frame(frame))
    }

    pub(crate) fn pack_number(&self, name: &FileHash) -> Option<u32> {
        let is_it = |&number: &u32| self.packs[number as usize].name == *name;
        self.pack_numbers.find(name_hash(name), is_it).copied()
    }

    /// The index files there are, superseded ones too.
    pub(crate) fn files(&self) -> &HashMap<FileHash, SeenFile> {
        &self.seen
    }

    /// The index files that count: those that no other one supersedes.
    pub(crate) fn live_files(&self) -> impl Iterator<Item = (&FileHash, &SeenFile)> {
        self.seen
            .iter()
            .filter(|(name, _)| !self.superseded.contains(*name))
    }

    /// The index files that do not count any more but are still there.
    pub(crate) fn superseded_files(&self) -> impl Iterator<Item = FileHash> {
        self.superseded
            .iter()
            .filter(|name| self.seen.contains_key(*name))
            .copied()
    }

    /// Notes that an index file was removed.
    pub(crate) fn forget_file(&mut self, name: &FileHash) {
        self.seen.remove(name);
        self.superseded.remove(name);
    }

    /// Brings the index up to date with the files there are.
    pub(crate) fn refresh(&mut self, store: &LocalStore, keys: &Keys) -> Result<(), RepoError> {
        self.refresh_despite(store, keys, &mut |_, error| Err(error))
    }

    /// As [`Index::refresh`], asking `on_damage` whether to go on without a file that cannot be
    /// read. A file that vanishes between listing and reading was merged into a new one by
    /// another writer, so the folder is listed again.
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
            return self.look_at_packs(store);
        }
        // A fixed order, so that of two copies of a blob every process finds the same one first.
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
            // Someone pruned, or was killed pruning. Blobs of dead packs may live on in others,
            // so start over, knowing this time which files do not count.
            self.start_over();
            return Ok(false);
        }
        self.look_at_packs(store)
    }

    /// Whether the index knows which packs are missing; if not, it starts over, since blobs of a
    /// missing pack may have been stored again in another.
    fn look_at_packs(&mut self, store: &LocalStore) -> Result<bool, RepoError> {
        let looked = self.presence.look(store, &self.packs);
        // Nor is what was seen before an error to be taken for all there is.
        if !matches!(looked, Ok(false)) {
            self.start_over();
        }
        looked.map(|different| !different)
    }

    /// Forgets all but which files do not count and which packs are missing.
    fn start_over(&mut self) {
        let mut presence = std::mem::take(&mut self.presence);
        presence.start_over();
        *self = Index {
            superseded: std::mem::take(&mut self.superseded),
            presence,
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

    /// Adds the contents of an index file. Superseded files are remembered (so that they are not
    /// read again) with no packs: the packs that they describe may be gone.
    pub(crate) fn add_file(
        &mut self,
        name: FileHash,
        file: &IndexFile,
        bytes: u64,
    ) -> Result<(), RepoError> {
        let told = match self.superseded.contains(&name) {
            true => &[],
            false => &file.packs[..],
        };
        self.ensure_room(told)?;
        let packs = told
            .iter()
            .map(|entry| self.add_pack(entry.pack, &entry.directory))
            .collect();
        self.superseded.extend(&file.supersedes);
        self.seen.insert(name, SeenFile { packs, bytes });
        Ok(())
    }

    /// Adds an index file that was merged from others and supersedes them: it describes no
    /// pack that they did not describe.
    pub(crate) fn add_merged(&mut self, name: FileHash, from: &[FileHash], bytes: u64) {
        let files = from.iter().filter_map(|name| self.seen.get(name));
        let mut packs: Vec<u32> = files.flat_map(|file| file.packs.iter().copied()).collect();
        packs.sort_unstable();
        packs.dedup();
        let packs = packs.into_boxed_slice();
        self.superseded.extend(from);
        self.seen.insert(name, SeenFile { packs, bytes });
    }

    /// An error if there would be more blobs than can be numbered with these packs.
    pub(crate) fn ensure_room(&self, packs: &[IndexedPack]) -> Result<(), RepoError> {
        let unknown = packs
            .iter()
            .filter(|entry| self.pack_number(&entry.pack).is_none());
        let blobs: usize = unknown.map(|entry| entry.directory.blobs()).sum();
        match (self.blobs.len() + blobs) as u64 > BLOBS_MAX {
            true => Err(RepoError::TooManyBlobs { max: BLOBS_MAX }),
            false => Ok(()),
        }
    }

    /// As if packs of this name had been found to be missing.
    #[cfg(test)]
    pub(crate) fn lose(&mut self, name: FileHash) {
        self.presence.lose(name);
    }

    /// Adds a pack, unless it is known already; its number. There must be room.
    fn add_pack(&mut self, name: FileHash, directory: &Directory) -> u32 {
        if let Some(number) = self.pack_number(&name) {
            return number;
        }
        // There are no more packs nor frames than blobs.
        let number = self.packs.len() as u32;
        let first_frame = self.places.frames();
        let missing = self.presence.missing().contains(&name);
        // A pack is at most 1 GiB long (checked when the directory was read).
        let mut offset = PREAMBLE_BYTES as u32;
        for frame in &directory.frames {
            self.places.add(number, offset, frame);
            offset += frame.stored_bytes;
            for (id, _) in &frame.blobs {
                let (places, packs) = (&self.places, &self.packs);
                self.blobs.add(id, |known| {
                    // A pack may contain a blob twice, and is not in the list yet then.
                    let pack = packs.get(places.pack(places.frame_of(known)) as usize);
                    !missing && pack.is_some_and(|pack| pack.missing)
                });
            }
        }
        self.any_missing |= missing;
        self.packs.push(PackInfo {
            name,
            file_bytes: directory.file_bytes(),
            first_frame,
            missing,
        });
        let packs = &self.packs;
        let hash_of = |&number: &u32| name_hash(&packs[number as usize].name);
        self.pack_numbers
            .insert_unique(name_hash(&name), number, hash_of);
        number
    }
}

/// Names of packs are hashes: the first bytes of one are as good as any made of it.
fn name_hash(name: &FileHash) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|at| name.0[at]))
}
