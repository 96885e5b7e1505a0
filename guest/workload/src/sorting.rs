//! An array that is sorted over and over again, by a quicksort of pseudo-random numbers.
//!
//! The parts of the array are sorted from left to right, so all words before the first unsorted part are in their final
//! order. Damage shows in three ways: those words do not ascend, the sum over all words differs from the sum of the
//! numbers that were filled in, or the digest differs from that of another run with the same seed. The digest follows
//! from every pivot and its place.

use crate::memory::Corruption;
use crate::random::{Random, mix};
use std::ops::Range;

/// The longest part that is sorted by insertion.
const INSERTION_WORDS_MAX: usize = 16;

/// The array and the state of its sort.
pub struct Sorting {
    random: Random,
    words: Vec<u64>,
    /// The unsorted parts; the last is the leftmost.
    parts: Vec<Range<usize>>,
    sum: u64,
    digest: u64,
}

impl Sorting {
    /// An array of this many words, filled and not sorted yet.
    pub fn new(words: usize, seed: u64) -> Self {
        let mut sorting = Self {
            random: Random::new(seed),
            words: vec![0; words],
            parts: Vec::new(),
            sum: 0,
            digest: 0,
        };
        sorting.fill();
        sorting
    }

    /// Follows from all pivots so far.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Sorts parts until `words` words have been visited. A sorted array is checked and filled with new numbers.
    pub fn advance(&mut self, words: usize) -> Result<(), Corruption> {
        let mut left = words;
        while left > 0 {
            let visited = match self.parts.pop() {
                Some(part) => {
                    let length = part.len();
                    self.sort(part);
                    length
                }
                None => {
                    self.check_all()?;
                    self.fill();
                    self.words.len()
                }
            };
            left = left.saturating_sub(visited.max(1));
        }
        Ok(())
    }

    /// Checks the order of one of `share` equal parts of the array, as far as it is sorted.
    pub fn check(&self, turn: usize, share: usize) -> Result<(), Corruption> {
        let length = self.words.len().div_ceil(share);
        // The word before, so that the borders of parts are checked, too.
        let start = (turn * length).saturating_sub(1);
        self.check_order(start..(turn + 1) * length)
    }

    /// Checks the order of all sorted words, and the sum of all words.
    pub fn check_all(&self) -> Result<(), Corruption> {
        self.check_order(0..self.words.len())?;
        let found = self
            .words
            .iter()
            .fold(0, |sum: u64, &word| sum.wrapping_add(word));
        if found == self.sum {
            return Ok(());
        }
        Err(Corruption::Sum {
            expected: self.sum,
            found,
        })
    }

    fn check_order(&self, range: Range<usize>) -> Result<(), Corruption> {
        let sorted = self
            .parts
            .last()
            .map_or(self.words.len(), |part| part.start);
        let end = range.end.min(sorted);
        let start = range.start.min(end);
        let words = &self.words[start..end];
        match words.windows(2).position(|pair| pair[0] > pair[1]) {
            None => Ok(()),
            Some(at) => Err(Corruption::Order {
                word: start + at + 1,
                before: words[at],
                found: words[at + 1],
            }),
        }
    }

    fn fill(&mut self) {
        self.sum = 0;
        for word in &mut self.words {
            *word = self.random.next();
            self.sum = self.sum.wrapping_add(*word);
        }
        self.parts.push(0..self.words.len());
    }

    /// Sorts a short part; divides a long one into two parts that are still unsorted.
    fn sort(&mut self, part: Range<usize>) {
        let words = &mut self.words[part.clone()];
        if words.len() <= INSERTION_WORDS_MAX {
            insert_all(words);
            return;
        }
        let (pivot, length) = divide(words);
        let middle = part.start + length;
        self.digest = mix(self.digest ^ pivot ^ middle as u64);
        self.parts.push(middle..part.end);
        self.parts.push(part.start..middle);
    }

    /// Damages a word, as a lost write would.
    #[cfg(test)]
    fn spoil(&mut self, word: usize) {
        self.words[word] = !self.words[word];
    }
}

fn insert_all(words: &mut [u64]) {
    for end in 1..words.len() {
        let mut at = end;
        while at > 0 && words[at - 1] > words[at] {
            words.swap(at - 1, at);
            at -= 1;
        }
    }
}

/// Hoare's partition. Gives the pivot, and the length of the first part: none of its words is greater than the pivot,
/// none of the others is less. As the pivot is the median of three words, neither part is empty.
fn divide(words: &mut [u64]) -> (u64, usize) {
    let mut samples = [words[0], words[words.len() / 2], words[words.len() - 1]];
    insert_all(&mut samples);
    let [_, pivot, _] = samples;
    let (mut low, mut high) = (0, words.len() - 1);
    loop {
        while words[low] < pivot {
            low += 1;
        }
        while words[high] > pivot {
            high -= 1;
        }
        if low >= high {
            return (pivot, low);
        }
        words.swap(low, high);
        low += 1;
        high -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: usize = 5000;

    #[test]
    fn the_array_gets_sorted_and_filled_anew() {
        let mut sorting = Sorting::new(WORDS, 7);
        let mut expected = sorting.words.clone();
        expected.sort_unstable();
        while !sorting.parts.is_empty() {
            sorting.advance(1).unwrap();
            assert_eq!(sorting.check_all(), Ok(()));
        }
        assert_eq!(sorting.words, expected);
        sorting.advance(1).unwrap();
        assert_ne!(sorting.words, expected);
    }

    #[test]
    fn equal_words_are_divided_into_parts_that_are_not_empty() {
        for words in [[4; 20], std::array::from_fn(|at| (at % 2) as u64)] {
            let mut divided = words;
            let (pivot, length) = divide(&mut divided);
            assert!(length > 0 && length < words.len());
            assert!(divided[..length].iter().all(|&word| word <= pivot));
            assert!(divided[length..].iter().all(|&word| word >= pivot));
        }
    }

    #[test]
    fn equal_seeds_give_equal_digests() {
        let digest = |seed| {
            let mut sorting = Sorting::new(WORDS, seed);
            sorting.advance(30 * WORDS).unwrap();
            sorting.digest()
        };
        assert_eq!(digest(1), digest(1));
        assert_ne!(digest(1), digest(2));
    }

    #[test]
    fn a_spoiled_word_is_found_wherever_it_is() {
        for word in 0..WORDS {
            let mut sorting = Sorting::new(WORDS, 7);
            sorting.advance(8 * WORDS).unwrap();
            sorting.spoil(word);
            assert!(sorting.check_all().is_err(), "word {word}");
        }
    }

    #[test]
    fn each_share_checks_its_words_and_the_border_before() {
        let mut sorting = Sorting::new(WORDS, 7);
        while !sorting.parts.is_empty() {
            sorting.advance(1).unwrap();
        }
        for word in 1..WORDS {
            sorting.words.swap(word - 1, word);
            let found = (0..3).any(|turn| sorting.check(turn, 3).is_err());
            assert!(found, "word {word}");
            sorting.words.swap(word - 1, word);
        }
    }
}
