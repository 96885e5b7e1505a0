//! The key table: for each blob the index files that may describe it, in three bytes.
//!
//! ```text
//! key of a blob     0x3a07_51c2               bytes 4..8 of its id, as in the sections of index files
//! bucket            0x3a07                    the upper half: its number implies these bits
//! entry                    0x51c2, group      the lower half, and the group of index files that describes it
//! ```
//!
//! A lookup finds the groups of a key with one search, so most blobs that do not exist cost no read: of 25 million
//! blobs, one in 170 has the key of another. A blob of a key that is there is looked up in the files of its groups.
//!
//! Entries are sorted by bucket and value in one list: insertion moves a part of it. So new entries go into a
//! second list, which is merged into the large one from time to time. Between checkpoints it is small, so that a
//! lookup there finds it in the processor's caches.

/// Number of buckets: one for each upper half of a key.
const BUCKETS: usize = 1 << 16;

/// The large list takes over the small one when that has this many entries, and one for this many of its own:
/// while keys are added, and afterwards. A list of 25 million takes over another in about 30 ms.
const RECENT_MIN: usize = 1 << 16;
const SHARE_ADDING: usize = 8;
const SHARE_SETTLED: usize = 64;

/// A group of index files.
pub(crate) type Group = u8;

/// Number of groups.
pub(crate) const GROUPS: usize = 1 << Group::BITS;

/// The lower half of a key, the more significant byte first, and a group.
type KeyEntry = [u8; KEY_ENTRY_BYTES];

/// Memory that a key takes, in bytes.
pub(crate) const KEY_ENTRY_BYTES: usize = 3;

/// The groups of each key.
#[derive(Default)]
pub(crate) struct KeyTable {
    large: Level,
    recent: Level,
}

impl KeyTable {
    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.large.entries.len() + self.recent.entries.len()
    }

    /// Adds keys, in ascending order, to a group.
    pub(crate) fn add(&mut self, keys: &[u32], group: Group) {
        self.recent.merge(&Level::of(keys, group));
        self.merge_above(SHARE_ADDING);
    }

    /// Prepares for lookups, after the last key was added.
    pub(crate) fn settle(&mut self) {
        self.merge_above(SHARE_SETTLED);
    }

    fn merge_above(&mut self, share: usize) {
        if self.recent.entries.len() > RECENT_MIN + self.large.entries.len() / share {
            self.large.merge(&self.recent);
            self.recent = Level::default();
        }
    }

    /// The groups that have a key; some may be returned twice.
    pub(crate) fn groups(&self, key: u32) -> impl Iterator<Item = Group> {
        let levels = [&self.large, &self.recent].into_iter();
        levels.flat_map(move |level| level.of_key(key).iter().map(|&[_, _, group]| group))
    }
}

/// A sorted list of entries.
struct Level {
    /// The position of the first entry of each bucket, then the number of entries.
    starts: Vec<u32>,
    entries: Vec<KeyEntry>,
}

impl Default for Level {
    fn default() -> Level {
        Level {
            starts: vec![0; BUCKETS + 1],
            entries: Vec::new(),
        }
    }
}

impl Level {
    /// The entries of these keys, which are in ascending order.
    fn of(keys: &[u32], group: Group) -> Level {
        let mut level = Level::default();
        for &key in keys {
            level.starts[bucket(key) + 1] += 1;
        }
        let mut sum = 0;
        for start in &mut level.starts {
            sum += *start;
            *start = sum;
        }
        level.entries = keys.iter().map(|&key| entry(key, group)).collect();
        level
    }

    /// The entries of a key.
    fn of_key(&self, key: u32) -> &[KeyEntry] {
        if self.entries.is_empty() {
            return &[];
        }
        let bucket = bucket(key);
        let entries = &self.entries[self.starts[bucket] as usize..self.starts[bucket + 1] as usize];
        let value = key as u16;
        // Keys are parts of hashes, so they lie near the position that their values suggest: a few steps from
        // there touch fewer cache lines than a binary search.
        let mut first = (entries.len() * usize::from(value)) >> u16::BITS;
        while first < entries.len() && lower_half(entries[first]) < value {
            first += 1;
        }
        while first > 0 && lower_half(entries[first - 1]) >= value {
            first -= 1;
        }
        let alike = entries[first..].iter();
        let alike = alike.take_while(|&&entry| lower_half(entry) == value);
        &entries[first..first + alike.count()]
    }

