//! cow
use anyhow::{Result, bail};

/// Runs it.
pub fn run(_quick: bool) -> Result<()> {
    bail!("not yet")
}
