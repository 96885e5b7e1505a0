//! Lookups in the on-demand index against the index that has everything in memory, and against damage.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use stillframe_page::hash::ContentId;

use super::support::{Dice, Vm, WAIT, init, keep_last, open, test_dir};
use crate::crypto::Nonce;
use crate::format::file_hash::FileHash;
use crate::index::file::{FRONT_BYTES, IndexFile, OpenIndex, head_bytes, read_index_file};
use crate::index::in_memory::Index;
use crate::index::on_demand::OnDemandIndex;
use crate::index::writer_index::WriterIndex;
use crate::pack::IndexedPack;
use crate::pack::place::Place;
use crate::pack::place::Wanted;
use crate::pack::{Directory, Frame, PREAMBLE_BYTES};
use crate::store::local::Area;
use crate::{CheckpointId, ErrorClass, RepoError, Repository};

/// Everything that the index files contain, live or superseded, read without the index.
pub(super) fn described(
    repo: &Repository,
) -> HashMap<ContentId, BTreeSet<(FileHash, u32, u32, u32)>> {
    let mut described: HashMap<_, BTreeSet<_>> = HashMap::new();
    for name in repo.store.names(Area::Index).unwrap() {
        let name = FileHash::from_name(&name).unwrap();
        for entry in read_index_file(&repo.store, &repo.keys, name)
            .unwrap()
            .0
            .packs
        {
            for (number, frame) in (0..).zip(&entry.directory.frames) {
                let mut offset = 0;
                for &(id, bytes) in &frame.blobs {
                    let place = (entry.pack, number, offset, bytes);
                    described.entry(id).or_default().insert(place);
                    offset += bytes;
                }
            }
        }
    }
    described
}

fn on_demand(repo: &Repository) -> OnDemandIndex {
    OnDemandIndex::open(&repo.images).unwrap()
}

/// For each blob in any index file, and some in none, the sections and the loaded index give the same result.
fn compare(repo: &Repository, dice: &mut Dice) {
    let mut index = Index::default();
    index.refresh(&repo.store, &repo.keys).unwrap();
    let described = described(repo);
    let mut ids: Vec<ContentId> = described.keys().copied().collect();
    ids.extend((0..20).map(|_| ContentId(dice.bytes(32).try_into().unwrap())));
    ids.sort_by_cached_key(|_| dice.next());
    let (one_by_one, together) = (on_demand(repo), on_demand(repo));
    let mut there = Vec::new();
    for &id in &ids {
        let found = one_by_one.get(&id).unwrap();
        assert_eq!(found.is_some(), index.place(&id).is_some());
        assert_eq!(found.is_some_and(|found| found.whole), index.contains(&id));
        if let Some(found) = found {
            compare_place(&one_by_one, found.place, &index, &described[&id]);
            there.push(Wanted {
                at: Place::default(),
                id,
                tag: (),
            });
        }
    }
    together.find_all(&mut there).unwrap();
    for wanted in &there {
        compare_place(&together, wanted.at, &index, &described[&wanted.id]);
        let pack = index
            .pack_number(&together.pack_name(wanted.at.pack))
            .unwrap();
        let missing = index.packs()[pack as usize].missing;
        assert_eq!(!missing, index.contains(&wanted.id));
    }
    there.extend(ids.iter().rev().map(|&id| Wanted {
        at: Place::default(),
        id,
        tag: (),
    }));
    let error = together.find_all(&mut there).unwrap_err();
    assert!(matches!(error, RepoError::MissingBlob { .. }), "{error}");
}

/// A location is one of those in the files, with the frame that the loaded index has.
fn compare_place(
    on_demand: &OnDemandIndex,
    place: Place,
    index: &Index,
    described: &BTreeSet<(FileHash, u32, u32, u32)>,
) {
    let name = on_demand.pack_name(place.pack);
    assert!(described.contains(&(name, place.frame, place.offset, place.bytes)));
    let pack = index.pack_number(&name).unwrap();
    let frame = index.frames_of(pack).nth(place.frame as usize);
    assert_eq!(frame, Some(place.info));
}

