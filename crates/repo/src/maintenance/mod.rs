//! What keeps a repository small, and what verifies that it is complete.

pub(crate) mod age;
pub(crate) mod check;
pub(crate) mod forget;
pub(crate) mod inspect;
pub(crate) mod mark;
pub(crate) mod problem;
pub(crate) mod prune;
pub(crate) mod rebuild;
mod remove_image;
pub(crate) mod retention;
pub(crate) mod scrub;
