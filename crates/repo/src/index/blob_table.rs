//! The numbers of blobs by their ids, in as little memory as can be: 16 bytes of the id in a list, and
//! a hash table of numbers over it.
//!
//! ```text
//! id --> one of 16 tables --> number --> first 16 bytes of the id: is it the one?
//!        5 bytes a place                 16 bytes a blob, in the order of the index
//! ```
//!
//! # Why 16 of 32 bytes will do
//!
//! Ids are keyed hashes: to anyone without the key they are random numbers, and a party without it cannot
//! look for two contents whose ids begin alike. So contents that differ meet in these 16 bytes by
//! chance only: among the 2^32 blobs an index can hold, with a probability of 2^-65; among those of
//! a terabyte, with one of 2^-73. Disks return wrong bytes unnoticed more often than that by many
//! orders of magnitude. Should it happen, the second content would be taken for a duplicate of the
//! first, and reading it be an error: a read verifies all 32 bytes of a blob's id (see
//! `blobs`), so there are never wrong bytes. Files have whole ids.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use stillframe_page::hash::ContentId;

use crate::index::chunked::Rows;
use crate::index::mark_bitmaps::Bits;

/// The part of an id that is kept.
type ShortId = [u8; 16];

const TABLES: usize = 16;

/// Hash tables double. These get shares of the ids of 16 to 31 parts, so they do not double at once
/// but one after the other: memory grows in small steps, and is always about what it is on average.
const PARTS: usize = TABLES * (3 * TABLES - 1) / 2;

/// Whose each part is.
const TABLE_OF_PART: [u8; PARTS] = {
    let mut tables = [0; PARTS];
    let (mut part, mut table) = (0, 0);
    while table < TABLES {
        let end = part + TABLES + table;
        while part < end {
            tables[part] = table as u8;
            part += 1;
        }
        table += 1;
    }
    tables
};

/// Blobs, numbered in the order they were added. A blob that was added twice has two numbers, of
/// which one is found.
#[derive(Default)]
pub(crate) struct BlobTable {
    ids: Rows<ShortId>,
    tables: [HashTable<u32>; TABLES],
}

impl BlobTable {
    /// How many numbers there are.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// How many different blobs there are.
    pub(crate) fn different(&self) -> usize {
        self.tables.iter().map(HashTable::len).sum()
    }

    pub(crate) fn find(&self, id: &ContentId) -> Option<u32> {
        let id = short(id);
        let is_it = |&number: &u32| self.ids.at(number as usize) == id;
        self.tables[table(&id)].find(hash(&id), is_it).copied()
    }

    /// Gives a blob the next number. Where it has one already, `replaces` decides for that one
    /// whether the new one is to be found instead.
    pub(crate) fn add(&mut self, id: &ContentId, replaces: impl FnOnce(u32) -> bool) {
        let id = short(id);
        // The index sees to it that there is room (`ensure_room`).
        let number = self.ids.len() as u32;
        self.ids.push(id);
        let ids = &self.ids;
        let id_of = |&number: &u32| ids.at(number as usize);
        let place = self.tables[table(&id)].entry(
            hash(&id),
            |number| id_of(number) == id,
            |number| hash(&id_of(number)),
        );
        match place {
            Entry::Vacant(place) => drop(place.insert(number)),
            Entry::Occupied(mut place) if replaces(*place.get()) => *place.get_mut() = number,
            Entry::Occupied(_) => {}
        }
    }

    /// The numbers that are found, one for each different blob, ascending.
    pub(crate) fn found(&self) -> impl Iterator<Item = u32> {
        // By way of a set, because what is known of a blob lies in the order of the numbers.
        let mut found = Bits::default();
        for &number in self.tables.iter().flatten() {
            found.set(number);
        }
        (0..self.ids.len() as u32).filter(move |&number| found.has(number))
    }
}

fn short(id: &ContentId) -> ShortId {
    std::array::from_fn(|at| id.0[at])
}

/// The ids are hashes: their bytes are as good as any made of them. Eight are for the place in the
/// table, others for which table.
fn hash(id: &ShortId) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|at| id[at]))
}

fn table(id: &ShortId) -> usize {
    let random = u32::from_le_bytes(std::array::from_fn(|at| id[8 + at]));
    let part = (u64::from(random) * PARTS as u64) >> 32;
    TABLE_OF_PART[part as usize].into()
}
