//! Fuzz target: what comes over a connection: preface, frames and messages.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    stillframe_link::fuzzing::preface(bytes);
    stillframe_engine::connection::fuzzing::messages(bytes);
});
