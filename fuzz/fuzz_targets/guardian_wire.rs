//! Fuzz target: what engine and guardian say to each other.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    stillframe_engine::guardian::fuzzing::messages(bytes).expect("a pair of sockets");
});
