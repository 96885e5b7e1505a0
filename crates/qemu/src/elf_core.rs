//! The head of an ELF core of a guest, as QEMU's `dump-guest-memory` makes it and `gdb` and `crash` read it.
//!
//! ```text
//! 0        ELF header, program headers, notes
//! 4 MiB    memory, by physical address without the holes: sparse
//! ```
//!
//! Each range of physical memory has a program header, whose virtual address is the physical one. Each mapping of
//! the guest's kernel has a program header that leads to the same bytes of the file. The notes hold the registers
//! of each vCPU twice: as Linux does (`NT_PRSTATUS`), for gdb, and as QEMU does, for crash.
//!
//! Format: System V ABI, chapters 4 and 5; Linux `struct elf_prstatus`; QEMU `target/i386/arch_dump.c` (layout of its
//! note).

use crate::cpu_state::{CpuState, Segment};
use crate::page_tables::Mapping;
use crate::physical_memory::PhysicalRange;

/// Where memory begins in the file: behind room for all program headers there may be.
pub const MEMORY_AT: u64 = 4 << 20;
/// Upper bound on the kernel's mappings in the head.
pub const MAPPINGS_MAX: usize = 60_000;
/// Upper bound on the vCPUs whose registers are in the head.
pub const CPUS_MAX: usize = 800;

const ELF_HEADER_BYTES: u64 = 64;
const PROGRAM_HEADER_BYTES: u64 = 56;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const NT_PRSTATUS: u32 = 1;
const PRSTATUS_BYTES: usize = 336;
const PRSTATUS_PID_AT: usize = 32;
const PRSTATUS_REGISTERS_AT: usize = 112;

/// The head, at most [`MEMORY_AT`] bytes. The ranges lie one behind the other in the file. Mappings and vCPUs above
/// the bounds are left out.
pub fn head(ranges: &[PhysicalRange], mappings: &[Mapping], cpus: &[CpuState]) -> Vec<u8> {
    let mut loads: Vec<(Mapping, u64)> = Vec::new();
    let mut places: Vec<(PhysicalRange, u64)> = Vec::new();
    let mut at = MEMORY_AT;
    for range in ranges {
        let itself = Mapping {
            virtual_address: range.address,
            physical: range.address,
            bytes: range.bytes,
        };
        loads.push((itself, at));
        places.push((*range, at));
        at += range.bytes;
    }
    let parts = mappings.iter().flat_map(|mapping| inside(mapping, &places));
    loads.extend(parts.take(MAPPINGS_MAX));
    let notes = notes(&cpus[..cpus.len().min(CPUS_MAX)]);
    let headers = loads.len() as u64 + 1;
    let notes_at = ELF_HEADER_BYTES + headers * PROGRAM_HEADER_BYTES;
    let mut out = elf_header(headers as u16);
    put_program_header(&mut out, PT_NOTE, [notes_at, 0, 0, notes.len() as u64]);
    for (mapping, at) in loads {
        let words = [at, mapping.virtual_address, mapping.physical, mapping.bytes];
        put_program_header(&mut out, PT_LOAD, words);
    }
    out.extend_from_slice(&notes);
    out
}

/// The parts of a mapping that are memory, and where they lie in the file.
fn inside<'p>(
    mapping: &Mapping,
    places: &'p [(PhysicalRange, u64)],
) -> impl Iterator<Item = (Mapping, u64)> + use<'p> {
    let mapping = *mapping;
    places.iter().filter_map(move |(range, at)| {
        let from = mapping.physical.max(range.address);
        let end = (mapping.physical + mapping.bytes).min(range.address + range.bytes);
        (from < end).then(|| {
            let part = Mapping {
                virtual_address: mapping.virtual_address + (from - mapping.physical),
                physical: from,
                bytes: end - from,
            };
            (part, at + (from - range.address))
        })
    })
}

fn elf_header(program_headers: u16) -> Vec<u8> {
    const CLASS_64: u8 = 2;
    const LITTLE_ENDIAN: u8 = 1;
    const CURRENT: u8 = 1;
    const ET_CORE: u16 = 4;
    const EM_X86_64: u16 = 62;
    let mut out = b"\x7fELF".to_vec();
    out.extend([CLASS_64, LITTLE_ENDIAN, CURRENT]);
    out.resize(16, 0);
    for half in [ET_CORE, EM_X86_64] {
        out.extend(half.to_le_bytes());
    }
    out.extend(u32::from(CURRENT).to_le_bytes());
    // No entry point, the program headers here, no section headers.
    for word in [0, ELF_HEADER_BYTES, 0] {
        out.extend(word.to_le_bytes());
    }
    out.extend(0u32.to_le_bytes());
    let sizes = [
        ELF_HEADER_BYTES as u16,
        PROGRAM_HEADER_BYTES as u16,
        program_headers,
        0,
        0,
        0,
    ];
    out.extend(sizes.iter().flat_map(|half| half.to_le_bytes()));
    out
}

/// Offset, virtual and physical address, and length.
fn put_program_header(out: &mut Vec<u8>, kind: u32, [at, from, physical, bytes]: [u64; 4]) {
    out.extend(kind.to_le_bytes());
    // No flags, as in QEMU's.
    out.extend(0u32.to_le_bytes());
    for word in [at, from, physical, bytes, bytes, 0] {
        out.extend(word.to_le_bytes());
    }
}

