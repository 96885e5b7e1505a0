//! Fuzz target: a delta of several pages, read and applied.
#![no_main]

use stillframe_page::PAGE;
use stillframe_page::delta::Delta;

libfuzzer_sys::fuzz_target!(|encoded: &[u8]| {
    if let Ok(delta) = Delta::decode(encoded) {
        let mut page = [0; PAGE];
        for index in 0..delta.pages().count() {
            delta.apply(index, &mut page);
        }
    }
});
