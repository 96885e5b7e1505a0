//! The storing half over captures of fake memory: what a checkpoint holds, what it follows, and what an error leaves.

use std::fs;
use std::ops::Range;
use std::time::Instant;

use proptest::prelude::*;
use stillframe_repo::{CheckpointId, Manifest};
use stillframe_sys::affinity;

use super::*;
use crate::capture::staging::StagingBuffer;
use crate::fakes::{FakeMemory, FakeRepository, device_state, pages, vm_record};
use crate::free_pages::FreePagesReport;
use crate::memory::BlockShape;
use crate::memory::block::Guest;
use crate::memory::ranges::runs;
use crate::verify::Image;

const RAM: &str = "pc.ram";
const PAGES: u64 = 30;

#[test]
fn only_an_error_that_broke_the_attachment_ends_it() {
    assert!(CheckpointError::RamChanged.ends_tracking());
    let overrun = PauseError::Overrun { limit_ms: 3000 };
    assert!(!CheckpointError::Pause(overrun).ends_tracking());
    let full = RepoError::NoSpace { path: "/r".into() };
    assert!(!CheckpointError::Repo(full).ends_tracking());
}

/// What capturing these pages of a stopped guest results in.
fn capture(memory: &FakeMemory, written: &[Range<u64>]) -> Captured {
    let mut staging = StagingBuffer::default();
    staging.reset(1, u64::MAX);
    staging
        .capture(0, &memory.block(), Guest::Stopped, written)
        .unwrap();
    Captured {
        begin: Instant::now(),
        schedule: ScheduleKind::StopCopy,
        instead_of: None,
        plan: None,
        staging,
        disk_bytes: 0,
        record: vm_record("vm", std::slice::from_ref(&memory.ram)),
        blocks: vec![BlockShape {
            name: RAM.to_owned(),
            pages: memory.block().pages(),
        }],
        copied: Copied::default(),
        copying: 0,
        downtime: DowntimeRecord::default(),
        time: jiff::Timestamp::now(),
        device_state: device_state(&[("timer", &[1; 16])]),
        image: None,
        left_out: Vec::new(),
        free_pages: None,
        balloon: None,
        disks: Default::default(),
        has_snapshots: false,
        disks_left_out: Vec::new(),
        disk_limit: 0,
        spare: affinity::of_this_thread(),
    }
}

/// A list of one range.
fn pages_of(pages: Range<u64>) -> Vec<Range<u64>> {
    std::iter::once(pages).collect()
}

/// One VM and its checkpoints.
struct Scene {
    memory: FakeMemory,
    stored: FakeRepository,
    checkpoints: CheckpointWriter,
    options: CheckpointOptions,
}

impl Scene {
    /// A VM with its first checkpoint.
    fn new(fillings: &[u8], options: CheckpointOptions) -> Scene {
        let mut scene = Scene {
            memory: FakeMemory::new(RAM, fillings),
            stored: FakeRepository::new(),
            checkpoints: CheckpointWriter::default(),
            options,
        };
        scene.first();
        scene
    }

    fn first(&mut self) -> CheckpointReport {
        let captured = capture(&self.memory, &self.memory.block().whole());
        let repository = &mut self.stored.repository;
        let id = repository.id().to_string();
        let writer = repository.begin(self.options.lock_wait).unwrap();
        let transaction = CheckpointWriter::begin_first(writer, &captured.blocks, &self.options);
        let checkpoints = &mut self.checkpoints;
        let stored = checkpoints.finish(transaction.unwrap(), &captured, id, &mut |_| ());
        stored.unwrap().report
    }

    fn increment(&mut self, written: &[Range<u64>]) -> Result<CheckpointReport, CheckpointError> {
        self.store(&capture(&self.memory, written))
    }

    fn store(&mut self, captured: &Captured) -> Result<CheckpointReport, CheckpointError> {
        let (repository, options) = (&mut self.stored.repository, &self.options);
        let stored = self
            .checkpoints
            .store(captured, repository, options, &mut |_| ());
        Ok(stored?.report)
    }

    fn manifest(&self, report: &CheckpointReport) -> Manifest {
        let id = CheckpointId::from_hex(&report.checkpoint).unwrap();
        self.stored.repository.manifest(&id).unwrap()
    }

