//! Fuzz target: a whole index file, its parts against its sections.
#![no_main]

use stillframe_repo::index::file::fuzzing::whole;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((length, bytes)) = bytes.split_first_chunk() else {
        return;
    };
    let length = usize::from(u16::from_le_bytes(*length)).min(bytes.len());
    let (head, rest) = bytes.split_at(length);
    let _ = whole(head, rest);
});
