//! Fuzz target: a segment of a page table.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::page_table::table::decode_segment(bytes, (bytes.len() / 33) as u64);
});
