//! Performs a migration of an attached VM: for `migrate`, and for a `watch` that `migrate` requests it from.

use std::path::PathBuf;

use stillframe_engine::attach::Vm;
use stillframe_engine::migration::{
    self, MigrateEvent, MigrateOptions, MigrateReport, SILENCE_MAX, VERSIONS, Wire,
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

/// What happens in a migration.
#[derive(Debug)]
pub enum Notice<'n> {
    /// The first connection is open. If it is closed before the hand-over, the migration fails.
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

    /// Connects to the destination once more; an error is in words.
    ///
    /// # Errors
    /// The same.
    pub fn reconnect(&self) -> Result<Wire, String> {
        let in_words = |error: ConnectError| output::chain(anyhow::Error::new(error).chain());
        self.connect().map_err(in_words)
    }

    /// Migrates the VM over a connection on which nothing was sent yet, after a rehearsal if one is requested.
    ///
    /// # Errors
    /// The VM runs on here, unless the error says otherwise.
    pub fn perform(
        &self,
        vm: &mut Vm,
        mut wire: Wire,
        notify: &mut dyn FnMut(Notice<'_>),
    ) -> anyhow::Result<MigrateReport> {
        let mut reconnect = || self.reconnect();
        notify(Notice::Connected(&wire));
        if self.rehearse {
            vm.rehearse(wire, &mut reconnect, &self.options)?;
            wire = self.connect()?;
            notify(Notice::Connected(&wire));
            notify(Notice::Rehearsed);
        }
        let mut events = |event| notify(Notice::Event(event));
        Ok(vm.migrate(wire, &mut reconnect, &self.options, &mut events)?)
    }
}
