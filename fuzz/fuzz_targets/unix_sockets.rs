//! Fuzz target: the kernel's list of unix sockets, whose paths are anybody's.
#![no_main]

use std::path::Path;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let table = String::from_utf8_lossy(bytes);
    for path in ["/run/a.sock", "a.sock", ""] {
        stillframe_qemu::fuzzing::sockets(&table, Path::new(path));
    }
});
