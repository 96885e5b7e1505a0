//! Settings of the whole host: tests that change them run apart from all others.

mod huge_pages;
mod merging;
mod moving;
mod vhost;
