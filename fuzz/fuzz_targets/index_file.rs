//! Fuzz target: index files of the versions before 3.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::index::file::IndexFile::decode(bytes);
});
