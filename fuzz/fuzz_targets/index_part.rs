//! Fuzz target: a part of an index file.
#![no_main]

use stillframe_repo::index::layout::Part;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(decoded) = Part::decode(bytes) {
        assert_eq!(Part::decode(&decoded.encode()), Ok(decoded));
    }
});
