//! An existing `syscall` instruction in a process.
//!
//! No byte of the victim's text is ever written: its other threads execute the same text.

use super::interrupted::SYSCALL_INSTRUCTION;
use crate::memory::RemoteMemory;
use crate::process::{Mapping, Process, ProcessError};

/// How much of a mapping is searched: enough for the C library's text.
const SEARCH_BYTES_MAX: u64 = 4 << 20;

/// Finds one that stays: in the vdso, which cannot be replaced while the process lives, otherwise in
/// the first other text that holds one. `None` when there is none.
pub(super) fn find(process: &Process, memory: &RemoteMemory) -> Result<Option<u64>, ProcessError> {
    let mappings = process.mappings()?;
    let usable = |mapping: &&Mapping| mapping.readable && mapping.executable && !mapping.writable;
    let is_vdso = |mapping: &&Mapping| {
        mapping
            .path
            .as_deref()
            .is_some_and(|path| path.as_os_str() == "[vdso]")
    };
    let vdso = mappings.iter().filter(usable).filter(is_vdso);
    let others = mappings
        .iter()
        .filter(usable)
        .filter(|mapping| !is_vdso(mapping));
    Ok(vdso
        .chain(others)
        .find_map(|mapping| search(memory, mapping)))
}

fn search(memory: &RemoteMemory, mapping: &Mapping) -> Option<u64> {
    let bytes = mapping.range.len().min(SEARCH_BYTES_MAX);
    let mut text = vec![0; usize::try_from(bytes).ok()?];
    // A mapping that cannot be read (it may be gone again) holds nothing for us.
    memory.read(mapping.range.start, &mut text).ok()?;
    let at = text
        .windows(2)
        .position(|pair| pair == SYSCALL_INSTRUCTION)?;
    Some(mapping.range.start + at as u64)
}

/// Whether there is one at this address right now.
pub(super) fn is_at(memory: &RemoteMemory, address: u64) -> bool {
    let mut bytes = [0; 2];
    memory.read(address, &mut bytes).is_ok() && bytes == SYSCALL_INSTRUCTION
}
