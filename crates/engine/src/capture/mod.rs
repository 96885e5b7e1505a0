//! The capture half: copies of the written pages, and the device state, of one instant.
//!
//! ```text
//!   full pass (first checkpoint only)   guest runs   every populated page -> repository
//!   schedule, before the pause          guest runs   written pages -> staging buffer
//!   pause                               stopped      device state beside: what the schedule does
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
