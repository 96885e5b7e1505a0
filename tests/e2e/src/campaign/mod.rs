//! Long runs that look for what must never happen; shorter forms of them are tests.

pub mod exactness;
pub mod flips;
pub mod kill;
pub mod soak;
