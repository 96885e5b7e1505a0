//! The content-addressed repository of checkpoints, in a local directory, encrypted.
//!
//! A checkpoint is a manifest; it names page tables and layers over them; those name pages and
//! deltas. All but the manifest are *blobs*, named by the keyed hash of their bytes, so what two checkpoints share is stored once.
//! Blobs lie in *packs*; *index* files tell in which. `docs/format.md` specifies every byte.
//!
//! ```text
//! config      keys/...      packs/ab/abcd...      index/...   manifests/...   working-sets/...   locks/...   leases/...   tmp/
//! ```
//!
//! Invariants:
//! - A file gets its name when it is whole and on disk, and is never changed after that.
//! - A manifest is written after everything it refers to, so every manifest there is can be read.
//! - Only `forget` and `prune` remove, under an exclusive lock, and each can be killed anywhere.
//! - Nothing read from disk is believed before its authentication tag or hash has been checked.

mod blob_table;
mod blobs;
mod catalog;
mod catalogs;
mod check;
mod compact;
pub mod config;
mod copy;
mod crypto;
mod editor;
mod error;
mod forget;
mod found_part;
mod frames;
mod holder;
mod index;
pub mod index_file;
pub mod index_format;
mod ingest;
mod inspect;
pub mod key_file;
mod keyring;
pub mod layer;
pub mod layout;
pub mod lease;
mod local;
pub mod lock;
mod lookup;
pub mod manifest;
mod marks;
mod overlay;
mod pace;
pub mod pack;
mod page_map;
mod page_reader;
mod places;
mod presence;
mod progress;
mod prune;
mod rebuild;
mod repository;
mod resolve;
pub mod retention;
mod rows;
mod scrub;
mod sealed_file;
pub mod table;
mod walk;
pub mod working_set;
mod writer;

#[cfg(test)]
mod tests;

pub use blobs::Blobs;
pub use check::{CheckReport, Problem};
pub use config::RepositoryId;
pub use copy::{Copied, Copies, Original};
pub use crypto::Password;
pub use editor::{MemoryEditor, Written};
pub use error::{ErrorClass, RepoError};
pub use forget::{Forget, ForgetReport, Summary};
pub use inspect::Stats;
pub use key_file::Label;
pub use keyring::{KEYS_MAX, KeyInfo, Keyring};
pub use lease::{Lease, LeaseRecord};
pub use manifest::{CheckpointId, LayerRef, Manifest, PageCounts, RamTable, Stream};
pub use page_map::{PageMap, PageSink, PageVersion};
pub use page_reader::{NearSink, PageReader};
pub use progress::{Phase, Progress};
pub use prune::PruneReport;
pub use rebuild::RebuildReport;
pub use repository::{Reader, Repository, UnlockedKey};
pub use retention::{KeepPolicy, KeepReason};
pub use working_set::WorkingSet;
pub use writer::{Committed, Put, Writer};
