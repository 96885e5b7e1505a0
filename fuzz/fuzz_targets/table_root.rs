//! Fuzz target: the root of a page table.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::page_table::table::decode_root(bytes, bytes.len() as u64 * 16);
});
