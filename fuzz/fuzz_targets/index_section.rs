//! Fuzz target: a section of an index file.
#![no_main]

use stillframe_repo::index::layout::{decode_section, encode_section};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(entries) = decode_section(bytes) {
        assert_eq!(encode_section(&entries), bytes);
    }
});
