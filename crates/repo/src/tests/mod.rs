//! Tests of the repository as a whole.

mod access;
mod copy;
mod corruption;
mod crash;
mod crash_many;
mod decoders;
mod on_demand;

mod blob_model;
mod document;
pub(crate) mod faults;
mod images;
mod index_model;
mod keys;
mod kill;
mod layers;
mod leases;
mod locations;
mod locking;
mod missing_packs;
mod removal;
mod renewal;
pub(crate) mod support;
mod writer_index;
