//! What captured pages are stored as: nothing, a mark, a delta against what they held, or the whole page.

pub mod delta_cache;
pub mod page_encoder;
