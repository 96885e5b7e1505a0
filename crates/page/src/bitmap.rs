//! The set of dirty pages of one RAM block.
//!
//! Two levels: one bit a page, and above it one summary bit for each word of 64 pages. Dirty sets are sparse
//! between checkpoints (a few thousand of millions of pages). So every walk goes by the summary and touches 4096
//! clean pages with one test:
//!
//! ```text
//! summary   ..0 1 0 0 1       bit w is set exactly when words[w] != 0
//!               |     |
//! words     [0][b][0][0][b]   bit p % 64 of words[p / 64] is page p
//! ```

use std::ops::Range;

const BITS: u64 = u64::BITS as u64;

/// A set of pages out of `0..pages`.
///
/// Page numbers come from the kernel and from QEMU. One that lies outside the block is ignored by
/// `set`, `set_range` and `clear` and is never contained; callers that must know compare with
/// [`DirtyBitmap::pages`].
#[derive(Clone, PartialEq, Eq)]
pub struct DirtyBitmap {
    pages: u64,
    count: u64,
    words: Vec<u64>,
    summary: Vec<u64>,
}

impl DirtyBitmap {
    /// The empty set for a block of `pages` pages.
    pub fn new(pages: u64) -> DirtyBitmap {
        let words = pages.div_ceil(BITS);
        DirtyBitmap {
            pages,
            count: 0,
            words: vec![0; words as usize],
            summary: vec![0; words.div_ceil(BITS) as usize],
        }
    }

    /// How many pages the block has.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Adds a page; whether it was not in the set before.
    pub fn set(&mut self, page: u64) -> bool {
        page < self.pages && self.or_word(page / BITS, 1 << (page % BITS)) == 1
    }

    /// Adds every page of the range that lies inside the block.
    pub fn set_range(&mut self, range: Range<u64>) {
        for (word, bits) in self.masks(range) {
            self.or_word(word, bits);
        }
    }

    /// Removes every page of the range.
    pub fn clear_range(&mut self, range: Range<u64>) {
        for (word, bits) in self.masks(range) {
            self.and_not_word(word, bits);
        }
    }

    /// Removes a page; whether it was in the set before.
    pub fn clear(&mut self, page: u64) -> bool {
        page < self.pages && self.and_not_word(page / BITS, 1 << (page % BITS)) == 1
    }

    /// Whether the page is in the set.
    pub fn get(&self, page: u64) -> bool {
        page < self.pages && self.words[(page / BITS) as usize] >> (page % BITS) & 1 == 1
    }

    /// How many pages are in the set (kept, not counted).
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Removes every page.
    pub fn clear_all(&mut self) {
        self.words.fill(0);
        self.summary.fill(0);
        self.count = 0;
    }

    /// Adds every page of `other` that lies inside this block.
    pub fn union_with(&mut self, other: &DirtyBitmap) {
        for word in other.used_words() {
            let first = word * BITS;
            if first >= self.pages {
                break;
            }
            let inside = u64::MAX >> (BITS - (self.pages - first).min(BITS));
            self.or_word(word, other.words[word as usize] & inside);
        }
    }

    /// Removes every page that is not in `other`.
    pub fn intersect_with(&mut self, other: &DirtyBitmap) {
        for at in 0..self.summary.len() {
            for bit in ones(self.summary[at]) {
                let word = at as u64 * BITS + bit;
                let kept = other.words.get(word as usize).copied().unwrap_or(0);
                self.and_not_word(word, !kept);
            }
        }
    }

    /// Removes every page of `other`.
    pub fn subtract(&mut self, other: &DirtyBitmap) {
        let words = self.words.len() as u64;
        for word in other.used_words().take_while(|&word| word < words) {
            self.and_not_word(word, other.words[word as usize]);
        }
    }

