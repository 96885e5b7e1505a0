//! Fuzz target: a working set.
#![no_main]

use stillframe_repo::WorkingSet;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(set) = WorkingSet::decode(bytes) {
        assert_eq!(WorkingSet::decode(&set.encode()), Ok(set));
    }
});
