//! The capture half: which pages were written, and copies of them taken at one instant.
//!
//! ```text
//!   full pass (first checkpoint only)   guest runs   every populated page -> repository
//!   pre-copy rounds                     guest runs   written pages -> stage
//!   pause                               stopped      device state beside: written since -> stage
//!   ingest                              guest runs   stage -> verdicts (zero, same, delta, whole) -> repository
//! ```

pub mod aside;
pub mod block;
pub mod cache;
pub mod heat;
pub mod ingest;
pub mod pause;
pub mod stage;
pub mod tracker;
pub mod verdict;

pub use block::Block;
pub use pause::DowntimeRecord;
