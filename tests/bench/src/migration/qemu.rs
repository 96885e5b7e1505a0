//! QEMU's own live migration, tuned in the ways that it offers.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::hosts::Hosts;
use crate::peers::set_capabilities;
use stillframe_harness::network::ADDRESSES;
use stillframe_harness::qmp::Qmp;

/// The id of an object with a certificate.
const CREDENTIALS: &str = "credentials";

/// How QEMU migrates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tuning {
    /// Pre-copy as it comes.
    PreCopy,
    /// With deltas of pages that were sent before.
    Xbzrle,
    /// Over several connections.
    Multifd,
    /// The same, encrypted.
    MultifdTls,
    /// Over several connections, compressed.
    MultifdZstd,
    /// The guest is slowed down until it converges.
    AutoConverge,
    /// A first round of pre-copy, then the guest runs there and fetches.
    PostCopy,
}

impl Tuning {
    fn capabilities(self) -> &'static [&'static str] {
        match self {
            Tuning::PreCopy => &[],
            Tuning::Xbzrle => &["xbzrle"],
            Tuning::Multifd | Tuning::MultifdTls | Tuning::MultifdZstd => &["multifd"],
            Tuning::AutoConverge => &["auto-converge"],
            Tuning::PostCopy => &["postcopy-ram"],
        }
    }
}

/// Sets both sides up. A cache of XBZRLE has room for all RAM.
pub fn prepare(
    hosts: &Hosts,
    source: &mut Qmp,
    destination: &mut Qmp,
    (tuning, ram_mib): (Tuning, u32),
) -> Result<()> {
    // QEMU takes only powers of two.
    let cache_bytes = u64::from(ram_mib.next_power_of_two()) << 20;
    for (place, side) in [source, destination].into_iter().enumerate() {
        set_capabilities(side, tuning.capabilities(), true)?;
        let mut parameters = json!({"max-bandwidth": 0, "max-postcopy-bandwidth": 0});
        match tuning {
            Tuning::MultifdZstd => parameters["multifd-compression"] = "zstd".into(),
            Tuning::MultifdTls => {
                side.execute("object-add", hosts.credentials(place, CREDENTIALS))?;
                parameters["tls-creds"] = CREDENTIALS.into();
                parameters["tls-hostname"] = ADDRESSES[1].into();
            }
            Tuning::Xbzrle => parameters["xbzrle-cache-size"] = cache_bytes.into(),
            _ => {}
        }
        side.execute("migrate-set-parameters", parameters)?;
    }
    Ok(())
}

/// Migrates; the last answer to `query-migrate`. A migration that does not end within the limit is cancelled.
pub fn migrate(source: &mut Qmp, to: &str, tuning: Tuning, limit: Duration) -> Result<Value> {
    source.execute("migrate", json!({"uri": to}))?;
    let begin = Instant::now();
    let mut switched = tuning != Tuning::PostCopy;
    loop {
        let state = source.execute("query-migrate", json!({}))?;
        match state["status"].as_str() {
            Some("completed") => return Ok(state),
            Some("failed" | "cancelled") => bail!("QEMU's migration failed: {state}"),
            Some("active") if !switched && state["ram"]["dirty-sync-count"].as_u64() > Some(1) => {
                source.execute("migrate-start-postcopy", json!({}))?;
                switched = true;
            }
            _ if begin.elapsed() > limit => {
                source.execute("migrate_cancel", json!({}))?;
                return Ok(state);
            }
            _ => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}
