//! Tracking finds the pages that a guest writes, by write protection. The fault handler serves pages whose first
//! write waits.

mod claims;
pub mod error;
pub mod fault_handler;
mod hot_set;
mod protection;
pub mod rewritten;
pub mod tracker;
