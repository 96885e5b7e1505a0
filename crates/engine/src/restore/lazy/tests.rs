//! What a successor believes of the record of an unfinished restore: no page goes to a process that is not the VM.

use std::process::Command;

use stillframe_qemu::guest_agent::AgentChannels;
use stillframe_repo::CheckpointId;
use stillframe_sys::private_dir::PrivateDir;
use tempfile::TempDir;

use super::*;
use crate::disks::lazy::LazyDisk;
use crate::fakes::guest_memory::this_process;
use crate::fakes::{FakeMemory, FakeRepository, device_state, pages, vm_record};
use crate::restore::filling_record::RecordError;

fn files() -> (TempDir, Files) {
    let root = tempfile::tempdir().unwrap();
    let directory = PrivateDir::create(&root.path().join("run")).unwrap();
    let files = Files::in_directory(directory, &root.path().join("qmp"));
    (root, files)
}

fn record(process: &Process, checkpoint: CheckpointId, blocks: &[RamBlock]) -> FillingRecord {
    let filling = FillingVm {
        remote_fd: 7,
        checkpoint,
        vm: "vm".to_owned(),
        repository: "repository".to_owned(),
        running: true,
        agents: AgentChannels::default(),
        blocks: blocks.to_vec(),
        disks: Vec::new(),
    };
    FillingRecord::new(process, filling).unwrap()
}

fn unfinished(record: FillingRecord, files: Files) -> Unfinished<'static> {
    Unfinished {
        record,
        files,
        qmp: Path::new("/no/monitor"),
        limit_fill: None,
    }
}

fn is_malformed(error: &RestoreError, words: &str) -> bool {
    matches!(error, RestoreError::Record(RecordError::Malformed { what, .. }) if what.contains(words))
}

#[test]
fn a_process_that_is_not_the_vm_is_not_filled() {
    let (_root, files) = files();
    let own = record(&this_process(), CheckpointId([1; 32]), &[]);
    let mut unfinished = unfinished(own, files);
    let error = the_vm(&unfinished).err().unwrap();
    assert!(is_malformed(&error, "is no QEMU"), "{error}");
    unfinished.record.uid += 1;
    let error = the_vm(&unfinished).err().unwrap();
    assert!(is_malformed(&error, "runs as user"), "{error}");
}

#[test]
fn a_vm_that_has_ended_leaves_no_files_unless_it_leaves_disks() {
    let (_root, mut files) = files();
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let process = Process::open(child.id().cast_signed()).unwrap();
    let record = record(&process, CheckpointId([1; 32]), &[]);
    files.write(&record).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let pid = record.pid;
    let mut unfinished = unfinished(record, files);
    unfinished.record.disks = vec![LazyDisk {
        device: "d0".to_owned(),
        image: "/no/image".into(),
    }];
    assert!(matches!(the_vm(&unfinished), Ok(None)));
    assert!(unfinished.files.read().is_ok());
    unfinished.record.disks.clear();
    let error = the_vm(&unfinished).err().unwrap();
    assert!(matches!(error, RestoreError::Ended { pid: ended, .. } if ended == pid));
    assert!(matches!(
        unfinished.files.read(),
        Err(RecordError::None { .. })
    ));
}

/// The record is the user's to write; the manifest is authenticated.
#[test]
fn pages_come_from_the_tables_of_the_manifest() {
    let (_root, files) = files();
    let mut stored = FakeRepository::new();
    let blocks = [("pc.ram", pages(&[1, 2])), ("vga.vram", pages(&[3]))];
    let (id, manifest) = stored.checkpoint(&vm_record("vm", &[]), &blocks, &device_state(&[]));
    let ram = |name: &str| FakeMemory::new(name, &[0]).ram;
    let known = record(&this_process(), id, &[ram("vga.vram"), ram("pc.ram")]);
    let tables = tables_of(&known, &files, &manifest).unwrap();
    assert_eq!(tables, [manifest.ram[1].clone(), manifest.ram[0].clone()]);
    let unknown = record(&this_process(), id, &[ram("rom")]);
    let error = tables_of(&unknown, &files, &manifest).unwrap_err();
    assert!(is_malformed(&error, "no memory \"rom\""), "{error}");
}
