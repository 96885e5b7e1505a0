//! Which pages a guest writes, found by write protection; and the fault handler of pages whose first write waits.

mod claims;
pub mod error;
pub mod fault_handler;
mod hot_set;
mod protection;
pub mod tracker;
