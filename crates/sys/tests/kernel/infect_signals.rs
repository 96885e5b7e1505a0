//! Infecting a process that is being hit by signals: none is lost, none comes twice.
pub fn play(_: &str) {}
