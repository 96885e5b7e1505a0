//! State.
pub fn play(_: &str) {}
