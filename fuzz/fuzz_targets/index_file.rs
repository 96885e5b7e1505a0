//! Fuzz target: index files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::index_file::IndexFile::decode(bytes);
});
