//! Images: their blocks count as blobs of a repository as long as they are as they were indexed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::blob_model::empty_manifest;
use super::support::{
    Dice, PAGE, SMALL_PACKS, Vm, WAIT, copy_tree, forget_ids, init, open, password, test_dir,
};
use crate::{CheckpointId, ImageId, ImageState, Indexed, Put, RepoError, Repository};

/// A repository, an image beside it, and a VM with the blocks of that in its memory.
struct Scene {
    dir: tempfile::TempDir,
    repo: Repository,
    vm: Vm,
}

const BLOCKS: usize = 300;

impl Scene {
    fn new() -> Scene {
        let dir = test_dir();
        let mut dice = Dice(1);
        let mut vm = Vm::new("vm", BLOCKS);
        vm.run(&mut dice, 600);
        let scene = Scene {
            repo: init(&dir.path().join("repo")),
            dir,
            vm,
        };
        fs::write(scene.image(), scene.vm.pages.concat()).unwrap();
        scene
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image.raw")
    }

    fn repo_dir(&self) -> PathBuf {
        self.dir.path().join("repo")
    }

    fn index(&mut self) -> ImageId {
        let image = self.image();
        index(&mut self.repo, &image).image.id
    }

    fn checkpoint(&mut self) -> CheckpointId {
        self.vm.checkpoint(&mut self.repo).unwrap()
    }

    /// Changes a block of the image that is not zero, and its time of change.
    fn spoil(&self) {
        let file = File::options().write(true).open(self.image()).unwrap();
        let block = self.vm.pages.iter().position(|page| page[9] != 0).unwrap();
        let other = [self.vm.pages[block][9] ^ 1];
        file.write_all_at(&other, (block * PAGE) as u64 + 9)
            .unwrap();
        let later = file.metadata().unwrap().modified().unwrap() + WAIT;
        file.set_modified(later).unwrap();
    }

    /// Puts the image back, with the time of change that it had.
    fn restore(&self, id: ImageId) {
        let record = self.repo.image(id).unwrap().record;
        fs::write(self.image(), self.vm.pages.concat()).unwrap();
        let file = File::options().write(true).open(self.image()).unwrap();
        file.set_modified(record.modified.into()).unwrap();
    }

    fn problems(&mut self, read_data: bool) -> Vec<String> {
        let report = self.repo.check(read_data, &mut |_| {}).unwrap();
        report.problems.iter().map(ToString::to_string).collect()
    }
}

fn index(repo: &mut Repository, image: &Path) -> crate::IndexReport {
    repo.index_image(image, WAIT, &mut |_| {}).unwrap()
}

fn pack_bytes(repo: &mut Repository) -> u64 {
    repo.stats().unwrap().pack_bytes
}

/// The pages that a checkpoint stored itself: all that it would store without the image, or none.
#[test]
fn what_an_image_has_is_not_stored() {
    let mut scene = Scene::new();
    let id = scene.index();
    let before = pack_bytes(&mut scene.repo);
    let taken = scene.checkpoint();
    let stored = pack_bytes(&mut scene.repo) - before;
    assert!(
        stored < 60_000,
        "{stored} bytes for a table and 10 kB of device state"
    );
    let manifest = scene.repo.manifest(&taken).unwrap();
    assert_eq!(manifest.images, BTreeSet::from([id]));
    let mut other = open(&scene.repo_dir());
    assert!(scene.vm.compare(&mut other, &taken).unwrap());
    assert_eq!(scene.problems(true), [] as [&str; 0]);
    let stats = scene.repo.stats().unwrap();
    assert_eq!(stats.images, 1);
    assert!(stats.image_blobs > 100, "{stats:?}");
}

#[test]
fn an_image_that_no_checkpoint_needs_is_in_no_manifest() {
    let mut scene = Scene::new();
    let taken = scene.checkpoint();
    scene.index();
    fs::remove_file(scene.image()).unwrap();
    assert!(scene.repo.manifest(&taken).unwrap().images.is_empty());
    // All that it has is in the repository's own packs, which come first.
    assert_eq!(scene.problems(true), [] as [&str; 0]);
    scene.repo.prune(false, &mut |_| {}).unwrap();
    assert!(
        scene
            .vm
            .compare(&mut open(&scene.repo_dir()), &taken)
            .unwrap()
    );
}

