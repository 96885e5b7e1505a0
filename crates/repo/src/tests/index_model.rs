//! The compact index against its slow reference model, a plain map with everything in it.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use stillframe_page::hash::ContentId;

use super::support::{Dice, Vm, WAIT, init, test_dir};
use crate::ErrorClass;
use crate::format::file_hash::FileHash;
use crate::index::file::IndexFile;
use crate::index::in_memory::Index;
use crate::index::mark_bitmaps::Mark;
use crate::pack::IndexedPack;
use crate::pack::{Directory, Frame, PREAMBLE_BYTES};

/// The location of a blob: pack, frame, offset and length.
type Place = (FileHash, u32, u32, u32);

/// The slow reference model of the index.
#[derive(Default)]
struct Model {
    blobs: HashMap<ContentId, Place>,
    missing: HashSet<FileHash>,
    packs: HashMap<FileHash, Directory>,
    marks: HashSet<(ContentId, bool)>,
}

impl Model {
    fn add(&mut self, name: FileHash, directory: Directory) {
        if self.packs.contains_key(&name) {
            return;
        }
        for (number, frame) in (0..).zip(&directory.frames) {
            let mut offset = 0;
            for &(id, bytes) in &frame.blobs {
                let place = (name, number, offset, bytes);
                let known = self.blobs.entry(id).or_insert(place);
                let known_pack = known.0;
                if self.missing.contains(&known_pack) && !self.missing.contains(&name) {
                    *known = place;
                }
                offset += bytes;
            }
        }
        self.packs.insert(name, directory);
    }

    fn compare(&self, index: &Index, ids: impl Iterator<Item = ContentId>) {
        for id in ids {
            let found = index.get(&id).map(|at| place(index, at));
            assert_eq!(found, self.blobs.get(&id).copied());
            let there = found.is_some_and(|(pack, ..)| !self.missing.contains(&pack));
            assert_eq!(index.contains(&id), there);
            if let Some(at) = index.get(&id) {
                assert_eq!(index.has(at, Mark::Used), self.marks.contains(&(id, false)));
                assert_eq!(
                    index.has(at, Mark::Walked),
                    self.marks.contains(&(id, true))
                );
            }
        }
        let locations: Vec<_> = index.locations().collect();
        assert!(locations.is_sorted_by(|a, b| a.blob < b.blob));
        assert_eq!(index.blobs(), self.blobs.len() as u64);
        let all: HashSet<Place> = locations.iter().map(|&at| place(index, at)).collect();
        assert_eq!(all, self.blobs.values().copied().collect());
        assert_eq!(locations.len(), all.len());
        self.compare_packs(index);
    }

    fn compare_packs(&self, index: &Index) {
        assert_eq!(index.packs().len(), self.packs.len());
        let mut frames = 0;
        for (number, pack) in (0..).zip(index.packs()) {
            assert_eq!(index.pack_number(&pack.name), Some(number));
            let directory = &self.packs[&pack.name];
            assert_eq!(pack.file_bytes, directory.file_bytes());
            let mut offset = PREAMBLE_BYTES as u32;
            let mut known = index.frames_of(number);
            for frame in &directory.frames {
                let info = known.next().unwrap();
                let lengths = (info.stored_bytes, info.plain_bytes);
                assert_eq!(lengths, (frame.stored_bytes, frame.plain_bytes));
                assert_eq!((info.kind, info.offset), (frame.kind, offset));
                offset += frame.stored_bytes;
                frames += 1;
            }
            assert!(known.next().is_none());
        }
        assert_eq!(index.frames(), frames);
        assert_eq!(index.pack_number(&FileHash([0xee; 32])), None);
    }
}

fn place(index: &Index, at: crate::index::locations::Location) -> Place {
    let (pack, _) = index.frame(at);
    assert_eq!(
        index.packs()[index.pack_of(at) as usize].name.0,
        pack.name.0
    );
    (pack.name, pack.frame_number(at), at.offset, at.bytes)
}

fn id(number: u64) -> ContentId {
    ContentId(*blake3::hash(&number.to_le_bytes()).as_bytes())
}

fn name(number: u8) -> FileHash {
    FileHash::of(&[number])
}

fn directory(frames: Vec<Vec<(u64, u32)>>, kind: u8) -> Directory {
    let frame = |blobs: Vec<(u64, u32)>| {
        let plain_bytes = blobs.iter().map(|(_, bytes)| bytes).sum();
        Frame {
            kind,
            stored_bytes: plain_bytes / 3 + 16,
            plain_bytes,
            blobs: blobs.into_iter().map(|(n, bytes)| (id(n), bytes)).collect(),
        }
    };
    Directory {
        image: None,
        frames: frames.into_iter().map(frame).collect(),
    }
}

