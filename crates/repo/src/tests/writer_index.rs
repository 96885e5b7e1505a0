//! The writer's index against the in-memory index: it finds every duplicate, and no other blob.

use std::collections::BTreeSet;
use std::fs;

use proptest::prelude::*;
use stillframe_page::hash::ContentId;

use super::on_demand::{described, directory, put_index_file};
use super::support::{Dice, init, test_dir};
use crate::Repository;
use crate::format::file_hash::FileHash;
use crate::index::file::{IndexFile, read_index_file};
use crate::index::in_memory::Index;
use crate::index::writer_index::WriterIndex;
use crate::pack::IndexedPack;
use crate::pack::place::{Place, Wanted};
use crate::store::local::Area;

/// For each blob in any index file, for ids that differ from them in the last byte, and for others.
pub(super) fn compare(repo: &Repository, writer_index: &WriterIndex, dice: &mut Dice) {
    let mut index = Index::default();
    index.refresh(&repo.store, &repo.keys).unwrap();
    let described = described(repo);
    let mut ids: Vec<ContentId> = described.keys().copied().collect();
    let alike = ids.iter().map(|id| {
        let mut alike = *id;
        alike.0[31] ^= 1;
        alike
    });
    ids = ids.iter().copied().chain(alike).collect();
    ids.extend((0..20).map(|_| ContentId(dice.bytes(32).try_into().unwrap())));
    ids.sort_by_cached_key(|_| dice.next());
    let mut there = Vec::new();
    for &id in &ids {
        let known = described.get(&id);
        // The in-memory index compares half of an id.
        let whole = known.is_some() && index.contains(&id);
        assert_eq!(writer_index.contains(&id).unwrap(), whole);
        let found = writer_index.get(&id).unwrap();
        assert_eq!(
            found.is_some(),
            known.is_some() && index.place(&id).is_some()
        );
        let (Some(found), Some(known)) = (found, known) else {
            continue;
        };
        let name = writer_index.pack_name(found.place.pack);
        let Place {
            frame,
            offset,
            bytes,
            ..
        } = found.place;
        assert!(known.contains(&(name, frame, offset, bytes)));
        let pack = index.pack_number(&name).unwrap();
        assert_eq!(index.packs()[pack as usize].missing, !found.whole);
        there.push(Wanted {
            at: Place::default(),
            id,
            tag: found.place,
        });
    }
    writer_index.find_all(&mut there).unwrap();
    assert!(there.iter().all(|wanted| wanted.at.bytes > 0));
    let missing: BTreeSet<FileHash> = index
        .packs()
        .iter()
        .filter(|pack| pack.missing)
        .map(|pack| pack.name)
        .collect();
    assert_eq!(writer_index.missing_packs(), &missing);
}

#[derive(Debug, Clone, Copy)]
enum Step {
    /// A file of packs, some of which are new.
    Add,
    /// A file in place of others, with the packs of these, and perhaps a new one.
    Merge,
    /// As `Merge`, of all files; some packs are left out and removed.
    Prune,
    RemoveSuperseded,
    LosePack,
    ReturnPack,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => Just(Step::Add),
        3 => Just(Step::Merge),
        1 => Just(Step::Prune),
        2 => Just(Step::RemoveSuperseded),
        1 => Just(Step::LosePack),
        1 => Just(Step::ReturnPack),
    ]
}

/// Changes a repository as writers and prunes do.
struct Scene {
    repo: Repository,
    dice: Dice,
    ids: u64,
    packs: u64,
    live: Vec<FileHash>,
    superseded: Vec<FileHash>,
    lost: BTreeSet<FileHash>,
}

impl Scene {
    fn new_pack(&mut self) -> IndexedPack {
        self.packs += 1;
        let frames = self.dice.below(60);
        IndexedPack {
            pack: FileHash::of(&self.packs.to_le_bytes()),
            directory: directory(&mut self.dice, self.ids, frames),
        }
    }

    fn packs_of(&self, name: FileHash) -> Vec<IndexedPack> {
        let file = read_index_file(&self.repo.store, &self.repo.keys, name);
        file.unwrap().0.packs
    }