#[test]
fn a_changed_image_counts_as_absent_and_is_reported_where_it_is_needed() {
    let mut scene = Scene::new();
    let id = scene.index();
    let taken = scene.checkpoint();
    let vm = scene.vm.clone();
    scene.spoil();
    assert_eq!(scene.repo.image(id).unwrap().state, ImageState::Changed);
    let problems = scene.problems(false).join("\n");
    let path = scene.image().display().to_string();
    assert!(
        problems.contains(&path) && problems.contains("changed since"),
        "{problems}"
    );
    assert!(
        scene.problems(true).len() > 1,
        "the block that differs is named too"
    );
    let error = vm
        .compare(&mut open(&scene.repo_dir()), &taken)
        .unwrap_err();
    assert!(matches!(error, RepoError::Image { .. }), "{error}");
    assert!(error.to_string().contains(&path), "{error}");
    // A full checkpoint stores all that it needs.
    scene.vm.forget_parent();
    let later = scene.checkpoint();
    assert!(scene.repo.manifest(&later).unwrap().images.is_empty());
    let writer = scene.repo.begin(WAIT).unwrap();
    assert_eq!(writer.changed_images().unwrap(), [path]);
    assert!(!writer.has_images(&BTreeSet::from([id])));
    drop(writer);
    assert!(scene.vm.compare(&mut scene.repo, &later).unwrap());
    // And the older checkpoint has become whole with it.
    assert!(vm.compare(&mut open(&scene.repo_dir()), &taken).unwrap());
    scene.restore(id);
    assert_eq!(scene.problems(true), [] as [&str; 0]);
}

#[test]
fn an_image_that_moves_is_found_where_it_is_indexed_again() {
    let mut scene = Scene::new();
    let id = scene.index();
    let taken = scene.checkpoint();
    let packs = pack_bytes(&mut scene.repo);
    let other = scene.dir.path().join("elsewhere.raw");
    fs::rename(scene.image(), &other).unwrap();
    let error = scene
        .vm
        .compare(&mut open(&scene.repo_dir()), &taken)
        .unwrap_err();
    assert!(matches!(error, RepoError::Image { .. }), "{error}");
    assert!(matches!(
        scene.repo.image(id).unwrap().state,
        ImageState::Missing(_)
    ));
    let report = index(&mut scene.repo, &other);
    let from = scene.image().display().to_string();
    assert_eq!(
        (report.found, report.image.id),
        (Indexed::Moved { from }, id)
    );
    assert_eq!(pack_bytes(&mut scene.repo), packs);
    assert!(
        scene
            .vm
            .compare(&mut open(&scene.repo_dir()), &taken)
            .unwrap()
    );
    assert_eq!(index(&mut scene.repo, &other).found, Indexed::Known);
    assert_eq!(scene.problems(true), [] as [&str; 0]);
}

#[test]
fn an_image_that_changes_during_a_checkpoint_ends_it() {
    let mut scene = Scene::new();
    scene.index();
    let vm = scene.vm.clone();
    let mut writer = scene.repo.begin(WAIT).unwrap();
    let manifest = vm.write(&mut writer, None, jiff::Timestamp::now()).unwrap();
    let file = File::options()
        .write(true)
        .open(scene.dir.path().join("image.raw"))
        .unwrap();
    file.set_len(PAGE as u64).unwrap();
    let error = writer.commit(manifest).unwrap_err();
    assert!(matches!(error, RepoError::Image { .. }), "{error}");
    assert!(scene.repo.manifests().unwrap().is_empty());
    let taken = scene.checkpoint();
    assert!(scene.vm.compare(&mut scene.repo, &taken).unwrap());
}

#[test]
fn maintenance_keeps_images_until_they_are_removed() {
    let mut scene = Scene::new();
    let id = scene.index();
    let indexed = pack_bytes(&mut scene.repo);
    scene.repo.prune(false, &mut |_| {}).unwrap();
    assert_eq!(pack_bytes(&mut scene.repo), indexed, "nothing needs it yet");
    let taken = scene.checkpoint();
    let error = scene.repo.remove_image(id).unwrap_err();
    assert!(
        matches!(&error, RepoError::ImageNeeded { checkpoints, .. } if *checkpoints == [taken])
    );
    scene.repo.rebuild_index(&mut |_| {}).unwrap();
    scene.repo.prune(false, &mut |_| {}).unwrap();
    assert!(
        scene
            .vm
            .compare(&mut open(&scene.repo_dir()), &taken)
            .unwrap()
    );
    scene.repo.forget(&forget_ids(vec![taken])).unwrap();
    scene.repo.remove_image(id).unwrap();
    assert!(scene.repo.images().unwrap().is_empty());
    scene.repo.prune(false, &mut |_| {}).unwrap();
    assert_eq!(pack_bytes(&mut scene.repo), 0);
    assert!(scene.image().exists());
    assert_eq!(scene.problems(true), [] as [&str; 0]);
}

