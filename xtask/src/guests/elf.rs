//! Checks whether an ELF program is static.

/// Offsets in the 64-bit ELF header and in a program header, elf(5).
const PROGRAM_HEADERS_AT: usize = 0x20;
const PROGRAM_HEADER_BYTES_AT: usize = 0x36;
const PROGRAM_HEADERS_COUNT_AT: usize = 0x38;
/// The type of a program header that names a dynamic loader.
const PT_INTERP: u32 = 3;

/// Whether these are the bytes of a 64-bit program that names no dynamic loader.
pub fn is_static(program: &[u8]) -> bool {
    has_loader(program) == Some(false)
}

fn has_loader(program: &[u8]) -> Option<bool> {
    if !program.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let half = |at: usize| -> Option<usize> {
        let bytes = program.get(at..at.checked_add(2)?)?;
        Some(usize::from(u16::from_le_bytes(bytes.try_into().ok()?)))
    };
    let start: [u8; 8] = program
        .get(PROGRAM_HEADERS_AT..PROGRAM_HEADERS_AT + 8)?
        .try_into()
        .ok()?;
    let start = usize::try_from(u64::from_le_bytes(start)).ok()?;
    let bytes = half(PROGRAM_HEADER_BYTES_AT)?;
    for number in 0..half(PROGRAM_HEADERS_COUNT_AT)? {
        let at = start.checked_add(number * bytes)?;
        let kind: [u8; 4] = program.get(at..at.checked_add(4)?)?.try_into().ok()?;
        if u32::from_le_bytes(kind) == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF header and program headers of the given kinds.
    fn program(kinds: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0; 0x40];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[PROGRAM_HEADERS_AT] = 0x40;
        bytes[PROGRAM_HEADER_BYTES_AT] = 56;
        bytes[PROGRAM_HEADERS_COUNT_AT] = kinds.len() as u8;
        for kind in kinds {
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0; 52]);
        }
        bytes
    }

    #[test]
    fn a_program_with_a_loader_is_not_static() {
        assert!(is_static(&program(&[6, 1, 1])));
        assert!(!is_static(&program(&[6, PT_INTERP, 1])));
    }

    #[test]
    fn an_incomplete_program_is_not_static() {
        assert!(!is_static(b"#!/bin/sh\n"));
        assert!(!is_static(&program(&[6, 1])[..0x50]));
        assert!(!is_static(b""));
    }
}
