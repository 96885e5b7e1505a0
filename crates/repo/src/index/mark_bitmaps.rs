//! Marks of blobs, by their numbers in the index: one bit each.

/// What the mark phase records about a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    /// A checkpoint refers to it.
    Used,
    /// It is a root or segment whose contents have been walked. This is a separate mark, because a page may have
    /// the bytes of a segment.
    Walked,
}

/// The marks of all blobs. They take memory only while there are any: a writer of checkpoints
/// never marks.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    used: Bits,
    walked: Bits,
}

impl Marks {
    /// Sets a mark. Returns whether it is new.
    pub(crate) fn set(&mut self, blob: u32, mark: Mark) -> bool {
        match mark {
            Mark::Used => self.used.set(blob),
            Mark::Walked => self.walked.set(blob),
        }
    }

    pub(crate) fn has(&self, blob: u32, mark: Mark) -> bool {
        match mark {
            Mark::Used => self.used.has(blob),
            Mark::Walked => self.walked.has(blob),
        }
    }
}

/// A set of numbers, as a bitmap up to the largest one.
#[derive(Debug, Default)]
pub(crate) struct Bits {
    words: Vec<u64>,
}

impl Bits {
    /// Adds a number. Returns whether it is new.
    pub(crate) fn set(&mut self, number: u32) -> bool {
        let (word, bit) = (number as usize / 64, 1 << (number % 64));
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        new
    }

    pub(crate) fn has(&self, number: u32) -> bool {
        let word = self.words.get(number as usize / 64);
        word.is_some_and(|word| word & (1 << (number % 64)) != 0)
    }
}
