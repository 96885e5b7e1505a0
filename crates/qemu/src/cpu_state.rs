//! The registers of a vCPU, out of its `cpu` section in the device state.
//!
//! The section is a row of fields without names. The fields up to the system registers have had the same offsets
//! for as long as the section has version 12 (QEMU 1.2 and newer). The description at the end of a migration file
//! names every field and its length:
//!
//! ```text
//! 0    16 general registers (rax rcx rdx rbx rsp rbp rsi rdi r8..r15), rip, rflags      8 bytes each
//! 144  hflags, FPU control and its eight registers
//! 236  es cs ss ds fs gs ldtr tr gdtr idtr        be32 selector, be64 base, be32 limit, be32 flags
//! 436  sysenter; 456 cr0 cr2 cr3 cr4; dr0..dr7; a20, mxcsr, xmm0..15
//! 816  efer star lstar cstar fmask kernel-gs-base
//! ```

use crate::device_state::{DeviceSection, DeviceStateError, sections};

/// Name and version of the sections that are read.
const SECTION: &str = "cpu";
const VERSION: u32 = 12;

const SEGMENTS_AT: usize = 236;
const SEGMENT_BYTES: usize = 20;
const CONTROL_AT: usize = 456;
const EFER_AT: usize = 816;
const KERNEL_GS_BASE_AT: usize = 856;
/// End of the fields that are read, in bytes.
const READ_BYTES: usize = 864;

/// A segment register, or a table register.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Segment {
    /// The selector.
    pub selector: u32,
    /// Its base address.
    pub base: u64,
    /// Its limit.
    pub limit: u32,
    /// Its attributes, as in the upper half of a descriptor.
    pub flags: u32,
}

/// The registers of a vCPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuState {
    /// rax rcx rdx rbx rsp rbp rsi rdi r8..r15.
    pub general: [u64; 16],
    /// The instruction pointer.
    pub rip: u64,
    /// The flags.
    pub rflags: u64,
    /// es cs ss ds fs gs ldtr tr gdtr idtr.
    pub segments: [Segment; 10],
    /// cr0.
    pub cr0: u64,
    /// cr2.
    pub cr2: u64,
    /// cr3: where the page tables are.
    pub cr3: u64,
    /// cr4.
    pub cr4: u64,
    /// The extended feature enable register.
    pub efer: u64,
    /// The base that `swapgs` exchanges with that of `gs`.
    pub kernel_gs_base: u64,
}

impl CpuState {
    /// Whether addresses go through page tables of four or five levels.
    pub fn is_long_mode(&self) -> bool {
        const CR0_PG: u64 = 1 << 31;
        const EFER_LMA: u64 = 1 << 10;
        self.cr0 & CR0_PG != 0 && self.efer & EFER_LMA != 0
    }

    /// Whether there are five levels.
    pub fn has_five_levels(&self) -> bool {
        const CR4_LA57: u64 = 1 << 12;
        self.cr4 & CR4_LA57 != 0
    }

    /// Whether the guest's kernel runs, not a program of it.
    pub fn is_in_kernel(&self) -> bool {
        self.segments[1].selector & 3 == 0
    }

    fn decode(data: &[u8]) -> Option<CpuState> {
        let data = data.get(..READ_BYTES)?;
        let word = |at: usize| u64::from_be_bytes(take(data, at));
        let half = |at: usize| u32::from_be_bytes(take(data, at));
        let segment = |number: usize| {
            let at = SEGMENTS_AT + number * SEGMENT_BYTES;
            Segment {
                selector: half(at),
                base: word(at + 4),
                limit: half(at + 12),
                flags: half(at + 16),
            }
        };
        Some(CpuState {
            general: std::array::from_fn(|number| word(number * 8)),
            rip: word(128),
            rflags: word(136),
            segments: std::array::from_fn(segment),
            cr0: word(CONTROL_AT),
            cr2: word(CONTROL_AT + 8),
            cr3: word(CONTROL_AT + 16),
            cr4: word(CONTROL_AT + 24),
            efer: word(EFER_AT),
            kernel_gs_base: word(KERNEL_GS_BASE_AT),
        })
    }
}

/// Bytes at a place; the caller has checked that they are there.
fn take<const N: usize>(data: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|index| data.get(at + index).copied().unwrap_or_default())
}

/// The registers of all vCPUs in a stream of device state, by their numbers. None if a section has another
/// version than the one that is known.
///
/// # Errors
/// When the stream is not whole.
pub fn cpus(raw: &[u8]) -> Result<Vec<CpuState>, DeviceStateError> {
    let mut found: Vec<DeviceSection> = sections(raw)?;
    found.retain(|section| section.name == SECTION);
    found.sort_by_key(|section| section.instance);
    let decoded = found.iter().map(|section| match section.version {
        VERSION => CpuState::decode(&raw[section.data.clone()]),
        _ => None,
    });
    Ok(decoded.collect::<Option<_>>().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_at_their_places() {
        let mut data = vec![0; READ_BYTES];
        let mut put =
            |at: usize, value: u64| data[at..at + 8].copy_from_slice(&value.to_be_bytes());
        put(32, 0xffff_8000_0000_1000);
        put(128, 0xffff_ffff_8100_0000);
        put(SEGMENTS_AT + SEGMENT_BYTES + 4, 0x1234);
        put(CONTROL_AT, 0x8000_0011);
        put(CONTROL_AT + 16, 0x273_a000);
        put(CONTROL_AT + 24, 1 << 12);
        put(EFER_AT, 0xd01);
        put(KERNEL_GS_BASE_AT, 7);
        data[SEGMENTS_AT + SEGMENT_BYTES + 3] = 0x10;
        let state = CpuState::decode(&data).expect("long enough");
        assert_eq!(state.general[4], 0xffff_8000_0000_1000);
        assert_eq!((state.rip, state.cr3), (0xffff_ffff_8100_0000, 0x273_a000));
        assert_eq!(
            (state.segments[1].selector, state.segments[1].base),
            (0x10, 0x1234)
        );
        assert!(state.is_long_mode() && state.has_five_levels() && state.is_in_kernel());
        assert_eq!(state.kernel_gs_base, 7);
        assert_eq!(CpuState::decode(&data[..READ_BYTES - 1]), None);
    }
}
