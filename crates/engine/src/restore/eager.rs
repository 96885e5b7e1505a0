//! Eager restore: all memory is populated before the guest runs.

use stillframe_fault::{self as fault, Point};
use stillframe_qemu::launch::{self, Launched};
use stillframe_repo::PageMap;

use super::events::{LazyEvent, LazySink};
use super::job::{Done, Job, PhaseClock};
use super::{LOAD_LIMIT, RestoreError};
use crate::guardian::{Guardian, OnDisconnect};
use crate::memory::Block;
use crate::populate::eager;
use crate::post_restore;
use crate::source::repository::shapes;

impl Job<'_> {
    /// Populates all memory before the guest runs.
    pub(crate) fn run_eagerly(
        &self,
        mut launched: Launched,
        guardian: &Guardian,
        maps: Vec<PageMap<'_>>,
        mut clock: PhaseClock,
        events: LazySink<'_>,
    ) -> Result<Done, RestoreError> {
        let ram = launched.monitor.ram_blocks()?;
        let blocks = eager::open_blocks(&launched.process, &ram, &shapes(&self.manifest.ram))?;
        let blocks: Vec<&Block> = blocks.iter().collect();
        let progress = &mut |progress| events(LazyEvent::Progress(progress));
        let pages = match self.template {
            Some(template) => template.complete(&launched.process, &blocks, maps, progress)?,
            None => eager::populate(&launched.process, &blocks, maps, progress)?,
        };
        // Before the device state, because loading it may rightly change memory: KVM writes each vCPU's
        // paravirtual clock anew when QEMU hands it the clock's address.
        let verify = match self.options.verify {
            true => Some(self.verify(&blocks, events)?),
            false => None,
        };
        clock.phases.memory = clock.lap();
        launch::load_device_state(&mut launched, self.state, LOAD_LIMIT)?;
        clock.phases.device_state = clock.lap();
        fault::at(Point::RestoreLoaded)?;
        // Before it runs: from then on the guardian must not end the VM.
        guardian.on_disconnect(OnDisconnect::Nothing)?;
        let mut suspended = false;
        if !self.options.paused {
            launched.monitor.cont()?;
            post_restore::announce(&mut launched.monitor);
            suspended = launched.monitor.is_suspended();
        }
        clock.phases.cont = clock.lap();
        let (process, _) = launched.keep();
        Ok(Done {
            process,
            pages,
            phases: clock.phases,
            lazy: None,
            suspended,
            clock: self.set_clock(suspended),
            verify,
        })
    }
}
