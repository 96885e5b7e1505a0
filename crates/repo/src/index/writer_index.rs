//! The writer's index: whether a blob exists, in three bytes of memory a blob.
//!
//! ```text
//! id --> after a blob that was found: the part of that blob --> location
//!    --> key table: no file has its key --> the blob is new
//!    --> a part found lately --> location
//!    --> the section of the id in the files of the group --> part: compares the whole id --> location
//! ```
//!
//! A writer looks up many blobs, most of which do not exist. The key table ([`crate::index::key_table`]) answers
//! for these. It is filled from the sections of the index files, a sixth of their bytes. A key that is there is
//! a hint only: the blob exists if a part has its id, and the pack is whole ([`crate::index::on_demand`]).
//!
//! The index stays in memory between checkpoints, so a refresh lists one folder and reads only new files.
//!
//! # Groups
//!
//! A lookup whose key is there searches the files of a group. An index file joins the group of the file before,
//! unless that would then have more than a share of all blobs. When files are merged, the new file describes the
//! packs of old ones, whose keys are in the table: it joins their groups, and the table stays as it is. So there are
//! few files in a group, and a file is in few groups. With more groups than there are numbers, groups share numbers.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashTable;
use stillframe_page::hash::ContentId;

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::image_record::ImageId;
use crate::images::Images;
use crate::index::in_memory::BLOBS_MAX;
use crate::index::key_table::{GROUPS, Group, KEY_ENTRY_BYTES, KeyTable};
use crate::index::layout::key;
use crate::index::missing_packs::{InspectedPack, MissingPackDetector};
use crate::index::on_demand::{FILES_OPEN, Found, OnDemandIndex, Origin};
use crate::index::sectioned_file::SectionedFile;
use crate::index::segment::IndexSegment;
use crate::index::segment_cache::CacheLimits;
use crate::pack::IndexedPack;
use crate::pack::place::Wanted;
use crate::store::local::{Area, LocalStore};

/// Share of the blobs of the index, and number of blobs, that a group may have if it is to take another file.
const GROUP_SHARE: usize = GROUPS / 2;
const GROUP_BLOBS_MIN: usize = 4096;

/// Memory that a writer may take in bytes, whatever the repository has: what the keys leave of it is for caches. In a
/// repository of up to a million blobs duplicates in any order are found there.
const MEMORY_BYTES: usize = 80 << 20;
/// The caches' share if the keys leave less, in bytes: parts of about 175,000 blobs, sections of about half a million.
const CACHE_BYTES_MIN: usize = 12 << 20;
const SECTIONS_BYTES_MIN: usize = 4 << 20;
/// Bytes of parts and sections over those of sections alone, for the same blobs.
const SECTIONS_SHARE: usize = 7;

/// The caches beside the keys of this many blobs.
fn cache_beside(blobs: usize) -> CacheLimits {
    let left = MEMORY_BYTES.saturating_sub(blobs * KEY_ENTRY_BYTES);
    let left = left.max(CACHE_BYTES_MIN);
    let sections = (left / SECTIONS_SHARE).max(SECTIONS_BYTES_MIN);
    CacheLimits {
        parts: left - sections,
        sections,
    }
}

/// Number of keys that are sorted and added at once.
const KEYS_AT_ONCE: usize = 1 << 18;

/// A pack of the index.
struct KnownPack {
    name: FileHash,
    file_bytes: u32,
    /// The group that has the keys of its blobs.
    group: Group,
}

impl InspectedPack for KnownPack {
    fn name(&self) -> &FileHash {
        &self.name
    }

    fn file_bytes(&self) -> u64 {
        self.file_bytes.into()
    }
}

/// The group that the last file has joined.
struct CurrentGroup {
    /// Counts groups.
    number: usize,
    blobs: usize,
    /// [`GROUP_BLOBS_MIN`], except in tests.
    blobs_min: usize,
}

impl CurrentGroup {
    /// The group of a file of this many blobs, where the index has `all`.
    fn join(&mut self, blobs: usize, all: usize) -> Group {
        let blobs_max = self.blobs_min.max(all / GROUP_SHARE);
        if self.blobs > 0 && self.blobs + blobs > blobs_max {
            self.number += 1;
            self.blobs = 0;
        }
        self.blobs += blobs;
        (self.number % GROUPS) as Group
    }
}

