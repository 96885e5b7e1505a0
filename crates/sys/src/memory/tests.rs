//! Transfers against simple loops, and extents against the bytes of the file.

use super::*;
use crate::pagemap::HOST_PAGE_BYTES;
use proptest::prelude::*;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

fn own() -> RemoteMemory {
    RemoteMemory::open(&Process::open(std::process::id() as i32).unwrap())
}

/// Cuts a length into pieces, empty ones too, as the numbers say.
fn cut(bytes: usize, sizes: &[usize]) -> Vec<usize> {
    let mut left = bytes;
    let mut pieces: Vec<usize> = sizes
        .iter()
        .map(|size| {
            let piece = (*size).min(left);
            left -= piece;
            piece
        })
        .collect();
    pieces.push(left);
    pieces
}

/// Ranges of these lengths inside of `memory`, in some other order than that of their addresses,
/// with gaps.
fn scatter(memory: &[u8], pieces: &[usize]) -> Vec<AddressRange> {
    let mut end = memory.as_ptr() as u64 + memory.len() as u64;
    let place = |bytes: &usize| {
        let range = AddressRange {
            start: end - *bytes as u64,
            end,
        };
        end = range.start - 3;
        range
    };
    pieces.iter().map(place).collect()
}

fn offset_in(memory: &[u8], range: AddressRange) -> usize {
    (range.start - memory.as_ptr() as u64) as usize
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn transfers_are_what_a_loop_would_do(
        bytes in 0..60_000_usize,
        near in prop::collection::vec(0..40_usize, 0..3000),
        far in prop::collection::vec(0..40_usize, 0..3000),
        seed in any::<u8>(),
    ) {
        let (near, far) = (cut(bytes, &near), cut(bytes, &far));
        let room = bytes + 3 * far.len() + 3;
        let mut memory: Vec<u8> = (0..room).map(|at| (at as u8).wrapping_mul(31) ^ seed).collect();
        let ranges = scatter(&memory, &far);
        let expected: Vec<u8> = ranges
            .iter()
            .flat_map(|range| {
                let from = offset_in(&memory, *range);
                memory[from..from + range.len() as usize].to_vec()
            })
            .collect();
        let mut read = vec![0; bytes];
        let mut buffers = Vec::new();
        let mut rest = read.as_mut_slice();
        for piece in &near {
            let (buffer, tail) = rest.split_at_mut(*piece);
            buffers.push(buffer);
            rest = tail;
        }
        own().read_vectored(&mut buffers, &ranges).unwrap();
        prop_assert!(read == expected);

        // And back, changed: exactly those bytes of the memory change.
        let changed: Vec<u8> = read.iter().map(|byte| !byte).collect();
        let mut wanted = memory.clone();
        let mut next = changed.iter();
        for range in &ranges {
            let from = offset_in(&memory, *range);
            wanted[from..from + range.len() as usize].fill_with(|| *next.next().unwrap());
        }
        let mut rest = changed.as_slice();
        let buffers: Vec<&[u8]> = near
            .iter()
            .map(|piece| {
                let (buffer, tail) = rest.split_at(*piece);
                rest = tail;
                buffer
            })
            .collect();
        // `memory` is written behind the compiler's back: it has to be borrowed for that.
        let _borrowed = memory.as_mut_ptr();
        own().write_vectored(&buffers, &ranges).unwrap();
        prop_assert!(memory == wanted);
    }

    /// Every byte outside of the extents is zero, and on a memory file extents are exactly the pages
    /// that were written and not discarded since.
    #[test]
    fn extents_agree_with_the_bytes(
        writes in prop::collection::vec((0..64_u64, 1..9_u64, any::<bool>()), 0..12),
        (start, count) in (0..70_u64, 0..70_u64),
        on_disk in any::<bool>(),
    ) {
        const PAGES: u64 = 72;
        let file = if on_disk { tempfile::tempfile().unwrap() } else { memory_file() };
        file.set_len(PAGES * HOST_PAGE_BYTES).unwrap();
        let mut written = [false; PAGES as usize];
        for (first, pages, discard) in writes {
            let (at, bytes) = (first * HOST_PAGE_BYTES, pages * HOST_PAGE_BYTES);
            if discard {
                use rustix::fs::FallocateFlags;
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(&file, flags, at, bytes).unwrap();
            } else {
                file.write_all_at(&vec![7; bytes as usize], at).unwrap();
            }
            written[first as usize..(first + pages) as usize].fill(!discard);
        }
        let (offset, bytes) = (start * HOST_PAGE_BYTES, count * HOST_PAGE_BYTES);
        let extents = data_extents(&file, offset, bytes).unwrap();
        for pair in extents.windows(2) {
            prop_assert!(pair[0].end < pair[1].start, "{extents:?}");
        }
        for page in 0..count {
            let inside = extents.iter().any(|extent| extent.contains(&(page * HOST_PAGE_BYTES)));
            let data = written.get((start + page) as usize).copied().unwrap_or(false);
            if on_disk {
                prop_assert!(inside || !data, "page {page}: {extents:?}");
            } else {
                prop_assert_eq!(inside, data, "page {}: {:?}", page, extents);
            }
        }
        prop_assert!(extents.last().is_none_or(|last| last.end <= bytes));
    }
}

