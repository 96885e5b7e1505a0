//! Fuzz target: the config file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::format::config::decode(bytes);
});