/// Creates an index file, with packs of the right length except those that are `missing`.
pub(super) fn put_index_file(
    repo: &Repository,
    file: &IndexFile,
    missing: impl Fn(FileHash) -> bool,
) -> FileHash {
    for entry in &file.packs {
        let path = repo.store.path(Area::Packs, &entry.pack.to_string());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        if !missing(entry.pack) {
            let pack = fs::File::create(path).unwrap();
            pack.set_len(entry.directory.file_bytes()).unwrap();
        }
    }
    let sealed = file.seal(&repo.keys).unwrap();
    let name = FileHash::of(&sealed);
    repo.store
        .create(Area::Index, &name.to_string(), &sealed)
        .unwrap();
    name
}

/// A directory of these blobs, some of which are listed twice.
pub(super) fn directory(dice: &mut Dice, ids: u64, frames: u64) -> Directory {
    let mut frame = || {
        let blobs: Vec<(ContentId, u32)> = (0..1 + dice.below(24))
            .map(|_| {
                let id = *blake3::hash(&dice.below(ids).to_le_bytes()).as_bytes();
                let bytes = match dice.below(5) {
                    0 => 1 + dice.below(9000) as u32,
                    _ => 4096,
                };
                (ContentId(id), bytes)
            })
            .collect();
        let plain_bytes = blobs.iter().map(|(_, bytes)| bytes).sum();
        Frame {
            kind: dice.below(4) as u8,
            stored_bytes: 16 + dice.below(u64::from(plain_bytes)) as u32,
            plain_bytes,
            blobs,
        }
    };
    Directory {
        image: None,
        frames: (0..frames).map(|_| frame()).collect(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Files of made-up packs, some of them missing, some described twice, some files superseded.
    #[test]
    fn sections_and_the_loaded_index_agree(seed: u64, files in 0..9_u64, ids in 1..4000_u64) {
        let mut dice = Dice(seed);
        let dir = test_dir();
        let repo = init(dir.path());
        let mut names = Vec::new();
        for number in 0..files {
            let mut file = IndexFile::default();
            if dice.below(3) == 0 {
                file.supersedes.extend(names.pop());
            }
            for pack in 0..dice.below(4) {
                // Sometimes a pack that another file describes.
                let name = FileHash::of(&[pack as u8, dice.below(number + 1) as u8]);
                // The same in every description.
                let frames = u64::from(name.0[1]) / 4;
                let directory = directory(&mut Dice(name.0[0].into()), ids, frames);
                file.packs.push(IndexedPack { pack: name, directory });
            }
            names.push(put_index_file(&repo, &file, |name| name.0[2] % 4 == 0));
        }
        compare(&repo, &mut dice);
    }
}

/// More sections and parts than are looked up one by one.
#[test]
fn many_blobs_of_a_large_index_are_looked_up_together() {
    let mut dice = Dice(11);
    let dir = test_dir();
    let repo = init(dir.path());
    for file in 0..3_u8 {
        let packs = (0..3_u8).map(|pack| IndexedPack {
            pack: FileHash::of(&[file, pack]),
            directory: directory(&mut dice, 30_000, 300),
        });
        let file = IndexFile {
            supersedes: Vec::new(),
            packs: packs.collect(),
        };
        put_index_file(&repo, &file, |name| name.0[0] % 5 == 0);
    }
    compare(&repo, &mut dice);
}

/// With checkpoints, merges of index files, forgetting, pruning and rebuilding.
#[test]
fn the_sections_are_right_after_every_change_of_an_index() {
    let mut dice = Dice(4);
    let dir = test_dir();
    let mut vm = Vm::new("vm", 600);
    let mut repo = init(dir.path());
    let mut taken: BTreeMap<CheckpointId, Vm> = BTreeMap::new();
    let mut writer_index = WriterIndex::new(&repo.images);
    for round in 0..90 {
        vm.run(&mut dice, if round == 0 { 500 } else { 7 });
        taken.insert(vm.checkpoint(&mut repo).unwrap(), vm.clone());
        match round {
            30 | 70 => {
                let what = keep_last(5);
                repo.forget(&what).unwrap();
                repo.prune(false, &mut |_| {}).unwrap();
            }
            50 => drop(repo.rebuild_index(&mut |_| {}).unwrap()),
            _ => {}
        }
        if round % 10 == 0 || round == 51 {
            compare(&repo, &mut dice);
            writer_index.refresh().unwrap();
            super::writer_index::compare(&repo, &writer_index, &mut dice);
            let mut reopened = open(dir.path());
            assert!(
                vm.compare(
                    &mut reopened,
                    taken.iter().find(|(_, then)| **then == vm).unwrap().0
                )
                .unwrap()
            );
        }
    }
    let mut repo = open(dir.path());
    for (id, then) in &taken {
        if repo.has_manifest(id).unwrap() {
            assert!(then.compare(&mut repo, id).unwrap());
        }
    }
    assert!(repo.check(true, &mut |_| {}).unwrap().is_clean());
}

fn index_files(dir: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(dir.join("index")).unwrap();
    files.map(|file| file.unwrap().path()).collect()
}

/// A repository with an index of one file of several parts and sections.
fn one_index_file(dir: &Path) -> (CheckpointId, Vm) {
    let mut repo = init(dir);
    let mut vm = Vm::new("vm", 3000);
    vm.run(&mut Dice(6), 6000);
    let id = vm.checkpoint(&mut repo).unwrap();
    repo.rebuild_index(&mut |_| {}).unwrap();
    (id, vm)
}

fn open_index(repo: &Repository, file: &[u8]) -> OpenIndex {
    let head = head_bytes(file).unwrap();
    let mut front = file[..FRONT_BYTES + head].to_vec();
    OpenIndex::new(&repo.keys, &mut front, file.len() as u64).unwrap()
}

/// In every part and section, and in the head: a read that meets a flipped byte reports the file, any other
/// returns the right bytes.
#[test]
fn a_flipped_byte_is_an_error_that_names_the_file() {
    let dir = test_dir();
    let (id, vm) = one_index_file(dir.path());
    let path = index_files(dir.path()).pop().unwrap();
    let good = fs::read(&path).unwrap();
    let head = head_bytes(&good).unwrap();
    let index = open_index(&open(dir.path()), &good);
    let (parts, sections) = (index.head.parts.len(), index.head.sections.len());
    assert!(parts > 4 && sections > 1, "{parts} {sections}");
    let mut starts: Vec<usize> = vec![0, 9, 20, 48, FRONT_BYTES, FRONT_BYTES + head - 1];
    let parts = (0..parts as u32).map(|part| index.part(part).unwrap());
    let sections = (0..sections as u32).map(|section| index.section(section));
    for range in parts.chain(sections) {
        starts.extend(
            [range.start, range.start.midpoint(range.end), range.end - 1].map(|at| at as usize),
        );
    }
    let name = format!("index/{}", path.file_name().unwrap().display());
    let mut met = 0;
    for &at in &starts {
        let mut bad = good.clone();
        bad[at] ^= 4;
        fs::write(&path, bad).unwrap();
        let mut repo = open(dir.path());
        match vm.compare(&mut repo, &id) {
            Ok(same) => assert!(same, "byte {at}: wrong pages"),
            Err(error) => {
                assert!(error.to_string().contains(&name), "byte {at}: {error}");
                assert_eq!(error.class(), ErrorClass::Damaged, "byte {at}: {error}");
                met += 1;
            }
        }
        let found = repo.check(false, &mut |_| {}).unwrap().problems;
        assert!(
            found.iter().any(|problem| problem.file == name),
            "byte {at}"
        );
    }
    // All pages of a VM need every part, but only some sections.
    assert!(met > starts.len() / 2, "{met} of {}", starts.len());
    // A file that is cut short or extended is refused at once.
    for bytes in [&good[..good.len() - 1], &[&good[..], b"x"].concat()] {
        fs::write(&path, bytes).unwrap();
        let error = open(dir.path()).reader(WAIT).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains(&name), "{error}");
    }
    fs::write(&path, good).unwrap();
    assert!(vm.compare(&mut open(dir.path()), &id).unwrap());
}

/// A part is bound to its number: another part in its place is refused.
#[test]
fn swapped_parts_are_an_error() {
    let dir = test_dir();
    let (id, vm) = one_index_file(dir.path());
    let path = index_files(dir.path()).pop().unwrap();
    let mut file = fs::read(&path).unwrap();
    let index = open_index(&open(dir.path()), &file);
    let count = index.head.parts.len() as u32;
    let alike = |&(a, b): &(u32, u32)| {
        a < b && index.part(a).unwrap().len() == index.part(b).unwrap().len()
    };
    let pairs = (0..count).flat_map(|a| (0..count).map(move |b| (a, b)));
    let (a, b) = { pairs }.find(alike).unwrap();
    let [a, b] = [a, b].map(|part| index.part(part).unwrap());
    let [a, b] = [a, b].map(|range| range.start as usize..range.end as usize);
    let first = file[a.clone()].to_vec();
    file.copy_within(b.clone(), a.start);
    file[b].copy_from_slice(&first);
    fs::remove_file(&path).unwrap();
    let name = FileHash::of(&file).to_string();
    fs::write(path.with_file_name(&name), &file).unwrap();
    let error = vm.compare(&mut open(dir.path()), &id).unwrap_err();
    assert!(error.to_string().contains(&name), "{error}");
    let found = open(dir.path()).check(false, &mut |_| {}).unwrap().problems;
    assert!(found.iter().any(|problem| problem.file.ends_with(&name)));
}

/// Sections that are sealed correctly but have wrong contents, as a faulty program writes them.
#[test]
fn sections_that_leave_blobs_out_are_found_by_check() {
    let dir = test_dir();
    let (_, vm) = one_index_file(dir.path());
    let repo = open(dir.path());
    let path = index_files(dir.path()).pop().unwrap();
    let mut file = fs::read(&path).unwrap();
    let index = open_index(&repo, &file);
    let range = index.section(0);
    let range = range.start as usize..range.end as usize;
    let cipher = repo
        .keys
        .index_cipher(&file[16..PREAMBLE_BYTES].try_into().unwrap());
    let bound = file[..PREAMBLE_BYTES].to_vec();
    let mut plain = cipher
        .open(Nonce::Section(0), &bound, &mut file[range.clone()])
        .unwrap()
        .to_vec();
    let last = plain.len() - 8;
    plain.copy_within(last - 8..last - 4, last);
    plain[last + 4..].copy_from_slice(&u32::MAX.to_le_bytes());
    cipher.seal(Nonce::Section(0), &bound, &mut plain, 0);
    file[range].copy_from_slice(&plain);
    fs::remove_file(&path).unwrap();
    fs::write(path.with_file_name(FileHash::of(&file).to_string()), &file).unwrap();
    let mut repo = open(dir.path());
    let found = repo.check(false, &mut |_| {}).unwrap().problems;
    assert!(
        found.len() == 1 && found[0].what.contains("sections"),
        "{found:?}"
    );
    repo.rebuild_index(&mut |_| {}).unwrap();
    assert!(repo.check(true, &mut |_| {}).unwrap().is_clean());
    drop(vm);
}

/// Another process merges index files while this one reads.
#[test]
fn index_files_that_were_removed_meanwhile_can_still_be_read() {
    let dir = test_dir();
    let (id, _) = one_index_file(dir.path());
    let mut repo = open(dir.path());
    let manifest = repo.manifest(&id).unwrap();
    let reader = repo.reader(WAIT).unwrap();
    for file in index_files(dir.path()) {
        fs::remove_file(file).unwrap();
    }
    let map = crate::PageMap::read(&reader, &manifest.ram[0]).unwrap();
    map.read_pages(0..map.pages(), 2, &|_, _| Ok::<(), RepoError>(()))
        .unwrap();
}
