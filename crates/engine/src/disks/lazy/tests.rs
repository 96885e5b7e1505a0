//! The content of lazily restored disks: each byte as the checkpoint has it, and no error for QEMU.

use std::collections::BTreeMap;
use std::fs;

use proptest::prelude::*;
use stillframe_nbd::{Client, NbdError};
use stillframe_page::PAGE;
use stillframe_repo::{CheckpointId, Manifest};

use super::*;
use crate::fakes::checkpoints::NO_WAIT;
use crate::fakes::{FakeRepository, device_state, pages, vm_record};

/// Bytes that the last page of the disk has beyond its end.
const BEYOND: u64 = 1024;

/// A disk of these pages, each full of one byte, in a repository.
fn stored(fillings: &[u8]) -> (FakeRepository, CheckpointId, DiskTable) {
    let mut stored = FakeRepository::new();
    let record = vm_record("vm", &[]);
    let blocks = [("d0", pages(fillings))];
    let (id, manifest): (_, Manifest) = stored.checkpoint(&record, &blocks, &device_state(&[]));
    let table = DiskTable {
        bytes: fillings.len() as u64 * PAGE_BYTES - BEYOND,
        bitmap: None,
        table: manifest.ram[0].clone(),
    };
    (stored, id, table)
}

fn open<'r>(
    (id, table): (&CheckpointId, &DiskTable),
    socket: &Path,
    reader: &'r Reader<'r>,
) -> LazyDisks<'r> {
    let disk = LazyDisk {
        device: "d0".to_owned(),
        image: socket.with_extension("image"),
    };
    let socket = ServerSocket::bind(socket, None).unwrap();
    LazyDisks::open(&id.to_string(), vec![disk], [table], socket, reader).unwrap()
}

fn connect(socket: &Path, export: &str) -> Result<Client, NbdError> {
    let socket = UnixStream::connect(socket).unwrap();
    let contexts = [crate::disks::view::ALLOCATION];
    Client::open(socket, export, &contexts, Duration::from_secs(60))
}

fn read(client: &mut Client, range: Range<u64>) -> Result<Vec<u8>, NbdError> {
    let mut all = vec![0; (range.end - range.start) as usize];
    let start = range.start;
    client.read(vec![range], &mut |offset, bytes| {
        let at = (offset - start) as usize;
        all[at..at + bytes.len()].copy_from_slice(bytes);
        Ok::<(), NbdError>(())
    })?;
    Ok(all)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Any range is that of the bytes one after the other, and is called a hole if and only if it is one.
    #[test]
    fn ranges_are_those_of_the_disk(
        fillings in prop::collection::vec(0u8..4, 2..40),
        ranges in prop::collection::vec((0u64..170_000, 1u64..40_000), 1..60),
    ) {
        let (mut stored, _, table) = stored(&fillings);
        let reader = stored.repository.reader(NO_WAIT).unwrap();
        let content = Content {
            map: PageMap::open(&reader, &table.table).unwrap(),
            bytes: table.bytes,
            reads: Arc::default(),
            pages: AtomicU64::new(0),
        };
        let expected = pages(&fillings);
        let is_zero = |at: u64| fillings[(at / PAGE_BYTES) as usize] == 0;
        for (start, length) in ranges {
            let start = start % table.bytes;
            let end = table.bytes.min(start + length);
            let mut bytes = vec![0xff; (end - start) as usize];
            content.read(start, &mut bytes).unwrap();
            prop_assert_eq!(&bytes[..], &expected[start as usize..end as usize]);
            let extents = content.allocation(start..end).unwrap();
            let mut at = start;
            for Extent { bytes, flags } in extents {
                prop_assert_eq!(bytes.start, at);
                prop_assert!(bytes.end > at && bytes.end <= table.bytes);
                let zero = flags & Extent::ZERO != 0;
                prop_assert_eq!(zero, flags & Extent::HOLE != 0);
                prop_assert!(bytes.clone().step_by(512).all(|at| is_zero(at) == zero));
                at = bytes.end;
            }
            prop_assert!(at >= end);
        }
    }
}

