//! Limits.
pub fn play(_: &str) {}
