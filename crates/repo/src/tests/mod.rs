//! Tests of the repository as a whole.

pub(crate) mod faults;
pub(crate) mod support;
mod twin;
