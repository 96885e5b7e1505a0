//! Tracking.
pub fn play(_: &str) {}
