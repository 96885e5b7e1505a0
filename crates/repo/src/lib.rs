//! The content-addressed repository of checkpoints, in a local directory, encrypted.
//!
//! A checkpoint is a manifest. It names page tables and the layers over them, which name pages and deltas. All
//! but the manifest are *blobs*, named by the keyed hash of their bytes, so content that checkpoints share is
//! stored once. Blobs lie in *packs*; *index* files name the pack of each. `docs/format.md` specifies every byte.
//!
//! ```text
//! config   keys/...   packs/ab/abcd...   index/...   manifests/...   working-sets/...   locks/...   leases/...   images/...   tmp/
//! ```
//!
//! Invariants:
//! - A data file gets its name when it is complete and on disk. Packs, index files, manifests and key files never
//!   change after that, and are named by a hash of their bytes; `config` never changes either. Working sets,
//!   locks and leases are replaced as a whole under the same name: working sets are hints, locks and leases
//!   belong to one owner.
//! - A manifest is written after everything that it refers to, so every existing manifest can be read.
//! - Only `forget` and `prune` remove data, under an exclusive lock. Each can be killed at any point.
//! - No byte read from disk is used before its authentication tag or hash is verified.

mod blobs;
mod copy;
pub mod crypto;
mod error;
pub mod format;
mod images;
pub mod index;
mod indexing;
mod keyring;
pub mod lease;
mod maintenance;
pub mod pack;
pub mod page_table;
mod progress;
mod repository;
mod selector;
pub mod store;
mod sync;
pub mod working_set;
mod writer;

#[cfg(test)]
mod tests;

pub use blobs::{BlobSink, Blobs};
pub use copy::{Copied, Copies, Original};
pub use crypto::Password;
pub use crypto::key_file::{Cost, Label};
pub use error::{ErrorClass, RepoError};
pub use format::annotation::{AnnotationError, Note, Tag, Tags};
pub use format::config::RepositoryId;
pub use format::image_record::{ImageId, ImageRecord};
pub use format::lease_record::LeaseRecord;
pub use format::manifest::{
    BlockTable, CheckpointId, DiskTable, LayerRef, Manifest, PageCounts, Stream, Subject, Summary,
};
pub use images::file::ImageState;
pub use indexing::{Image, IndexReport, Indexed};
pub use keyring::{KeyInfo, Keyring};
pub use lease::Lease;
pub use maintenance::age::Age;
pub use maintenance::check::CheckReport;
pub use maintenance::forget::{Forget, ForgetReport};
pub use maintenance::inspect::Stats;
pub use maintenance::problem::Problem;
pub use maintenance::prune::PruneReport;
pub use maintenance::rebuild::RebuildReport;
pub use maintenance::retention::{KeepPolicy, KeepReason};
pub use pack::packer::Meter;
pub use page_table::builder::{PageTableBuilder, Written};
pub use page_table::map::{PageMap, PageSink, PageVersion};
pub use page_table::reader::{NeighbourSink, PageReader};
pub use progress::{Phase, Progress};
pub use repository::{Reader, Repository, UnlockedKey};
pub use working_set::WorkingSet;
pub use writer::{Committed, Put, Writer};
