//! Named fault points: places in engine and repository at which a test makes the process fail.
//!
//! ```text
//!   STILLFRAME_FAULT=pause.stopped:kill       kill -9 at the first pass of this point
//!   STILLFRAME_FAULT=store.pack:error:3       an I/O error at the third pass
//! ```
//!
//! Without the feature `points`, which only tests turn on, every point compiles to nothing. A point that was
//! reached creates the file that `STILLFRAME_FAULT_REACHED` names. So a test can distinguish a fault that was
//! survived from one that never happened.

/// Declares the points, their names, and the list of all of them.
macro_rules! points {
    ($($(#[doc = $doc:literal])+ $point:ident = $name:literal,)+) => {
        /// Where something can be made to fail.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Point {
            $($(#[doc = $doc])+ $point,)+
        }

        impl Point {
            /// All points, in the order in which a checkpoint passes them.
            pub const ALL: &[Point] = &[$(Point::$point),+];

            /// The name under which tests ask for it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Point::$point => $name,)+
                }
            }
        }
    };
}

points! {
    /// QEMU has opened a userfaultfd for us; nothing is registered yet.
    AttachOpened = "attach.opened",
    /// All of guest memory is registered and protected.
    AttachProtected = "attach.protected",
    /// The balloon is inflated; the guest does not have its memory again yet.
    BalloonInflated = "balloon.inflated",
    /// Disks are copied in rounds: a round has copied what was written before it.
    DisksRound = "disks.round",
    /// The guardian expects a pause, and `stop` is not sent yet.
    PauseBeforeStop = "pause.before-stop",
    /// The guest is stopped, and QEMU is held; what is left of the disks is not read yet.
    PauseHeld = "pause.held",
    /// The guest is stopped.
    PauseStopped = "pause.stopped",
    /// Written pages are found and copied, or armed; `cont` is not sent yet.
    PauseBeforeCont = "pause.before-cont",
    /// The guest runs again, and the guardian does not know it yet.
    PauseAfterCont = "pause.after-cont",
    /// Copy-on-write: a batch of armed pages is about to be copied.
    CopyOnWriteBatch = "copy-on-write.batch",
    /// Copy-on-write: a write fault is about to be handled.
    CopyOnWriteFault = "copy-on-write.fault",
    /// Rewind: the guest is stopped, and the differing pages are gathered; nothing is changed.
    RewindStopped = "rewind.stopped",
    /// Rewind: `cont` is blocked; nothing is changed.
    RewindInhibited = "rewind.inhibited",
    /// Rewind: a disk is about to be taken from its device.
    RewindDiskTaking = "rewind.disk-taking",
    /// Rewind: the device has an empty node, and the disk is not exported yet.
    RewindDiskTaken = "rewind.disk-taken",
    /// Rewind: half of the differing pages of a disk are exchanged; its device has an empty node.
    RewindDiskExchange = "rewind.disk-exchange",
    /// Rewind: all disks are exchanged, and their devices have them again; memory is as it was.
    RewindDisksExchanged = "rewind.disks-exchanged",
    /// Rewind: half of the differing pages of a RAM block are exchanged.
    RewindExchange = "rewind.exchange",
    /// Rewind: all pages are exchanged; the device state is not loaded.
    RewindExchanged = "rewind.exchanged",
    /// Rewind: the device state is loaded; `cont` is still blocked.
    RewindLoaded = "rewind.loaded",
    /// Rewind: `cont` is unblocked, and not sent yet.
    RewindBeforeCont = "rewind.before-cont",
    /// Migration, source: the VM is stopped; a part of its device state is sent.
    StoppedSaving = "stopped.saving",
    /// Migration, destination: QEMU has a part of the device state.
    ArrivingLoading = "arriving.loading",
    /// Migration, source: the destination is ready; the guardian is about to give the VM up.
    CommitGivingUp = "commit.giving-up",
    /// The same: the VM is given up, and `cont` is not blocked yet.
    CommitBlocking = "commit.blocking",
    /// The same: the VM is given up, and the destination does not know it.
    CommitGivenUp = "commit.given-up",
    /// The same: *commit* is sent; no answer has come.
    CommitSent = "commit.sent",
    /// The same: the VM runs at the destination, and lacks pages that are fetched from here.
    CommitServing = "commit.serving",
    /// The same: the VM runs at the destination; this QEMU is about to end.
    CommitEnding = "commit.ending",
    /// The same: this QEMU has ended; the destination does not know it.
    CommitEnded = "commit.ended",
    /// The same: the VM is about to be resumed here.
    CommitResuming = "commit.resuming",
    /// Migration, destination: all is loaded, and nothing is on record.
    TakeoverLoaded = "takeover.loaded",
    /// The same: *ready* is on record, and not sent.
    TakeoverMarked = "takeover.marked",
    /// The same: *ready* is sent.
    TakeoverReady = "takeover.ready",
    /// The same: *commit* has come.
    TakeoverReleasing = "takeover.releasing",
    /// The same: QEMU is not ended with this engine any more; *committed* is not on record.
    TakeoverReleased = "takeover.released",
    /// The same: *committed* is on record; `cont` is not sent.
    TakeoverCommitted = "takeover.committed",
    /// The same: the VM runs and lacks pages; the source knows it.
    TakeoverFilling = "takeover.filling",
    /// The same: the VM runs; the source does not know it.
    TakeoverRunning = "takeover.running",
    /// The same: *running* is sent; the source has not settled it.
    TakeoverSaid = "takeover.said",
    /// Clone: the memory template is in its files, which are not recorded and have no name yet.
    TemplateFilled = "template.filled",
    /// Restore or clone: the new QEMU is started; its memory is empty.
    RestoreLaunched = "restore.launched",
    /// Restore or clone: the device state is loaded; the guest has not run.
    RestoreLoaded = "restore.loaded",
    /// Lazy restore: a page that the guest waits for is about to be populated.
    LazyFault = "lazy.fault",
    /// Lazy restore: all memory is there; its ranges are still registered.
    LazyRelease = "lazy.release",
    /// Lazy restore: QEMU's copy of the userfaultfd is closed; the record for a successor is still there.
    LazyReleased = "lazy.released",
    /// A pack is whole and on disk under a temporary name.
    StorePack = "store.pack",
    /// The same of an index file.
    StoreIndex = "store.index",
    /// The same of a manifest.
    StoreManifest = "store.manifest",
    /// The same of a working set.
    StoreWorkingSet = "store.working-set",
    /// The same of the file of an image.
    StoreImage = "store.image",
    /// An index file that was merged into another is about to be removed.
    IndexRemove = "index.remove",
    /// A lock is about to be written.
    LockTake = "lock.take",
    /// A lock is about to be refreshed.
    LockRefresh = "lock.refresh",
    /// A lock is about to be given up.
    LockEnd = "lock.end",
    /// The lease of a lazy restore is about to be written.
    LeaseTake = "lease.take",
    /// A lease is about to be given up.
    LeaseEnd = "lease.end",
    /// A manifest is about to be removed.
    ForgetRemove = "forget.remove",
    /// A prune has written its new index, and is about to remove a pack.
    PruneRemove = "prune.remove",
    /// A key file is whole and on disk under a temporary name.
    KeyWrite = "key.write",
    /// A key file is about to be removed.
    KeyRemove = "key.remove",
}

/// Passes a fault point.
///
/// # Errors
/// An I/O error where the test set one; never without the feature `points`.
#[cfg(not(feature = "points"))]
#[inline(always)]
pub fn at(_point: Point) -> std::io::Result<()> {
    Ok(())
}

/// Time until a point that is passed at intervals is passed next. It is `usual`, unless a test set a fault there
/// and cannot wait for it.
#[cfg(not(feature = "points"))]
#[inline(always)]
pub fn interval(_point: Point, usual: std::time::Duration) -> std::time::Duration {
    usual
}

#[cfg(feature = "points")]
pub use active::{at, interval};

#[cfg(feature = "points")]
mod active {
    //! The effect of a point that a test has set.

    use std::io;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;
    use std::time::Duration;

    use rustix::process::{Signal, getpid, kill_process};

    use super::Point;

    /// How long a point hangs: longer than every limit of engine and guardian for a single step.
    const HANG: Duration = Duration::from_secs(5);
    /// How long each pass of a slow point takes.
    const SLOW: Duration = Duration::from_millis(200);

    /// The interval of a point that a test wants passed.
    const HASTENED: Duration = Duration::from_secs(1);

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Action {
        Error,
        Kill,
        Stop,
        Hang,
        Slow,
    }

    struct Fault {
        point: String,
        action: Action,
        /// The pass at which it happens, counted from 1; slow points are slow from then on.
        pass: u64,
        passes: AtomicU64,
    }

    impl Fault {
        fn parse(text: &str) -> Option<Fault> {
            let mut words = text.split(':');
            let point = words.next()?.to_owned();
            let action = match words.next()? {
                "error" => Action::Error,
                "kill" => Action::Kill,
                "stop" => Action::Stop,
                "hang" => Action::Hang,
                "slow" => Action::Slow,
                _ => return None,
            };
            let pass = words.next().map_or(Some(1), |pass| pass.parse().ok())?;
            Some(Fault {
                point,
                action,
                pass,
                passes: AtomicU64::new(0),
            })
        }
    }

    fn wanted() -> Option<&'static Fault> {
        static FAULT: OnceLock<Option<Fault>> = OnceLock::new();
        let fault = FAULT.get_or_init(|| {
            let text = std::env::var("STILLFRAME_FAULT").ok()?;
            let fault = Fault::parse(&text);
            // A test with a misspelt fault would pass without testing anything.
            if !fault
                .as_ref()
                .is_some_and(|fault| Point::ALL.iter().any(|point| point.name() == fault.point))
            {
                eprintln!("STILLFRAME_FAULT={text}: no such fault point or action");
                std::process::exit(2);
            }
            fault
        });
        fault.as_ref()
    }

    /// Passes a fault point; see the module for the faults that a test can set.
    ///
    /// # Errors
    /// An I/O error where the test set one.
    pub fn at(point: Point) -> io::Result<()> {
        let Some(fault) = wanted().filter(|fault| fault.point == point.name()) else {
            return Ok(());
        };
        let pass = fault.passes.fetch_add(1, Ordering::Relaxed) + 1;
        let due = match fault.action {
            Action::Slow => pass >= fault.pass,
            _ => pass == fault.pass,
        };
        if !due {
            return Ok(());
        }
        if let Some(path) = std::env::var_os("STILLFRAME_FAULT_REACHED") {
            std::fs::write(path, point.name())?;
        }
        match fault.action {
            Action::Error => {
                let words = format!("injected fault at {}", point.name());
                return Err(io::Error::other(words));
            }
            Action::Kill => kill_process(getpid(), Signal::KILL)?,
            Action::Stop => kill_process(getpid(), Signal::STOP)?,
            Action::Hang => thread::sleep(HANG),
            Action::Slow => thread::sleep(SLOW),
        }
        Ok(())
    }

    /// Time until a point that is passed at intervals is passed next: `usual`, or a second where a test set a fault
    /// there.
    pub fn interval(point: Point, usual: Duration) -> Duration {
        match wanted().is_some_and(|fault| fault.point == point.name()) {
            true => HASTENED,
            false => usual,
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn faults_are_read_and_misspelt_ones_refused() {
            let fault = Fault::parse("pause.stopped:kill:3").unwrap();
            assert_eq!(
                (fault.point.as_str(), fault.action, fault.pass),
                ("pause.stopped", Action::Kill, 3)
            );
            assert_eq!(Fault::parse("pause.stopped:slow").unwrap().pass, 1);
            for wrong in ["pause.stopped", "pause.stopped:dance", "a:kill:x"] {
                assert!(Fault::parse(wrong).is_none(), "{wrong}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for (index, point) in Point::ALL.iter().enumerate() {
            let others = &Point::ALL[index + 1..];
            assert!(others.iter().all(|other| other.name() != point.name()));
        }
    }
}
