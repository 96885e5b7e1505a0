//! The index in memory: which pack and frame each blob lies in.
//!
//! It holds about 48 bytes a blob and 16 a frame and nothing else that grows. It remembers which
//! index files it was made from, so bringing it up to date lists one folder and reads only files
//! it has not seen; the number of those files is kept small by [`crate::compact`].

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use stillframe_page::hash::ContentId;

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::index_file::{INDEX_BYTES_MAX, IndexFile};
use crate::layout::{FileKind, FormatError};
use crate::local::{Area, LocalStore};
use crate::pack::{Directory, FileHash, PREAMBLE_BYTES};
use crate::presence::Presence;
use crate::sealed_file::open_file;

/// Where a blob lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    /// Number of the pack in this index.
    pub(crate) pack: u32,
    /// Number of the frame in the pack.
    pub(crate) frame: u32,
    /// Where the blob starts in the frame's plain bytes.
    pub(crate) offset: u32,
    /// Its length, below 32 MiB; the top bits carry [`Mark`]s, so that marking what is in use
    /// takes no memory beside the index.
    bytes_and_marks: u32,
}

impl Location {
    /// The blob's length.
    pub(crate) fn bytes(self) -> u32 {
        self.bytes_and_marks & !Mark::ALL
    }

    pub(crate) fn has(self, mark: Mark) -> bool {
        self.bytes_and_marks & mark as u32 != 0
    }
}

/// What a walk over all checkpoints has found out about a blob.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub(crate) enum Mark {
    /// Something refers to it.
    Used = 1 << 31,
    /// It is a root or segment whose contents have been walked. A mark of its own, because
    /// nothing forbids a page to have the bytes of a segment.
    Walked = 1 << 30,
}

impl Mark {
    const ALL: u32 = Mark::Used as u32 | Mark::Walked as u32;
}

/// Where a frame lies and how it is encoded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameInfo {
    pub(crate) offset: u32,
    pub(crate) stored_bytes: u32,
    pub(crate) plain_bytes: u32,
    pub(crate) kind: u8,
}

/// One pack.
#[derive(Debug)]
pub(crate) struct PackInfo {
    pub(crate) name: FileHash,
    pub(crate) file_bytes: u64,
    pub(crate) frames: Vec<FrameInfo>,
    /// It is not on disk, or not whole.
    pub(crate) missing: bool,
}

/// Content ids are keyed hashes: uniformly distributed, and nobody without the key can choose
/// them, so their first bytes are as good a hash as any.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*first);
        }
    }
    fn write_usize(&mut self, _length: usize) {}
    fn finish(&self) -> u64 {
        self.0
    }
}

pub(crate) type IdMap<V> = HashMap<ContentId, V, BuildHasherDefault<IdHasher>>;
pub(crate) type IdSet = HashSet<ContentId, BuildHasherDefault<IdHasher>>;

/// An index file that is there.
#[derive(Debug)]
pub(crate) struct SeenFile {
    /// The packs it tells of.
    pub(crate) packs: Vec<u32>,
    pub(crate) bytes: u64,
}

/// The index.
#[derive(Default)]
pub(crate) struct Index {
    blobs: IdMap<Location>,
    packs: Vec<PackInfo>,
    pack_numbers: HashMap<FileHash, u32>,
    seen: HashMap<FileHash, SeenFile>,
    /// Index files others have taken the place of, as far as they are still there.
    superseded: HashSet<FileHash>,
    presence: Presence,
}

impl Index {
    pub(crate) fn get(&self, id: &ContentId) -> Option<Location> {
        self.blobs.get(id).copied()
    }

    /// Whether there is a blob of this id, in a pack that is there.
    pub(crate) fn contains(&self, id: &ContentId) -> bool {
        self.get(id)
            .is_some_and(|at| !self.packs[at.pack as usize].missing)
    }

    /// The packs that the index tells of and that are not there, or not whole.
    pub(crate) fn missing_packs(&self) -> &BTreeSet<FileHash> {
        self.presence.missing()
    }

    pub(crate) fn blobs(&self) -> &IdMap<Location> {
        &self.blobs
    }

    /// Marks a blob; its location, and whether it did not have the mark before.
    pub(crate) fn mark(&mut self, id: &ContentId, mark: Mark) -> Option<(Location, bool)> {
        let location = self.blobs.get_mut(id)?;
        let new = !location.has(mark);
        location.bytes_and_marks |= mark as u32;
        Some((*location, new))
    }

    pub(crate) fn clear_marks(&mut self) {
        for location in self.blobs.values_mut() {
            location.bytes_and_marks &= !Mark::ALL;
        }
    }

    pub(crate) fn packs(&self) -> &[PackInfo] {
        &self.packs
    }

