//! Written data is read again, and no input does harm.

use std::collections::BTreeMap;
use std::io::Cursor;

use proptest::prelude::*;

use super::*;

const MACHINE: &str = "pc-q35-10.0";
const LIMIT: u64 = 1 << 20;

/// Pages with content by block and number.
type Pages = BTreeMap<GuestPage, [u8; PAGE]>;

/// A device state of two sections; RAM cannot have their numbers.
fn devices() -> Vec<u8> {
    let section = |number: u8, name: &[u8], data: &[u8]| {
        let head = [&[4, 0, 0, 0, number, name.len() as u8], name].concat();
        [&head, &[0; 8][..], data, &[FOOTER, 0, 0, 0, number]].concat()
    };
    let sections = [
        section(0, b"timer", &[7; 16]),
        section(1, b"cpu", b"\x7e\0\0"),
    ]
    .concat();
    [&HEADER[..], &sections, &[0]].concat()
}

fn blocks(pages: &[u64]) -> Vec<FileBlock> {
    let block = |(number, pages): (usize, &u64)| FileBlock {
        name: format!("/rom@etc/block-{number}"),
        used_bytes: pages * PAGE_BYTES,
    };
    pages.iter().enumerate().map(block).collect()
}

fn stream(blocks: &[FileBlock], pages: &Pages) -> Vec<u8> {
    let mut encoder =
        StreamEncoder::begin(Vec::new(), MACHINE, blocks, &devices()).expect("short names");
    for (number, block) in blocks.iter().enumerate() {
        for page in 0..block.pages() {
            let page = GuestPage::new(number, page);
            match pages.get(&page) {
                Some(bytes) => encoder.page(page, bytes),
                None => encoder.zero(page),
            }
            .expect("memory takes all");
        }
    }
    let (bytes, length) = encoder.finish(&devices()).expect("memory takes all");
    assert_eq!(bytes.len() as u64, length);
    bytes
}

fn mapped(blocks: &[FileBlock], pages: &Pages) -> Vec<u8> {
    let layout = mapped_layout(MACHINE, blocks, &devices()).expect("short names");
    let mut file = vec![0; layout.file_bytes as usize];
    let mut put = |at: u64, bytes: &[u8]| {
        file[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    };
    for (at, piece) in &layout.pieces {
        put(*at, piece);
    }
    for (&GuestPage { block, page }, bytes) in pages {
        let place = layout.blocks[block];
        put(place.pages_at + page * PAGE_BYTES, bytes);
    }
    for &GuestPage { block, page } in pages.keys() {
        file[(layout.blocks[block].bitmap_at + page / 8) as usize] |= 1 << (page % 8);
    }
    file
}

/// All of a file: its form, blocks, pages with content and device state.
fn read(file: &[u8]) -> Result<(Form, Vec<FileBlock>, Pages, Vec<u8>), MigrationFileError> {
    let mut reading = MigrationFile::open(Cursor::new(file))?;
    assert_eq!(reading.machine(), MACHINE);
    let mut pages = Pages::new();
    let mut bytes = [0; PAGE];
    while let Some(found) = reading.next_page(&mut bytes)? {
        match found.is_zero {
            true => pages.remove(&found.page),
            false => pages.insert(found.page, bytes),
        };
    }
    let (form, blocks) = (reading.form(), reading.blocks().to_vec());
    Ok((form, blocks, pages, reading.device_state(LIMIT)?))
}

fn sample() -> (Vec<FileBlock>, Pages) {
    let pages = [
        (GuestPage::new(0, 0), [1; PAGE]),
        (GuestPage::new(0, 69), [2; PAGE]),
        (GuestPage::new(1, 2), [3; PAGE]),
    ];
    (blocks(&[70, 3]), pages.into())
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let (blocks, pages) = sample();
    let good = stream(&blocks, &pages);
    // The first record behind the list of blocks, its footer and the head of the next section.
    let record = good
        .windows(5)
        .rposition(|at| at == b"\x03\0\0\0\x02")
        .expect("the last section")
        + 5;
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        drain(&changed).expect_err("changed").to_string()
    };
    for (flag, words) in [
        (0x40u64, "xbzrle"),
        (0x100, "compressed"),
        (0x200, "multifd"),
        (0x80, "RDMA"),
    ] {
        let said = with(record, &flag.to_be_bytes());
        assert!(
            said.contains(words) && said.contains("without that capability"),
            "{said}"
        );
    }
    let beyond = (70 * PAGE_BYTES) | FLAG_PAGE;
    assert!(with(record, &beyond.to_be_bytes()).contains("beyond the end"));
    assert!(with(record, &(FLAG_PAGE | FLAG_CONTINUE).to_be_bytes()).contains("no RAM block"));
    assert!(with(0, b"LibvirtQemudSave").contains("libvirt"));
    assert!(with(0, b"MVEQ").contains("other order"));
    assert!(with(7, b"\x04").contains("another version"));
    assert!(with(8, b"\x01").contains("configuration"));
    let cut = drain(&good[..record + 100]).expect_err("cut").to_string();
    assert!(
        cut.contains(&format!("ends at byte {}", record + 100)),
        "{cut}"
    );
    let cut = drain(&good[..good.len() - 12]).expect_err("cut");
    assert!(
        matches!(cut, MigrationFileError::DeviceState { .. }),
        "{cut}"
    );
    let in_parts = with(record - 5, b"\x03\0\0\0\x01");
    assert!(in_parts.contains("dirty bitmaps"), "{in_parts}");
}