#[test]
fn a_disk_is_shown_under_its_checkpoint_only() {
    let (mut stored, id, table) = stored(&[1, 0, 2]);
    let socket = stored.folder.path().join("socket");
    let reader = stored.repository.reader(NO_WAIT).unwrap();
    let disks = open((&id, &table), &socket, &reader);
    thread::scope(|scope| {
        let serving = disks.serve(scope).unwrap();
        let mut client = connect(&socket, &export_name(&id.to_string(), 0)).unwrap();
        assert_eq!(client.bytes(), table.bytes);
        let all = read(&mut client, 0..table.bytes).unwrap();
        assert_eq!(all, &pages(&[1, 0, 2])[..table.bytes as usize]);
        assert_eq!(disks.pages_read(), [2]);
        let other = CheckpointId([7; 32]).to_string();
        assert!(connect(&socket, &export_name(&other, 0)).is_err());
        // It ends although a client is connected.
        drop(serving);
        assert!(read(&mut client, 0..512).is_err());
    });
    drop(disks);
    assert!(!socket.exists());
}

#[test]
fn what_cannot_be_read_waits_and_is_no_error() {
    let (mut stored, id, table) = stored(&[1, 2, 3]);
    let folder = stored.folder.path().to_owned();
    let socket = folder.join("socket");
    let reader = stored.repository.reader(NO_WAIT).unwrap();
    let disks = open((&id, &table), &socket, &reader);
    let packs = folder.join("repository").join("packs");
    let away = folder.join("away");
    let export = export_name(&id.to_string(), 0);
    let wait_for = |stalls: bool| {
        let begin = Instant::now();
        while disks.stall().is_some() != stalls {
            assert!(begin.elapsed() < Duration::from_secs(60), "{stalls}");
            thread::sleep(Duration::from_millis(10));
        }
    };
    thread::scope(|scope| {
        let serving = disks.serve(scope).unwrap();
        assert!(disks.stall().is_none());
        fs::rename(&packs, &away).unwrap();
        let mut client = connect(&socket, &export).unwrap();
        let waiting = scope.spawn(move || read(&mut client, 0..PAGE_BYTES));
        wait_for(true);
        let (_, why) = disks.stall().unwrap();
        assert!(!why.is_empty());
        assert!(!waiting.is_finished());
        fs::rename(&away, &packs).unwrap();
        let page = waiting.join().unwrap().unwrap();
        assert!(page == [1; PAGE]);
        wait_for(false);
        // At the end one that waits gets no answer at all: QEMU keeps it for another server.
        fs::rename(&packs, &away).unwrap();
        for pack in fs::read_dir(&away).unwrap().flatten() {
            let pack = fs::read_dir(pack.path()).unwrap().flatten();
            pack.for_each(|file| fs::write(file.path(), []).unwrap());
        }
        let mut client = connect(&socket, &export).unwrap();
        let waiting = scope.spawn(move || read(&mut client, 0..PAGE_BYTES));
        wait_for(true);
        drop(serving);
        let error = waiting.join().unwrap().unwrap_err();
        assert!(!matches!(error, NbdError::Request { .. }), "{error}");
    });
}

#[test]
fn a_socket_of_a_killed_process_is_replaced_and_no_other_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    drop(listener);
    let socket = ServerSocket::bind(&path, None).unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(socket);
    assert!(!path.exists());
    fs::write(&path, "precious").unwrap();
    assert!(ServerSocket::bind(&path, None).is_err());
    assert_eq!(fs::read(&path).unwrap(), b"precious");
}

#[test]
fn an_image_names_its_server_with_a_delay() {
    let words = backing(Path::new("/a \"b\"/s"), &export_name(&"ab".repeat(32), 3));
    let options = words.strip_prefix("json:").unwrap();
    let options: BTreeMap<String, serde_json::Value> = serde_json::from_str(options).unwrap();
    let file = &options["file"];
    assert_eq!(file["server"]["path"], "/a \"b\"/s");
    assert_eq!(file["export"], "stillframe-lazy-abababababababab/3");
    assert_eq!(file["reconnect-delay"], RECONNECT_SECONDS);
}
