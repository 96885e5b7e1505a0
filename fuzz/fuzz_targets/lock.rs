//! Fuzz target: lock files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::format::lock_record::decode(bytes);
});
