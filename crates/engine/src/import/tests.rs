//! Migration files as QEMU writes them, stored without a QEMU to query: the VM's record is given.

use std::collections::BTreeMap;
use std::fs;

use proptest::prelude::*;
use stillframe_qemu::migration_file::StreamEncoder;
use stillframe_qemu::monitor::RamBlock;
use stillframe_repo::CheckpointId;

use super::*;
use crate::fakes::checkpoints::{MACHINE, NO_WAIT};
use crate::fakes::{FakeRepository, device_state, pages, vm_record};

/// Names of the blocks, and their lengths in pages.
const BLOCKS: [(&str, u64); 2] = [("pc.ram", 20), ("vga.vram", 3)];

/// One page as it was sent: its block, its number, and what it is full of.
type Sent = (usize, u64, u8);

fn raw_state() -> Vec<u8> {
    let mut state = vec![0; 104];
    state[4..11].copy_from_slice(b"running");
    device_state(&[("timer", &[1; 16]), ("globalstate", &state)])
}

fn ram_blocks() -> Vec<RamBlock> {
    let block = |&(name, pages): &(&str, u64)| RamBlock {
        name: name.to_owned(),
        page_bytes: PAGE_BYTES,
        offset: 0,
        used_bytes: pages * PAGE_BYTES,
        total_bytes: pages * PAGE_BYTES,
        address: 0,
    };
    BLOCKS.iter().map(block).collect()
}

/// A file of a VM that was sent while it ran, page by page.
fn file_of(sent: &[Sent], raw: &[u8]) -> Vec<u8> {
    let block = |&(name, pages): &(&str, u64)| FileBlock {
        name: name.to_owned(),
        used_bytes: pages * PAGE_BYTES,
    };
    let blocks: Vec<FileBlock> = BLOCKS.iter().map(block).collect();
    let mut encoder = StreamEncoder::begin(Vec::new(), MACHINE, &blocks, raw).unwrap();
    for &(block, page, filling) in sent {
        let page = GuestPage::new(block, page);
        match filling {
            0 => encoder.zero(page).unwrap(),
            _ => encoder.page(page, &[filling; PAGE]).unwrap(),
        }
    }
    encoder.finish(raw).unwrap().0
}

/// What a receiver has, by block.
fn received(sent: &[Sent]) -> Vec<Vec<u8>> {
    let mut memory: BTreeMap<(usize, u64), u8> = BTreeMap::new();
    for &(block, page, filling) in sent {
        memory.insert((block, page), filling);
    }
    let block = |(block, &(_, pages)): (usize, &(&str, u64))| {
        let filling = |page| memory.get(&(block, page)).copied().unwrap_or(0);
        (0..pages).map(filling).collect::<Vec<u8>>()
    };
    let fillings = BLOCKS.iter().enumerate().map(block);
    fillings.map(|fillings| pages(&fillings)).collect()
}

/// Imports a file with these bytes.
fn take(
    stored: &mut FakeRepository,
    bytes: &[u8],
    record: VmRecord,
) -> Result<ImportReport, ImportError> {
    let path = stored.folder.path().join("vm.migration");
    fs::write(&path, bytes).unwrap();
    let source = Source::open(&path)?;
    source.store(record, &mut stored.repository, NO_WAIT, &mut |_| ())
}

fn manifest_of(stored: &FakeRepository, report: &ImportReport) -> Manifest {
    let id = CheckpointId::from_hex(&report.checkpoint).unwrap();
    stored.repository.manifest(&id).unwrap()
}

#[test]
fn what_is_imported_is_a_checkpoint_of_the_vm() {
    let mut stored = FakeRepository::new();
    let sent = [(0, 1, 5), (0, 2, 5), (1, 0, 6), (0, 3, 0)];
    let report = take(
        &mut stored,
        &file_of(&sent, &raw_state()),
        vm_record("vm", &ram_blocks()),
    )
    .unwrap();
    assert_eq!((report.vm.as_str(), report.format), ("vm", "migration"));
    let counts = report.pages;
    assert_eq!(
        (counts.total, counts.captured, counts.new, counts.zero),
        (23, 4, 2, 1)
    );
    let manifest = manifest_of(&stored, &report);
    assert_eq!(stored.memory(&manifest), received(&sent));
    let id = CheckpointId::from_hex(&report.checkpoint).unwrap();
    let record = crate::restore::vm_record(&id, &manifest).unwrap();
    assert!(record.was_running);
    let reader = stored.repository.reader(NO_WAIT).unwrap();
    let raw = crate::restore::raw_device_state(&id, &manifest, &reader).unwrap();
    assert_eq!(raw, raw_state());
}

