//! What a successor believes of the record of an unfinished restore: no page goes to a process that is not the VM.

use std::process::Command;

use stillframe_repo::CheckpointId;
use stillframe_sys::private_dir::PrivateDir;
use tempfile::TempDir;

use super::*;
use crate::fakes::checkpoints::NO_WAIT;
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
        agent: None,
        blocks: blocks.to_vec(),
    };
    FillingRecord::new(process, filling).unwrap()
}

fn refusal(record: &FillingRecord, files: &Files) -> RestoreError {
    the_vm(record, files, Path::new("/no/monitor")).unwrap_err()
}

fn is_malformed(error: &RestoreError, words: &str) -> bool {
    matches!(error, RestoreError::Record(RecordError::Malformed { what, .. }) if what.contains(words))
}

#[test]
fn a_process_that_is_not_the_vm_is_not_filled() {
    let (_root, files) = files();
    let own = record(&this_process(), CheckpointId([1; 32]), &[]);
    let error = refusal(&own, &files);
    assert!(is_malformed(&error, "is no QEMU"), "{error}");
    let mut of_another = own;
    of_another.uid += 1;
    let error = refusal(&of_another, &files);
    assert!(is_malformed(&error, "runs as user"), "{error}");
}

#[test]
fn a_vm_that_has_ended_leaves_no_files() {
    let (_root, mut files) = files();
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let process = Process::open(child.id().cast_signed()).unwrap();
    let record = record(&process, CheckpointId([1; 32]), &[]);
    files.write(&record).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let error = refusal(&record, &files);
    assert!(matches!(error, RestoreError::Ended { pid, .. } if pid == record.pid));
    assert!(matches!(files.read(), Err(RecordError::None { .. })));
}

/// The record is the user's to write; the manifest is authenticated.
#[test]
fn pages_come_from_the_tables_of_the_manifest() {
    let (_root, files) = files();
    let mut stored = FakeRepository::new();
    let blocks = [("pc.ram", pages(&[1, 2])), ("vga.vram", pages(&[3]))];
    let (id, manifest) = stored.checkpoint(&vm_record("vm", &[]), &blocks, &device_state(&[]));
    let reader = stored.repository.reader(NO_WAIT).unwrap();
    let ram = |name: &str| FakeMemory::new(name, &[0]).ram;
    let known = record(&this_process(), id, &[ram("vga.vram"), ram("pc.ram")]);
    let tables = tables_of(&known, &files, &reader).unwrap();
    assert_eq!(tables, [manifest.ram[1].clone(), manifest.ram[0].clone()]);
    let unknown = record(&this_process(), id, &[ram("rom")]);
    let error = tables_of(&unknown, &files, &reader).unwrap_err();
    assert!(is_malformed(&error, "no memory \"rom\""), "{error}");
}