    /// The pages as maximal runs, ascending.
    pub fn ranges(&self) -> Ranges<'_> {
        Ranges {
            bitmap: self,
            word: 0,
            left: self.words.first().copied().unwrap_or(0),
        }
    }

    /// The numbers of the words that are not empty, ascending.
    fn used_words(&self) -> impl Iterator<Item = u64> + '_ {
        self.summary.iter().enumerate().flat_map(|(at, &bits)| {
            let base = at as u64 * BITS;
            ones(bits).map(move |bit| base + bit)
        })
    }

    /// The first word that is not empty, at or after `from`.
    fn next_used_word(&self, from: usize) -> Option<usize> {
        let bits = BITS as usize;
        let mut at = from / bits;
        let mut left = self.summary.get(at)? & (u64::MAX << (from % bits));
        while left == 0 {
            at += 1;
            left = *self.summary.get(at)?;
        }
        Some(at * bits + left.trailing_zeros() as usize)
    }

    /// The words in which a range has pages of the block, and which.
    fn masks(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64)> + use<> {
        let end = range.end.min(self.pages);
        let mut page = range.start;
        std::iter::from_fn(move || {
            let first = page % BITS;
            let taken = (BITS - first).min(end.checked_sub(page)?);
            let word = page / BITS;
            page += taken;
            (taken > 0).then(|| (word, (u64::MAX >> (BITS - taken)) << first))
        })
    }

    /// Sets bits of one word; how many are new.
    fn or_word(&mut self, word: u64, bits: u64) -> u64 {
        let slot = &mut self.words[word as usize];
        let new = u64::from((bits & !*slot).count_ones());
        *slot |= bits;
        if bits != 0 {
            self.summary[(word / BITS) as usize] |= 1 << (word % BITS);
        }
        self.count += new;
        new
    }

    /// Clears bits of one word; how many were set.
    fn and_not_word(&mut self, word: u64, bits: u64) -> u64 {
        let slot = &mut self.words[word as usize];
        let gone = u64::from((bits & *slot).count_ones());
        *slot &= !bits;
        if *slot == 0 {
            self.summary[(word / BITS) as usize] &= !(1 << (word % BITS));
        }
        self.count -= gone;
        gone
    }
}

/// Maximal runs of pages; see [`DirtyBitmap::ranges`].
#[derive(Debug)]
pub struct Ranges<'a> {
    bitmap: &'a DirtyBitmap,
    word: usize,
    /// The bits of `word` that have not been handed out.
    left: u64,
}

impl Iterator for Ranges<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        if self.left == 0 {
            self.word = self.bitmap.next_used_word(self.word + 1)?;
            self.left = self.bitmap.words[self.word];
        }
        let first = self.left.trailing_zeros();
        let start = self.word as u64 * BITS + u64::from(first);
        let mut length = u64::from((self.left >> first).trailing_ones());
        let mut end_bit = u64::from(first) + length;
        // A run that fills its word to the end continues in the next one.
        while end_bit == BITS {
            self.word += 1;
            let next = self.bitmap.words.get(self.word).copied().unwrap_or(0);
            self.left = next;
            end_bit = u64::from(next.trailing_ones());
            length += end_bit;
        }
        self.left &= u64::MAX << end_bit;
        Some(start..start + length)
    }
}

/// The positions of the set bits, ascending.
fn ones(mut bits: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let bit = (bits != 0).then(|| u64::from(bits.trailing_zeros()))?;
        bits &= bits - 1;
        Some(bit)
    })
}

