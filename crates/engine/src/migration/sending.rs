//! How a VM is sent: what the user wants, and what the destination can do.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, bounded};
use stillframe_sys::affinity::Processors;

use super::convergence::Switch;
use super::disks::{CopyDisks, DiskError};
use super::error::MigrateError;
use super::image_blocks::{ImageFinder, SharedFiles};
use super::limiter::Limiter;
use super::seed::Seeds;
use super::{
    BEAT, DEMAND_LANES, LastCheckpoint, MigrateEvent, MigrateOptions, MigrateSink, Mode, Wire,
};
use crate::connection::ConnectionError;
use crate::connection::message::{Base, Control, Message};
use crate::connection::word::Session;

/// Time for the destination's words, where it has ended the connections for pages.
const WORDS_LIMIT: Duration = Duration::from_secs(3);

/// A VM on its way.
pub(super) struct Sending<'s> {
    pub mode: Mode,
    pub switch: Switch,
    pub session: &'s Session,
    pub options: &'s MigrateOptions,
    /// The destination has from the base what was not written since.
    pub based: bool,
    /// What the destination has of the VM; empty until it has said so, and if it has nothing.
    pub seeds: Arc<OnceLock<Seeds>>,
    /// Which of the shared images the destination has.
    pub images_there: Vec<bool>,
    /// Finds pages in these, once they are read.
    pub images: Arc<OnceLock<ImageFinder>>,
    /// What all connections share.
    pub limiter: Arc<Limiter>,
    pub rounds: u32,
    /// Pages are fetched when it runs at the destination.
    pub later: bool,
    /// The destination has started its QEMU.
    accepted: bool,
}