/// `globalstate` has the name of the state, filled up with zeros.
#[test]
fn a_vm_that_was_paused_is_one_that_is_paused() {
    let mut state = vec![0; 104];
    state[4..10].copy_from_slice(b"paused");
    let paused = device_state(&[("globalstate", &state)]);
    assert!(!machine::ran(&paused).unwrap());
    assert!(machine::ran(&device_state(&[("timer", &[1])])).unwrap());
}

#[test]
fn a_file_of_another_machine_is_refused() {
    let mut stored = FakeRepository::new();
    let bytes = file_of(&[(0, 1, 5)], &raw_state());
    let mut other = vm_record("vm", &ram_blocks());
    "pc-i440fx-10.0".clone_into(&mut other.identity.machine);
    let refused = take(&mut stored, &bytes, other).unwrap_err();
    assert!(matches!(refused, ImportError::Machine { .. }));
    let mut longer = ram_blocks();
    longer[0].used_bytes += PAGE_BYTES;
    let mut more = ram_blocks();
    more.push(RamBlock {
        name: "rom".to_owned(),
        ..more[0].clone()
    });
    let fewer = ram_blocks()[..1].to_vec();
    for (blocks, words) in [
        (longer, "pc.ram has 81920 bytes in the file and 86016"),
        (more, "rom is not in the file"),
        (fewer, "vga.vram is only in the file"),
    ] {
        let refused = take(&mut stored, &bytes, vm_record("vm", &blocks)).unwrap_err();
        assert!(refused.to_string().contains(words), "{refused}");
    }
    assert!(stored.repository.manifests().unwrap().is_empty());
}

/// Wherever it is cut, and whatever follows it.
#[test]
fn nothing_is_committed_of_a_file_that_is_not_whole() {
    let mut stored = FakeRepository::new();
    let whole = file_of(&[(0, 1, 5), (1, 2, 6)], &raw_state());
    let record = || vm_record("vm", &ram_blocks());
    for length in (0..whole.len()).step_by(113).chain([whole.len() - 1]) {
        let failed = take(&mut stored, &whole[..length], record());
        assert!(failed.is_err(), "{length}");
    }
    assert!(stored.repository.manifests().unwrap().is_empty());
    take(&mut stored, &whole, record()).unwrap();
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    for path in ["/dev/null", "/"] {
        let refused = Source::open(Path::new(path)).err().unwrap();
        assert!(matches!(refused, ImportError::NoFile { .. }), "{path}");
    }
    let missing = Source::open(Path::new("/no/such/file")).err().unwrap();
    assert!(matches!(missing, ImportError::Open { .. }));
}

/// It would be the latest checkpoint for ever.
#[test]
fn a_file_from_the_future_is_one_of_now() {
    let mut stored = FakeRepository::new();
    let path = stored.folder.path().join("later.migration");
    fs::write(&path, file_of(&[], &raw_state())).unwrap();
    let later = std::time::SystemTime::now() + Duration::from_secs(1 << 20);
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(later).unwrap();
    let source = Source::open(&path).unwrap();
    let record = vm_record("vm", &ram_blocks());
    let report = source.store(record, &mut stored.repository, NO_WAIT, &mut |_| ());
    assert!(report.unwrap().time <= Timestamp::now());
}

fn sent() -> impl Strategy<Value = Sent> {
    let page = prop_oneof![
        (0..BLOCKS[0].1).prop_map(|page| (0, page)),
        (0..BLOCKS[1].1).prop_map(|page| (1, page)),
    ];
    (page, 0u8..4).prop_map(|((block, page), filling)| (block, page, filling))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A VM that runs while it is sent sends pages again.
    #[test]
    fn the_last_version_of_each_page_counts(sent in prop::collection::vec(sent(), 0..80)) {
        let mut stored = FakeRepository::new();
        let bytes = file_of(&sent, &raw_state());
        let report = take(&mut stored, &bytes, vm_record("vm", &ram_blocks())).unwrap();
        let manifest = manifest_of(&stored, &report);
        prop_assert!(stored.memory(&manifest) == received(&sent));
    }
}
