//! The on-demand index, for restores: the heads of the index files; other segments are read when a lookup needs
//! them. So opening takes the same time for any size of repository. A restore reads a share of the index that is
//! about as large as its share of the repository.
//!
//! ```text
//! id --> is it in a part found lately? --> location
//!    --> the section of the id in each index file, largest file first --> part --> location
//! ```
//!
//! Consecutive reads mostly find adjacent blobs, so a few lookups in a thousand use sections. Lookups of many blobs at
//! once ([`OnDemandIndex::find_all`]) are sorted, so that each section and each part is opened once.
//!
//! Sections and parts are cached up to [`PARTS_BYTES_MAX`] and [`SECTIONS_BYTES_MAX`]. Each was authenticated
//! under its file's key and its number. The bytes of a file are not compared with its name, since this would take
//! reading it all: a file under another file's name can hide blobs, as its removal would, and `check` reports it.

use std::collections::HashSet;
use std::fs::File;
use std::sync::{Arc, Mutex};

use lru::LruCache;
use stillframe_page::hash::ContentId;

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::layout::FormatError;
use crate::index::file::{FRONT_BYTES, INDEX_BYTES_MAX, OpenIndex, head_bytes};
use crate::index::layout::{Entry, key, order, parts_of, section_of};
use crate::index::mark_bitmaps::Bits;
use crate::index::segment::IndexSegment;
use crate::pack::place::Place;
use crate::pack::place::Wanted;
use crate::store::local::{Area, LocalStore};
use crate::store::read_exact_at;
use crate::sync::lock;

/// Bytes of cached parts: about 700,000 blobs.
const PARTS_BYTES_MAX: usize = 32 << 20;
/// Bytes of cached sections: about a million blobs.
const SECTIONS_BYTES_MAX: usize = 8 << 20;

/// Number of recent parts, which are searched before any section.
const RECENT_PARTS: usize = 8;

/// Number of files kept open, so that a file can still be read after another process has merged it. Merged files
/// are small; beyond this number the largest files are opened when needed.
const FILES_OPEN: usize = 128;

/// Bytes of the first read of an index file, which nearly always contains all of its head.
const FIRST_READ_BYTES: u64 = 16 << 10;

/// Number of blobs that are looked up by section one by one: this many, and one in this many of all.
const SINGLY: usize = 256;

/// The location of a blob that was found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    pub(crate) place: Place,
    /// Whether its pack is there in its full length.
    pub(crate) whole: bool,
}

/// The live index files.
pub(crate) struct OnDemandIndex {
    store: Arc<LocalStore>,
    /// The largest first.
    files: Vec<SectionedFile>,
    packs: Vec<PackEntry>,
    first: FirstNumbers,
    cache: Mutex<Cache>,
}

/// Where the numbers of an on-demand index begin. Lower numbers belong to earlier on-demand indexes.
#[derive(Debug, Clone, Copy, Default)]
struct FirstNumbers {
    /// The number of the first pack.
    pack: u32,
    /// The number of the first part.
    part: u32,
}

struct SectionedFile {
    label: String,
    name: FileHash,
    index: OpenIndex,
    bytes: u64,
    kept: Mutex<Option<Arc<File>>>,
    keep: bool,
    /// The numbers of its first pack, part and section in the on-demand index; the others follow.
    first_pack: u32,
    first_part: u32,
    first_section: u32,
}

struct PackEntry {
    name: FileHash,
    file_bytes: u32,
    /// The number of its first part.
    first_part: u32,
}

struct Cache {
    parts: LruCache<u32, Arc<IndexSegment>>,
    parts_bytes: usize,
    sections: LruCache<u32, Arc<[Entry]>>,
    sections_bytes: usize,
    /// The parts of recent lookups, the last one last; only of packs that are whole.
    recent: Vec<Arc<IndexSegment>>,
    /// The packs known to be whole.
    whole: Bits,
}

impl Cache {
    fn new() -> Cache {
        Cache {
            parts: LruCache::unbounded(),
            parts_bytes: 0,
            sections: LruCache::unbounded(),
            sections_bytes: 0,
            recent: Vec::with_capacity(RECENT_PARTS),
            whole: Bits::default(),
        }
    }

