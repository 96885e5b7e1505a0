//! What the tests share: cheap repositories, and a small VM whose memory can be checkpointed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use stillframe_page::delta::{Added, DeltaEncoder};
use stillframe_page::{PageRequest, ReadOrder, is_zero};

use crate::crypto::key_file::Cost;
use crate::pack::PackLimits;
use crate::page_table::table::PageRef;
use crate::store::local::LocalStore;
use crate::{
    BlockTable, CheckpointId, Forget, ImageId, KeepPolicy, Manifest, Note, PageCounts, PageMap,
    PageReader, PageTableBuilder, Password, RepoError, Repository, Tags, Writer,
};

pub(crate) const WAIT: Duration = Duration::from_secs(60);
pub(crate) use stillframe_page::PAGE;

pub(crate) fn password() -> Password {
    Password::new("correct horse")
}

/// Packs of a frame or two, each described by an index file before the checkpoint ends.
pub(crate) const SMALL_PACKS: PackLimits = PackLimits {
    stored_bytes: 16 << 10,
    directory_bytes: 400,
};

/// The cost of a password that takes next to no time to try.
pub(crate) const CHEAP: Cost = Cost {
    memory_kib: 8,
    passes: 1,
    lanes: 1,
};

/// A repository with a password of that cost.
pub(crate) fn init(dir: &Path) -> Repository {
    Repository::init_at(LocalStore::new(dir), &password(), CHEAP).unwrap()
}

pub(crate) fn open(dir: &Path) -> Repository {
    Repository::open(dir, &password()).unwrap()
}

/// A deterministic source of numbers (SplitMix64).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Bytes of some compressibility: noise, or a few symbols.
    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mask = match self.below(2) {
            0 => u64::MAX,
            _ => 0x0303_0303_0303_0303,
        };
        let words = std::iter::repeat_with(|| (self.next() & mask).to_le_bytes());
        words.take(len.div_ceil(8)).flatten().take(len).collect()
    }
}

/// The slow reference model of a checkpointed VM: its whole memory.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Vm {
    pub(crate) label: String,
    pub(crate) pages: Vec<Vec<u8>>,
    pub(crate) device_state: Vec<u8>,
    pub(crate) tags: Tags,
    pub(crate) note: Option<Note>,
    last: Option<Last>,
    dirty: BTreeSet<u64>,
}

/// The last checkpoint.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Last {
    id: CheckpointId,
    table: BlockTable,
    images: BTreeSet<ImageId>,
    pages: Vec<Vec<u8>>,
}

impl Vm {
    pub(crate) fn new(label: &str, pages: usize) -> Vm {
        Vm {
            label: label.into(),
            pages: vec![vec![0; PAGE]; pages],
            device_state: vec![1; 10_000],
            tags: Tags::default(),
            note: None,
            last: None,
            dirty: (0..pages as u64).collect(),
        }
    }

    /// Writes to some pages.
    pub(crate) fn run(&mut self, dice: &mut Dice, writes: usize) {
        for _ in 0..writes {
            let at = dice.below(self.pages.len() as u64);
            let page = &mut self.pages[at as usize];
            match dice.below(8) {
                0 => page.fill(0),
                1 => page.fill(7),
                2..5 => page[dice.below(PAGE as u64) as usize] = dice.next() as u8,
                _ => *page = dice.bytes(PAGE),
            }
            self.dirty.insert(at);
        }
        let at = dice.below(self.device_state.len() as u64);
        self.device_state[at as usize] ^= 1;
    }

    /// Makes the next checkpoint a full one.
    pub(crate) fn forget_parent(&mut self) {
        self.last = None;
    }

    /// Takes a checkpoint the way the engine does: changed pages only, after the parent.
    pub(crate) fn checkpoint(&mut self, repo: &mut Repository) -> Result<CheckpointId, RepoError> {
        self.checkpoint_at(repo, Timestamp::now())
    }

    pub(crate) fn checkpoint_at(
        &mut self,
        repo: &mut Repository,
        time: Timestamp,
    ) -> Result<CheckpointId, RepoError> {
        let mut writer = repo.begin(WAIT)?;
        // Under the lock: no process can forget it now.
        let parent = match &self.last {
            Some(last) if writer.has_manifest(&last.id)? => Some(last),
            _ => None,
        };
        let manifest = self.write(&mut writer, parent, time)?;
        let table = manifest.ram[0].clone();
        let committed = writer.commit(manifest)?;
        let images = repo.manifest(&committed.id)?.images;
        self.last = Some(Last {
            id: committed.id,
            table,
            images,
            pages: self.pages.clone(),
        });
        self.dirty.clear();
        Ok(committed.id)
    }

