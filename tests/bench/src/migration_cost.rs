//! `cargo xtask bench migration-cost`: what a migration costs its hosts and its guest, beside QEMU's own.
//!
//! [`processors`] has the time of processors and the memory of the engines on a link as quick as the machine, [`pause`] the
//! pause of many migrations, [`guest_work`] the work that D-Track's ways leave to the guest.

mod guest_work;
mod pause;
mod processors;

use anyhow::Result;
use clap::ValueEnum;

use crate::migration::hosts::Hosts;
use crate::page::Page;
use stillframe_harness::results::{self, Claim};

const BENCH: &str = "migration-cost";
const COMMAND: &str = "cargo xtask bench migration-cost";

/// A part of the bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Time of processors, and memory.
    Processors,
    /// The pause of many migrations.
    Pause,
    /// The guest's work meanwhile.
    GuestWork,
}

/// Runs it, and writes `docs/results/migration-cost/` unless only a part is wanted.
pub fn run(only: Option<Part>) -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-migration-cost-")
        .tempdir()?;
    let elsewhere = only.map(|_| folder.path());
    let setting = "Linux guests under TCG, one vCPU. Source and destination are two network namespaces of one machine with two \
                   processors. Every migration of a table begins with the same saved state. The pause lasts from the source's \
                   STOP event to the destination's RESUME event.";
    let mut page = Page::new(BENCH, elsewhere, "What a migration costs", COMMAND, setting)?;
    let wants = |part| only.is_none_or(|only| only == part);
    let mut claims: Vec<Claim> = Vec::new();
    if wants(Part::Processors) {
        // Its link is not shaped, and no later one is to be like it.
        let hosts = Hosts::new()?;
        claims.extend(processors::measure(&hosts, folder.path(), &mut page)?);
    }
    let hosts = Hosts::new()?;
    if wants(Part::Pause) {
        claims.extend(pause::measure(&hosts, folder.path(), &mut page)?);
    }
    if wants(Part::GuestWork) {
        claims.push(guest_work::measure(&hosts, folder.path(), &mut page)?);
    }
    page.add_claims(&claims, "-", "goals of our own, but for the guest's work.");
    if only.is_none() {
        results::write_summary(BENCH, &claims)?;
    }
    page.write()
}
