//! Which pages a guest writes, found out by write protection; and the faults of the pages whose first write waits.

mod claims;
pub mod error;
pub mod fault_handler;
mod hot_set;
mod protection;
pub mod tracker;
