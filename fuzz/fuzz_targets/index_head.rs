//! Fuzz target: the head of an index file.
#![no_main]

use stillframe_repo::index::layout::Head;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(decoded) = Head::decode(bytes) {
        assert_eq!(Head::decode(&decoded.encode()), Ok(decoded));
    }
});
