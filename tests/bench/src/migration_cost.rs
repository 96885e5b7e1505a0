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
use stillframe_harness::results;

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

impl Part {
    const ALL: [Part; 3] = [Part::Processors, Part::Pause, Part::GuestWork];

    /// Under `docs/results`.
    fn folder(self) -> &'static str {
        match self {
            Part::Processors => "migration-processors",
            Part::Pause => "migration-pause",
            Part::GuestWork => "migration-guest-work",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Part::Processors => "Time of processors and memory of a migration",
            Part::Pause => "The pause of many migrations",
            Part::GuestWork => "The guest's work during a migration",
        }
    }

    /// Measures it, and writes its folder.
    fn run(self) -> Result<()> {
        let folder = tempfile::Builder::new()
            .prefix("stillframe-migration-cost-")
            .tempdir()?;
        let setting = "Linux guests under TCG, one vCPU. Source and destination are two network namespaces of one machine with \
                       two processors. Every migration of a table begins with the same saved state. The pause lasts from the \
                       source's STOP event to the destination's RESUME event.";
        let mut page = Page::new(self.folder(), None, self.title(), COMMAND, setting)?;
        let hosts = Hosts::new()?;
        let claims = match self {
            Part::Processors => processors::measure(&hosts, folder.path(), &mut page)?,
            Part::Pause => pause::measure(&hosts, folder.path(), &mut page)?,
            Part::GuestWork => guest_work::measure(&hosts, folder.path(), &mut page)?,
        };
        page.add_claims(&claims, "-", "goals of our own.");
        results::write_summary(self.folder(), &claims)?;
        page.write()
    }
}

/// Measures all parts, or one.
pub fn run(only: Option<Part>) -> Result<()> {
    let parts = Part::ALL.into_iter();
    let mut wanted = parts.filter(|&part| only.is_none_or(|only| only == part));
    wanted.try_for_each(Part::run)
}
