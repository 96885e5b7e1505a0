//! Which content each page of a RAM block has: tables, the layers of changes over them, and their readers.

pub(crate) mod builder;
pub mod layer;
pub(crate) mod map;
pub(crate) mod overlay;
pub(crate) mod reader;
pub mod table;
