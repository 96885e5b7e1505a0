//! Fuzz target: headers of all kinds of files, and both ends of packs.
#![no_main]

use stillframe_repo::format::layout::{Cursor, FileKind, HEADER_BYTES, header, read_header};
use stillframe_repo::pack::{PREAMBLE_BYTES, TAIL_BYTES, decode_preamble, decode_tail};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    for kind in [FileKind::Pack, FileKind::Index, FileKind::Manifest] {
        if read_header(&mut Cursor::new(bytes), kind) == Ok(()) {
            assert_eq!(bytes[..HEADER_BYTES], header(kind));
        }
    }
    if decode_preamble(bytes).is_ok() {
        assert!(bytes.len() >= PREAMBLE_BYTES);
    }
    let Some((tail, rest)) = bytes.split_first_chunk::<TAIL_BYTES>() else {
        return;
    };
    let length = rest
        .iter()
        .take(8)
        .fold(0, |sum, &byte| sum << 8 | u64::from(byte));
    if let Ok(range) = decode_tail(*tail, length) {
        assert!(range.start >= PREAMBLE_BYTES as u64 && range.start < range.end);
        assert_eq!(range.end, length - TAIL_BYTES as u64);
    }
});
