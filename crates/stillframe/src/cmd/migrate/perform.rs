//! Performs a migration of an attached VM: for `migrate`, and for a `watch` that `migrate` requests it from.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;

use stillframe_engine::attach::Vm;
use stillframe_engine::migration::{
    self, CommitError, LastCheckpoint, MigrateError, MigrateEvent, MigrateOptions, MigrateReport,
    SILENCE_MAX, Unreachable, VERSIONS, Wire,
};
use stillframe_link::{Address, ConnectError, Identity, Security, connect};

use super::message::Request;
use crate::output;

/// A migration with all that it needs but the VM.
pub struct Migration {
    to: Address,
    security: Security,
    options: MigrateOptions,
    rehearse: bool,
}

/// Whether a migration is to fail, if the VM is not given up yet.
pub type IsCancelled<'c> = &'c dyn Fn() -> bool;

/// What happens in a migration.
#[derive(Debug)]
pub enum Notice<'n> {
    /// The first connection is open, or is open again. If it is closed before the hand-over, and a cancellation forbids to
    /// open it again, the migration fails.
    Connected(&'n Wire),
    /// The engine reports this.
    Event(MigrateEvent),
    /// The rehearsal has succeeded.
    Rehearsed,
}

/// The protection of a connection: with the certificate in this directory, or none.
///
/// # Errors
/// There is no certificate that is valid.
pub fn security(certs: Option<&PathBuf>) -> anyhow::Result<Security> {
    Ok(match certs {
        Some(folder) => Security::Tls(Identity::load(folder)?),
        None => Security::PlainText,
    })
}

impl Migration {
    /// Loads the certificate that the request names.
    ///
    /// # Errors
    /// The address or the certificate is not valid.
    pub fn new(request: &Request) -> anyhow::Result<Migration> {
        Ok(Migration {
            to: request.to.parse()?,
            security: security(request.certs.as_ref())?,
            options: request.options.clone(),
            rehearse: request.rehearse,
        })
    }

    /// Connects to the destination.
    ///
    /// # Errors
    /// The destination cannot be reached, or refuses this host.
    pub fn connect(&self) -> Result<Wire, ConnectError> {
        connect(&self.to, &self.security, &VERSIONS, SILENCE_MAX).map(migration::connection)
    }

    /// The VM's last checkpoint, if all writes since are known.
    pub fn with_base(mut self, base: Option<LastCheckpoint>) -> Migration {
        self.options.base = base;
        self
    }

    /// Connects to the destination once more.
    ///
    /// # Errors
    /// The same.
    pub fn reconnect(&self) -> Result<Wire, Unreachable> {
        self.connect().map_err(|error| Unreachable {
            refused: error.is_refused(),
            why: output::chain(anyhow::Error::new(error).chain()),
        })
    }

    /// Migrates the VM over a connection on which nothing was sent yet, after a rehearsal if one is requested.
    ///
    /// # Errors
    /// The VM runs on here, unless the error says otherwise.
    pub fn perform(
        &self,
        vm: &mut Vm,
        mut wire: Wire,
        cancelled: IsCancelled<'_>,
        notify: &mut dyn FnMut(Notice<'_>),
    ) -> anyhow::Result<MigrateReport> {
        notify(Notice::Connected(&wire));
        if self.rehearse {
            vm.rehearse(wire, &mut || self.reconnect(), &self.options)?;
            wire = self.connect()?;
            notify(Notice::Connected(&wire));
            notify(Notice::Rehearsed);
        }
        let (cut, notify) = (Cell::new(false), RefCell::new(notify));
        let mut reconnect = || {
            if !cut.get() {
                return self.reconnect();
            }
            if cancelled() {
                // The next connection is for a last word.
                cut.set(false);
                let why = "the migration was cancelled".to_owned();
                return Err(Unreachable { why, refused: true });
            }
            let wire = self.reconnect()?;
            cut.set(false);
            notify.borrow_mut()(Notice::Connected(&wire));
            Ok(wire)
        };
        let mut events = |event| {
            // The next connection is the first one again.
            cut.set(matches!(event, MigrateEvent::Cut));
            notify.borrow_mut()(Notice::Event(event));
        };
        Ok(vm.migrate(wire, &mut reconnect, &self.options, &mut events)?)
    }
}

/// Whether the VM does not run on here. The error says what to do.
pub fn is_unclear(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(MigrateError::Commit(
            CommitError::InDoubt { .. }
                | CommitError::PagesLost { .. }
                | CommitError::NotEnded(_)
                | CommitError::NotResumed(_)
                | CommitError::NotUnblocked(_)
                | CommitError::Disk(_)
        ))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_unclear_unless_the_vm_runs_on_here() {
        let unclear = |error| is_unclear(&MigrateError::Commit(error).into());
        let why = || "silence".to_owned();
        assert!(unclear(CommitError::InDoubt { why: why() }));
        assert!(unclear(CommitError::PagesLost { why: why() }));
        assert!(!unclear(CommitError::Lost { why: why() }));
        assert!(!unclear(CommitError::ResumedByOthers));
        assert!(!is_unclear(&anyhow::anyhow!("no connection")));
    }
}