impl<'s> Sending<'s> {
    pub fn new(session: &'s Session, options: &'s MigrateOptions, runs: bool) -> Sending<'s> {
        let (mode, switch) = match options.mode {
            None if runs || options.base.is_some() => (Mode::PreCopy, Switch::IfNeeded),
            None => (Mode::StopCopy, Switch::Never),
            Some(Mode::Hybrid) => (Mode::Hybrid, Switch::AfterFirst),
            Some(mode) => (mode, Switch::Never),
        };
        Sending {
            mode,
            switch,
            session,
            options,
            based: false,
            seeds: Arc::default(),
            images_there: Vec::new(),
            images: Arc::default(),
            limiter: Arc::new(Limiter::new(options.bytes_per_s)),
            rounds: 0,
            later: mode == Mode::PostCopy,
            accepted: false,
        }
    }

    /// Connections over which pages are sent.
    pub fn connections(&self) -> usize {
        match self.mode {
            Mode::PreCopy | Mode::Hybrid => self.options.connections,
            Mode::PostCopy | Mode::StopCopy | Mode::Rehearsal => 0,
        }
    }

    /// Connections over which pages are fetched, where they are.
    pub fn lanes(&self) -> usize {
        match (self.mode, self.switch) {
            (Mode::PreCopy, Switch::Never) => 0,
            (Mode::StopCopy, _) => self.options.connections,
            _ => DEMAND_LANES + self.options.connections,
        }
    }

    /// Whether the destination keeps what it has if the connection is lost now.
    pub fn may_begin_again(&self) -> bool {
        self.connections() > 0 && !self.later && self.options.copy_disks == CopyDisks::No
    }

    /// Whether the first round may end before all its pages are sent. A destination that has pages of the VM would fetch
    /// them again.
    pub fn may_cut_short(&self) -> bool {
        self.switch == Switch::IfNeeded && self.seeds.get().is_none()
    }

    /// The checkpoint that an increment could be sent of.
    pub fn base(&self) -> Option<&Base> {
        let last = self.options.base.as_ref();
        let last = last.filter(|_| matches!(self.mode, Mode::PreCopy | Mode::Hybrid));
        last.map(|last| &last.base)
    }

    /// The images of which places could be sent: none, and that is reported, where pages are fetched.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub fn shared_images(&self, events: MigrateSink<'_>) -> Result<SharedFiles, MigrateError> {
        let paths = &self.options.shared_images;
        if self.connections() > 0 {
            return Ok(SharedFiles::open(paths)?);
        }
        if !paths.is_empty() {
            events(MigrateEvent::ImagesUnused);
        }
        Ok(SharedFiles::default())
    }

    /// Reads those that the destination has, while that starts its QEMU and hears that this side lives.
    ///
    /// # Errors
    /// One of them cannot be read, or they are too large; the connection failed.
    pub fn read_images(
        &self,
        images: &SharedFiles,
        wire: &mut Wire,
        processors: &Processors,
    ) -> Result<(), MigrateError> {
        let there = &self.images_there;
        if !there.contains(&true) {
            return Ok(());
        }
        let stop = &AtomicBool::new(false);
        let (done, ended) = bounded(1);
        let read = thread::scope(|scope| {
            // It is awaited, unless the connection has failed.
            scope.spawn(move || _ = done.send(images.read(there, processors, stop)));
            loop {
                match ended.recv_timeout(BEAT) {
                    Ok(read) => return Ok(read?),
                    // Its thread has panicked, and so does the scope.
                    Err(RecvTimeoutError::Disconnected) => return Ok(ImageFinder::default()),
                    Err(RecvTimeoutError::Timeout) => {
                        let alive = wire.send_control(&Control::Alive);
                        alive.inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
                    }
                }
            }
        });
        let finder = read.map_err(|error| explained(wire, error))?;
        self.images.get_or_init(|| finder);
        Ok(())
    }

    /// The one that the destination reads.
    pub fn used_base(&self) -> Option<&LastCheckpoint> {
        self.options.base.as_ref().filter(|_| self.based)
    }

    /// The destination takes the VM. Returns whether it says what it has of it.
    ///
    /// # Errors
    /// It does not, or the connection failed.
    pub fn begun(&mut self, wire: &mut Wire) -> Result<bool, ConnectionError> {
        match wire.receive_message()? {
            Message::Control(Control::Begun {
                seeded,
                based,
                images,
            }) if !based || (self.base().is_some() && !seeded) => {
                self.based = based;
                self.images_there = images;
                Ok(seeded)
            }
            other => Err(other.unexpected()),
        }
    }

    /// Waits until the destination has started its QEMU. It may say that it can have no pages later. Returns whether it
    /// can.
    ///
    /// # Errors
    /// It has none; or it cannot have pages later, and the user wants that.
    pub fn accepted(&mut self, wire: &mut Wire) -> Result<Switch, MigrateError> {
        if std::mem::replace(&mut self.accepted, true) {
            return Ok(self.switch);
        }
        match (answer(wire)?, self.mode) {
            (Some(_), Mode::PreCopy) => self.switch = Switch::Never,
            (Some(why), Mode::Hybrid | Mode::PostCopy) => {
                return Err(MigrateError::NoPostCopy { why });
            }
            (None, _) | (Some(_), Mode::StopCopy | Mode::Rehearsal) => {}
        }
        Ok(self.switch)
    }
}

/// Waits until the destination has started its QEMU. Returns why it can have no pages later, if it cannot.
pub(super) fn answer(wire: &mut Wire) -> Result<Option<String>, ConnectionError> {
    loop {
        match wire.receive_message()? {
            // It reads a checkpoint.
            Message::Control(Control::Alive) => {}
            Message::Control(Control::Accepted { no_post_copy }) => return Ok(no_post_copy),
            other => return Err(other.unexpected()),
        }
    }
}

/// The destination's own words, where it has ended the connections for pages; else this error.
pub(super) fn explained(wire: &mut Wire, error: MigrateError) -> MigrateError {
    let by_connection = matches!(
        error,
        MigrateError::Connection(_)
            | MigrateError::NoMoreConnections { .. }
            | MigrateError::Disk(
                DiskError::Failed { .. } | DiskError::NotOpened { .. } | DiskError::Connection(_)
            )
            | MigrateError::Disk(DiskError::Refused { .. })
    );
    if !by_connection {
        return error;
    }
    wire.limit_silence(WORDS_LIMIT);
    loop {
        match wire.receive_message() {
            Ok(Message::Control(Control::Accepted { .. })) => {}
            Ok(other) => match other.unexpected() {
                said @ ConnectionError::GaveUp { .. } => return said.into(),
                _ => return error,
            },
            Err(_) => return error,
        }
    }
}
