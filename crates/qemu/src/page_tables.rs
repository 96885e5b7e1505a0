//! The guest's page tables: at which virtual addresses its kernel sees which memory.
//!
//! Only the upper half of the addresses is examined, the kernel's, which every process of the guest shares. The
//! guest controls the contents of the tables: they may be endless, or lead nowhere.
//!
//! Format: Intel 64 manual, volume 3, 4.5 (four and five levels).

use std::io;

/// Bytes of a table: 512 entries.
pub const TABLE_BYTES: usize = 4096;

/// Upper bound on the tables that are read: the tables of 512 GiB mapped in pages of 4 KiB.
const TABLES_MAX: usize = 1 << 18;

const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Memory that is seen at a virtual address, as far as both continue together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mapping {
    /// The virtual address.
    pub virtual_address: u64,
    /// The physical one.
    pub physical: u64,
    /// The length in bytes.
    pub bytes: u64,
}

/// The mappings of a guest's kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mappings {
    /// Ascending by virtual address.
    pub found: Vec<Mapping>,
    /// Whether there was more than the bound.
    pub is_cut: bool,
}

/// Reads a table at a physical address; `false` when no memory is there.
pub type TableReader<'r> = &'r mut dyn FnMut(u64, &mut [u8; TABLE_BYTES]) -> io::Result<bool>;

/// Walks the tables that `cr3` points to. Finds at most `limit` mappings.
///
/// # Errors
/// The errors of `read`.
pub fn kernel_mappings(
    cr3: u64,
    has_five_levels: bool,
    limit: usize,
    read: TableReader<'_>,
) -> io::Result<Mappings> {
    let mut walk = Walk {
        read,
        mappings: Mappings::default(),
        tables: 0,
        limit,
    };
    let levels = if has_five_levels { 5 } else { 4 };
    walk.upper_half(cr3 & ADDRESS, levels)?;
    walk.mappings.found.sort_unstable();
    Ok(walk.mappings)
}

struct Walk<'r> {
    read: TableReader<'r>,
    mappings: Mappings,
    tables: usize,
    limit: usize,
}

/// Bytes that an entry of a table of that level stands for.
fn reach(level: u32) -> u64 {
    1 << (12 + 9 * (level - 1))
}

impl Walk<'_> {
    /// The last entry first: the kernel itself is there, and must not be lost behind something endless.
    fn upper_half(&mut self, table: u64, levels: u32) -> io::Result<()> {
        let bits = 12 + 9 * levels;
        let entries = self.table(table)?;
        for number in (256..512u64).rev() {
            let sign = u64::MAX << bits;
            let from = sign | (number * reach(levels));
            self.entry(entries[number as usize], from, levels)?;
        }
        Ok(())
    }

    fn entry(&mut self, entry: u64, from: u64, level: u32) -> io::Result<()> {
        if entry & PRESENT == 0 {
            return Ok(());
        }
        let is_page = level == 1 || (level <= 3 && entry & LARGE != 0);
        if is_page {
            // The low bits of a large page's address are others' (PAT).
            let physical = entry & ADDRESS & !(reach(level) - 1);
            self.add(Mapping {
                virtual_address: from,
                physical,
                bytes: reach(level),
            });
            return Ok(());
        }
        if self.tables >= TABLES_MAX || self.mappings.found.len() >= self.limit {
            self.mappings.is_cut = true;
            return Ok(());
        }
        let entries = self.table(entry & ADDRESS)?;
        for (number, entry) in (0u64..).zip(entries) {
            self.entry(entry, from + number * reach(level - 1), level - 1)?;
        }
        Ok(())
    }

    fn table(&mut self, at: u64) -> io::Result<[u64; 512]> {
        self.tables += 1;
        let mut bytes = [0; TABLE_BYTES];
        if !(self.read)(at, &mut bytes)? {
            return Ok([0; 512]);
        }
        let (words, _) = bytes.as_chunks::<8>();
        Ok(std::array::from_fn(|number| {
            u64::from_le_bytes(words[number])
        }))
    }

    fn add(&mut self, next: Mapping) {
        if let Some(last) = self.mappings.found.last_mut()
            && last.virtual_address.wrapping_add(last.bytes) == next.virtual_address
            && last.physical.wrapping_add(last.bytes) == next.physical
        {
            last.bytes += next.bytes;
            return;
        }
        match self.mappings.found.len() < self.limit {
            true => self.mappings.found.push(next),
            false => self.mappings.is_cut = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A memory of four tables: level 4 at 0, 3 at 0x1000, 2 at 0x2000, 1 at 0x3000.
    fn memory() -> Vec<u8> {
        let mut memory = vec![0; 4 * TABLE_BYTES];
        let mut put =
            |at: usize, value: u64| memory[at..at + 8].copy_from_slice(&value.to_le_bytes());
        // User addresses are passed over.
        put(0, 0x1000 | PRESENT);
        put(511 * 8, 0x1000 | PRESENT);
        put(0x1000 + 510 * 8, 0x2000 | PRESENT);
        put(0x2000, 0x20_0000 | LARGE | PRESENT);
        put(0x2008, 0x40_1000 | LARGE | PRESENT);
        put(0x2010, 0x3000 | PRESENT);
        put(0x3000, 0x60_0000 | PRESENT);
        put(0x3018, 0x9000 | PRESENT);
        memory
    }

    fn walk(memory: &[u8], cr3: u64, five: bool, limit: usize) -> Mappings {
        kernel_mappings(cr3, five, limit, &mut |at, into| {
            let found = memory.get(at as usize..at as usize + TABLE_BYTES);
            if let Some(found) = found {
                into.copy_from_slice(found);
            }
            Ok(found.is_some())
        })
        .expect("reading memory does not fail")
    }

    #[test]
    fn pages_of_both_sizes_are_found_and_joined() {
        let mapping = |virtual_address, physical, bytes| Mapping {
            virtual_address,
            physical,
            bytes,
        };
        let base = 0xffff_ffff_8000_0000;
        let all = walk(&memory(), 0x18, false, 10);
        let expected = [
            mapping(base, 0x20_0000, 0x40_1000),
            mapping(base + 0x40_3000, 0x9000, 0x1000),
        ];
        assert_eq!((all.found.as_slice(), all.is_cut), (&expected[..], false));
        let cut = walk(&memory(), 0, false, 1);
        assert_eq!((cut.found.len(), cut.is_cut), (1, true));
    }

    proptest! {
        #[test]
        fn no_tables_lead_astray(
            entries in proptest::collection::vec((0usize..2048, 0u64..8, any::<bool>()), 0..64),
            five: bool,
        ) {
            let mut memory = vec![0; 4 * TABLE_BYTES];
            for (slot, table, large) in entries {
                let entry = table << 12 | PRESENT | if large { LARGE } else { 0 };
                memory[slot * 8..slot * 8 + 8].copy_from_slice(&entry.to_le_bytes());
            }
            let all = walk(&memory, 0, five, 50);
            prop_assert!(all.found.len() <= 50);
            prop_assert!(all.found.iter().all(|found| found.virtual_address >> 63 == 1));
        }
    }
}