/// QEMU sends RAM in many sections, and names a block only where it is another than that of the record before.
#[test]
fn a_block_goes_on_from_one_section_to_the_next() {
    let (blocks, pages) = sample();
    let whole = stream(&blocks, &pages);
    let head = b"\x03\0\0\0\x02";
    let start = whole.windows(5).rposition(|at| at == head);
    let start = start.expect("the last section");
    // Behind the first record, which names its block.
    let cut = start + 5 + 8 + 1 + blocks[0].name.len() + PAGE;
    let end = b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02";
    let (before, behind) = whole.split_at(cut);
    let mut parts = [before, end, head, behind].concat();
    parts[start] = SECTION_PART;
    assert!(read(&parts).expect("whole").2 == pages, "other pages");
}

#[test]
fn a_mapped_file_that_contradicts_itself_is_refused() {
    let (blocks, pages) = sample();
    let good = mapped(&blocks, &pages);
    let layout = mapped_layout(MACHINE, &blocks, &devices()).expect("short names");
    let header = layout.blocks[0].bitmap_at as usize - MAPPED_HEADER_BYTES as usize;
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        drain(&changed).expect_err("changed").to_string()
    };
    assert!(with(header, &2u32.to_be_bytes()).contains("version 2"));
    assert!(with(header + 4, &8192u64.to_be_bytes()).contains("8192 bytes"));
    assert!(with(header + 12, &8u64.to_be_bytes()).contains("overlap"));
    assert!(with(header + 20, &(1u64 << 40).to_be_bytes()).contains("cut off"));
    assert!(with(header + 20, &u64::MAX.to_be_bytes()).contains("beyond all files"));
    let last_word = layout.blocks[0].bitmap_at as usize + 8;
    assert!(with(last_word, &[0xff]).contains("page 70 is beyond"));
    let cut = drain(&good[..good.len() / 2]).expect_err("cut").to_string();
    assert!(cut.contains("cut off"), "{cut}");
}

#[test]
fn more_device_state_than_is_allowed_is_not_read() {
    let (blocks, pages) = sample();
    let file = stream(&blocks, &pages);
    let mut reading = MigrationFile::open(Cursor::new(&file)).expect("whole");
    while reading.next_page(&mut [0; PAGE]).expect("whole").is_some() {}
    let error = reading.device_state(10).expect_err("longer");
    assert!(matches!(
        error,
        MigrationFileError::DeviceStateTooLong { limit: 10, .. }
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_is_written_is_read(
        sizes in proptest::collection::vec(1u64..150, 1..4),
        content in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1u8..), 0..20),
    ) {
        let blocks = blocks(&sizes);
        let mut pages = Pages::new();
        for (block, page, fill) in content {
            let block = block.index(blocks.len());
            let page = page.index(sizes[block] as usize) as u64;
            pages.insert(GuestPage { block, page }, [fill; PAGE]);
        }
        for (form, file) in [(Form::Stream, stream(&blocks, &pages)), (Form::Mapped, mapped(&blocks, &pages))] {
            let (found, found_blocks, found_pages, state) = read(&file).expect("whole");
            prop_assert_eq!((found, &found_blocks), (form, &blocks));
            prop_assert!(found_pages == pages, "other pages");
            prop_assert_eq!(state, devices());
        }
    }

    #[test]
    fn damage_never_panics(at: prop::sample::Index, bit in 0u8..8, cut: prop::sample::Index, is_mapped: bool) {
        let (blocks, pages) = sample();
        let mut file = if is_mapped { mapped(&blocks, &pages) } else { stream(&blocks, &pages) };
        // The pages' own bytes are arbitrary.
        let interesting = 400.min(file.len());
        file[at.index(interesting)] ^= 1 << bit;
        let _ = drain(&file);
        file.truncate(cut.index(file.len()));
        let _ = drain(&file);
    }

    #[test]
    fn noise_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..600), mapped: bool) {
        let (blocks, _) = sample();
        let good = stream(&blocks, &Pages::new());
        let start = if mapped { 8 } else { 30 };
        let _ = drain(&[&good[..start], &noise].concat());
    }
}

/// Reads to the end or an error, whatever it is.
fn drain(file: &[u8]) -> Result<(), MigrationFileError> {
    let mut reading = MigrationFile::open(Cursor::new(file))?;
    let mut bytes = [0; PAGE];
    while reading.next_page(&mut bytes)?.is_some() {}
    reading.device_state(LIMIT).map(drop)
}
