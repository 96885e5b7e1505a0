//! Fuzz target: a layer over a page table.
#![no_main]

use stillframe_repo::page_table::layer::Layer;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // Of 256 MiB at most: a larger block takes longer and has no other rules.
    for pages in [0, 3000, 1 << 16] {
        if let Ok(layer) = Layer::decode(bytes, pages) {
            assert_eq!(Layer::decode(&layer.encode(pages), pages), Ok(layer));
        }
    }
});