    fn create(&mut self, file: &IndexFile) {
        let lost = &self.lost;
        let name = put_index_file(&self.repo, file, |pack| lost.contains(&pack));
        self.live.push(name);
    }

    /// Takes some live files, one at least.
    fn take_live(&mut self, count: u64) -> IndexFile {
        let mut file = IndexFile::default();
        for _ in 0..count.min(self.live.len() as u64) {
            let at = self.dice.below(self.live.len() as u64) as usize;
            let name = self.live.swap_remove(at);
            file.packs.extend(self.packs_of(name));
            file.supersedes.push(name);
        }
        self.superseded.extend(&file.supersedes);
        file
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Add => {
                let mut file = IndexFile::default();
                for _ in 0..self.dice.below(3) {
                    file.packs.push(self.new_pack());
                }
                // As after two writers have merged the same files.
                if self.dice.below(3) == 0 && !self.live.is_empty() {
                    let at = self.dice.below(self.live.len() as u64) as usize;
                    file.packs.extend(self.packs_of(self.live[at]).pop());
                }
                self.create(&file);
            }
            Step::Merge => {
                let count = 1 + self.dice.below(4);
                let mut file = self.take_live(count);
                if self.dice.below(2) == 0 {
                    file.packs.push(self.new_pack());
                }
                self.create(&file);
            }
            Step::Prune => {
                let mut file = self.take_live(u64::MAX);
                let (kept, gone) = file.packs.into_iter().partition(|_| self.dice.below(3) > 0);
                file.packs = kept;
                self.create(&file);
                let kept: BTreeSet<FileHash> = file.packs.iter().map(|entry| entry.pack).collect();
                let gone: Vec<IndexedPack> = gone;
                for entry in gone {
                    if !kept.contains(&entry.pack) {
                        let name = entry.pack.to_string();
                        self.repo.store.remove(Area::Packs, &name).unwrap();
                    }
                }
            }
            Step::RemoveSuperseded => {
                for name in self.superseded.drain(..) {
                    let name = name.to_string();
                    self.repo.store.remove(Area::Index, &name).unwrap();
                }
            }
            Step::LosePack => self.lose_pack(),
            Step::ReturnPack => {
                self.lost.clear();
                for name in self.live.clone() {
                    for entry in self.packs_of(name) {
                        let path = self.repo.store.path(Area::Packs, &entry.pack.to_string());
                        let pack = fs::File::create(path).unwrap();
                        pack.set_len(entry.directory.file_bytes()).unwrap();
                    }
                }
            }
        }
    }

    fn lose_pack(&mut self) {
        let Some(&name) = self.live.first() else {
            return;
        };
        if let Some(entry) = self.packs_of(name).pop() {
            let path = self.repo.store.path(Area::Packs, &entry.pack.to_string());
            let _ = fs::remove_file(path);
            self.lost.insert(entry.pack);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// One index that is refreshed after some steps, and one of each state.
    #[test]
    fn the_writers_index_agrees_with_the_in_memory_index(
        seed: u64,
        steps in prop::collection::vec((step(), any::<bool>()), 1..14),
        ids in 1..4000_u64,
        group_blobs in prop_oneof![Just(1_usize), Just(300), Just(100_000)],
    ) {
        let dir = test_dir();
        let mut scene = Scene {
            repo: init(dir.path()),
            dice: Dice(seed),
            ids,
            packs: 0,
            live: Vec::new(),
            superseded: Vec::new(),
            lost: BTreeSet::new(),
        };
        let new = |repo: &Repository| {
            let mut index = WriterIndex::new(&repo.images);
            index.limit_groups(group_blobs);
            index
        };
        let mut kept = new(&scene.repo);
        for (step, refresh) in steps {
            scene.run(step);
            if refresh {
                kept.refresh().unwrap();
                compare(&scene.repo, &kept, &mut scene.dice);
            }
        }
        kept.refresh().unwrap();
        let mut anew = new(&scene.repo);
        anew.refresh().unwrap();
        for index in [&kept, &anew] {
            compare(&scene.repo, index, &mut scene.dice);
        }
    }
}