    fn memory_of(&mut self, report: &CheckpointReport) -> Vec<u8> {
        let manifest = self.manifest(report);
        self.stored.memory(&manifest).remove(0)
    }

    /// Whether the repository can be written: something else is where its new files are made, or not.
    fn can_write(&self, can: bool) {
        let folder = self.stored.repository.dir().join("tmp");
        match can {
            true => {
                fs::remove_file(&folder).unwrap();
                fs::create_dir(&folder).unwrap();
            }
            false => {
                fs::remove_dir(&folder).unwrap();
                fs::write(&folder, "").unwrap();
            }
        }
    }
}

#[test]
fn an_increment_holds_all_of_memory_and_counts_what_was_written() {
    let mut scene = Scene::new(&[1, 2, 0, 4], CheckpointOptions::default());
    scene.memory.write(0, 9);
    scene.memory.write(1, 0);
    // As before: it was written with the same content.
    let first = scene.increment(&pages_of(0..4)).unwrap();
    assert_eq!(scene.memory_of(&first), pages(&[9, 0, 0, 4]));
    let PageCounts {
        total,
        captured,
        new,
        duplicate,
        zero,
        ..
    } = first.pages;
    assert_eq!((total, captured, new, duplicate, zero), (4, 4, 1, 1, 2));
    let second = scene.increment(&[]).unwrap();
    assert_eq!(second.parent, Some(first.checkpoint.clone()));
    assert_eq!(scene.memory_of(&second), scene.memory_of(&first));
    assert_eq!(scene.manifest(&second).vm, "vm");
}

/// Changes and contents that the delta cache knows become deltas; without it pages are stored whole.
#[test]
fn a_small_change_is_a_delta_where_the_old_content_is_known() {
    for (delta_cache_bytes, deltas) in [(1 << 20, 1), (0, 0)] {
        let options = CheckpointOptions {
            delta_cache_bytes,
            ..CheckpointOptions::default()
        };
        let mut scene = Scene::new(&[1, 2, 3], options);
        scene.increment(&pages_of(0..3)).unwrap();
        scene.memory.change(1, 77, 200);
        let report = scene.increment(&pages_of(1..2)).unwrap();
        assert_eq!(report.pages.delta, deltas);
        assert_eq!(scene.memory_of(&report), scene.memory.bytes());
    }
}

#[test]
fn an_increment_follows_a_checkpoint_of_the_same_repository_that_is_there() {
    let gone = |stored: Result<CheckpointReport, CheckpointError>| {
        matches!(stored, Err(CheckpointError::ParentGone))
    };
    let mut scene = Scene::new(&[1, 2], CheckpointOptions::default());
    let last = scene.increment(&pages_of(0..1)).unwrap();
    // Forgotten.
    let manifests = scene.stored.repository.dir().join("manifests");
    fs::remove_file(manifests.join(&last.checkpoint)).unwrap();
    assert!(gone(scene.increment(&pages_of(0..1))));
    assert!(!scene.checkpoints.has_parent());
    assert!(gone(scene.increment(&pages_of(0..1))));
    let anew = scene.first();
    assert_eq!(anew.parent, None);
    assert_eq!(scene.memory_of(&anew), pages(&[1, 2]));
    // Another repository.
    scene.stored = FakeRepository::new();
    assert!(gone(scene.increment(&pages_of(0..1))));
}

/// `--verify` compares with an image of the pause: it finds a write that the capture missed.
#[test]
fn a_capture_that_missed_a_write_is_found() {
    let mut scene = Scene::new(&[1, 2, 3], CheckpointOptions::default());
    scene.memory.write(1, 7);
    scene.memory.write(2, 8);
    for (written, differing) in [(1..2, &["pc.ram 2"][..]), (1..3, &[])] {
        let mut captured = capture(&scene.memory, &[written]);
        let hasher = scene.stored.repository.hasher();
        let block = scene.memory.block();
        captured.image = Some(Image::take([&block].into_iter(), &hasher).unwrap());
        let report = scene.store(&captured).unwrap().verify.unwrap();
        assert_eq!(report.pages, 3);
        assert_eq!(report.first, differing);
    }
}

