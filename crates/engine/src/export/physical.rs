//! Main RAM by physical address: raw, or as an ELF core.

use stillframe_page::PAGE_BYTES;
use stillframe_qemu::cpu_state::{self, CpuState};
use stillframe_qemu::elf_core;
use stillframe_qemu::migration_file::MigrationFileError;
use stillframe_qemu::page_tables::{self, Mappings, TABLE_BYTES};
use stillframe_qemu::physical_memory::{self, PhysicalRange};

use super::output::Output;
use super::{ExportError, Job, Written};

impl Job<'_> {
    /// Each byte lies at its physical address; the hole below 4 GiB is one of the file.
    pub(super) fn raw(&mut self, output: Output) -> Result<Written, ExportError> {
        let (main, ranges) = self.layout()?;
        let end = ranges.last().map_or(0, |range| range.address + range.bytes);
        output.set_length(end)?;
        self.main_ram(main, &output, &|offset| {
            let range = ranges.iter().rfind(|range| range.block_offset <= offset);
            range.map_or(offset, |range| {
                range.address + (offset - range.block_offset)
            })
        })?;
        let mut written = self.finish(output, end)?;
        written.notes.push(only_main(main, self));
        if let [low, high] = ranges.as_slice() {
            written.notes.push(format!(
                "every byte lies at its physical address: from {:#x} to {:#x} is a hole",
                low.bytes, high.address
            ));
        }
        Ok(written)
    }

    /// Writes an ELF core as `dump-guest-memory` makes it.
    pub(super) fn elf(&mut self, output: Output) -> Result<Written, ExportError> {
        let (main, ranges) = self.layout()?;
        let bytes = elf_core::MEMORY_AT + self.blocks[main].used_bytes;
        output.set_length(bytes)?;
        self.main_ram(main, &output, &|offset| elf_core::MEMORY_AT + offset)?;
        let cpus = cpu_state::cpus(&self.device_state)?;
        let (mappings, mut notes) = kernel_mappings(&cpus, &ranges, &output)?;
        output.put(&elf_core::head(&ranges, &mappings.found, &cpus), 0)?;
        let mut written = self.finish(output, bytes)?;
        notes.insert(0, only_main(main, self));
        written.notes = notes;
        written.cpus = Some(cpus.len().min(elf_core::CPUS_MAX));
        written.mappings = Some(mappings.found.len());
        Ok(written)
    }

    fn layout(&self) -> Result<(usize, Vec<PhysicalRange>), ExportError> {
        let arguments = &self.record.arguments;
        Ok(physical_memory::layout(
            arguments,
            &self.blocks,
            &self.device_state,
        )?)
    }

    /// Writes the pages of the main block where `place` says for an offset in it.
    pub(super) fn main_ram(
        &mut self,
        main: usize,
        output: &Output,
        place: &(dyn Fn(u64) -> u64 + Sync),
    ) -> Result<(), ExportError> {
        self.walk.only(main);
        let sink = |first: u64, bytes: &[u8]| {
            let mut rest = bytes;
            let mut offset = first * PAGE_BYTES;
            while !rest.is_empty() {
                // As far as what lies together in the block does so in the file.
                let at = place(offset);
                let together = (PAGE_BYTES..rest.len() as u64)
                    .step_by(PAGE_BYTES as usize)
                    .find(|&length| place(offset + length) != at + length);
                let (part, behind) = rest.split_at(together.map_or(rest.len(), |end| end as usize));
                let put = output.put_io(part, at);
                put.map_err(|source| ExportError::from(MigrationFileError::Write(source)))?;
                offset += part.len() as u64;
                rest = behind;
            }
            Ok(())
        };
        let walked = self.walk.block(main, &mut |_, _| Ok(()), &sink);
        walked.map_err(|error| output.blame(error))
    }
}

fn only_main(main: usize, job: &Job<'_>) -> String {
    let name = &job.blocks[main].name;
    format!("main RAM only ({name}): neither video memory nor firmware is in it")
}

/// The mappings of the guest's kernel, by the page tables of a vCPU that runs it, and warnings about them. The
/// tables are read from the file, which contains memory by now.
fn kernel_mappings(
    cpus: &[CpuState],
    ranges: &[PhysicalRange],
    output: &Output,
) -> Result<(Mappings, Vec<String>), ExportError> {
    let mut notes = Vec::new();
    if cpus.is_empty() {
        notes.push("the registers of its vCPUs are of a version that is not known".to_owned());
    }
    let paging = || cpus.iter().filter(|cpu| cpu.is_long_mode());
    let in_kernel = paging().find(|cpu| cpu.is_in_kernel());
    let Some(cpu) = in_kernel.or_else(|| paging().next()) else {
        notes.push("no vCPU uses 64-bit page tables: addresses are physical ones".to_owned());
        return Ok((Mappings::default(), notes));
    };
    if in_kernel.is_none() {
        notes.push(
            "all vCPUs ran programs: where the guest's kernel isolates page tables, most of its addresses are missing"
                .to_owned(),
        );
    }
    let mut read = |at: u64, table: &mut [u8; TABLE_BYTES]| {
        let inside =
            |range: &&PhysicalRange| (range.address..range.address + range.bytes).contains(&at);
        let Some(range) = ranges.iter().find(inside) else {
            return Ok(false);
        };
        let offset = range.block_offset + (at - range.address);
        output.read(table, elf_core::MEMORY_AT + offset)?;
        Ok(true)
    };
    let limit = elf_core::MAPPINGS_MAX;
    let found = page_tables::kernel_mappings(cpu.cr3, cpu.has_five_levels(), limit, &mut read);
    let found = found.map_err(|error| output.wrong(error))?;
    if found.is_cut {
        notes.push("the guest's page tables say more than the file has a place for".to_owned());
    }
    Ok((found, notes))
}
