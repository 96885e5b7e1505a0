//! What two engines say about who runs a VM, and the name of the migration that they mean.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What one side says to the other about who runs the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Word {
    /// Destination: all is here, the VM is paused.
    Ready,
    /// Source: the VM may run there.
    Commit,
    /// Source: it must not run there.
    Retract,
    /// Source, on a new connection: what became of it?
    Ask,
    /// Destination: the VM runs, or has run.
    Running,
    /// Destination: it runs, and needs pages that the source has.
    NeedsPages,
    /// Destination: it has not run, and never will.
    Never,
    /// Destination: it may have run.
    Unclear,
    /// Source: it is known here where the VM runs, and the destination need not remember.
    Settled,
}

/// The name of one migration, on both sides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session(String);

impl Session {
    /// A name that no other migration has.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn random() -> Result<Session, getrandom::Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)?;
        Ok(Session(
            bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        ))
    }
}

impl fmt::Display for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