    fn add_part(&mut self, part: &Arc<IndexSegment>) {
        self.parts_bytes += part.memory_bytes();
        // Two threads may have read the same part.
        if let Some(old) = self.parts.put(part.number, part.clone()) {
            self.parts_bytes -= old.memory_bytes();
        }
        while self.parts_bytes > PARTS_BYTES_MAX
            && let Some((_, old)) = self.parts.pop_lru()
        {
            self.parts_bytes -= old.memory_bytes();
        }
    }

    fn add_section(&mut self, number: u32, section: &Arc<[Entry]>) {
        self.sections_bytes += size_of_val(&section[..]);
        if let Some(old) = self.sections.put(number, section.clone()) {
            self.sections_bytes -= size_of_val(&old[..]);
        }
        while self.sections_bytes > SECTIONS_BYTES_MAX
            && let Some((_, old)) = self.sections.pop_lru()
        {
            self.sections_bytes -= size_of_val(&old[..]);
        }
    }

    fn find_recent(&mut self, id: &ContentId) -> Option<Place> {
        let newest_first = self.recent.iter().enumerate().rev();
        let (at, place) = newest_first
            .filter_map(|(at, part)| Some((at, part.find(id)?)))
            .next()?;
        if at + 1 < self.recent.len() {
            let part = self.recent.remove(at);
            self.recent.push(part);
        }
        Some(place)
    }

    fn add_recent(&mut self, part: Arc<IndexSegment>) {
        if self.recent.iter().any(|known| known.number == part.number) {
            return;
        }
        if self.recent.len() == RECENT_PARTS {
            self.recent.remove(0);
        }
        self.recent.push(part);
    }
}

impl OnDemandIndex {
    /// Reads the heads of the index files.
    pub(crate) fn open(store: &Arc<LocalStore>, keys: &Keys) -> Result<OnDemandIndex, RepoError> {
        OnDemandIndex::open_from(store, keys, FirstNumbers::default())
    }

    /// As [`OnDemandIndex::open`]; the numbers of packs and parts continue those of another on-demand index.
    pub(crate) fn open_after(
        store: &Arc<LocalStore>,
        keys: &Keys,
        before: &OnDemandIndex,
    ) -> Result<OnDemandIndex, RepoError> {
        let parts = before.files.iter().flat_map(|file| &file.index.head.packs);
        let parts: u32 = parts.map(|entry| entry.parts).sum();
        let first = FirstNumbers {
            pack: before.first.pack + before.packs.len() as u32,
            part: before.first.part + parts,
        };
        OnDemandIndex::open_from(store, keys, first)
    }

    fn open_from(
        store: &Arc<LocalStore>,
        keys: &Keys,
        first: FirstNumbers,
    ) -> Result<OnDemandIndex, RepoError> {
        const TRIES: usize = 16;
        for _ in 0..TRIES {
            match OnDemandIndex::try_open(store, keys, first) {
                // Another process has merged the file since the folder was listed.
                Err(error) if error.is_absent() => {}
                other => return other,
            }
        }
        Err(RepoError::Damaged {
            file: Area::Index.folder().into(),
            what: "its files vanish faster than they can be read".into(),
        })
    }

    fn try_open(
        store: &Arc<LocalStore>,
        keys: &Keys,
        first: FirstNumbers,
    ) -> Result<OnDemandIndex, RepoError> {
        let names = store.names(Area::Index)?;
        let mut files = Vec::new();
        for name in names.iter().filter_map(|name| FileHash::from_name(name)) {
            files.push(SectionedFile::open(store, keys, name)?);
        }
        let heads = files.iter().map(|file| &file.index.head);
        let superseded: HashSet<FileHash> =
            heads.flat_map(|head| &head.supersedes).copied().collect();
        files.retain(|file| !superseded.contains(&file.name));
        files.sort_unstable_by_key(|file| (std::cmp::Reverse(file.bytes), file.name));
        Ok(OnDemandIndex::new(store.clone(), files, first))
    }

