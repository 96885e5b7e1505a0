//! Fuzz target: a layer over a page table.
#![no_main]

use stillframe_repo::layer::Layer;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    for pages in [0, 3000, 1 << 20] {
        if let Ok(layer) = Layer::decode(bytes, pages) {
            assert_eq!(Layer::decode(&layer.encode(pages), pages), Ok(layer));
        }
    }
});
