//! The contents of the files of a repository, and their encodings.

pub mod annotation;
pub mod config;
pub mod file_hash;
pub(crate) mod id_text;
pub mod image_record;
pub mod layout;
pub mod lease_record;
pub mod lock_owner;
pub mod lock_record;
pub mod manifest;
