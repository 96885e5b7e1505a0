//! What the files of an export hold, and what an error leaves of the file that was there.

use std::fs;
use std::io::Cursor;
use std::path::Path;

use proptest::prelude::*;
use stillframe_qemu::migration_file::{Form, FoundPage, MigrationFile};

use super::*;
use crate::fakes::checkpoints::{MACHINE, NO_WAIT};
use crate::fakes::{FakeRepository, device_state, pages, vm_record};

const RAM: &str = "pc.ram";
const VIDEO: &str = "vga.vram";

fn raw_state() -> Vec<u8> {
    device_state(&[("timer", &[1; 16])])
}

/// A repository with one checkpoint of two blocks.
struct Scene {
    stored: FakeRepository,
    id: CheckpointId,
    manifest: Manifest,
}

impl Scene {
    fn new(ram: &[u8], video: &[u8]) -> Scene {
        let mut stored = FakeRepository::new();
        let blocks = [(RAM, pages(ram)), (VIDEO, pages(video))];
        let (id, manifest) = stored.checkpoint(&vm_record("vm", &[]), &blocks, &raw_state());
        Scene {
            stored,
            id,
            manifest,
        }
    }

    fn export(&mut self, format: Format, to: Destination<'_>) -> Result<ExportReport, ExportError> {
        let checkpoint = Checkpoint {
            id: &self.id,
            manifest: &self.manifest,
        };
        let repository = &mut self.stored.repository;
        export(repository, checkpoint, format, to, NO_WAIT, &mut |_| ())
    }

    fn write_pipe(&mut self) -> Vec<u8> {
        let mut pipe = Vec::new();
        self.export(Format::Migration, Destination::Pipe(&mut pipe))
            .unwrap();
        pipe
    }

    fn write_file(&mut self, format: Format, path: &Path) -> Vec<u8> {
        let to = file(path, false);
        let report = self.export(format, to).unwrap();
        assert_eq!(report.file.as_deref(), Some(path));
        let bytes = fs::read(path).unwrap();
        assert_eq!(report.bytes, bytes.len() as u64);
        bytes
    }

    fn path(&self, name: &str) -> PathBuf {
        self.stored.folder.path().join(name)
    }
}

fn file(path: &Path, replace: bool) -> Destination<'static> {
    Destination::File {
        path: path.to_owned(),
        replace,
    }
}

