//! What captured pages are stored as: nothing, a mark, a delta against their content before, or the whole page.

pub mod delta_cache;
pub mod page_encoder;
