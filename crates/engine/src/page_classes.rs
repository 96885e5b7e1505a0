//! The verb *show*: why the pages of a checkpoint's memory need no place of their own, or do (Park et al., table 4 and
//! figure 5).

use std::collections::HashSet;

use serde::Serialize;
use stillframe_page::PAGE;
use stillframe_page::hash::{ContentHasher, ContentId};
use stillframe_repo::{BlockTable, Manifest, PageMap, Reader, RepoError};

use crate::{Progress, ProgressSink};

/// Pages with deltas that are read at once.
const BATCH_PAGES: usize = 1024;

/// The pages of a checkpoint's memory, each in the first class that it belongs to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PageClasses {
    /// All zero, because this checkpoint left them out: the guest called them free.
    pub free: u64,
    /// All other zeros.
    pub zero: u64,
    /// Equal to a block of one of the disks in this checkpoint.
    pub on_disk: u64,
    /// Read from an indexed image, for the repository has no copy of it.
    pub in_image: u64,
    /// Equal to another page of this memory.
    pub duplicate: u64,
    /// Stored anew since the parent.
    pub changed: u64,
    /// As in the parent; without a parent, all that is left.
    pub other: u64,
}

impl PageClasses {
    /// All pages.
    pub fn pages(&self) -> u64 {
        self.free
            + self.zero
            + self.on_disk
            + self.in_image
            + self.duplicate
            + self.changed
            + self.other
    }
}

/// The beginning of an id: of contents of one repository, of which there are less than 2^28, two share it by a chance of
/// 2^-8 at most.
fn short(id: &ContentId) -> u64 {
    let ContentId([a, b, c, d, e, f, g, h, ..]) = *id;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Classifies the pages of a checkpoint's memory by their contents, which pages with deltas are read for. Takes about 50 bytes
/// for each page and each block of its disks that is not zero.
///
/// # Errors
/// The repository fails.
pub fn classify(
    reader: &Reader<'_>,
    hasher: &ContentHasher,
    manifest: &Manifest,
    parent: Option<&Manifest>,
    progress: ProgressSink<'_>,
) -> Result<PageClasses, RepoError> {
    let disks = manifest.disks.iter().map(|disk| &disk.table);
    let total = disks.clone().chain(&manifest.ram).map(|table| table.pages);
    let total = total.sum();
    let mut done = 0;
    let mut advance = |pages| {
        done += pages;
        progress(Progress::Comparing { done, total });
    };
    let mut on_disk = HashSet::new();
    for table in disks {
        let map = PageMap::read(reader, table)?;
        each_id(&map, hasher, &mut advance, |_, id| {
            on_disk.extend(id.as_ref().map(short));
            Ok(())
        })?;
    }
    // Each lookup takes a microsecond or more.
    let has_images = !manifest.images.is_empty();
    let mut classes = PageClasses::default();
    let mut seen = HashSet::new();
    for table in &manifest.ram {
        let map = PageMap::read(reader, table)?;
        let before = parent.and_then(|parent| same_block(parent, table));
        let before = before
            .map(|table| PageMap::read(reader, table))
            .transpose()?;
        each_id(&map, hasher, &mut advance, |page, id| {
            let Some(id) = id else {
                classes.zero += 1;
                return Ok(());
            };
            let class = match short(&id) {
                short if on_disk.contains(&short) => &mut classes.on_disk,
                _ if has_images && reader.image_of(&id)?.is_some() => &mut classes.in_image,
                short if !seen.insert(short) => &mut classes.duplicate,
                _ => match &before {
                    Some(before) if before.version(page)? == map.version(page)? => {
                        &mut classes.other
                    }
                    None if parent.is_none() => &mut classes.other,
                    _ => &mut classes.changed,
                },
            };
            *class += 1;
            Ok(())
        })?;
    }
    // It is not noted which of the zeros they are.
    classes.free = manifest.pages.free.min(classes.zero);
    classes.zero -= classes.free;
    Ok(classes)
}

/// The RAM block of the parent that this one was.
fn same_block<'m>(parent: &'m Manifest, table: &BlockTable) -> Option<&'m BlockTable> {
    let mut tables = parent.ram.iter();
    tables.find(|before| before.name == table.name && before.pages == table.pages)
}