impl std::fmt::Debug for DirtyBitmap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DirtyBitmap({} of {} pages)", self.count, self.pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// The slow reference model: an ordered set, with the same rule for pages outside the block.
    struct Model {
        pages: u64,
        set: BTreeSet<u64>,
    }

    impl Model {
        fn ranges(&self) -> Vec<Range<u64>> {
            let mut runs: Vec<Range<u64>> = Vec::new();
            for &page in &self.set {
                match runs.last_mut() {
                    Some(run) if run.end == page => run.end += 1,
                    _ => runs.push(page..page + 1),
                }
            }
            runs
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Set(u64),
        Clear(u64),
        SetRange(u64, u64),
        ClearRange(u64, u64),
        Union(Vec<u64>),
        Subtract(Vec<u64>),
        Intersect(Vec<u64>),
        ClearAll,
    }

    fn steps(pages: u64) -> impl Strategy<Value = Vec<Step>> {
        let page = 0..pages + 70;
        let some = prop::collection::vec(page.clone(), 0..40);
        let step = prop_oneof![
            6 => page.clone().prop_map(Step::Set),
            4 => page.clone().prop_map(Step::Clear),
            4 => (page.clone(), 0..200_u64).prop_map(|(from, len)| Step::SetRange(from, from + len)),
            2 => (page, 0..200_u64).prop_map(|(from, len)| Step::ClearRange(from, from + len)),
            2 => some.clone().prop_map(Step::Union),
            2 => some.prop_map(Step::Subtract),
            2 => prop::collection::vec(0..pages + 70, 0..400).prop_map(Step::Intersect),
            1 => Just(Step::ClearAll),
        ];
        prop::collection::vec(step, 0..60)
    }

    fn other(pages: u64, members: &[u64]) -> DirtyBitmap {
        // A block of another size on purpose.
        let mut map = DirtyBitmap::new(pages + 100);
        for &page in members {
            map.set(page);
        }
        map
    }

    proptest! {
        #[test]
        fn behaves_like_an_ordered_set((pages, steps) in (0..9000_u64).prop_flat_map(|n| (Just(n), steps(n)))) {
            let mut map = DirtyBitmap::new(pages);
            let mut model = Model { pages, set: BTreeSet::new() };
            for step in steps {
                match step {
                    Step::Set(p) => prop_assert_eq!(map.set(p), p < model.pages && model.set.insert(p)),
                    Step::Clear(p) => prop_assert_eq!(map.clear(p), model.set.remove(&p)),
                    Step::SetRange(from, to) => {
                        map.set_range(from..to);
                        model.set.extend(from..to.min(pages));
                    }
                    Step::ClearRange(from, to) => {
                        map.clear_range(from..to);
                        model.set.retain(|p| !(from..to).contains(p));
                    }
                    Step::Union(members) => {
                        map.union_with(&other(pages, &members));
                        model.set.extend(members.into_iter().filter(|&p| p < pages));
                    }
                    Step::Subtract(members) => {
                        map.subtract(&other(pages, &members));
                        model.set.retain(|p| !members.contains(p));
                    }
                    Step::Intersect(members) => {
                        map.intersect_with(&other(pages, &members));
                        model.set.retain(|p| members.contains(p));
                    }
                    Step::ClearAll => {
                        map.clear_all();
                        model.set.clear();
                    }
                }
                prop_assert_eq!(map.count(), model.set.len() as u64);
                prop_assert_eq!(map.is_empty(), model.set.is_empty());
                prop_assert_eq!(map.ranges().collect::<Vec<_>>(), model.ranges());
                for p in model.set.iter().copied().chain([0, pages, pages + 1, u64::MAX]) {
                    prop_assert_eq!(map.get(p), model.set.contains(&p));
                }
            }
        }
    }

    #[test]
    fn a_full_block_is_one_range() {
        for pages in [1, 63, 64, 65, 4096, 4097] {
            let mut map = DirtyBitmap::new(pages);
            map.set_range(0..u64::MAX);
            assert_eq!(map.ranges().collect::<Vec<_>>(), vec![0..pages]);
            assert_eq!(map.count(), pages);
        }
    }

    #[test]
    fn a_reversed_range_adds_nothing() {
        let mut map = DirtyBitmap::new(100);
        #[expect(clippy::reversed_empty_ranges, reason = "the point of the test")]
        map.set_range(50..10);
        assert!(map.is_empty());
    }
}
