//! The guest memory that is watched: every page's content follows from a small table entry.
//!
//! The words of a page are a function of the seed, the page's *stamp* and the word's place. A page that went back
//! to an older content, or holds another page's content, therefore does not match its table entry. A page may be
//! half way between two stamps: single-word writes bring in the words of the next stamp one by one in a fixed
//! order. Beside the table runs a sum over all words, updated on each write and recomputed from memory by
//! [`Memory::check_all`]. Table, sum and counters are guest memory themselves: if they go stale, the pages no
//! longer match.
//!
//! Every write first checks the content that it replaces, so that no damage is covered up.

use crate::random::{GOLDEN, mix};
use std::fmt;
use std::hint::black_box;
use std::ops::Range;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// 64-bit words of a page.
pub const PAGE_WORDS: usize = PAGE_BYTES / 8;
/// One page in this many is left as the kernel gave it, never touched, at the start.
const UNTOUCHED_SHARE: usize = 16;
/// Single-word writes walk a page in steps of this many words; odd, so that each is met once.
const STRIDE: usize = 181;
/// The inverse of [`STRIDE`] modulo [`PAGE_WORDS`].
const STRIDE_INVERSE: usize = 413;
const _: () = assert!(STRIDE * STRIDE_INVERSE % PAGE_WORDS == 1);

/// The content that one page must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Zero,
    /// The first `advanced` words in stride order hold the words of `next`, the others those of
    /// `stamp`.
    Filled {
        stamp: u64,
        next: u64,
        advanced: usize,
    },
}

/// A difference between memory and its required content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Corruption {
    /// One word of a page.
    Word {
        page: usize,
        word: usize,
        expected: u64,
        found: u64,
    },
    /// The sum over all words, although each page matches its entry.
    Sum { expected: u64, found: u64 },
    /// A word of a sorted array that is less than the one before it.
    Order {
        word: usize,
        before: u64,
        found: u64,
    },
    /// One row of the text screen.
    Screen {
        row: usize,
        expected: String,
        found: String,
    },
}

impl fmt::Display for Corruption {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word {
                page,
                word,
                expected,
                found,
            } => write!(
                out,
                "page {page} word {word} expected {expected:016x} found {found:016x}"
            ),
            Self::Sum { expected, found } => {
                write!(out, "sum expected {expected:016x} found {found:016x}")
            }
            Self::Order {
                word,
                before,
                found,
            } => write!(out, "word {word} found {found:016x} after {before:016x}"),
            Self::Screen {
                row,
                expected,
                found,
            } => write!(
                out,
                "screen row {row} expected {expected:?} found {found:?}"
            ),
        }
    }
}

/// The watched pages and what each must hold.
pub struct Memory {
    seed: u64,
    /// One page longer than the pages, so that they can begin where a page of the machine does.
    words: Vec<u64>,
    /// Index in `words` of the first page's first word.
    start: usize,
    table: Vec<Content>,
    stamps_given: u64,
    sum: u64,
}

impl Memory {
    /// Takes `pages` pages and fills all but every sixteenth, which stays untouched.
    pub fn new(pages: usize, seed: u64) -> Self {
        // Zeroed by the kernel, not by us: what stays untouched has no page behind it yet.
        let words = vec![0u64; (pages + 1) * PAGE_WORDS];
        let into_page = words.as_ptr().addr() % PAGE_BYTES;
        let mut memory = Self {
            seed,
            words,
            start: (PAGE_BYTES - into_page) / 8,
            table: vec![Content::Zero; pages],
            stamps_given: 0,
            sum: 0,
        };
        for page in (0..pages).filter(|page| page % UNTOUCHED_SHARE != UNTOUCHED_SHARE - 1) {
            let stamp = memory.take_stamp();
            memory.store_page(page, Content::filled(stamp));
        }
        memory
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.table.len()
    }

    /// Sum over all words, as kept up by the writes.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Whether the page must be all zero now.
    pub fn is_zero(&self, page: usize) -> bool {
        self.table[page] == Content::Zero
    }

