//! Where a PC's RAM lies among the guest's physical addresses.
//!
//! ```text
//! 0 ......... below      4 GiB ......... 4 GiB + above
//! [ main RAM, begin ]    [ main RAM, the rest ]
//! ```
//!
//! The size of the RAM below 4 GiB differs by machine type and option. The machine itself reports it to its
//! firmware, in the clock chip's CMOS memory, which is part of the device state. Bytes 0x34 and 0x35 count units of
//! 64 KiB from 16 MiB to 4 GiB; bytes 0x5b to 0x5d count units of 64 KiB above 4 GiB. The guest can write there, so
//! both together must be the RAM there is.

use crate::arguments::{CommandLine, Properties};
use crate::device_state::{DeviceStateError, sections};
use crate::migration_file::FileBlock;
use crate::monitor::{Monitor, MonitorError, RamBlock};

/// The name of main RAM that was not given a backend of its own.
const MAIN: &str = "pc.ram";
const CMOS_SECTION: &str = "mc146818rtc";
const CMOS_BYTES: usize = 128;
const UNIT: u64 = 64 << 10;
const HIGH: u64 = 4 << 30;
/// From here on QEMU leaves another hole, for some processors; in bytes.
const RAM_BYTES_MAX: u64 = 1000 << 30;

/// Why it is not known where RAM lies.
#[derive(Debug, thiserror::Error)]
pub enum PhysicalMemoryError {
    /// The device state cannot be read.
    #[error(transparent)]
    DeviceState(#[from] DeviceStateError),
    /// The VM's memory layout is unknown.
    #[error(
        "it is not known where this VM's memory lies among its physical addresses: {why}; export it as \
         mapped-ram or migration, load that into QEMU, and use QEMU's own dump-guest-memory"
    )]
    Unknown {
        /// The fault in it.
        why: String,
    },
}

/// A piece of main RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhysicalRange {
    /// Its physical address.
    pub address: u64,
    /// Where it begins in the RAM block, in bytes.
    pub block_offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Main RAM: the number of its block among `blocks`, and where it lies, ascending.
///
/// # Errors
/// When there is no such knowledge.
pub fn layout(
    arguments: &[String],
    blocks: &[FileBlock],
    device_state: &[u8],
) -> Result<(usize, Vec<PhysicalRange>), PhysicalMemoryError> {
    let command_line = CommandLine::parse(arguments);
    let unknown = |why: String| PhysicalMemoryError::Unknown { why };
    if let Some(why) = several_memories(&command_line) {
        return Err(unknown(why));
    }
    let backend = command_line
        .values("machine")
        .chain(command_line.values("M"));
    let backend = backend
        .filter_map(|value| {
            let properties = Properties::parse(value, "type");
            properties.get("memory-backend").map(str::to_owned)
        })
        .last();
    let names = match backend {
        None => vec![MAIN.to_owned()],
        Some(id) => vec![format!("/objects/{id}"), id],
    };
    let main = blocks.iter().position(|block| names.contains(&block.name));
    let main = main.ok_or_else(|| unknown(format!("it has no RAM block named {}", names[0])))?;
    let bytes = blocks[main].used_bytes;
    let section = sections(device_state)?;
    let cmos = section
        .iter()
        .find(|section| section.name == CMOS_SECTION && section.data.len() >= CMOS_BYTES)
        .map(|section| &device_state[section.data.clone()])
        .ok_or_else(|| unknown("it has no PC's clock chip, which reports it".to_owned()))?;
    let ranges = split(cmos, bytes);
    ranges.map(|ranges| (main, ranges)).ok_or_else(|| {
        unknown(format!(
            "its CMOS memory does not describe {bytes} bytes of RAM, so the guest has written there"
        ))
    })
}