/// A free page is zeros, also to the delta cache, which had its content.
#[test]
fn what_is_written_to_a_page_that_was_free_is_stored_whole() {
    let mut scene = Scene::new(&[1, 2, 3], CheckpointOptions::default());
    scene.increment(&pages_of(0..3)).unwrap();
    let mut captured = capture(&scene.memory, &pages_of(0..1));
    captured.left_out = vec![pages_of(1..2)];
    captured.free_pages = Some(FreePagesReport {
        left_out: 1,
        ..FreePagesReport::default()
    });
    let report = scene.store(&captured).unwrap();
    assert_eq!((report.pages.free, report.pages.captured), (1, 1));
    assert_eq!(scene.memory_of(&report), pages(&[1, 0, 3]));
    scene.memory.change(1, 77, 200);
    let report = scene.increment(&pages_of(1..2)).unwrap();
    assert_eq!((report.pages.delta, report.pages.new), (0, 1));
    assert_eq!(scene.memory_of(&report), scene.memory.bytes());
}

/// `--verify` takes zeros for a free page, and nothing else.
#[test]
fn a_free_page_may_be_zeros_and_no_other_page_may() {
    let mut scene = Scene::new(&[1, 2, 3], CheckpointOptions::default());
    scene.memory.write(2, 8);
    for (free, expected) in [
        (0..2, (1, &["pc.ram 2"][..])),
        (0..1, (0, &["pc.ram 1", "pc.ram 2"])),
        (1..3, (1, &["pc.ram 2"])),
    ] {
        let mut captured = capture(&scene.memory, &[]);
        captured.left_out = vec![pages_of(1..2)];
        let hasher = scene.stored.repository.hasher();
        let block = scene.memory.block();
        let image = Image::take([&block].into_iter(), &hasher).unwrap();
        captured.image = Some(image.with_free(vec![pages_of(free)]));
        let report = scene.store(&captured).unwrap().verify.unwrap();
        assert_eq!(
            (report.free, &report.first[..]),
            (
                expected.0,
                &expected.1.iter().map(|s| s.to_string()).collect::<Vec<_>>()[..]
            )
        );
    }
}

/// The guest's writes to one page between two checkpoints.
#[derive(Debug, Clone, Copy)]
enum Write {
    Fill(u8),
    Change(u8),
}

fn write() -> impl Strategy<Value = Write> {
    prop_oneof![
        (0u8..4).prop_map(Write::Fill),
        (1u8..200).prop_map(Write::Change)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every checkpoint is the memory of its moment, also after errors in between, whatever is remembered.
    #[test]
    fn every_checkpoint_is_one_moment(
        steps in prop::collection::vec((prop::collection::btree_map(0..PAGES, write(), 0..12), any::<bool>()), 1..6),
        delta_cache_bytes in prop_oneof![Just(0u64), Just(8 << 12), Just(1 << 20)],
        dedup: bool,
        images: bool,
    ) {
        let options = CheckpointOptions { delta_cache_bytes, dedup, images, ..CheckpointOptions::default() };
        let mut scene = Scene::new(&[5; PAGES as usize], options);
        let mut taken = Vec::new();
        let mut pending = Vec::new();
        for (writes, fails) in &steps {
            for (&page, &write) in writes {
                match write {
                    Write::Fill(filling) => scene.memory.write(page, filling),
                    Write::Change(byte) => scene.memory.change(page, u64::from(byte) * 20, byte),
                }
            }
            // What was written since the last checkpoint that was committed.
            pending.extend(writes.keys().copied());
            pending.sort_unstable();
            pending.dedup();
            let written = runs(&pending);
            if *fails {
                scene.can_write(false);
                let failed = scene.increment(&written);
                scene.can_write(true);
                prop_assert!(matches!(failed, Err(CheckpointError::Repo(_))));
                prop_assert!(scene.checkpoints.has_parent());
                continue;
            }
            let report = scene.increment(&written).unwrap();
            pending.clear();
            taken.push((report, scene.memory.bytes()));
        }
        for (report, expected) in &taken {
            prop_assert!(&scene.memory_of(report) == expected);
        }
    }
}
