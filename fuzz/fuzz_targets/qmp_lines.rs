//! Fuzz target: what a monitor sends.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((&piece_bytes, bytes)) = bytes.split_first() else {
        return;
    };
    stillframe_qemu::fuzzing::monitor_lines(bytes, piece_bytes.into());
});
