//! A reader without a lock, because it cannot write one, while a prune on another host repacks.

use std::fs;

use super::support::{Dice, PAGE, Vm, WAIT, forget_ids, init, open, test_dir};
use stillframe_page::{PageRequest, ReadOrder};

use crate::store::local::Area;
use crate::{CheckpointId, PageMap, PageReader, Reader, RepoError, Repository};

const PAGES: usize = 900;

/// Three checkpoints that share pages, and the VM at the last.
fn three(repo: &mut Repository) -> ([CheckpointId; 3], Vm) {
    let mut dice = Dice(31);
    let mut vm = Vm::new("vm", PAGES);
    let ids = [900, 400, 400].map(|writes| {
        vm.forget_parent();
        vm.run(&mut dice, writes);
        vm.checkpoint(repo).unwrap()
    });
    (ids, vm)
}

/// Reads some pages one by one.
fn read_some(reader: &Reader<'_>, map: &PageMap<'_>, vm: &Vm, each: usize) {
    let mut pages = PageReader::new(reader).unwrap();
    for page in (0..PAGES as u64).step_by(each) {
        let mut read = Vec::new();
        let mut keep = |_: u64, bytes: &[u8]| {
            read = bytes.to_vec();
            Ok::<(), RepoError>(())
        };
        let request = PageRequest {
            page,
            neighbours: &[],
            order: ReadOrder::RequestedFirst,
        };
        pages.read(map, request, &mut keep).unwrap();
        assert!(read == vm.pages[page as usize], "page {page}");
    }
}

/// Reads all pages together.
fn read_all(map: &PageMap<'_>, vm: &Vm) -> Result<(), RepoError> {
    map.read_pages(0..PAGES as u64, 2, &|first, bytes| {
        let mut pages = (first as usize..).zip(bytes.chunks(PAGE));
        match pages.all(|(page, bytes)| bytes == vm.pages[page]) {
            true => Ok(()),
            false => Err(RepoError::Table {
                what: "it differs".into(),
            }),
        }
    })
}

#[test]
fn repacked_blobs_are_found() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let ([first, second, last], vm) = three(&mut repo);
    let mut reading = open(dir.path());
    let manifest = reading.manifest(&last).unwrap();
    let reader = reading.reader(WAIT).unwrap();
    fs::remove_dir_all(dir.path().join("locks")).unwrap();
    let map = PageMap::open(&reader, &manifest.ram[0]).unwrap();
    // Locations that are known already lie in packs that will be gone.
    read_some(&reader, &map, &vm, 90);
    for gone in [first, second] {
        let before = repo.store.names(Area::Packs).unwrap();
        let forget = forget_ids(vec![gone]);
        repo.forget(&forget).unwrap();
        assert!(repo.prune(false, &mut |_| {}).unwrap().packs_repacked > 0);
        let after = repo.store.names(Area::Packs).unwrap();
        assert!(before.iter().any(|name| !after.contains(name)));
        read_some(&reader, &map, &vm, 7);
        read_all(&map, &vm).unwrap();
        let state = reader.read_stream(&manifest.streams["device-state"], 1 << 20);
        assert!(state.unwrap() == vm.device_state);
    }
}

/// A lost blob is an error, and known locations stay known while the file system is away.
#[test]
fn a_lost_blob_is_an_error() {
    let dir = test_dir();
    let mut repo = init(dir.path());
    let ([.., last], vm) = three(&mut repo);
    let mut reading = open(dir.path());
    let manifest = reading.manifest(&last).unwrap();
    let reader = reading.reader(WAIT).unwrap();
    let map = PageMap::open(&reader, &manifest.ram[0]).unwrap();
    read_all(&map, &vm).unwrap();
    let away = dir.path().with_extension("away");
    fs::rename(dir.path(), &away).unwrap();
    assert!(read_all(&map, &vm).is_err());
    fs::rename(&away, dir.path()).unwrap();
    read_all(&map, &vm).unwrap();
    for name in repo.store.names(Area::Packs).unwrap() {
        repo.store.remove(Area::Packs, &name).unwrap();
    }
    let error = read_all(&map, &vm).unwrap_err();
    assert!(error.to_string().contains("packs/"), "{error}");
}
