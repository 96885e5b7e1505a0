//! Fuzz target: what an export finds out from a guest: registers, and the page tables they lead to.
#![no_main]

use stillframe_qemu::page_tables::{TABLE_BYTES, kernel_mappings};
use stillframe_qemu::{cpu_state, elf_core};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let cpus = cpu_state::cpus(bytes).unwrap_or_default();
    let cr3 = cpus.first().map_or(0, |cpu| cpu.cr3);
    let mappings = kernel_mappings(cr3, bytes.len() % 2 == 0, 1000, &mut |at, table| {
        // A small memory that repeats itself: tables lead to tables.
        let whole = bytes.len() / TABLE_BYTES;
        if whole == 0 {
            return Ok(false);
        }
        let number = (at as usize / TABLE_BYTES) % whole;
        table.copy_from_slice(&bytes[number * TABLE_BYTES..][..TABLE_BYTES]);
        Ok(true)
    });
    let mappings = mappings.expect("memory can be read");
    assert!(mappings.found.len() <= 1000);
    let head = elf_core::head(&[], &mappings.found, &cpus);
    assert!(head.len() as u64 <= elf_core::MEMORY_AT);
});
