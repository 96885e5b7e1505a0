//! A chunked vector: a list that only grows, and never moves its elements.
//!
//! A vector that grows copies itself into one of twice the size: for a moment three times what is
//! needed. This one adds a chunk at a time, so the memory of an index rises as slowly as the index.

use std::ops::Range;

/// Elements in a chunk: few, so that a small repository costs little.
const PIECE_ROWS: usize = 1024;

/// A chunked vector.
#[derive(Debug)]
pub(crate) struct Rows<T> {
    /// All full but the last.
    pieces: Vec<Vec<T>>,
}

impl<T> Default for Rows<T> {
    fn default() -> Rows<T> {
        Rows { pieces: Vec::new() }
    }
}

impl<T: Copy> Rows<T> {
    pub(crate) fn len(&self) -> usize {
        match self.pieces.split_last() {
            Some((last, full)) => full.len() * PIECE_ROWS + last.len(),
            None => 0,
        }
    }

    pub(crate) fn push(&mut self, row: T) {
        match self.pieces.last_mut() {
            Some(last) if last.len() < PIECE_ROWS => last.push(row),
            _ => {
                let mut piece = Vec::with_capacity(PIECE_ROWS);
                piece.push(row);
                self.pieces.push(piece);
            }
        }
    }

    pub(crate) fn get(&self, number: usize) -> Option<T> {
        let piece = self.pieces.get(number / PIECE_ROWS)?;
        piece.get(number % PIECE_ROWS).copied()
    }

    /// An element that is known to be there.
    pub(crate) fn at(&self, number: usize) -> T {
        self.pieces[number / PIECE_ROWS][number % PIECE_ROWS]
    }

    /// The first element in `range` for which `before` is false. It must be true for all elements before
    /// that one and false for all after it.
    pub(crate) fn partition_point(&self, range: Range<usize>, before: impl Fn(T) -> bool) -> usize {
        let Range { mut start, mut end } = range;
        while start < end {
            let middle = start.midpoint(end);
            match before(self.at(middle)) {
                true => start = middle + 1,
                false => end = middle,
            }
        }
        start
    }
}
