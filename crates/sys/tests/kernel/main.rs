//! The crate against the real kernel, on real child processes.
//!
//! They need what the engine needs: the right to trace (root), userfaultfd with asynchronous write
//! protection (Linux 6.7), `/proc`. Without it they fail; none is skipped.

#![allow(
    clippy::unwrap_used,
    reason = "a test, and a victim, fails by panicking"
)]

mod calls;
mod identity;
mod infect_calls;
mod infect_limits;
mod infect_signals;
mod infect_state;
mod missing;
mod ram;
mod tracking;
mod victim;
