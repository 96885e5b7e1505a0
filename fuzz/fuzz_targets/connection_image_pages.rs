//! Fuzz target: places of pages in shared images that came over a connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    stillframe_engine::connection::fuzzing::image_pages(bytes);
});
