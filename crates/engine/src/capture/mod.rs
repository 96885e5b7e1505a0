//! The capture half: copies of the written pages, and the device state, of one instant.
//!
//! ```text
//!   streaming pre-copy (if need be)     guest runs   pages that exceed the staging buffer -> sink
//!   schedule, before the pause          guest runs   written pages -> staging buffer
//!   pause                               stopped      device state; meanwhile the schedule's copies
//!   schedule, after the pause           guest runs   (copy-on-write) protected pages -> staging buffer
//! ```

pub mod convergence;
pub mod device_state;
pub mod devices;
pub mod downtime;
pub mod pause;
pub mod paused_vm;
pub mod schedule;
pub mod staging;