/// The form, machine, memory by block, and device state of a file, as QEMU would take it.
fn decode(bytes: &[u8]) -> (Form, String, Vec<Vec<u8>>, Vec<u8>) {
    let mut file = MigrationFile::open(Cursor::new(bytes)).unwrap();
    let block = |block: &FileBlock| vec![0; block.used_bytes as usize];
    let mut memory: Vec<Vec<u8>> = file.blocks().iter().map(block).collect();
    let mut page_bytes = [0; PAGE];
    while let Some(FoundPage { page, is_zero }) = file.next_page(&mut page_bytes).unwrap() {
        let at = (page.page * PAGE_BYTES) as usize;
        match is_zero {
            true => memory[page.block][at..at + PAGE].fill(0),
            false => memory[page.block][at..at + PAGE].copy_from_slice(&page_bytes),
        }
    }
    let (form, machine) = (file.form(), file.machine().to_owned());
    (form, machine, memory, file.device_state(1 << 20).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn every_form_of_migration_file_is_the_checkpoint(
        ram in prop::collection::vec(0u8..4, 1..70),
        video in prop::collection::vec(0u8..2, 1..4),
    ) {
        let mut scene = Scene::new(&ram, &video);
        let memory = vec![pages(&ram), pages(&video)];
        let expected = |form| (form, MACHINE.to_owned(), memory.clone(), raw_state());
        prop_assert!(decode(&scene.write_pipe()) == expected(Form::Stream));
        let path = scene.path("stream");
        prop_assert!(decode(&scene.write_file(Format::Migration, &path)) == expected(Form::Stream));
        let path = scene.path("mapped");
        prop_assert!(decode(&scene.write_file(Format::MappedRam, &path)) == expected(Form::Mapped));
    }

    /// RAM lies in two pieces by physical address, and each byte where the layout says.
    #[test]
    fn main_ram_is_written_where_it_lies(
        ram in prop::collection::vec(any::<u8>(), 2..60),
        low_pages in 1u64..60,
        gap_pages in 0u64..9,
    ) {
        let mut scene = Scene::new(&ram, &[9]);
        let path = scene.path("raw");
        let low = low_pages.min(ram.len() as u64 - 1);
        let output = Output::create(&path, false).unwrap();
        output.set_length((ram.len() as u64 + gap_pages) * PAGE_BYTES).unwrap();
        let reader = scene.stored.repository.reader(NO_WAIT).unwrap();
        let maps = scene.manifest.ram.iter().map(|table| PageMap::open(&reader, table).unwrap());
        let mut no_progress = |_| ();
        let mut job = Job {
            id: &scene.id,
            manifest: &scene.manifest,
            record: vm_record("vm", &[]),
            blocks: scene.manifest.ram.iter().map(file_block).collect(),
            device_state: raw_state(),
            walk: Walk::new(maps.collect(), &mut no_progress),
        };
        let place = |offset: u64| match offset < low * PAGE_BYTES {
            true => offset,
            false => offset + gap_pages * PAGE_BYTES,
        };
        job.main_ram(0, &output, &place).unwrap();
        output.finish().unwrap();
        let (below, above) = ram.split_at(low as usize);
        let expected = [below, &vec![0; gap_pages as usize], above].concat();
        prop_assert!(fs::read(&path).unwrap() == pages(&expected));
    }
}

/// QEMU has put its firmware into small blocks before it loads the file, and nothing into large ones.
#[test]
fn a_mapped_file_mentions_zero_pages_of_small_blocks_only() {
    let large = FIRMWARE_BYTES / PAGE_BYTES + 1;
    let mut ram = vec![0; large as usize];
    (ram[3], ram[700]) = (5, 6);
    let mut scene = Scene::new(&ram, &[0, 7, 0]);
    let path = scene.path("mapped");
    let bytes = scene.write_file(Format::MappedRam, &path);
    let mut file = MigrationFile::open(Cursor::new(&bytes)).unwrap();
    let mut page_bytes = [0; PAGE];
    let mut mentioned = Vec::new();
    while let Some(FoundPage { page, .. }) = file.next_page(&mut page_bytes).unwrap() {
        mentioned.push(page);
    }
    let expected = [(0, 3), (0, 700), (1, 0), (1, 1), (1, 2)];
    assert_eq!(
        mentioned,
        expected.map(|(block, page)| GuestPage::new(block, page))
    );
}

#[test]
fn only_a_stream_goes_into_a_pipe() {
    let mut scene = Scene::new(&[1, 2], &[3]);
    for format in [Format::MappedRam, Format::Raw, Format::Elf] {
        let mut pipe = Vec::new();
        let refused = scene.export(format, Destination::Pipe(&mut pipe));
        assert!(matches!(refused, Err(ExportError::NoPipe)));
        assert!(pipe.is_empty());
    }
}

/// A file that is there stays as it was until the new one is whole.
#[test]
fn a_file_is_replaced_as_a_whole_or_not_at_all() {
    let mut scene = Scene::new(&[1, 2], &[3]);
    let folder = scene.path("out");
    fs::create_dir(&folder).unwrap();
    let path = folder.join("vm");
    fs::write(&path, "old").unwrap();
    let names = || fs::read_dir(&folder).unwrap().count();
    let refused = scene.export(Format::Migration, file(&path, false));
    assert!(matches!(refused, Err(ExportError::Exists { .. })));
    let packs = scene.stored.repository.dir().join("packs");
    fs::rename(&packs, scene.path("away")).unwrap();
    for format in [Format::Migration, Format::MappedRam] {
        let failed = scene.export(format, file(&path, true));
        assert!(matches!(
            failed,
            Err(ExportError::Repo(_) | ExportError::Checkpoint(_))
        ));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(), 1, "something was left");
    }
    fs::rename(scene.path("away"), &packs).unwrap();
    scene.export(Format::Migration, file(&path, true)).unwrap();
    assert_eq!(decode(&fs::read(&path).unwrap()).2[0], pages(&[1, 2]));
    assert_eq!(names(), 1, "something was left");
    let refused = scene.export(Format::Migration, file(&folder, true));
    assert!(matches!(refused, Err(ExportError::NoFile { .. })));
}

#[test]
fn the_command_is_the_recorded_one_with_another_source() {
    let mut record = vm_record("vm", &[]);
    for word in ["-incoming", "defer", "-loadvm", "old"] {
        record.arguments.push(word.to_owned());
    }
    let line = |format, file: Option<&str>| {
        let command = load_command(&record, format, file.map(Path::new))?;
        assert_eq!(command.exe, record.exe);
        Some(command.arguments[1..].join(" "))
    };
    let file = Some("/f");
    assert_eq!(
        line(Format::Migration, file).as_deref(),
        Some("-m 64 -incoming file:/f")
    );
    assert_eq!(
        line(Format::Migration, None).as_deref(),
        Some("-m 64 -incoming fd:0")
    );
    assert_eq!(
        line(Format::MappedRam, file).as_deref(),
        Some("-m 64 -global migration.mapped-ram=on -incoming file:/f")
    );
    assert_eq!(line(Format::Raw, file), None);
    assert_eq!(line(Format::Elf, file), None);
}
