//! Tests of the repository as a whole.

pub(crate) mod faults;
mod removal;
pub(crate) mod support;
mod twin;