fn index_file(name: FileHash, directory: &Directory) -> IndexFile {
    IndexFile {
        supersedes: Vec::new(),
        packs: vec![IndexedPack {
            pack: name,
            directory: directory.clone(),
        }],
    }
}

/// Number of different blobs: few, so that blobs occur several times.
const IDS: u64 = 300;

#[derive(Debug, Clone)]
enum Step {
    Add {
        pack: u8,
        missing: bool,
        kind: u8,
        frames: Vec<Vec<(u64, u32)>>,
    },
    Mark(u64, bool),
    ClearMarks,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![6 => Just(4096_u32), 1 => 1..9000_u32];
    let frames = prop::collection::vec(prop::collection::vec((0..IDS, bytes), 1..24), 0..12);
    let add = (0..24_u8, prop::bool::weighted(0.3), 0..4_u8, frames);
    let add = add.prop_map(|(pack, missing, kind, frames)| Step::Add {
        pack,
        missing,
        kind,
        frames,
    });
    let mark = (0..IDS, any::<bool>()).prop_map(|(id, walked)| Step::Mark(id, walked));
    prop::collection::vec(
        prop_oneof![2 => add, 4 => mark, 1 => Just(Step::ClearMarks)],
        1..24,
    )
}

proptest! {
    #[test]
    fn the_index_agrees_with_the_reference_model(steps in steps()) {
        let (mut index, mut model) = (Index::default(), Model::default());
        for (number, step) in (0..).zip(steps) {
            match step {
                Step::Add { pack, missing, kind, frames } => {
                    let (name, directory) = (name(pack), directory(frames, kind));
                    if missing && !model.packs.contains_key(&name) {
                        index.lose(name);
                        model.missing.insert(name);
                    }
                    let file = FileHash([number; 32]);
                    index.add_file(file, &index_file(name, &directory), 100).unwrap();
                    model.marks.clear();
                    index.clear_marks();
                    model.add(name, directory);
                }
                Step::Mark(number, walked) => {
                    let mark = if walked { Mark::Walked } else { Mark::Used };
                    let marked = index.mark(&id(number), mark);
                    prop_assert_eq!(marked.is_some(), model.blobs.contains_key(&id(number)));
                    if let Some((at, new)) = marked {
                        prop_assert_eq!(Some(at), index.get(&id(number)));
                        prop_assert_eq!(new, model.marks.insert((id(number), walked)));
                    }
                }
                Step::ClearMarks => {
                    index.clear_marks();
                    model.marks.clear();
                }
            }
        }
        model.compare(&index, (0..IDS + 10).map(id));
    }
}

#[test]
fn a_large_index_agrees_with_the_reference_model() {
    let (mut index, mut model) = (Index::default(), Model::default());
    let mut dice = Dice(5);
    for pack in 0..20 {
        // Some of them are repeated, some have another length than a page.
        let blob = |dice: &mut Dice| match dice.below(30) {
            0 => (dice.below(30_000), 1 + dice.below(20_000) as u32),
            _ => (dice.below(30_000), 4096),
        };
        let mut frames = Vec::new();
        for _ in 0..100 {
            let blobs = 1 + dice.below(32);
            frames.push((0..blobs).map(|_| blob(&mut dice)).collect());
        }
        let (name, directory) = (name(pack), directory(frames, 2));
        let file = FileHash([pack; 32]);
        index
            .add_file(file, &index_file(name, &directory), 100)
            .unwrap();
        model.add(name, directory);
    }
    model.compare(&index, (0..30_000).map(id));
}

/// The index compares half of an id; a read of a blob compares all of it.
#[test]
fn an_id_that_begins_like_another_is_an_error() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 8);
    vm.run(&mut Dice(2), 8);
    let checkpoint = vm.checkpoint(&mut repo).unwrap();
    let known = repo.manifest(&checkpoint).unwrap().ram[0].root;
    repo.refresh_index().unwrap();
    let blobs = repo.blobs();
    assert!(repo.index.contains(&known) && blobs.read(&known).is_ok());
    let (mut alike, mut other) = (known, known);
    alike.0[31] ^= 1;
    other.0[15] ^= 1;
    assert!(repo.index.contains(&alike) && !repo.index.contains(&other));
    let error = blobs.read(&alike).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Damaged, "{error}");
    // Also if both are read together.
    assert!(blobs.read_many(&[known, alike]).is_err());
    assert!(blobs.read_many(&[alike, known]).is_err());
    // A reader and a writer compare all of it.
    assert!(!repo.reader(WAIT).unwrap().contains(&alike).unwrap());
    let writer = repo.begin(WAIT).unwrap();
    assert!(writer.contains(&known).unwrap() && !writer.contains(&alike).unwrap());
}
