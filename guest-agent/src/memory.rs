//! How memory is used, in the kernel's own words.

use std::fs;
use std::io;

/// The kernel's file.
const MEMINFO: &str = "/proc/meminfo";

/// The kernel's text.
pub fn text() -> io::Result<String> {
    fs::read_to_string(MEMINFO)
}
