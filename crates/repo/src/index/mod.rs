//! The pack and frame of each blob: the index files, and the ways to look a blob up.

pub(crate) mod blob_table;
pub(crate) mod chunked;
pub(crate) mod compact;
pub mod file;
pub(crate) mod in_memory;
pub(crate) mod key_table;
pub mod layout;
pub(crate) mod locations;
pub(crate) mod mark_bitmaps;
pub(crate) mod missing_packs;
pub(crate) mod on_demand;
pub(crate) mod reader;
pub(crate) mod recording;
pub(crate) mod reopening;
pub(crate) mod sectioned_file;
pub(crate) mod segment;
pub(crate) mod segment_cache;
pub(crate) mod writer_index;
