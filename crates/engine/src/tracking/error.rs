//! Why the pages that a guest writes cannot be tracked.

use std::io;

use stillframe_qemu::monitor::MonitorError;
use stillframe_sys::pagemap::PagemapError;
use stillframe_sys::uffd::UffdError;
use thiserror::Error;

use crate::memory::block::BlockError;

/// Why tracking failed.
#[derive(Debug, Error)]
pub enum TrackerError {
    /// The userfaultfd refused.
    #[error("cannot track writes to RAM block {block}")]
    Uffd {
        /// The block's name, or `all` for the handshake.
        block: String,
        /// Why.
        #[source]
        source: UffdError,
    },
    /// The scan failed.
    #[error("cannot read which pages of RAM block {block} were written")]
    Scan {
        /// The block's name.
        block: String,
        /// Why.
        #[source]
        source: PagemapError,
    },
    /// The page map could not be opened.
    #[error("cannot read QEMU's page map")]
    Pagemap(#[source] PagemapError),
    /// A block cannot be reached.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// Copy-on-write works on small pages.
    #[error(
        "RAM block {block} has pages of {page_bytes} bytes; copy-on-write handles 4096 only: choose another schedule"
    )]
    HugePages {
        /// The block's name.
        block: String,
        /// Its page size.
        page_bytes: u64,
    },
    /// The disks do not become quiet.
    #[error("cannot wait for the disk requests of the VM")]
    Drain(#[source] MonitorError),
    /// The kernel's faults in QEMU cannot be handled: QEMU lacks the right.
    #[error(
        "QEMU runs as a user whose page faults in the kernel may not be handled by userfaultfd, so copy-on-write would fail its disk requests: choose another schedule, or set vm.unprivileged_userfaultfd=1"
    )]
    UserModeOnly,
    /// The fault handler could not be started.
    #[error("cannot start the thread that serves the VM's write faults")]
    FaultHandler(#[source] io::Error),
    /// Copy-on-write was requested of an attachment without it.
    #[error("this VM was attached to without copy-on-write")]
    NoFaultServer,
    /// The kernel or QEMU took write protection away.
    #[error(
        "pages lost their write protection before they were copied (the host's KSM merged them, or the balloon took them); this checkpoint is discarded. If this recurs, choose another schedule, or start the VM with -machine mem-merge=off"
    )]
    ProtectionLost,
    /// A fault that a test injected.
    #[error("a step of the capture failed")]
    Injected(#[source] io::Error),
    /// A page was unprotected without being saved.
    #[error("a page could not be saved before the guest wrote it; this checkpoint is discarded")]
    NotSaved,
    /// No thread handles write faults any more; no page is protected.
    #[error(
        "the thread that serves the VM's write faults has ended; the VM runs on, and this checkpoint is discarded"
    )]
    HandlerEnded,
}