    /// Adds the entries of another list, from the last bucket to the first: in place, so that this takes no
    /// second copy of a list that may have hundreds of megabytes.
    fn merge(&mut self, other: &Level) {
        let entries = &mut self.entries;
        entries.reserve_exact(other.entries.len());
        entries.resize(entries.len() + other.entries.len(), KeyEntry::default());
        for bucket in (0..BUCKETS).rev() {
            let range = |starts: &[u32]| (starts[bucket] as usize, starts[bucket + 1] as usize);
            let (start, mut from) = range(&self.starts);
            let (first, end) = range(&other.starts);
            // All entries of the other list up to this bucket come before.
            let mut to = from + end;
            for added in other.entries[first..end].iter().rev() {
                let less = entries[start..from].iter().rev();
                let greater = less.take_while(|&entry| entry > added).count();
                entries.copy_within(from - greater..from, to - greater);
                from -= greater;
                to -= greater + 1;
                entries[to] = *added;
            }
            entries.copy_within(start..from, to - (from - start));
        }
        for (start, added) in self.starts.iter_mut().zip(&other.starts) {
            *start += added;
        }
    }
}

fn bucket(key: u32) -> usize {
    (key >> 16) as usize
}

/// The lower half of the key of an entry.
fn lower_half([high, low, _]: KeyEntry) -> u16 {
    u16::from_be_bytes([high, low])
}

fn entry(key: u32, group: Group) -> KeyEntry {
    let [_, _, high, low] = key.to_be_bytes();
    [high, low, group]
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    /// Keys that share buckets and often repeat, and others.
    fn key() -> impl Strategy<Value = u32> {
        prop_oneof![
            (0..3_u32, 0..40_u32).prop_map(|(upper, lower)| (upper << 16) + lower * 1639),
            any::<u32>(),
            Just(u32::MAX),
        ]
    }

    proptest! {
        /// Compared with a map; a table whose second list is merged at each addition has the same entries.
        #[test]
        fn it_finds_all_groups_of_a_key(
            files in prop::collection::vec((prop::collection::vec(key(), 0..200), any::<u8>()), 0..8),
            strangers in prop::collection::vec(key(), 0..50),
        ) {
            let (mut table, mut merged) = (KeyTable::default(), KeyTable::default());
            let mut model: BTreeMap<u32, BTreeSet<u8>> = BTreeMap::new();
            for (mut keys, group) in files {
                keys.sort_unstable();
                table.add(&keys, group);
                merged.add(&keys, group);
                let recent = std::mem::take(&mut merged.recent);
                merged.large.merge(&recent);
                for key in keys {
                    model.entry(key).or_default().insert(group);
                }
                prop_assert_eq!(table.len(), merged.len());
                for key in model.keys().chain(&strangers) {
                    let expected = model.get(key).cloned().unwrap_or_default();
                    for table in [&table, &merged] {
                        prop_assert_eq!(table.groups(*key).collect::<BTreeSet<u8>>(), expected.clone());
                    }
                }
            }
        }
    }

    /// More entries than the second list takes.
    #[test]
    fn the_second_list_is_merged_into_the_large_one() {
        let mut table = KeyTable::default();
        let mut all = Vec::new();
        for group in 0..40_u8 {
            let hash = |number: u32| number.wrapping_mul(0x9e37_79b9).rotate_left(7);
            let first = u32::from(group) * 10_000;
            let mut keys: Vec<u32> = (first..first + 10_000).map(hash).collect();
            keys.sort_unstable();
            table.add(&keys, group);
            all.extend(keys.iter().map(|&key| (key, group)));
        }
        assert_eq!(table.len(), 400_000);
        assert!(table.large.entries.len() > 300_000 && !table.recent.entries.is_empty());
        for (key, group) in all {
            assert!(table.groups(key).any(|found| found == group));
        }
    }
}
