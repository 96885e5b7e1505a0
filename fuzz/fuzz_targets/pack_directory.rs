//! Fuzz target: the directory of a pack.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = stillframe_repo::pack::Directory::decode(bytes);
});
