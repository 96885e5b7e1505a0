//! How captured pages are stored: as nothing, a mark, a delta against their earlier content, or the whole page.

pub mod delta_cache;
pub mod page_encoder;
mod slab;
