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
//! Sections and parts are cached up to [`CacheLimits`]. Each was authenticated under its file's key and its number.
//! The bytes of a file are not compared with its name, since this would take reading it all: a file under another
//! file's name can hide blobs, as its removal would, and `check` reports it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use stillframe_page::hash::ContentId;

use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::image_record::ImageId;
use crate::images::Images;
use crate::index::layout::{Entry, key, order, parts_of};
use crate::index::mark_bitmaps::Bits;
use crate::index::sectioned_file::SectionedFile;
use crate::index::segment::IndexSegment;
use crate::index::segment_cache::{CacheLimits, SegmentCache};
use crate::pack::place::Place;
use crate::pack::place::Wanted;
use crate::store::local::{Area, LocalStore};
use crate::sync::lock;

/// The cache of a reader: parts of about 700,000 blobs, and sections of about a million.
const READER_CACHE: CacheLimits = CacheLimits {
    parts: 32 << 20,
    sections: 8 << 20,
};

/// Number of files kept open, so that a file can still be read after another process has merged it. Merged files
/// are small; beyond this number the largest files are opened when needed.
pub(crate) const FILES_OPEN: usize = 128;

/// Number of packs of files that are gone whose numbers are not given to others yet.
const NUMBERS_UNUSED_MAX: usize = 1024;

/// Number of blobs that are looked up by section one by one: this many, and one in this many of all.
const SINGLY: usize = 256;

/// The location of a blob that was found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    pub(crate) place: Place,
    /// Whether its pack is there in its full length.
    pub(crate) whole: bool,
}

/// Which copies of a blob count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// All.
    Any,
    /// Those in packs of the repository's own.
    Repository,
    /// Those in images.
    Image,
}

/// The live index files.
pub(crate) struct OnDemandIndex {
    store: Arc<LocalStore>,
    images: Arc<Images>,
    /// The largest first.
    files: Vec<SectionedFile>,
    packs: Vec<PackEntry>,
    /// Where its numbers begin. Lower ones belong to earlier on-demand indexes.
    first: Numbers,
    /// The numbers that the next file gets.
    next: Numbers,
    cache: Mutex<SegmentCache>,
}

/// Numbers of an on-demand index.
#[derive(Debug, Clone, Copy, Default)]
struct Numbers {
    pack: u32,
    part: u32,
    section: u32,
}

struct PackEntry {
    name: FileHash,
    file_bytes: u32,
    /// The image that has its content, if it is an external pack.
    image: Option<ImageId>,
    /// The number of its first part.
    first_part: u32,
}

impl OnDemandIndex {
    /// Reads the heads of the index files.
    pub(crate) fn open(images: &Arc<Images>) -> Result<OnDemandIndex, RepoError> {
        OnDemandIndex::open_from(images, Numbers::default())
    }

    /// As [`OnDemandIndex::open`]; the numbers of packs and parts continue those of another on-demand index.
    pub(crate) fn open_after(
        images: &Arc<Images>,
        before: &OnDemandIndex,
    ) -> Result<OnDemandIndex, RepoError> {
        OnDemandIndex::open_from(images, before.next)
    }

