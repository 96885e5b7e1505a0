//! Fuzz target: lease files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::lease::decode(bytes);
});