/// The index of a writer.
pub(crate) struct WriterIndex {
    store: Arc<LocalStore>,
    crypto: Arc<Keys>,
    images: Arc<Images>,
    keys: KeyTable,
    /// The live files.
    files: OnDemandIndex,
    /// Whether the last lookup found its blob.
    found_last: AtomicBool,
    /// The groups of each live file.
    file_groups: HashMap<FileHash, Vec<Group>>,
    /// The positions in `files` of the files of each group.
    groups: Vec<Vec<u32>>,
    current: CurrentGroup,
    /// The packs of the live files, each once.
    packs: Vec<KnownPack>,
    pack_numbers: HashTable<u32>,
    /// Superseded index files that still exist.
    superseded: HashSet<FileHash>,
    missing_packs: MissingPackDetector,
}

impl WriterIndex {
    /// An index that has read nothing yet.
    pub(crate) fn new(images: &Arc<Images>) -> WriterIndex {
        WriterIndex {
            keys: KeyTable::default(),
            files: OnDemandIndex::empty(images.clone(), cache_beside(0)),
            found_last: AtomicBool::new(false),
            file_groups: HashMap::new(),
            groups: vec![Vec::new(); GROUPS],
            current: CurrentGroup {
                number: 0,
                blobs: 0,
                blobs_min: GROUP_BLOBS_MIN,
            },
            packs: Vec::new(),
            pack_numbers: HashTable::new(),
            superseded: HashSet::new(),
            missing_packs: MissingPackDetector::default(),
            store: images.store.clone(),
            crypto: images.keys.clone(),
            images: images.clone(),
        }
    }

    /// Lets groups of this many blobs take another file.
    #[cfg(test)]
    pub(crate) fn limit_groups(&mut self, blobs: usize) {
        self.current.blobs_min = blobs;
    }

    /// Whether there is a blob of this id in a pack that is not missing.
    pub(crate) fn contains(&self, id: &ContentId) -> Result<bool, RepoError> {
        let found = self.get(id)?;
        Ok(found.is_some_and(|found| found.whole))
    }

    /// The location of a blob; if it is in several packs, in one that is whole.
    pub(crate) fn get(&self, id: &ContentId) -> Result<Option<Found>, RepoError> {
        self.get_of(id, Origin::Any)
    }

    /// As [`WriterIndex::get`], where only copies of this origin count.
    pub(crate) fn get_of(
        &self,
        id: &ContentId,
        origin: Origin,
    ) -> Result<Option<Found>, RepoError> {
        // Duplicates often come in the order in which they were stored.
        if self.found_last.load(Ordering::Relaxed)
            && let Some(found) = self.files.find_newest(id, origin)
        {
            return Ok(Some(found));
        }
        let found = self.get_by_key(id, origin)?;
        self.found_last.store(found.is_some(), Ordering::Relaxed);
        Ok(found)
    }

    fn get_by_key(&self, id: &ContentId, origin: Origin) -> Result<Option<Found>, RepoError> {
        let mut groups = self.keys.groups(key(id)).peekable();
        if groups.peek().is_none() {
            return Ok(None);
        }
        let positions = groups.flat_map(|group| &self.groups[usize::from(group)]);
        let files = self.files.files();
        self.files
            .get_among(id, origin, positions.map(|&at| &files[at as usize]))
    }

    /// Locates all wanted blobs, each of which must exist.
    pub(crate) fn find_all<T: Copy>(&self, wanted: &mut [Wanted<T>]) -> Result<(), RepoError> {
        for blob in wanted {
            let found = self.get(&blob.id)?;
            blob.at = found.ok_or(RepoError::MissingBlob { id: blob.id })?.place;
        }
        Ok(())
    }

    /// The name of a pack by the number in a location.
    pub(crate) fn pack_name(&self, pack: u32) -> FileHash {
        self.files.pack_name(pack)
    }

    /// The image that has the content of a pack, by the number in a location.
    pub(crate) fn pack_image(&self, pack: u32) -> Option<ImageId> {
        self.files.pack_image(pack)
    }