/// Passes each page with the id of its content; zeros have none. Those with deltas come later than their neighbours.
fn each_id(
    map: &PageMap<'_>,
    hasher: &ContentHasher,
    advance: &mut dyn FnMut(u64),
    mut found: impl FnMut(u64, Option<ContentId>) -> Result<(), RepoError>,
) -> Result<(), RepoError> {
    let mut changed = Vec::new();
    let mut advanced = 0;
    for page in 0..map.pages() {
        match (map.is_zero(page)?, map.whole_id(page)?) {
            (true, _) => found(page, None)?,
            (false, Some(id)) => found(page, Some(id))?,
            (false, None) => changed.push(page),
        }
        let is_last = page + 1 == map.pages();
        if changed.len() >= BATCH_PAGES || is_last {
            let contents = map.read_together(&changed)?;
            for (page, content) in changed.drain(..).zip(contents.as_chunks::<PAGE>().0) {
                let is_zero = content.iter().all(|&byte| byte == 0);
                found(page, (!is_zero).then(|| hasher.id(content)))?;
            }
        }
        if (page + 1).is_multiple_of(BATCH_PAGES as u64) || is_last {
            advance(page + 1 - advanced);
            advanced = page + 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stillframe_repo::DiskTable;

    use super::*;
    use crate::fakes::checkpoints::NO_WAIT;
    use crate::fakes::{FakeRepository, pages, vm_record};

    const RAM: &str = "pc.ram";
    const DISK: &str = "disk";

    /// A checkpoint of two blocks, the second of which is a disk.
    fn stored(repository: &mut FakeRepository, ram: &[u8], disk: &[u8]) -> Manifest {
        let blocks = [(RAM, pages(ram)), (DISK, pages(disk))];
        let (_, mut manifest) = repository.checkpoint(&vm_record("vm", &[]), &blocks, &[]);
        manifest.disks = vec![DiskTable {
            bytes: pages(disk).len() as u64,
            bitmap: None,
            table: manifest.ram.pop().unwrap(),
        }];
        manifest
    }

    /// The same by comparing each with each.
    fn slowly(ram: &[u8], disk: &[u8], before: Option<&[u8]>) -> PageClasses {
        let mut classes = PageClasses::default();
        for (at, content) in ram.iter().enumerate() {
            let class = match before {
                _ if *content == 0 => &mut classes.zero,
                _ if disk.contains(content) => &mut classes.on_disk,
                _ if ram[..at].contains(content) => &mut classes.duplicate,
                Some(before) if before.len() != ram.len() || before[at] != *content => {
                    &mut classes.changed
                }
                _ => &mut classes.other,
            };
            *class += 1;
        }
        classes
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn each_page_is_in_the_first_class_it_belongs_to(
            ram in prop::collection::vec(0u8..12, 1..40),
            disk in prop::collection::vec(0u8..6, 1..9),
            before in prop::option::of(prop::collection::vec(0u8..12, 1..40)),
            same_length: bool,
            free in 0u64..4,
        ) {
            let mut repository = FakeRepository::new();
            let before = before.map(|mut before| {
                if same_length {
                    before.resize(ram.len(), 3);
                }
                before
            });
            let parent = before.as_ref().map(|before| stored(&mut repository, before, &disk));
            let mut manifest = stored(&mut repository, &ram, &disk);
            manifest.pages.free = free;
            let hasher = repository.repository.hasher();
            let reader = repository.repository.reader(NO_WAIT).unwrap();
            let (mut done, mut total) = (0, 0);
            let progress = &mut |progress| {
                if let Progress::Comparing { done: now, total: all } = progress {
                    (done, total) = (now, all);
                }
            };
            let classes = classify(&reader, &hasher, &manifest, parent.as_ref(), progress).unwrap();
            let mut expected = slowly(&ram, &disk, before.as_deref());
            expected.free = free.min(expected.zero);
            expected.zero -= expected.free;
            prop_assert_eq!(classes, expected);
            prop_assert_eq!(classes.pages(), ram.len() as u64);
            prop_assert_eq!((done, total), (total, (ram.len() + disk.len()) as u64));
        }
    }
}