fn notes(cpus: &[CpuState]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, cpu) in (1u32..).zip(cpus) {
        put_note(&mut out, b"CORE\0", NT_PRSTATUS, &prstatus(number, cpu));
    }
    for cpu in cpus {
        put_note(&mut out, b"QEMU\0", 0, &qemu_note(cpu));
    }
    out
}

fn put_note(out: &mut Vec<u8>, name: &[u8], kind: u32, description: &[u8]) {
    for length in [name.len() as u32, description.len() as u32, kind] {
        out.extend(length.to_le_bytes());
    }
    for part in [name, description] {
        out.extend_from_slice(part);
        out.resize(out.len().next_multiple_of(4), 0);
    }
}

fn prstatus(number: u32, cpu: &CpuState) -> Vec<u8> {
    let [
        rax,
        rcx,
        rdx,
        rbx,
        rsp,
        rbp,
        rsi,
        rdi,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
    ] = cpu.general;
    let [es, cs, ss, ds, fs, gs, ..] = cpu.segments;
    let selector = |segment: Segment| u64::from(segment.selector);
    // The order of `struct user_regs_struct`.
    let registers = [
        r15,
        r14,
        r13,
        r12,
        rbp,
        rbx,
        r11,
        r10,
        r9,
        r8,
        rax,
        rcx,
        rdx,
        rsi,
        rdi,
        rax,
        cpu.rip,
        selector(cs),
        cpu.rflags,
        rsp,
        selector(ss),
        fs.base,
        gs.base,
        selector(ds),
        selector(es),
        selector(fs),
        selector(gs),
    ];
    let mut out = vec![0; PRSTATUS_REGISTERS_AT];
    out[PRSTATUS_PID_AT..PRSTATUS_PID_AT + 4].copy_from_slice(&number.to_le_bytes());
    out.extend(registers.iter().flat_map(|word| word.to_le_bytes()));
    out.resize(PRSTATUS_BYTES, 0);
    out
}

fn qemu_note(cpu: &CpuState) -> Vec<u8> {
    const VERSION: u32 = 1;
    const BYTES: u32 = 440;
    let [
        rax,
        rcx,
        rdx,
        rbx,
        rsp,
        rbp,
        rsi,
        rdi,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
    ] = cpu.general;
    let [es, cs, ss, ds, fs, gs, ldt, tr, gdt, idt] = cpu.segments;
    let mut out = Vec::new();
    for half in [VERSION, BYTES] {
        out.extend(half.to_le_bytes());
    }
    let registers = [
        rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, cpu.rip,
        cpu.rflags,
    ];
    out.extend(registers.iter().flat_map(|word| word.to_le_bytes()));
    for segment in [cs, ds, es, fs, gs, ss, ldt, tr, gdt, idt] {
        for half in [segment.selector, segment.limit, segment.flags, 0] {
            out.extend(half.to_le_bytes());
        }
        out.extend(segment.base.to_le_bytes());
    }
    let control = [cpu.cr0, 0, cpu.cr2, cpu.cr3, cpu.cr4, cpu.kernel_gs_base];
    out.extend(control.iter().flat_map(|word| word.to_le_bytes()));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(address: u64, block_offset: u64, bytes: u64) -> PhysicalRange {
        PhysicalRange {
            address,
            block_offset,
            bytes,
        }
    }

    #[test]
    fn a_mapping_is_cut_where_there_is_no_memory() {
        let ranges = [range(0, 0, 0x4000), range(0x1_0000, 0x4000, 0x2000)];
        let mapping = Mapping {
            virtual_address: 0xffff_8000_0000_0000,
            physical: 0x3000,
            bytes: 0xe000,
        };
        let head = head(&ranges, &[mapping], &[]);
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight"));
        let load = |number: usize| {
            let at = 64 + 56 * (number + 1);
            [word(at + 8), word(at + 16), word(at + 24), word(at + 32)]
        };
        assert_eq!(u16::from_le_bytes([head[56], head[57]]), 5);
        assert_eq!(load(0), [MEMORY_AT, 0, 0, 0x4000]);
        assert_eq!(load(1), [MEMORY_AT + 0x4000, 0x1_0000, 0x1_0000, 0x2000]);
        let base = mapping.virtual_address;
        assert_eq!(load(2), [MEMORY_AT + 0x3000, base, 0x3000, 0x1000]);
        assert_eq!(
            load(3),
            [MEMORY_AT + 0x4000, base + 0xd000, 0x1_0000, 0x1000]
        );
    }

    #[test]
    fn the_largest_head_has_its_place() {
        let cpu = CpuState {
            general: [1; 16],
            rip: 2,
            rflags: 3,
            segments: [Segment::default(); 10],
            cr0: 0,
            cr2: 0,
            cr3: 0,
            cr4: 0,
            efer: 0,
            kernel_gs_base: 0,
        };
        assert_eq!((prstatus(1, &cpu).len(), qemu_note(&cpu).len()), (336, 440));
        let mapping = |number: u64| Mapping {
            virtual_address: u64::MAX << 40 | number << 13,
            physical: 0,
            bytes: 0x1000,
        };
        let mappings: Vec<Mapping> = (0..70_000).map(mapping).collect();
        let ranges = [range(0, 0, 1 << 30), range(4 << 30, 1 << 30, 1 << 30)];
        let head = head(&ranges, &mappings, &vec![cpu; 1000]);
        assert!(head.len() as u64 <= MEMORY_AT, "{}", head.len());
    }
}
