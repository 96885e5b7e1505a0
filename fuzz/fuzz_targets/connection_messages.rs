//! Fuzz target: the frames and messages of a transfer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    stillframe_engine::connection::fuzzing::messages(bytes);
});
