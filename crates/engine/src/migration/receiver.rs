//! What a receiver wants, and what it learns.

use std::time::Duration;

use super::ReceiveReport;
use super::error::ReceiveError;
use super::filling::FilledReport;
use super::image_files::LocalImage;
use super::new_qemu::{NewQemu, Rehearsal};
use crate::Progress;
use crate::populate::lazy::supervision::Supervised;

/// What came of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received {
    /// It is known where its VM is.
    Over,
    /// The VM would run here. The source will connect again, to migrate it.
    Rehearsed(Rehearsal),
    /// No VM: a source had a last word for a destination that is gone.
    Nothing,
}

/// How to receive.
#[derive(Debug, Clone)]
pub struct ReceiveOptions {
    /// The QEMU.
    pub qemu: NewQemu,
    /// Leave the guest paused, ready to run.
    pub paused: bool,
    /// Files that this host may read for a source, which has them too.
    pub shared_images: Vec<LocalImage>,
    /// Copy disks over images that exist.
    pub overwrite_disks: bool,
    /// The last rehearsal.
    pub rehearsed: Option<Rehearsal>,
    /// How long a source is waited for to which the connection was lost, while the VM runs there.
    pub patience: Duration,
}

/// What a receiver learns.
pub enum ReceiveEvent<'e> {
    /// The VM runs here, independently, or is ready to run.
    Arrived(&'e ReceiveReport),
    /// A VM that ran before all its memory was here has all of it.
    Filled(FilledReport),
    /// How it fares until then.
    Supervised(Supervised),
    /// How much is here.
    Progress(Progress),
    /// The connection was lost while the VM runs at the source, which is waited for.
    Cut(&'e ReceiveError),
}

/// Where that is reported.
pub type ReceiveSink<'s> = &'s mut dyn FnMut(ReceiveEvent<'_>);
