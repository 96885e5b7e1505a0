//! Tests of the repository as a whole.

mod access;
mod catalog;
mod copy;
mod corruption;
mod crash;
mod crash_many;
mod decoders;

mod document;
pub(crate) mod faults;
mod index_twin;
mod keys;
mod kill;
mod layers;
mod leases;
mod locking;
mod places;
mod presence;
mod removal;
mod renewal;
pub(crate) mod support;
mod twin;
