//! The capture half: which pages were written, and copies of them taken at one instant.
//!
//! ```text
//!   full pass (first checkpoint only)   guest runs   every populated page -> repository
//!   schedule, before the pause          guest runs   written pages -> stage
//!   pause                               stopped      device state beside: what the schedule does
//!   schedule, after the pause           guest runs   (copy-on-write) protected pages -> stage
//!   ingest                              guest runs   stage -> verdicts (zero, same, delta, whole) -> repository
//! ```

pub mod aside;
pub mod block;
pub mod cache;
pub mod claim;
pub mod device_state;
pub mod devices;
pub mod faults;
pub mod heat;
pub mod ingest;
pub mod pause;
pub mod ranges;
pub mod schedule;
pub mod stage;
pub mod tracker;
pub mod verdict;

pub use block::Block;
pub use pause::DowntimeRecord;
