//! The rules of a restore without a new QEMU: what is refused, and which pages are written.

mod supervisor;

use proptest::prelude::*;
use stillframe_page::PAGE;
use stillframe_qemu::monitor::RamBlock;

use super::*;
use crate::fakes::checkpoints::NO_WAIT;
use crate::fakes::guest_memory::this_process;
use crate::fakes::{FakeMemory, FakeRepository, FakeSource, device_state, pages, vm_record};
use crate::memory::BlockShape;
use crate::populate::eager;

const RAM: &str = "pc.ram";

#[test]
fn a_manifest_that_lacks_something_is_refused_by_name() {
    let mut stored = FakeRepository::new();
    let record = vm_record("vm", &[]);
    let (id, manifest) = stored.checkpoint(&record, &[], &device_state(&[("timer", &[1])]));
    let reader = stored.repository.reader(NO_WAIT).unwrap();
    let sections = device_sections(&id, &manifest, &reader).unwrap();
    assert_eq!(sections, ["timer"]);
    assert_eq!(vm_record_of(&id, &manifest).unwrap(), record);
    let no_record = Manifest {
        vm_record: serde_json::json!({ "label": "vm" }),
        ..manifest.clone()
    };
    let no_state = Manifest {
        streams: Default::default(),
        ..manifest
    };
    for error in [
        vm_record_of(&id, &no_record).unwrap_err(),
        device_sections(&id, &no_state, &reader).unwrap_err(),
    ] {
        let words = error.to_string();
        assert!(words.contains(&id.to_string()), "{words}");
        assert!(matches!(error, RestoreError::Manifest { .. }), "{words}");
    }
}

#[test]
fn a_device_state_that_is_none_never_reaches_qemu() {
    let mut stored = FakeRepository::new();
    let record = vm_record("vm", &[]);
    let whole = device_state(&[("timer", &[1; 16]), ("cpu", &[2; 40])]);
    for raw in [&whole[..whole.len() - 1], b"", b"QEVM\0\0\0\x02\x04"] {
        let (id, manifest) = stored.checkpoint(&record, &[], raw);
        let reader = stored.repository.reader(NO_WAIT).unwrap();
        let refused = super::device_state(&id, &manifest, &record, &reader);
        assert!(matches!(refused, Err(RestoreError::DeviceState(_))));
    }
}

/// The blocks of the new QEMU must be those of the checkpoint, one for one.
#[test]
fn other_ram_blocks_are_refused() {
    let memory = FakeMemory::new(RAM, &[0; 4]);
    let open = |ram: &[RamBlock], shapes: &[(&str, u64)]| {
        let shape = |&(name, pages): &(&str, u64)| BlockShape {
            name: name.to_owned(),
            pages,
        };
        let shapes: Vec<BlockShape> = shapes.iter().map(shape).collect();
        match eager::open_blocks(&this_process(), ram, &shapes) {
            Ok(blocks) => Ok(blocks.len()),
            Err(PopulateError::Blocks { difference }) => Err(difference),
            Err(error) => panic!("{error}"),
        }
    };
    let ram = [memory.ram.clone()];
    assert_eq!(open(&ram, &[(RAM, 4)]), Ok(1));
    for (shapes, difference) in [
        (&[][..], "pc.ram is not in the checkpoint"),
        (&[(RAM, 5)], "pc.ram has 16384 bytes, the checkpoint 20480"),
        (&[(RAM, 4), ("vga.vram", 1)], "vga.vram is missing"),
    ] {
        assert_eq!(open(&ram, shapes), Err(difference.to_owned()));
    }
}

#[test]
fn a_source_that_fails_ends_an_eager_restore() {
    let memory = FakeMemory::new(RAM, &[0; 4]);
    let source = FakeSource {
        fillings: vec![1, 2, 3, 4],
        failing: Some(2),
    };
    let failed = eager::populate(
        &this_process(),
        &[&memory.block()],
        vec![source],
        &mut |_| (),
    );
    assert!(matches!(failed, Err(PopulateError::Source(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A fresh QEMU has firmware of its own in some pages. Pages that are zero on both sides stay untouched.
    #[test]
    fn an_eager_restore_writes_what_is_needed_and_no_more(
        firmware in prop::collection::vec(0u8..3, 50),
        fillings in prop::collection::vec(0u8..3, 50),
    ) {
        let memory = FakeMemory::new(RAM, &firmware);
        let block = memory.block();
        let source = FakeSource { fillings: fillings.clone(), failing: None };
        let written = eager::populate(&this_process(), &[&block], vec![source], &mut |_| ()).unwrap();
        prop_assert!(memory.bytes() == pages(&fillings));
        prop_assert_eq!(written, fillings.iter().filter(|&&filling| filling != 0).count() as u64);
        let touched = block.data_pages().unwrap().unwrap();
        let touched: Vec<u64> = touched.into_iter().flatten().collect();
        let needed = (0..50).filter(|&page| firmware[page] != 0 || fillings[page] != 0);
        prop_assert_eq!(touched, needed.map(|page| page as u64).collect::<Vec<_>>());
    }
}

/// The comparison of `--verify`, which ends a VM that differs before it runs.
#[test]
fn a_page_that_differs_is_found_and_named() {
    let mut stored = FakeRepository::new();
    let record = vm_record("vm", &[]);
    let blocks = [(RAM, pages(&[1, 0, 3])), ("vga.vram", pages(&[5]))];
    let (_, manifest) = stored.checkpoint(&record, &blocks, &device_state(&[]));
    let hasher = stored.repository.hasher();
    let reader = stored.repository.reader(NO_WAIT).unwrap();
    let ram = FakeMemory::new(RAM, &[1, 0, 3]);
    let video = FakeMemory::new("vga.vram", &[5]);
    let compare = || {
        let blocks = [ram.block(), video.block()];
        let image = crate::verify::Image::take(blocks.iter(), &hasher).unwrap();
        let report = image.compare(&reader, &manifest.ram, &mut |_| ()).unwrap();
        assert_eq!(report.pages, 4);
        report.first.join(", ")
    };
    assert_eq!(compare(), "");
    let mut bytes = vec![0; PAGE];
    bytes[PAGE - 1] = 1;
    ram.block().write(1, &bytes).unwrap();
    video.write(0, 0);
    assert_eq!(compare(), "pc.ram 1, vga.vram 0");
}

fn vm_record_of(id: &CheckpointId, manifest: &Manifest) -> Result<VmRecord, RestoreError> {
    super::vm_record(id, manifest)
}
