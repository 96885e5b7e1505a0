//! The numbers of blobs by their ids, in little memory: a list with 16 bytes of each id, and hash tables of
//! numbers over it.
//!
//! ```text
//! id --> one of 16 tables --> number --> first 16 bytes of the id: is it the one?
//!        5 bytes a slot                  16 bytes a blob, in the order of the index
//! ```
//!
//! # Why 16 of 32 bytes suffice
//!
//! Ids are keyed hashes: without the key they are random numbers, and no party can search for two contents whose
//! ids begin alike. Different contents collide in these 16 bytes by chance only: among the 2^32 blobs that an
//! index can hold with a probability of 2^-65, among those of a terabyte of 2^-73. Disks return wrong bytes
//! unnoticed many orders of magnitude more often. After a collision, prune takes one content for the other.
//! Reading it is an error: a read verifies all 32 bytes of a blob's id (see `blobs`), so wrong bytes are never
//! returned. Files have whole ids.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use stillframe_page::hash::ContentId;

use crate::index::chunked::ChunkedVec;
use crate::index::mark_bitmaps::Bits;

/// The part of an id that is kept.
type ShortId = [u8; 16];

const TABLES: usize = 16;

/// Number of shares of the ids. The tables get 16 to 31 of them each, so they double one after the other: memory
/// grows in small steps.
const SHARES: usize = TABLES * (3 * TABLES - 1) / 2;

/// The table of each share.
const TABLE_OF_SHARE: [u8; SHARES] = {
    let mut tables = [0; SHARES];
    let (mut share, mut table) = (0, 0);
    while table < TABLES {
        let end = share + TABLES + table;
        while share < end {
            tables[share] = table as u8;
            share += 1;
        }
        table += 1;
    }
    tables
};

/// Blobs, numbered in the order in which they were added. A blob that was added twice has two numbers, one of
/// which is found.
#[derive(Default)]
pub(crate) struct BlobTable {
    ids: ChunkedVec<ShortId>,
    tables: [HashTable<u32>; TABLES],
}

impl BlobTable {
    /// Number of blobs, with repetitions.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Number of different blobs.
    pub(crate) fn different(&self) -> usize {
        self.tables.iter().map(HashTable::len).sum()
    }

    pub(crate) fn find(&self, id: &ContentId) -> Option<u32> {
        let id = short(id);
        let is_it = |&number: &u32| self.ids.at(number as usize) == id;
        self.tables[table(&id)].find(hash(&id), is_it).copied()
    }

    /// Gives a blob the next number. If it has a number already, `replaces` decides whether lookups find the new
    /// one instead of that.
    pub(crate) fn add(&mut self, id: &ContentId, replaces: impl FnOnce(u32) -> bool) {
        self.add_short(short(id), replaces);
    }

    fn add_short(&mut self, id: ShortId, replaces: impl FnOnce(u32) -> bool) {
        // The index has checked that the number fits (`ensure_room`).
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

    /// Forgets the blobs with the first `count` numbers. The others are numbered anew.
    pub(crate) fn forget_first(&mut self, count: usize) {
        let old = std::mem::take(self);
        for number in count..old.len() {
            self.add_short(old.ids.at(number), |_| false);
        }
    }

    /// The numbers that lookups find, one for each different blob, ascending.
    pub(crate) fn found(&self) -> impl Iterator<Item = u32> {
        // Sorted by a bit set: the data of blobs is stored in the order of their numbers.
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

/// Ids are hashes, so their bytes serve as hash values: eight for the slot in a table, four others for the table.
fn hash(id: &ShortId) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|at| id[at]))
}

fn table(id: &ShortId) -> usize {
    let random = u32::from_le_bytes(std::array::from_fn(|at| id[8 + at]));
    let share = (u64::from(random) * SHARES as u64) >> 32;
    TABLE_OF_SHARE[share as usize].into()
}