    /// Writes one word of the page: the next in stride order gets its word of the next stamp.
    pub fn advance(&mut self, page: usize) -> Result<(), Corruption> {
        let (stamp, next, advanced) = match self.table[page] {
            Content::Zero => return self.fill(page),
            Content::Filled {
                stamp, advanced: 0, ..
            } => (stamp, self.take_stamp(), 0),
            Content::Filled {
                stamp,
                next,
                advanced,
            } => (stamp, next, advanced),
        };
        let word = advanced * STRIDE % PAGE_WORDS;
        let expected = word_of(self.key(stamp), word);
        let new = word_of(self.key(next), word);
        let at = self.place(page).start + word;
        let cell = &mut self.words[at];
        let found = std::mem::replace(cell, new);
        if found != expected {
            *cell = found;
            return Err(Corruption::Word {
                page,
                word,
                expected,
                found,
            });
        }
        self.sum = self.sum.wrapping_sub(expected).wrapping_add(new);
        self.table[page] = if advanced + 1 == PAGE_WORDS {
            Content::filled(next)
        } else {
            Content::Filled {
                stamp,
                next,
                advanced: advanced + 1,
            }
        };
        Ok(())
    }

    /// Gives the whole page new words.
    pub fn fill(&mut self, page: usize) -> Result<(), Corruption> {
        let stamp = self.take_stamp();
        self.replace(page, Content::filled(stamp))
    }

    /// Makes the whole page zero.
    pub fn zero(&mut self, page: usize) -> Result<(), Corruption> {
        self.replace(page, Content::Zero)
    }

    /// Stores the words that the page holds already: written, but not changed.
    pub fn rewrite(&mut self, page: usize) -> Result<(), Corruption> {
        self.replace(page, self.table[page])
    }

    /// Copies a page's words over another page's.
    pub fn copy(&mut self, from: usize, to: usize) -> Result<(), Corruption> {
        let added = self.check_page(from)?;
        let removed = self.check_page(to)?;
        let (source, target) = (self.place(from), self.place(to));
        self.words.copy_within(source, target.start);
        self.table[to] = self.table[from];
        self.sum = self.sum.wrapping_sub(removed).wrapping_add(added);
        Ok(())
    }

    /// Compares the pages of a range with their table entries.
    pub fn check(&self, pages: Range<usize>) -> Result<(), Corruption> {
        for page in pages {
            self.check_page(page)?;
        }
        Ok(())
    }

    /// Compares all pages with their table entries, and the sum of their words with the sum
    /// that the writes kept up.
    pub fn check_all(&self) -> Result<(), Corruption> {
        let mut found = 0u64;
        for page in 0..self.pages() {
            found = found.wrapping_add(self.check_page(page)?);
        }
        if found == self.sum {
            Ok(())
        } else {
            Err(Corruption::Sum {
                expected: self.sum,
                found,
            })
        }
    }

    /// Compares one page with its table entry; gives the sum of its words.
    fn check_page(&self, page: usize) -> Result<u64, Corruption> {
        let rule = Rule::of(self.table[page], self.seed);
        let words = &self.words[self.place(page)];
        let mut sum = 0u64;
        for (word, found) in words.iter().copied().enumerate() {
            let expected = rule.word(word);
            if found != expected {
                return Err(Corruption::Word {
                    page,
                    word,
                    expected,
                    found,
                });
            }
            sum = sum.wrapping_add(found);
        }
        Ok(sum)
    }

    fn replace(&mut self, page: usize, content: Content) -> Result<(), Corruption> {
        let removed = self.check_page(page)?;
        self.sum = self.sum.wrapping_sub(removed);
        self.store_page(page, content);
        Ok(())
    }

    /// Stores every word of `content` and adds it to the sum.
    fn store_page(&mut self, page: usize, content: Content) {
        let rule = Rule::of(content, self.seed);
        for (word, at) in self.place(page).enumerate() {
            // The compiler may not find out that a silent store changes nothing and drop it.
            let new = black_box(rule.word(word));
            self.words[at] = new;
            self.sum = self.sum.wrapping_add(new);
        }
        self.table[page] = content;
    }

    /// Where the page's words are.
    fn place(&self, page: usize) -> Range<usize> {
        let start = self.start + page * PAGE_WORDS;
        start..start + PAGE_WORDS
    }

    fn take_stamp(&mut self) -> u64 {
        self.stamps_given += 1;
        self.stamps_given
    }

    fn key(&self, stamp: u64) -> u64 {
        key_of(self.seed, stamp)
    }
}

impl Content {
    const fn filled(stamp: u64) -> Self {
        Self::Filled {
            stamp,
            next: 0,
            advanced: 0,
        }
    }
}

/// A table entry made ready to give its words.
enum Rule {
    Zero,
    Whole {
        key: u64,
    },
    Between {
        key: u64,
        next: u64,
        advanced: usize,
    },
}

