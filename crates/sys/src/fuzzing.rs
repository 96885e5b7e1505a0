//! The parts of the crate's inside that the fuzz targets reach.

use crate::process::Mapping;

/// A line of `/proc/PID/maps`.
pub fn mapping(line: &[u8]) -> Option<Mapping> {
    Mapping::parse(line)
}
