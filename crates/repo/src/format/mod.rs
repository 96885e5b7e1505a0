//! The contents of the files of a repository, and their encodings.

pub mod annotation;
pub mod config;
pub mod file_hash;
pub mod layout;
pub mod lease_record;
pub mod lock_owner;
pub mod lock_record;
pub mod manifest;
