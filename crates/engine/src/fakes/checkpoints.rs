//! Checkpoints in a repository of the test's own.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use stillframe_qemu::monitor::RamBlock;
use stillframe_qemu::record::{Described, VmRecord};
use stillframe_repo::{CheckpointId, Manifest, PageMap, Password, Reader, Repository, Tags};
use tempfile::TempDir;

use crate::checkpoint::DEVICE_STATE;
use crate::encoding::delta_cache::DeltaCache;
use crate::encoding::page_encoder::PageEncoder;
use crate::memory::{BlockShape, Page};
use crate::sink::page_stream::PageStream;
use crate::sink::repository::RepositoryPages;

/// The machine of every fake VM.
pub(crate) const MACHINE: &str = "pc-q35-10.0";
/// No other process uses the repository.
pub(crate) const NO_WAIT: Duration = Duration::ZERO;

/// A repository that goes when it is dropped.
pub(crate) struct FakeRepository {
    pub(crate) repository: Repository,
    pub(crate) folder: TempDir,
}

impl FakeRepository {
    pub(crate) fn new() -> FakeRepository {
        let folder = tempfile::tempdir().unwrap();
        let password = Password::random().unwrap();
        FakeRepository {
            repository: Repository::init(&folder.path().join("repository"), &password).unwrap(),
            folder,
        }
    }

    /// Stores a checkpoint of these blocks and this device state.
    pub(crate) fn checkpoint(
        &mut self,
        record: &VmRecord,
        blocks: &[(&str, Vec<u8>)],
        raw_state: &[u8],
    ) -> (CheckpointId, Manifest) {
        let id = self.store(record, blocks, raw_state);
        (id, self.repository.manifest(&id).unwrap())
    }

    fn store(
        &mut self,
        record: &VmRecord,
        blocks: &[(&str, Vec<u8>)],
        raw_state: &[u8],
    ) -> CheckpointId {
        let shape = |(name, bytes): &(&str, Vec<u8>)| BlockShape {
            name: (*name).to_owned(),
            pages: Page::consecutive(0, bytes).count() as u64,
        };
        let shapes: Vec<BlockShape> = blocks.iter().map(shape).collect();
        let writer = self.repository.begin(NO_WAIT).unwrap();
        let mut sink = RepositoryPages::first(writer, &shapes, true);
        let mut stream = PageStream::new(&shapes);
        let (mut encoder, nothing) = (PageEncoder::default(), DeltaCache::default());
        for (number, (_, bytes)) in blocks.iter().enumerate() {
            let pages: Vec<Page<'_>> = Page::consecutive(0, bytes).collect();
            let put = stream.put(&mut sink, &mut encoder, &nothing, number, &pages);
            put.unwrap();
        }
        let manifest = Manifest {
            vm: record.label.clone(),
            time: Timestamp::now(),
            parent: None,
            tags: Tags::default(),
            note: None,
            ram: sink.finish(&shapes).unwrap(),
            disks: Vec::new(),
            images: BTreeSet::new(),
            streams: BTreeMap::from([(
                DEVICE_STATE.to_owned(),
                sink.writer.put_whole_stream(raw_state).unwrap(),
            )]),
            pages: stream.counts.into(),
            bytes_stored: 0,
            vm_record: serde_json::to_value(record).unwrap(),
            downtime_us: serde_json::json!({}),
        };
        sink.writer.commit(manifest).unwrap().id
    }

    /// The bytes of every block of a checkpoint.
    pub(crate) fn memory(&mut self, manifest: &Manifest) -> Vec<Vec<u8>> {
        let reader = self.repository.reader(NO_WAIT).unwrap();
        memory(&reader, manifest)
    }
}

fn memory(reader: &Reader<'_>, manifest: &Manifest) -> Vec<Vec<u8>> {
    let block = |table| {
        let map = PageMap::read(reader, table).unwrap();
        let all: Vec<u64> = (0..map.pages()).collect();
        map.read_together(&all).unwrap()
    };
    manifest.ram.iter().map(block).collect()
}

/// The record of a VM with this name and these blocks.
pub(crate) fn vm_record(label: &str, ram_blocks: &[RamBlock]) -> VmRecord {
    let mut record = VmRecord::described(Described {
        label: Some(label.to_owned()),
        exe: "/usr/bin/qemu-system-x86_64".into(),
        qemu_version: "10.0.2".to_owned(),
        arguments: ["qemu-system-x86_64", "-m", "64"].map(str::to_owned).into(),
        cwd: "/".into(),
    });
    MACHINE.clone_into(&mut record.identity.machine);
    record.ram_blocks = ram_blocks.to_vec();
    record
}

/// A device state with these sections, as QEMU saves it (`qemu_savevm_state` in QEMU's migration/savevm.c).
pub(crate) fn device_state(sections: &[(&str, &[u8])]) -> Vec<u8> {
    const SECTION_FULL: u8 = 4;
    const FOOTER: u8 = 0x7e;
    let mut raw = b"QEVM\0\0\0\x03".to_vec();
    for (number, (name, data)) in (0u32..).zip(sections) {
        raw.push(SECTION_FULL);
        raw.extend(number.to_be_bytes());
        raw.push(name.len() as u8);
        raw.extend(name.as_bytes());
        // Its instance and version.
        raw.extend([0, 0, 0, 0, 0, 0, 0, 1]);
        raw.extend(*data);
        raw.push(FOOTER);
        raw.extend(number.to_be_bytes());
    }
    raw.push(0);
    raw
}
