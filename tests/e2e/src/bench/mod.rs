//! Benches: ratios against a named peer in one run, raw data kept.

pub mod checkpoint;
pub mod clones;
pub mod direct_io;
pub mod extremes;
pub mod frequency;
pub mod host_memory;
pub mod papers;
mod peers;
pub mod responsive;
pub mod restore;
mod slowdown;
pub mod works;