    /// Numbers the packs, parts and sections of the files.
    fn new(
        store: Arc<LocalStore>,
        mut files: Vec<SectionedFile>,
        first: FirstNumbers,
    ) -> OnDemandIndex {
        let mut packs = Vec::new();
        let (mut part, mut section) = (first.part, 0);
        let count = files.len();
        for (at, file) in files.iter_mut().enumerate() {
            file.keep = count - at <= FILES_OPEN;
            if !file.keep {
                *lock(&file.kept) = None;
            }
            file.first_pack = packs.len() as u32;
            file.first_part = part;
            file.first_section = section;
            for entry in &file.index.head.packs {
                packs.push(PackEntry {
                    name: entry.pack,
                    file_bytes: entry.file_bytes,
                    first_part: part,
                });
                part += entry.parts;
            }
            section += file.index.head.sections.len() as u32;
        }
        OnDemandIndex {
            store,
            files,
            packs,
            first,
            cache: Mutex::new(Cache::new()),
        }
    }

    /// The number of its first pack.
    pub(crate) fn first_pack(&self) -> u32 {
        self.first.pack
    }

    /// The name of one of its packs.
    pub(crate) fn pack_name(&self, pack: u32) -> FileHash {
        self.packs[(pack - self.first.pack) as usize].name
    }

    /// The location of a blob; if it is in several packs, in one that is whole.
    pub(crate) fn get(&self, id: &ContentId) -> Result<Option<Found>, RepoError> {
        let recent = lock(&self.cache).find_recent(id);
        match recent {
            Some(place) => Ok(Some(Found { place, whole: true })),
            None => self.get_by_section(id),
        }
    }

    fn get_by_section(&self, id: &ContentId) -> Result<Option<Found>, RepoError> {
        let mut found = None;
        for file in &self.files {
            let Some(section) = file.section_number(id) else {
                continue;
            };
            for number in parts_of(&self.section(file, section)?, key(id)) {
                let part = self.part(file, number)?;
                let Some(place) = part.find(id) else {
                    continue;
                };
                if self.is_whole(part.pack)? {
                    lock(&self.cache).add_recent(part);
                    return Ok(Some(Found { place, whole: true }));
                }
                found.get_or_insert(Found {
                    place,
                    whole: false,
                });
            }
        }
        Ok(found)
    }

    /// A part that was read before, if it is still cached.
    pub(crate) fn known_part(&self, part: u32) -> Option<Arc<IndexSegment>> {
        lock(&self.cache).parts.get(&part).cloned()
    }

    /// Locates all wanted blobs, each of which must exist.
    pub(crate) fn find_all<T: Copy>(&self, wanted: &mut [Wanted<T>]) -> Result<(), RepoError> {
        let singly = wanted.len().div_ceil(SINGLY) + SINGLY;
        let mut rest = Vec::new();
        let mut by_section = 0;
        for (at, blob) in (0..).zip(&mut *wanted) {
            let recent = lock(&self.cache).find_recent(&blob.id);
            if let Some(place) = recent {
                blob.at = place;
            } else if by_section < singly {
                let found = self.get_by_section(&blob.id)?;
                let found = found.ok_or(RepoError::MissingBlob { id: blob.id })?;
                blob.at = found.place;
                by_section += 1;
            } else {
                rest.push(at);
            }
        }
        self.sweep(wanted, rest)
    }