/// As a prune of a repository whose folder `images` was lost in a copy.
#[test]
fn a_needed_image_without_its_record_stops_a_prune() {
    let mut scene = Scene::new();
    let id = scene.index();
    scene.checkpoint();
    fs::remove_file(scene.repo_dir().join(format!("images/{id}"))).unwrap();
    let error = scene.repo.prune(false, &mut |_| {}).unwrap_err();
    assert!(
        error.to_string().contains(&format!("images/{id}")),
        "{error}"
    );
    let problems = scene.problems(false).join("\n");
    assert!(problems.contains(&format!("images/{id}")), "{problems}");
}

#[test]
fn a_copy_has_the_content_itself() {
    let mut scene = Scene::new();
    scene.index();
    let taken = scene.checkpoint();
    let mut target = init(&scene.dir.path().join("target"));
    let mut copies = crate::Copies::default();
    let copied = scene
        .repo
        .copy_to(&taken, &mut target, &mut copies, WAIT, &mut |_| {})
        .unwrap();
    fs::remove_file(scene.image()).unwrap();
    assert!(target.manifest(&copied.id).unwrap().images.is_empty());
    assert!(scene.vm.compare(&mut target, &copied.id).unwrap());
}

/// Content of an image, of a checkpoint, and of neither, with and without either kind of sharing.
#[test]
fn a_writer_finds_content_where_it_may() {
    for (ignores_images, again) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut scene = Scene::new();
        let image = scene.index();
        let own = Dice(7).bytes(PAGE);
        let mut writer = scene.repo.begin(WAIT).unwrap();
        writer.put_unnamed(&own).unwrap();
        writer.commit(empty_manifest()).unwrap();
        let of_image = scene.vm.pages.iter().find(|page| page[9] != 0).unwrap();
        let mut writer = scene.repo.begin(WAIT).unwrap();
        if ignores_images {
            writer.ignore_images();
        }
        let puts = [of_image.clone(), own, Dice(8).bytes(PAGE)].map(|page| {
            let id = writer.hasher().id(&page);
            match again {
                true => writer.put_again(id, &page).unwrap(),
                false => writer.put(id, &page).unwrap(),
            }
        });
        let expected = |is_new| if is_new { Put::New } else { Put::Duplicate };
        assert_eq!(puts, [ignores_images, again, true].map(expected));
        let committed = writer.commit(empty_manifest()).unwrap();
        assert_eq!(committed.images.contains(&image), !ignores_images);
    }
}

#[test]
fn a_checkpoint_that_ignores_images_outlives_them() {
    let mut scene = Scene::new();
    let image = scene.index();
    let referring = scene.checkpoint();
    let mut writer = scene.repo.begin(WAIT).unwrap();
    writer.ignore_images();
    let stream = writer.put_whole_stream(&scene.vm.pages.concat()).unwrap();
    let mut manifest = empty_manifest();
    manifest.streams.insert("memory".into(), stream.clone());
    let itself = writer.commit(manifest).unwrap();
    assert!(itself.images.is_empty());
    scene.repo.prune(false, &mut |_| {}).unwrap();
    scene.repo.forget(&forget_ids(vec![referring])).unwrap();
    scene.repo.remove_image(image).unwrap();
    fs::remove_file(scene.image()).unwrap();
    scene.repo.prune(false, &mut |_| {}).unwrap();
    assert_eq!(scene.problems(true), [] as [&str; 0]);
    let mut repo = open(&scene.repo_dir());
    let reader = repo.reader(WAIT).unwrap();
    for (piece, page) in stream.pieces.iter().zip(&scene.vm.pages) {
        assert_eq!(reader.read(piece).unwrap(), *page);
    }
}

/// A meter counts its part alone, whether threads write it or not.
#[test]
fn meters_count_the_bytes_of_a_part() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut dice = Dice(3);
    let mut writer = repo.begin(WAIT).unwrap();
    let [small, none, large] = [10, 0, 4000].map(|pages| {
        let meter = writer.meter().unwrap();
        for _ in 0..pages {
            writer.put_unnamed(&dice.bytes(PAGE)).unwrap();
        }
        (meter, pages * PAGE as u64)
    });
    writer.meter().unwrap();
    writer.put_unnamed(&dice.bytes(PAGE)).unwrap();
    let committed = writer.commit(empty_manifest()).unwrap();
    for (meter, plain) in [small, none, large] {
        let bytes = meter.bytes();
        // The dice's bytes compress a little.
        assert!((plain / 2..=plain).contains(&bytes), "{bytes} of {plain}");
        assert!(bytes < committed.bytes_stored);
    }
}

