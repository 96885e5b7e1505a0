//! What the fuzz targets reach of the crate's inside.

use crate::process::Mapping;

/// A line of `/proc/PID/maps`.
pub fn mapping(line: &[u8]) -> Option<Mapping> {
    Mapping::parse(line)
}
