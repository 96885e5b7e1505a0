//! Fuzz target: lease files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::format::lease_record::decode(bytes);
});
