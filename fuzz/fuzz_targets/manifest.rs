//! Fuzz target: manifests.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::format::manifest::parse(bytes);
    let _ = stillframe_repo::format::manifest::decode(bytes);
});