/// The same of a running VM: the number of main RAM's block among `ram`, and where it lies. QEMU reports where physical
/// addresses are in its own memory. `None` if they are not one block in two pieces, as on most machines.
///
/// # Errors
/// QEMU does not answer.
pub fn of_running(
    monitor: &mut Monitor,
    ram: &[RamBlock],
) -> Result<Option<(usize, Vec<PhysicalRange>)>, MonitorError> {
    let Some(begin) = monitor.host_address(0)? else {
        return Ok(None);
    };
    let Some(main) = ram.iter().position(|block| block.address == begin) else {
        return Ok(None);
    };
    let bytes = ram[main].used_bytes;
    let high = monitor.host_address(HIGH)?;
    let low = high.map_or(Some(bytes), |high| high.checked_sub(begin));
    let Some(low) = low.filter(|&low| low > 0 && low <= bytes.min(HIGH)) else {
        return Ok(None);
    };
    let mut ranges = vec![PhysicalRange {
        address: 0,
        block_offset: 0,
        bytes: low,
    }];
    if low < bytes {
        ranges.push(PhysicalRange {
            address: HIGH,
            block_offset: low,
            bytes: bytes - low,
        });
    }
    for range in &ranges {
        let last = monitor.host_address(range.address + range.bytes - 1)?;
        if last != Some(begin + range.block_offset + range.bytes - 1) {
            return Ok(None);
        }
    }
    Ok(Some((main, ranges)))
}

/// More memory than main RAM, if the command line requests it.
fn several_memories(command_line: &CommandLine) -> Option<String> {
    let in_nodes = command_line
        .values("numa")
        .any(|value| value.contains("memdev"));
    let device = command_line.values("device").find(|value| {
        let driver = Properties::parse(value, "driver");
        let driver = driver.get("driver").unwrap_or_default();
        ["pc-dimm", "nvdimm", "virtio-mem", "virtio-pmem", "cxl"]
            .iter()
            .any(|kind| driver.starts_with(kind))
    });
    match device {
        Some(device) => Some(format!("-device {device} adds to it")),
        None => in_nodes.then(|| "it is put together of several by -numa".to_owned()),
    }
}

fn split(cmos: &[u8], bytes: u64) -> Option<Vec<PhysicalRange>> {
    let byte = |at: usize| cmos.get(at).copied().map(u64::from);
    let low_units = byte(0x34)? | byte(0x35)? << 8;
    let high_units = byte(0x5b)? | byte(0x5c)? << 8 | byte(0x5d)? << 16;
    let low = low_units * UNIT + (16 << 20);
    let above = high_units * UNIT;
    let range = |address, block_offset, bytes| PhysicalRange {
        address,
        block_offset,
        bytes,
    };
    let is_small = low_units == 0 && bytes <= 16 << 20;
    // A remainder of a unit is not reported.
    if above == 0 && (is_small || bytes / UNIT == low / UNIT) {
        return Some(vec![range(0, 0, bytes)]);
    }
    let fits = low + above == bytes && low < HIGH && above > 0 && bytes <= RAM_BYTES_MAX;
    fits.then(|| vec![range(0, 0, low), range(HIGH, low, above)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cmos(low_mib: u64, high_mib: u64) -> Vec<u8> {
        let mut cmos = vec![0; CMOS_BYTES];
        let low = low_mib.saturating_sub(16) * 16;
        cmos[0x34..0x36].copy_from_slice(&(low as u16).to_le_bytes());
        cmos[0x5b..0x5e].copy_from_slice(&((high_mib * 16) as u32).to_le_bytes()[..3]);
        cmos
    }

    #[test]
    fn the_machine_tells_where_its_memory_is() {
        let range = |address, block_offset, bytes| PhysicalRange {
            address,
            block_offset,
            bytes,
        };
        assert_eq!(
            split(&cmos(128, 0), 128 << 20),
            Some(vec![range(0, 0, 128 << 20)])
        );
        assert_eq!(
            split(&cmos(8, 0), 8 << 20),
            Some(vec![range(0, 0, 8 << 20)])
        );
        assert_eq!(
            split(&cmos(2048, 3072), 5 << 30),
            Some(vec![range(0, 0, 2 << 30), range(HIGH, 2 << 30, 3 << 30)])
        );
        // Written by the guest.
        assert_eq!(split(&cmos(2048, 3071), 5 << 30), None);
        assert_eq!(split(&cmos(64, 0), 128 << 20), None);
    }

    #[test]
    fn more_than_main_ram_is_refused() {
        for extra in [
            "-device pc-dimm,memdev=m",
            "-device virtio-mem-pci,memdev=m",
            "-numa node,memdev=a",
        ] {
            let words = format!("q {extra}");
            let argv: Vec<String> = words.split(' ').map(str::to_owned).collect();
            let error = layout(&argv, &[], b"").expect_err("several");
            assert!(
                matches!(error, PhysicalMemoryError::Unknown { .. }),
                "{extra}"
            );
        }
    }
}
