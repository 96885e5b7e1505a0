//! A QEMU that a manager started, and that waits for the state of a VM.

use std::path::Path;
use std::time::Duration;

use super::LaunchError;
use super::start::{Launched, OwnedQemu};
use crate::monitor::{Monitor, MonitorError, missing_features};
use crate::record::VmRecord;
use crate::target::{self, Selector};

/// The run state of a QEMU that was started with `-incoming defer` and has got nothing yet.
const WAITING: &str = "inmigrate";

/// Takes over the QEMU with this monitor, which must be able to become the recorded VM. From here on it is ended like
/// one that was started by this process, if anything fails before it runs.
///
/// # Errors
/// It is left as it was.
pub fn adopt(qmp: &Path, record: &VmRecord, timeout: Duration) -> Result<Launched, LaunchError> {
    let target = target::find(&Selector::Qmp(qmp.to_owned())).map_err(LaunchError::NotFound)?;
    let mut monitor = Monitor::connect(&target, timeout).map_err(not_adopted)?;
    let status = monitor.run_state().map_err(not_adopted)?.status;
    if status != WAITING {
        let path = qmp.to_owned();
        return Err(LaunchError::NotWaiting { path, status });
    }
    let (then, now) = (&record.identity, monitor.identity().map_err(not_adopted)?);
    let accelerator = |identity: &crate::monitor::Identity| format!("{:?}", identity.accelerator);
    for (what, recorded, found) in [
        (
            "QEMU version",
            then.qemu_version.clone(),
            now.qemu_version.clone(),
        ),
        ("machine type", then.machine.clone(), now.machine.clone()),
        (
            "architecture",
            then.architecture.clone(),
            now.architecture.clone(),
        ),
        ("accelerator", accelerator(then), accelerator(&now)),
    ] {
        if recorded != found {
            return Err(LaunchError::OtherMachine {
                what,
                found,
                recorded,
            });
        }
    }
    let features = monitor.cpu_features().map_err(not_adopted)?;
    let missing = missing_features(&record.cpu_features, &features);
    if !missing.is_empty() {
        let missing = missing.join(", ");
        return Err(LaunchError::CpuFeatures { missing });
    }
    // Without -S it would run the VM as soon as it has it. Here `stop` only prevents that (`qmp_stop` in QEMU's
    // monitor/qmp-cmds.c).
    monitor.stop().map_err(not_adopted)?;
    Ok(Launched {
        owned: OwnedQemu::adopted(target.process.clone()),
        process: target.process,
        monitor,
        version: now.qemu_version,
    })
}

fn not_adopted(source: MonitorError) -> LaunchError {
    LaunchError::Monitor {
        doing: "looking at the QEMU that waits",
        source: Box::new(source),
        log: String::new(),
    }
}
