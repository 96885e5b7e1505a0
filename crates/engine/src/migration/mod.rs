//! The verb *migrate*.
pub mod handover;