/// The image's own file comes last: until then no block of it counts.
#[test]
fn every_step_of_an_indexing_may_fail() {
    let mut scene = Scene::new();
    let taken = scene.checkpoint();
    let more = scene.dir.path().join("more.raw");
    let mut dice = Dice(9);
    fs::write(&more, dice.bytes(40 * PAGE)).unwrap();
    let fails = |steps: u64| {
        let dir = test_dir();
        copy_tree(&scene.repo_dir(), dir.path());
        let mut repo = open(dir.path());
        repo.pack_limits = SMALL_PACKS;
        repo.store.faults.fail_after(steps, false);
        let result = repo.index_image(&more, WAIT, &mut |_| {});
        let fired = repo.store.faults.have_fired();
        // Where only the removal of its lock fails, it has succeeded.
        assert!(fired || result.is_ok(), "{result:?}");
        repo.store.faults.heal();
        drop(repo);
        fs::remove_dir_all(dir.path().join("locks")).unwrap();
        let mut repo = open(dir.path());
        let report = repo.check(true, &mut |_| {}).unwrap();
        assert_eq!(report.problems, [], "step {steps}");
        let block = fs::read(&more).unwrap()[..PAGE].to_vec();
        let mut writer = repo.begin(WAIT).unwrap();
        let put = writer.put_unnamed(&block).unwrap();
        let known = writer.put(put, &block).unwrap();
        assert_eq!(known, Put::Duplicate);
        drop(writer);
        let has_image = !repo.images().unwrap().is_empty();
        // Where only the name could not be made durable, it is there.
        assert!(has_image || result.is_err());
        repo.prune(false, &mut |_| {}).unwrap();
        let stats = repo.stats().unwrap();
        assert_eq!(
            stats.image_blobs,
            if has_image { 40 } else { 0 },
            "step {steps}"
        );
        assert!(scene.vm.compare(&mut repo, &taken).unwrap());
        fired
    };
    let last = (0..500).find(|&steps| !fails(steps));
    assert!(last.is_some_and(|steps| steps > 20), "{last:?} steps");
}

#[test]
fn what_cannot_be_indexed_is_refused_by_name() {
    let mut scene = Scene::new();
    let folder = scene.dir.path().join("folder");
    fs::create_dir(&folder).unwrap();
    let pipe = scene.dir.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    for path in [folder, pipe, scene.dir.path().join("nothing")] {
        let error = scene
            .repo
            .index_image(&path, WAIT, &mut |_| {})
            .unwrap_err();
        assert!(matches!(error, RepoError::ImageRefused { .. }), "{error}");
        assert!(
            error.to_string().contains(&path.display().to_string()),
            "{error}"
        );
    }
    assert!(scene.repo.images().unwrap().is_empty());
}

/// Not the length of whole blocks, and one in which nothing can be found.
#[test]
fn an_image_of_any_length_is_indexed() {
    let mut scene = Scene::new();
    for (bytes, blocks) in [
        (0, 0),
        (511, 0),
        (PAGE, 1),
        (3 * PAGE + 1, 3),
        (2 << 20, 512),
    ] {
        let path = scene.dir.path().join(format!("{bytes}.raw"));
        fs::write(&path, Dice(bytes as u64).bytes(bytes)).unwrap();
        let report = index(&mut scene.repo, &path);
        assert_eq!(report.image.blocks, blocks, "{bytes} bytes");
    }
    let zeros = scene.dir.path().join("zeros.raw");
    fs::write(&zeros, vec![0; 1 << 20]).unwrap();
    assert_eq!(index(&mut scene.repo, &zeros).image.blocks, 0);
    assert_eq!(scene.problems(true), [] as [&str; 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Blocks of a few contents and zeros, in packs of any size: each that is not zero is found, no other.
    #[test]
    fn each_block_of_an_image_is_found_and_read(
        blocks in prop::collection::vec(0..40_u8, 0..200),
        small in any::<bool>(),
    ) {
        let dir = test_dir();
        let mut repo = Repository::init_with(&dir.path().join("repo"), &password(), super::support::CHEAP).unwrap();
        if small {
            repo.pack_limits = SMALL_PACKS;
        }
        let content = |number: &u8| match number {
            0..10 => vec![0; PAGE],
            _ => Dice((*number).into()).bytes(PAGE),
        };
        let path = dir.path().join("image");
        fs::write(&path, blocks.iter().flat_map(content).collect::<Vec<u8>>()).unwrap();
        let report = index(&mut repo, &path);
        let expected = blocks.iter().filter(|number| **number >= 10).count();
        prop_assert_eq!(report.image.blocks, expected as u64);
        let hasher = repo.hasher();
        let reader = repo.reader(WAIT).unwrap();
        for number in 0..40 {
            let bytes = content(&number);
            let id = hasher.id(&bytes);
            let there = number >= 10 && blocks.contains(&number);
            prop_assert_eq!(reader.contains(&id).unwrap(), there, "{}", number);
            if there {
                prop_assert_eq!(reader.read(&id).unwrap(), bytes);
            }
        }
        drop(reader);
        let report = repo.check(true, &mut |_| {}).unwrap();
        prop_assert!(report.is_clean());
    }
}