fn memory_file() -> File {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    File::from(rustix::fs::memfd_create("test", flags).unwrap())
}

/// Four pages, of which the third may not be touched.
struct Torn {
    base: *mut libc::c_void,
}

impl Torn {
    fn new() -> Torn {
        use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let none = std::ptr::null_mut();
        // SAFETY: new memory at an address of the kernel's choice; then a part of it is closed.
        let base = unsafe {
            let base =
                rustix::mm::mmap_anonymous(none, 4 * 4096, access, MapFlags::PRIVATE).unwrap();
            rustix::mm::mprotect(base.byte_add(2 * 4096), 4096, MprotectFlags::empty()).unwrap();
            base
        };
        Torn { base }
    }
}

impl Drop for Torn {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no longer used.
        unsafe { rustix::mm::munmap(self.base, 4 * 4096).unwrap() };
    }
}

#[test]
fn an_error_names_the_first_bad_address() {
    let torn = Torn::new();
    let start = torn.base as u64;
    let bad = start + 2 * 4096;
    let mut buffer = vec![0; 4 * 4096];
    for result in [own().read(start, &mut buffer), own().write(start, &buffer)] {
        let Err(MemoryError::NotMapped { address, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(address, bad);
    }
    // In pieces that straddle pages, too.
    let ranges = [
        AddressRange {
            start: start + 100,
            end: start + 200,
        },
        AddressRange {
            start: start + 4000,
            end: start + 4 * 4096 - 100,
        },
    ];
    let bytes = ranges.iter().map(|range| range.len() as usize).sum();
    let result = own().read_vectored(&mut [&mut buffer[..bytes]], &ranges);
    assert!(matches!(result, Err(MemoryError::NotMapped { address, .. }) if address == bad));
    own().read(start, &mut buffer[..2 * 4096]).unwrap();
    let result = own().read(u64::MAX - 4, &mut buffer[..8]);
    assert!(
        matches!(result, Err(MemoryError::NotMapped { .. })),
        "{result:?}"
    );
}

#[test]
fn lengths_have_to_fit() {
    let range = AddressRange {
        start: 4096,
        end: 4100,
    };
    let result = own().read_vectored(&mut [&mut [0; 3]], &[range]);
    assert!(matches!(
        result,
        Err(MemoryError::LengthMismatch {
            local_bytes: 3,
            remote_bytes: 4
        })
    ));
    own().read_vectored(&mut [], &[]).unwrap();
    own()
        .read_vectored(&mut [&mut []], &[AddressRange { start: 9, end: 9 }])
        .unwrap();
}

#[test]
fn a_mapping_shares_the_file() {
    let file = memory_file();
    file.set_len(4 * 4096).unwrap();
    file.write_all_at(b"hello", 4096 + 10).unwrap();
    let mapping = SharedMapping::map(&file, 4096, 2 * 4096, true).unwrap();
    assert_eq!((mapping.len(), mapping.is_empty()), (2 * 4096, false));
    let mut bytes = [0; 5];
    mapping.read(10, &mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    mapping.write(2 * 4096 - 5, b"world").unwrap();
    file.read_exact_at(&mut bytes, 3 * 4096 - 5).unwrap();
    assert_eq!(&bytes, b"world");
    for offset in [2 * 4096 - 4, u64::MAX] {
        let result = mapping.read(offset, &mut bytes);
        assert!(
            matches!(result, Err(MemoryError::OutOfRange { .. })),
            "{result:?}"
        );
        let result = mapping.write(offset, &bytes);
        assert!(
            matches!(result, Err(MemoryError::OutOfRange { .. })),
            "{result:?}"
        );
    }
    mapping.read(2 * 4096, &mut []).unwrap();
    let reader = SharedMapping::map(&file, 0, 4096, false).unwrap();
    assert!(reader.write(0, b"x").is_err());
}

#[test]
fn a_mapping_lies_within_the_file() {
    let file = memory_file();
    file.set_len(4096).unwrap();
    for (offset, bytes) in [(0, 0), (0, 8192), (4096, 4096), (u64::MAX, 2)] {
        let result = SharedMapping::map(&file, offset, bytes, false);
        assert!(
            matches!(result, Err(MemoryError::OutOfRange { .. })),
            "{result:?}"
        );
    }
    let result = SharedMapping::map(&file, 1, 4000, false);
    assert!(matches!(result, Err(MemoryError::Io { .. })), "{result:?}");
    let read_only = File::from(OwnedFd::from(std::io::pipe().unwrap().0));
    assert!(SharedMapping::map(&read_only, 0, 4096, true).is_err());
    assert!(data_extents(&file, u64::MAX, 2).is_err());
    assert_eq!(data_extents(&file, 9 * 4096, 4096).unwrap(), []);
}