    /// The pack and frame of a location made by this index.
    pub(crate) fn frame(&self, at: Location) -> (&PackInfo, FrameInfo) {
        let pack = &self.packs[at.pack as usize];
        (pack, pack.frames[at.frame as usize])
    }

    pub(crate) fn pack_number(&self, name: &FileHash) -> Option<u32> {
        self.pack_numbers.get(name).copied()
    }

    /// The index files there are, superseded ones too.
    pub(crate) fn files(&self) -> &HashMap<FileHash, SeenFile> {
        &self.seen
    }

    /// The index files that count: those no other one takes the place of.
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
                Ok((file, bytes)) => self.add_file(name, &file, bytes),
                Err(error) if error.is_absent() => return Ok(false),
                Err(error) => {
                    on_damage(name, error)?;
                    self.add_file(name, &IndexFile::default(), 0);
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
        let different = self.presence.look(store, &self.packs)?;
        if different {
            self.start_over();
        }
        Ok(!different)
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

    /// Whether the index holds packs that no live index file tells of.
    fn has_dead_packs(&self) -> bool {
        let mut live = vec![false; self.packs.len()];
        for (_, file) in self.live_files() {
            for &pack in &file.packs {
                live[pack as usize] = true;
            }
        }
        live.contains(&false)
    }

    /// Adds the contents of an index file. Superseded files are remembered (so that they are not
    /// read again) with no packs: what they tell of may be gone.
    pub(crate) fn add_file(&mut self, name: FileHash, file: &IndexFile, bytes: u64) {
        let packs = match self.superseded.contains(&name) {
            true => Vec::new(),
            false => file
                .packs
                .iter()
                .map(|entry| self.add_pack(entry.pack, &entry.directory))
                .collect(),
        };
        self.superseded.extend(&file.supersedes);
        self.seen.insert(name, SeenFile { packs, bytes });
    }

    /// Adds a pack, unless it is known already; its number.
    pub(crate) fn add_pack(&mut self, name: FileHash, directory: &Directory) -> u32 {
        if let Some(number) = self.pack_number(&name) {
            return number;
        }
        // 2^32 packs of one frame each would be more files than any file system holds.
        let number = self.packs.len() as u32;
        let blobs: usize = directory.frames.iter().map(|f| f.blobs.len()).sum();
        self.blobs.reserve(blobs);
        let mut frames = Vec::with_capacity(directory.frames.len());
        let missing = self.presence.missing().contains(&name);
        // A pack is at most 1 GiB long (checked when the directory was read).
        let mut file_offset = PREAMBLE_BYTES as u32;
        for (frame, info) in (0_u32..).zip(&directory.frames) {
            frames.push(FrameInfo {
                offset: file_offset,
                stored_bytes: info.stored_bytes,
                plain_bytes: info.plain_bytes,
                kind: info.kind,
            });
            file_offset += info.stored_bytes;
            let mut offset = 0;
            for &(id, bytes) in &info.blobs {
                let location = Location {
                    pack: number,
                    frame,
                    offset,
                    bytes_and_marks: bytes,
                };
                match self.blobs.entry(id) {
                    Entry::Vacant(entry) => {
                        entry.insert(location);
                    }
                    Entry::Occupied(mut entry) => {
                        // A pack may hold a blob twice, and is not in the list yet then.
                        let found = self.packs.get(entry.get().pack as usize);
                        if !missing && found.is_some_and(|pack| pack.missing) {
                            entry.insert(location);
                        }
                    }
                }
                offset += bytes;
            }
        }
        self.packs.push(PackInfo {
            name,
            file_bytes: directory.file_bytes(),
            frames,
            missing,
        });
        self.pack_numbers.insert(name, number);
        number
    }
}

/// Reads one index file and checks it against its name; its contents and its length in bytes.
pub(crate) fn read_index_file(
    store: &LocalStore,
    keys: &Keys,
    name: FileHash,
) -> Result<(IndexFile, u64), RepoError> {
    let text = name.to_string();
    let mut bytes = store.read(Area::Index, &text, INDEX_BYTES_MAX)?;
    decode_index_file(keys, name, &mut bytes)
        .map(|file| (file, bytes.len() as u64))
        .map_err(|error| RepoError::format(store.label(Area::Index, &text), &error))
}

/// Reads the bytes of an index file called `name`.
fn decode_index_file(
    keys: &Keys,
    name: FileHash,
    bytes: &mut [u8],
) -> Result<IndexFile, FormatError> {
    if FileHash::of(bytes) != name {
        return Err(FormatError::Mismatch { what: "its name" });
    }
    IndexFile::decode(open_file(FileKind::Index, keys, bytes)?)
}