    /// A part that was read before, if it is still cached.
    pub(crate) fn known_part(&self, part: u32) -> Option<Arc<IndexSegment>> {
        self.files.known_part(part)
    }

    /// The packs of the index that are missing or cut short.
    pub(crate) fn missing_packs(&self) -> &BTreeSet<FileHash> {
        self.missing_packs.missing()
    }

    /// The live index files and their lengths in bytes.
    pub(crate) fn live_files(&self) -> impl Iterator<Item = (FileHash, u64)> {
        self.files
            .files()
            .iter()
            .map(|file| (file.name, file.bytes))
    }

    /// The superseded index files that still exist.
    pub(crate) fn superseded_files(&self) -> impl Iterator<Item = FileHash> {
        self.superseded.iter().copied()
    }

    /// Records that a superseded index file was removed.
    pub(crate) fn forget_file(&mut self, name: &FileHash) {
        self.superseded.remove(name);
    }

    /// An error if the blobs of these new packs exceed the 32-bit numbers.
    pub(crate) fn ensure_room(&self, packs: &[IndexedPack]) -> Result<(), RepoError> {
        let blobs = packs.iter().map(|entry| entry.directory.blobs()).sum();
        self.ensure_room_for(blobs)
    }

    fn ensure_room_for(&self, blobs: usize) -> Result<(), RepoError> {
        match (self.keys.len() + blobs) as u64 > BLOBS_MAX {
            true => Err(RepoError::TooManyBlobs { max: BLOBS_MAX }),
            false => Ok(()),
        }
    }

    /// Brings the index up to date with the existing files, and inspects packs and images.
    pub(crate) fn refresh(&mut self) -> Result<(), RepoError> {
        self.refresh_files()?;
        let changed = self.missing_packs.inspect(&self.store, &self.packs);
        if self.images.inspect() || !matches!(changed, Ok(false)) {
            // It says which packs are whole.
            self.files.forget_cached();
        }
        if changed.is_err() {
            // The inspection is incomplete.
            self.missing_packs.start_over();
        }
        changed.map(|_| ())
    }

    /// Brings the index up to date with the existing files. A file that vanishes between listing and reading was
    /// merged into a new one by another writer, so the folder is listed again.
    pub(crate) fn refresh_files(&mut self) -> Result<(), RepoError> {
        const TRIES: usize = 16;
        for _ in 0..TRIES {
            if self.try_refresh()? {
                return Ok(());
            }
        }
        Err(RepoError::Damaged {
            file: Area::Index.folder().into(),
            what: "its files vanish faster than they can be read".into(),
        })
    }

