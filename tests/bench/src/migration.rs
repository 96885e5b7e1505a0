//! One live migration, by Stillframe or by QEMU itself, between two hosts that are network namespaces.
//!
//! [`guest`] has the guests, [`hosts`] the hosts and the link between them, [`run`] one migration, [`qemu`] QEMU's ways,
//! [`meter`] what it takes, and [`bound`] what it has to send.

pub mod bound;
pub mod guest;
pub mod hosts;
pub mod meter;
pub mod qemu;
pub mod run;