    /// Locates the blobs at the positions `rest` in `wanted`. Each section and each part of a file is opened
    /// once.
    fn sweep<T: Copy>(
        &self,
        wanted: &mut [Wanted<T>],
        mut rest: Vec<u32>,
    ) -> Result<(), RepoError> {
        // In the order of the sections of any file.
        rest.sort_unstable_by_key(|&at| order(&wanted[at as usize].id));
        let mut whole = Bits::default();
        for file in &self.files {
            let mut candidates: Vec<(u32, u32)> = Vec::new();
            let section = |at: &u32| file.section_number(&wanted[*at as usize].id);
            for group in rest.chunk_by(|at, next| section(at) == section(next)) {
                let Some(number) = section(&group[0]) else {
                    continue;
                };
                let entries = self.section(file, number)?;
                for &at in group {
                    let parts = parts_of(&entries, key(&wanted[at as usize].id));
                    candidates.extend(parts.map(|part| (part, at)));
                }
            }
            candidates.sort_unstable();
            for group in candidates.chunk_by(|(part, _), (next, _)| part == next) {
                let part = self.part(file, group[0].0)?;
                let is_whole = self.is_whole(part.pack)?;
                for &(_, at) in group {
                    let blob = &mut wanted[at as usize];
                    if !whole.has(at)
                        && let Some(place) = part.find(&blob.id)
                    {
                        blob.at = place;
                        if is_whole {
                            whole.set(at);
                        }
                    }
                }
            }
            rest.retain(|&at| !whole.has(at));
        }
        let lost = rest.iter().map(|&at| &wanted[at as usize]);
        match { lost }.find(|blob| blob.at.bytes == 0) {
            Some(blob) => Err(RepoError::MissingBlob { id: blob.id }),
            None => Ok(()),
        }
    }

    fn section(&self, file: &SectionedFile, number: u32) -> Result<Arc<[Entry]>, RepoError> {
        let in_index = file.first_section + number;
        if let Some(section) = lock(&self.cache).sections.get(&in_index) {
            return Ok(section.clone());
        }
        let mut sealed = file.read(&self.store, file.index.section(number))?;
        let section = file.index.open_section(number, &mut sealed);
        let section: Arc<[Entry]> = section.map_err(|error| file.wrong(&error))?.into();
        lock(&self.cache).add_section(in_index, &section);
        Ok(section)
    }

    /// A part of a file, by its number in the file.
    fn part(&self, file: &SectionedFile, number: u32) -> Result<Arc<IndexSegment>, RepoError> {
        let in_index = file.first_part + number;
        if let Some(part) = lock(&self.cache).parts.get(&in_index) {
            return Ok(part.clone());
        }
        let range = file
            .index
            .part(number)
            .map_err(|error| file.wrong(&error))?;
        let mut sealed = file.read(&self.store, range)?;
        let part = file.index.open_part(number, &mut sealed);
        let part = part.map_err(|error| file.wrong(&error))?;
        // The last pack of this file whose first part is not after this one; packs without parts come before it.
        let own = &self.packs[file.first_pack as usize..];
        let own = &own[..file.index.head.packs.len()];
        let after = own.partition_point(|pack| pack.first_part <= in_index);
        let pack = self.first.pack + file.first_pack + after as u32 - 1;
        let part = Arc::new(IndexSegment::new(in_index, pack, part));
        lock(&self.cache).add_part(&part);
        Ok(part)
    }

    /// Whether a pack is there in its full length.
    fn is_whole(&self, pack: u32) -> Result<bool, RepoError> {
        let pack = pack - self.first.pack;
        if lock(&self.cache).whole.has(pack) {
            return Ok(true);
        }
        let entry = &self.packs[pack as usize];
        let bytes = self.store.length(Area::Packs, &entry.name.to_string())?;
        let whole = bytes == Some(entry.file_bytes.into());
        // A missing pack may be put back, and is inspected again.
        if whole {
            lock(&self.cache).whole.set(pack);
        }
        Ok(whole)
    }
}

impl SectionedFile {
    /// Reads the head of an index file.
    fn open(store: &LocalStore, keys: &Keys, name: FileHash) -> Result<SectionedFile, RepoError> {
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

    /// The section of an id; `None` where the file describes no blobs.
    fn section_number(&self, id: &ContentId) -> Option<u32> {
        let sections = self.index.head.sections.len();
        (sections > 0).then(|| section_of(order(id), sections) as u32)
    }

    fn read(&self, store: &LocalStore, range: std::ops::Range<u32>) -> Result<Vec<u8>, RepoError> {
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

    fn wrong(&self, error: &FormatError) -> RepoError {
        RepoError::format(&self.label, error)
    }
}
