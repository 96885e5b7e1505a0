//! What an NBD client sends.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stillframe_nbd::fuzzing::server(bytes));
