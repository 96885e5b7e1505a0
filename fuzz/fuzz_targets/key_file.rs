//! Fuzz target: key files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::crypto::key_file::decode(bytes);
});
