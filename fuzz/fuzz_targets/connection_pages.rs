//! Fuzz target: a batch of pages that came over a connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    stillframe_engine::connection::fuzzing::batch(bytes);
});
