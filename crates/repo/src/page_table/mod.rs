//! The content of each page of a RAM block: tables, the layers of changes over them, and their readers.

pub(crate) mod builder;
pub mod layer;
pub(crate) mod map;
pub(crate) mod overlay;
pub(crate) mod reader;
pub mod table;