    /// Returns whether the index is up to date.
    fn try_refresh(&mut self) -> Result<bool, RepoError> {
        let names = self.store.names(Area::Index)?;
        let present: HashSet<FileHash> = names
            .iter()
            .filter_map(|name| FileHash::from_name(name))
            .collect();
        let live: HashSet<FileHash> = self.live_files().map(|(name, _)| name).collect();
        let is_new = |name: &&FileHash| !live.contains(*name) && !self.superseded.contains(*name);
        let mut new: Vec<FileHash> = present.iter().filter(is_new).copied().collect();
        if new.is_empty() && live.is_subset(&present) {
            self.superseded.retain(|name| present.contains(name));
            return Ok(true);
        }
        new.sort_unstable();
        let mut opened = Vec::with_capacity(new.len());
        for name in new {
            match SectionedFile::open(&self.store, &self.crypto, name) {
                Ok(mut file) => {
                    file.keep_open(opened.len() < FILES_OPEN);
                    opened.push(file);
                }
                Err(error) if error.is_absent() => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        for file in &opened {
            self.superseded.extend(&file.index.head.supersedes);
        }
        opened.retain(|file| !self.superseded.contains(&file.name));
        self.superseded.retain(|name| present.contains(name));
        if let Err(error) = self.add_files(opened, &present) {
            // Only some keys were added.
            self.start_over();
            return match error.is_absent() {
                true => Ok(false),
                false => Err(error),
            };
        }
        let is_left = |name: &FileHash| self.file_groups.contains_key(name);
        if !live.iter().all(is_left) && self.has_dead_packs() {
            // A prune ran, or was killed. The superseded files are known this time.
            self.start_over();
            return Ok(false);
        }
        Ok(true)
    }

    /// Adds files, and leaves out those that are superseded or gone.
    fn add_files(
        &mut self,
        opened: Vec<SectionedFile>,
        present: &HashSet<FileHash>,
    ) -> Result<(), RepoError> {
        for file in &opened {
            self.add_packs(file)?;
            let mut groups: Vec<Group> = self.groups_of(file).collect();
            groups.sort_unstable();
            groups.dedup();
            self.file_groups.insert(file.name, groups);
        }
        self.keys.settle();
        self.files.limit_cache(cache_beside(self.keys.len()));
        let superseded = &self.superseded;
        let keep = |name: &FileHash| present.contains(name) && !superseded.contains(name);
        self.file_groups.retain(|name, _| keep(name));
        self.files.replace_files(opened, keep);
        for files in &mut self.groups {
            files.clear();
        }
        for (position, file) in (0..).zip(self.files.files()) {
            for &group in &self.file_groups[&file.name] {
                self.groups[usize::from(group)].push(position);
            }
        }
        Ok(())
    }

    /// The groups of the known packs of a file, with repetitions.
    fn groups_of(&self, file: &SectionedFile) -> impl Iterator<Item = Group> {
        let packs = file.index.head.packs.iter();
        let numbers = packs.filter_map(|entry| self.pack_number(&entry.pack));
        numbers.map(|number| self.packs[number as usize].group)
    }

    /// Adds the packs of a file that are not known, and the keys of all its blobs if there are any.
    fn add_packs(&mut self, file: &SectionedFile) -> Result<(), RepoError> {
        let packs = &file.index.head.packs;
        if packs
            .iter()
            .all(|entry| self.pack_number(&entry.pack).is_some())
        {
            return Ok(());
        }
        let blobs = file.blobs();
        self.ensure_room_for(blobs)?;
        let group = self.current.join(blobs, self.keys.len());
        self.add_keys(file, group)?;
        for entry in packs {
            if self.pack_number(&entry.pack).is_some() {
                continue;
            }
            // There are at most as many packs as blobs.
            let number = self.packs.len() as u32;
            self.packs.push(KnownPack {
                name: entry.pack,
                file_bytes: entry.file_bytes,
                group,
            });
            let packs = &self.packs;
            let hash_of = |&number: &u32| packs[number as usize].name.short();
            self.pack_numbers
                .insert_unique(entry.pack.short(), number, hash_of);
        }
        Ok(())
    }

    /// Adds the keys of all blobs of a file.
    fn add_keys(&mut self, file: &SectionedFile, group: Group) -> Result<(), RepoError> {
        let mut keys = Vec::with_capacity(file.blobs().min(KEYS_AT_ONCE));
        let sections = file.index.head.sections.len() as u32;
        for number in 0..sections {
            let section = file.read_section(&self.store, number)?;
            keys.extend(section.iter().map(|entry| entry.key));
            if keys.len() >= KEYS_AT_ONCE || number + 1 == sections {
                keys.sort_unstable();
                // Two parts may describe a blob.
                keys.dedup();
                self.keys.add(&keys, group);
                keys.clear();
            }
        }
        Ok(())
    }

    fn pack_number(&self, name: &FileHash) -> Option<u32> {
        let is_it = |&number: &u32| self.packs[number as usize].name == *name;
        self.pack_numbers.find(name.short(), is_it).copied()
    }

    /// Whether the index has packs that no live index file describes.
    fn has_dead_packs(&self) -> bool {
        let mut live = vec![false; self.packs.len()];
        let files = self.files.files().iter();
        for entry in files.flat_map(|file| &file.index.head.packs) {
            if let Some(number) = self.pack_number(&entry.pack) {
                live[number as usize] = true;
            }
        }
        live.contains(&false)
    }

    /// Clears all but the superseded files and the missing packs.
    fn start_over(&mut self) {
        let mut missing_packs = std::mem::take(&mut self.missing_packs);
        missing_packs.start_over();
        let current = CurrentGroup {
            number: 0,
            blobs: 0,
            ..self.current
        };
        *self = WriterIndex {
            current,
            superseded: std::mem::take(&mut self.superseded),
            missing_packs,
            ..WriterIndex::new(&self.images)
        };
    }
}
