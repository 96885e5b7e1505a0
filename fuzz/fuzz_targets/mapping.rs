//! Fuzz target: the mappings of a process, whose paths are anybody's.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    for line in bytes.split(|&byte| byte == b'\n') {
        let _ = stillframe_sys::fuzzing::mapping(line);
    }
});