    /// Writes everything but the commit.
    pub(crate) fn write(
        &self,
        writer: &mut Writer<'_>,
        parent: Option<&Last>,
        time: Timestamp,
    ) -> Result<Manifest, RepoError> {
        let pages = self.pages.len() as u64;
        let mut memory = match parent {
            Some(last) => PageTableBuilder::after(&last.table),
            None => PageTableBuilder::new(pages),
        };
        let captured: Vec<u64> = match parent {
            Some(_) => self.dirty.iter().copied().collect(),
            None => (0..pages).collect(),
        };
        let mut encoder = DeltaEncoder::new(1)?;
        for page in captured {
            let bytes = &self.pages[page as usize];
            if let Some(last) = parent {
                let old = &last.pages[page as usize];
                let versions = [old, bytes].map(|page| page.as_slice().try_into().unwrap());
                if encoder.add(page as u32, versions, PAGE / 2) != Added::TooMuch {
                    continue;
                }
            }
            let content = match is_zero(bytes) {
                true => PageRef::Zero,
                false => PageRef::Stored(writer.put_unnamed(bytes)?),
            };
            memory.set(page, content);
        }
        memory.add_delta(writer, encoder.finish()?)?;
        let written = memory.finish(writer)?;
        let stream = writer.put_whole_stream(&self.device_state)?;
        let ram = BlockTable {
            name: "pc.ram".into(),
            page_bytes: PAGE as u32,
            pages,
            root: written.root,
            layers: written.layers,
        };
        Ok(Manifest {
            vm: self.label.clone(),
            time,
            parent: parent.map(|last| last.id),
            tags: self.tags.clone(),
            note: self.note.clone(),
            ram: vec![ram],
            disks: Vec::new(),
            images: parent.map_or_else(BTreeSet::new, |last| last.images.clone()),
            streams: BTreeMap::from([("device-state".to_owned(), stream)]),
            pages: PageCounts::default(),
            bytes_stored: 0,
            vm_record: serde_json::json!({"label": self.label}),
            downtime_us: serde_json::json!({"total_us": 812}),
        })
    }

    /// Whether a checkpoint has exactly the memory of this VM; the error describes any other failure.
    pub(crate) fn compare(
        &self,
        repo: &mut Repository,
        id: &CheckpointId,
    ) -> Result<bool, RepoError> {
        let manifest = repo.manifest(id)?;
        let reader = repo.reader(WAIT)?;
        let state = reader.read_stream(&manifest.streams["device-state"], 1 << 20)?;
        let map = PageMap::read(&reader, &manifest.ram[0])?;
        let same = state == self.device_state && map.pages() == self.pages.len() as u64;
        let seen = Mutex::new(BTreeSet::new());
        let wrong = AtomicBool::new(!same);
        map.read_pages(0..map.pages(), 2, &|first, bytes| {
            for (page, bytes) in (first..).zip(bytes.chunks(PAGE)) {
                if self.pages[page as usize] != bytes || !seen.lock().unwrap().insert(page) {
                    wrong.store(true, Ordering::Relaxed);
                }
            }
            Ok::<(), RepoError>(())
        })?;
        Ok(!wrong.into_inner() && seen.into_inner().unwrap().len() == self.pages.len())
    }
}

/// Reads every page of a checkpoint by itself, in any order, with up to `reach` neighbours on each side, and
/// compares it, in both orders of reading. Returns how many neighbours were read.
pub(crate) fn compare_one_by_one(
    vm: &Vm,
    repo: &mut Repository,
    id: &CheckpointId,
    dice: &mut Dice,
    reach: u64,
) -> u64 {
    let manifest = repo.manifest(id).unwrap();
    let reader = repo.reader(WAIT).unwrap();
    let map = PageMap::open(&reader, &manifest.ram[0]).unwrap();
    let mut pages = PageReader::new(&reader).unwrap();
    let mut came_along = 0;
    for _ in 0..map.pages() {
        let page = dice.below(map.pages());
        let near = page.saturating_sub(reach)..map.pages().min(page + reach + 1);
        let near: Vec<u64> = near.filter(|&other| other != page).collect();
        let mut seen = Vec::new();
        let mut compare = |first: u64, bytes: &[u8]| {
            for (at, bytes) in (first..).zip(bytes.chunks(PAGE)) {
                assert_eq!(vm.pages[at as usize], bytes, "page {at}, with {page}");
                seen.push(at);
            }
            Ok::<(), RepoError>(())
        };
        let order = match dice.below(2) {
            0 => ReadOrder::Ascending,
            _ => ReadOrder::RequestedFirst,
        };
        let request = PageRequest {
            page,
            neighbours: &near,
            order,
        };
        pages.read(&map, request, &mut compare).unwrap();
        if order == ReadOrder::Ascending {
            assert!(seen.is_sorted_by(|one, next| one < next));
            // The same pages in the other order.
            let mut first = Vec::new();
            let mut note = |from: u64, bytes: &[u8]| {
                first.extend(from..from + (bytes.len() / PAGE) as u64);
                Ok::<(), RepoError>(())
            };
            let order = ReadOrder::RequestedFirst;
            pages
                .read(&map, PageRequest { order, ..request }, &mut note)
                .unwrap();
            first.sort_unstable();
            assert_eq!(first, seen);
            seen.retain(|&other| other != page);
            seen.insert(0, page);
        }
        assert_eq!(seen[0], page);
        assert!(seen[1..].iter().all(|other| near.contains(other)));
        // Deltas may yield zeros, too.
        assert!(!map.is_zero(page).unwrap() || is_zero(&vm.pages[page as usize]));
        came_along += seen.len() as u64 - 1;
    }
    came_along
}

/// A request to forget all but the last `count` checkpoints of each VM.
pub(crate) fn keep_last(count: u32) -> Forget {
    Forget {
        policy: KeepPolicy {
            last: count,
            ..KeepPolicy::default()
        },
        ..Forget::default()
    }
}

/// A request to forget these checkpoints.
pub(crate) fn forget_ids(ids: Vec<CheckpointId>) -> Forget {
    Forget {
        ids,
        ..Forget::default()
    }
}

/// Copies a folder and everything in it.
pub(crate) fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_tree(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// A folder for one test, in memory if possible: thousands of fsyncs are not what is tested.
pub(crate) fn test_dir() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}