impl Rule {
    fn of(content: Content, seed: u64) -> Self {
        match content {
            Content::Zero => Self::Zero,
            Content::Filled {
                stamp, advanced: 0, ..
            } => Self::Whole {
                key: key_of(seed, stamp),
            },
            Content::Filled {
                stamp,
                next,
                advanced,
            } => Self::Between {
                key: key_of(seed, stamp),
                next: key_of(seed, next),
                advanced,
            },
        }
    }

    #[inline]
    fn word(&self, word: usize) -> u64 {
        match *self {
            Self::Zero => 0,
            Self::Whole { key } => word_of(key, word),
            Self::Between {
                key,
                next,
                advanced,
            } => {
                let written = word * STRIDE_INVERSE % PAGE_WORDS < advanced;
                word_of(if written { next } else { key }, word)
            }
        }
    }
}

const fn key_of(seed: u64, stamp: u64) -> u64 {
    mix(seed ^ stamp.wrapping_mul(GOLDEN))
}

#[inline]
const fn word_of(key: u64, word: usize) -> u64 {
    mix(key.wrapping_add(word as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Memory {
        /// Changes one bit behind the table's back.
        pub fn spoil(&mut self, page: usize) {
            let at = self.place(page).start;
            self.words[at] ^= 1;
        }
    }

    /// All kinds of page content: untouched, filled, half advanced, copied, zeroed, rewritten.
    fn lived_in() -> Memory {
        let mut memory = Memory::new(32, 7);
        for _ in 0..PAGE_WORDS + 3 {
            memory.advance(1).unwrap();
        }
        memory.advance(15).unwrap();
        memory.fill(2).unwrap();
        memory.zero(3).unwrap();
        memory.advance(4).unwrap();
        memory.copy(4, 5).unwrap();
        memory.advance(5).unwrap();
        memory.rewrite(1).unwrap();
        memory
    }

    #[test]
    fn pages_lie_where_pages_of_the_machine_do() {
        let memory = Memory::new(3, 1);
        let first = memory.words[memory.place(0)].as_ptr().addr();
        assert_eq!(first % PAGE_BYTES, 0);
        assert!(memory.place(2).end <= memory.words.len());
    }

    #[test]
    fn damage_free_memory_passes() {
        assert_eq!(lived_in().check_all(), Ok(()));
    }

    /// Each page in turn goes back to its content one write earlier.
    #[test]
    fn a_stale_page_is_found_wherever_it_is() {
        for page in 0..32 {
            let mut memory = lived_in();
            let stale = memory.words.clone();
            memory.advance(page).unwrap();
            let range = memory.place(page);
            memory.words[range.clone()].copy_from_slice(&stale[range]);
            let found = memory.check(page..page + 1).unwrap_err();
            assert!(matches!(found, Corruption::Word { page: p, .. } if p == page));
            assert_eq!(memory.check_all(), Err(found));
        }
    }

    #[test]
    fn a_stale_table_entry_is_found() {
        let mut memory = lived_in();
        let stale = memory.table.clone();
        memory.fill(9).unwrap();
        memory.table = stale;
        assert!(memory.check_all().is_err());
    }

    /// A page and its table entry that went back together still miss in the sum.
    #[test]
    fn a_page_gone_back_with_its_entry_is_found_by_the_sum() {
        let mut memory = lived_in();
        let (words, table) = (memory.words.clone(), memory.table.clone());
        memory.fill(9).unwrap();
        memory.words.copy_from_slice(&words);
        memory.table = table;
        assert_eq!(memory.check(0..32), Ok(()));
        assert!(matches!(memory.check_all(), Err(Corruption::Sum { .. })));
    }

    /// No write may cover damage up.
    #[test]
    fn every_write_looks_at_what_it_replaces() {
        type Write = fn(&mut Memory) -> Result<(), Corruption>;
        let writes: [Write; 5] = [
            |memory| memory.advance(6),
            |memory| memory.fill(6),
            |memory| memory.zero(6),
            |memory| memory.rewrite(6),
            |memory| memory.copy(7, 6),
        ];
        for write in writes {
            let mut memory = lived_in();
            memory.spoil(6);
            assert!(write(&mut memory).is_err());
            assert!(memory.check_all().is_err());
        }
    }

    #[test]
    fn a_silent_store_changes_nothing() {
        let mut memory = lived_in();
        let (words, sum) = (memory.words.clone(), memory.sum());
        memory.rewrite(1).unwrap();
        assert_eq!((memory.words, memory.sum), (words, sum));
    }
}
