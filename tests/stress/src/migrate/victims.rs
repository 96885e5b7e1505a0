//! The VMs whose migrations are struck: one without a disk, and one whose disk is copied while it writes a journal to it.

use std::fs;

use anyhow::{Context, Result, ensure};
use stillframe_harness::committing::{Committing, expect_no_copy};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health;
use stillframe_harness::migration::Order;
use stillframe_harness::running::signal;
use stillframe_harness::serial::Serial;

use super::TICK_LIMIT;
use crate::exactness::wait_gone;

/// Records after which a journal is begun anew: it has room for twice as many.
const RECORDS_MAX: u64 = 6000;
/// Records, or ticks, by which a VM shows that it goes on.
const GOES_ON: usize = 2;

/// Ends what runs at the destination.
pub fn end_there(order: &Order) -> Result<()> {
    for pid in health::pids_with(&order.files().0.display().to_string())? {
        signal(pid.unsigned_abs(), "KILL")?;
        wait_gone(pid)?;
    }
    Ok(())
}

/// What the disk of a struck VM is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// It has none.
    None,
    /// An image of this format, which only the source reaches.
    Copied(&'static str),
}

/// A VM that is struck.
pub enum Victim {
    /// Without a disk.
    Plain(Guest),
    /// With one that is copied.
    Committing(Committing),
}

impl Victim {
    /// Boots one.
    pub fn boot(disk: Disk) -> Result<Victim> {
        Ok(match disk {
            Disk::None => Victim::Plain(Setup::small(Kind::Private, "struck").boot()?),
            Disk::Copied(format) => Victim::Committing(Committing::journal("struck", format)?),
        })
    }

    /// The VM before it is moved.
    pub fn guest(&self) -> &Guest {
        match self {
            Victim::Plain(guest) => guest,
            Victim::Committing(it) => &it.guest,
        }
    }

    /// Its migration.
    pub fn order(&self, name: String) -> Order {
        match self {
            Victim::Plain(guest) => Order::of(guest, name),
            Victim::Committing(it) => it.order(&name),
        }
    }

    /// It goes on where it runs now.
    pub fn expect_going_on(&self, order: &Order, moved: bool) -> Result<()> {
        let there = Serial::new(&order.files().1);
        let serial = if moved { &there } else { &self.guest().serial };
        match self {
            Victim::Plain(_) => serial.wait_more(GOES_ON, TICK_LIMIT).map(drop),
            Victim::Committing(_) => serial.wait_more_committed(GOES_ON as u64).map(drop),
        }
    }

    /// The disk, where a VM that moved has been ended, has all that was committed. One that stayed has nothing of the copy
    /// left.
    pub fn expect_disk(&self, order: &Order, moved: bool) -> Result<()> {
        let Victim::Committing(it) = self else {
            return Ok(());
        };
        if moved {
            let there = Serial::new(&order.files().1);
            it.expect_all(&it.copy, &[&it.guest.serial, &there])
                .context("the copy")?;
            return Ok(());
        }
        expect_no_copy(&mut it.guest.second_monitor()?)?;
        match fs::remove_file(&it.copy) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// The same VM for the next strike, or none if it is used up. What it wrote to its own disk is there then.
    pub fn again(self) -> Result<Option<Victim>> {
        match self {
            Victim::Committing(mut it) if it.guest.serial.committed() > Some(RECORDS_MAX) => {
                it.guest.kill()?;
                let (said, found) = (it.guest.serial.committed(), it.records(&it.disk)?);
                ensure!(Some(found) >= said, "{found} records of {said:?}");
                Ok(None)
            }
            victim => Ok(Some(victim)),
        }
    }
}
