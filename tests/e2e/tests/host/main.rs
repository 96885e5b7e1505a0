//! Settings of the whole host: tests that change them run apart from all others.

mod merging;
