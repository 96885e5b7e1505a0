//! How the guest writes: which pages a tick touches, and in which way.

use crate::memory::{Corruption, Memory};
use crate::random::Random;
use std::str::FromStr;

/// One way of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One new word in a random page.
    Random,
    /// New words for whole pages, one page after the other.
    Sequential,
    /// A random page written with the words that it holds already.
    Silent,
    /// A random page turned from zero to not zero or back.
    Toggle,
    /// A random page copied over another.
    Copy,
    /// No write.
    Idle,
    /// Each write one of the others.
    Mixed,
    /// No page is written; all memory is an array that is sorted, see [`crate::sorting`].
    Quicksort,
}

const NAMED: [(&str, Pattern); 8] = [
    ("random", Pattern::Random),
    ("sequential", Pattern::Sequential),
    ("silent", Pattern::Silent),
    ("toggle", Pattern::Toggle),
    ("copy", Pattern::Copy),
    ("idle", Pattern::Idle),
    ("mixed", Pattern::Mixed),
    ("quicksort", Pattern::Quicksort),
];

const MIXTURE: [Pattern; 5] = [
    Pattern::Random,
    Pattern::Sequential,
    Pattern::Silent,
    Pattern::Toggle,
    Pattern::Copy,
];

impl FromStr for Pattern {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        NAMED
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, pattern)| *pattern)
            .ok_or_else(|| {
                let known: Vec<_> = NAMED.iter().map(|(name, _)| *name).collect();
                format!("unknown pattern {name:?}; known: {}", known.join(", "))
            })
    }
}

/// Carries a pattern out, write by write. Its writes follow from the seed alone.
pub struct Writer {
    pattern: Pattern,
    random: Random,
    next_sequential: usize,
}

impl Writer {
    /// A writer at the start of its sequence.
    pub fn new(pattern: Pattern, seed: u64) -> Self {
        Self {
            pattern,
            random: Random::new(seed),
            next_sequential: 0,
        }
    }

    /// Makes `writes` writes.
    pub fn write(&mut self, memory: &mut Memory, writes: usize) -> Result<(), Corruption> {
        for _ in 0..writes {
            let pattern = match self.pattern {
                Pattern::Mixed => MIXTURE[self.random.below(MIXTURE.len())],
                single => single,
            };
            self.write_once(memory, pattern)?;
        }
        Ok(())
    }

    fn write_once(&mut self, memory: &mut Memory, pattern: Pattern) -> Result<(), Corruption> {
        let page = self.random.below(memory.pages());
        match pattern {
            Pattern::Random => memory.advance(page),
            Pattern::Sequential => {
                let page = self.next_sequential;
                self.next_sequential = (page + 1) % memory.pages();
                memory.fill(page)
            }
            Pattern::Silent => memory.rewrite(page),
            Pattern::Toggle if memory.is_zero(page) => memory.fill(page),
            Pattern::Toggle => memory.zero(page),
            Pattern::Copy => memory.copy(page, self.random.below(memory.pages())),
            Pattern::Idle | Pattern::Mixed | Pattern::Quicksort => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_leaves_memory_that_checks() {
        for (_, pattern) in NAMED {
            let mut memory = Memory::new(64, 3);
            Writer::new(pattern, 3).write(&mut memory, 2000).unwrap();
            assert_eq!(memory.check_all(), Ok(()), "{pattern:?}");
        }
    }

    #[test]
    fn writing_patterns_change_the_sum_and_the_others_do_not() {
        for (_, pattern) in NAMED {
            let mut memory = Memory::new(64, 3);
            let before = memory.sum();
            Writer::new(pattern, 3).write(&mut memory, 50).unwrap();
            let quiet = matches!(
                pattern,
                Pattern::Silent | Pattern::Idle | Pattern::Quicksort
            );
            assert_eq!(memory.sum() == before, quiet, "{pattern:?}");
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known() {
        assert!("zigzag".parse::<Pattern>().unwrap_err().contains("toggle"));
    }
}