    fn open_from(images: &Arc<Images>, first: Numbers) -> Result<OnDemandIndex, RepoError> {
        const TRIES: usize = 16;
        for _ in 0..TRIES {
            match OnDemandIndex::try_open(images, first) {
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

    fn try_open(images: &Arc<Images>, first: Numbers) -> Result<OnDemandIndex, RepoError> {
        let (store, keys) = (&images.store, &images.keys);
        let names = store.names(Area::Index)?;
        let mut files = Vec::new();
        for name in names.iter().filter_map(|name| FileHash::from_name(name)) {
            files.push(SectionedFile::open(store, keys, name)?);
        }
        let heads = files.iter().map(|file| &file.index.head);
        let superseded: HashSet<FileHash> =
            heads.flat_map(|head| &head.supersedes).copied().collect();
        files.retain(|file| !superseded.contains(&file.name));
        let mut index = OnDemandIndex::empty_from(images.clone(), READER_CACHE, first);
        index.replace_files(files, |_| true);
        Ok(index)
    }

    /// An index of no files.
    pub(crate) fn empty(images: Arc<Images>, limits: CacheLimits) -> OnDemandIndex {
        OnDemandIndex::empty_from(images, limits, Numbers::default())
    }

    fn empty_from(images: Arc<Images>, limits: CacheLimits, first: Numbers) -> OnDemandIndex {
        OnDemandIndex {
            store: images.store.clone(),
            images,
            files: Vec::new(),
            packs: Vec::new(),
            first,
            next: first,
            cache: Mutex::new(SegmentCache::new(limits)),
        }
    }

    /// Its files, the largest first.
    pub(crate) fn files(&self) -> &[SectionedFile] {
        &self.files
    }

    /// Adds files and leaves out those that `keep` refuses. What is cached stays valid: every pack of a file that
    /// is left out must be in another file.
    pub(crate) fn replace_files(
        &mut self,
        added: Vec<SectionedFile>,
        keep: impl Fn(&FileHash) -> bool,
    ) {
        self.files.retain(|file| keep(&file.name));
        let live: usize = self
            .files
            .iter()
            .map(|file| file.index.head.packs.len())
            .sum();
        if self.packs.len() > 2 * live + NUMBERS_UNUSED_MAX {
            self.number_anew();
        }
        for mut file in added {
            self.number(&mut file);
            self.files.push(file);
        }
        let order = |file: &SectionedFile| (std::cmp::Reverse(file.bytes), file.name);
        self.files.sort_unstable_by_key(order);
        let count = self.files.len();
        for (at, file) in self.files.iter_mut().enumerate() {
            file.keep_open(count - at <= FILES_OPEN);
        }
    }

    /// Numbers the packs, parts and sections of a file.
    fn number(&mut self, file: &mut SectionedFile) {
        file.first_pack = self.packs.len() as u32;
        file.first_part = self.next.part;
        file.first_section = self.next.section;
        for entry in &file.index.head.packs {
            self.packs.push(PackEntry {
                name: entry.pack,
                file_bytes: entry.file_bytes,
                image: entry.image,
                first_part: self.next.part,
            });
            self.next.part += entry.parts;
        }
        self.next.pack = self.first.pack + self.packs.len() as u32;
        self.next.section += file.index.head.sections.len() as u32;
    }

    /// Numbers everything from the start, so that files which are gone take no memory.
    fn number_anew(&mut self) {
        self.forget_cached();
        self.packs = Vec::new();
        self.next = self.first;
        let mut files = std::mem::take(&mut self.files);
        for file in &mut files {
            self.number(file);
        }
        self.files = files;
    }

    /// Sets other limits of the cache.
    pub(crate) fn limit_cache(&self, limits: CacheLimits) {
        lock(&self.cache).limit(limits);
    }

    /// Empties the cache, since a pack may have gone missing or come back.
    pub(crate) fn forget_cached(&self) {
        lock(&self.cache).clear();
    }

    /// The number of its first pack.
    pub(crate) fn first_pack(&self) -> u32 {
        self.first.pack
    }

    /// The name of one of its packs.
    pub(crate) fn pack_name(&self, pack: u32) -> FileHash {
        self.packs[(pack - self.first.pack) as usize].name
    }

    /// The image that has the content of one of its packs.
    pub(crate) fn pack_image(&self, pack: u32) -> Option<ImageId> {
        self.packs[(pack - self.first.pack) as usize].image
    }

    /// The location of a blob; if it is in several packs, in one that is whole.
    pub(crate) fn get(&self, id: &ContentId) -> Result<Option<Found>, RepoError> {
        self.get_among(id, Origin::Any, self.files.iter())
    }

    /// The location of a blob, if the part of the last lookup describes it, and is of this origin.
    pub(crate) fn find_newest(&self, id: &ContentId, origin: Origin) -> Option<Found> {
        let place = lock(&self.cache).find_newest(id)?;
        let found = Found { place, whole: true };
        self.is_of(place.pack, origin).then_some(found)
    }

    /// As [`OnDemandIndex::get`], where only these files may describe the blob, and copies of this origin count.
    pub(crate) fn get_among<'a>(
        &self,
        id: &ContentId,
        origin: Origin,
        files: impl Iterator<Item = &'a SectionedFile>,
    ) -> Result<Option<Found>, RepoError> {
        let recent = lock(&self.cache).find_recent(id);
        match recent.filter(|place| self.is_of(place.pack, origin)) {
            Some(place) => Ok(Some(Found { place, whole: true })),
            None => self.get_by_section(id, origin, files),
        }
    }

    fn is_of(&self, pack: u32, origin: Origin) -> bool {
        match origin {
            Origin::Any => true,
            Origin::Repository => self.pack_image(pack).is_none(),
            Origin::Image => self.pack_image(pack).is_some(),
        }
    }

    fn get_by_section<'a>(
        &self,
        id: &ContentId,
        origin: Origin,
        files: impl Iterator<Item = &'a SectionedFile>,
    ) -> Result<Option<Found>, RepoError> {
        let mut found = None;
        for file in files {
            let Some(section) = file.section_number(id) else {
                continue;
            };
            for number in parts_of(&self.section(file, section)?, key(id)) {
                let part = self.part(file, number)?;
                let place = part.find(id).filter(|_| self.is_of(part.pack, origin));
                let Some(place) = place else {
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
                let found = self.get_by_section(&blob.id, Origin::Any, self.files.iter())?;
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
        let section: Arc<[Entry]> = file.read_section(&self.store, number)?.into();
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

    /// Whether a pack is there in its full length, and the image that an external one needs is as it was.
    fn is_whole(&self, pack: u32) -> Result<bool, RepoError> {
        let pack = pack - self.first.pack;
        if lock(&self.cache).whole.has(pack) {
            return Ok(true);
        }
        let entry = &self.packs[pack as usize];
        let bytes = self.store.length(Area::Packs, &entry.name.to_string())?;
        let intact = |image| self.images.is_intact(image);
        let whole = bytes == Some(entry.file_bytes.into()) && entry.image.is_none_or(intact);
        // A missing pack may be put back, and is inspected again.
        if whole {
            lock(&self.cache).whole.set(pack);
        }
        Ok(whole)
    }
}
