//! A chunked vector: a list that only grows, and never moves its elements.
//!
//! A growing vector is copied into one of twice the size, and takes three times the memory meanwhile. This one
//! adds a chunk at a time, so its memory grows in step with the index.

use std::ops::Range;

/// Elements in a chunk: few, so that a small repository takes little memory.
const CHUNK_ELEMENTS: usize = 1024;

/// A chunked vector.
#[derive(Debug)]
pub(crate) struct ChunkedVec<T> {
    /// All full but the last.
    chunks: Vec<Vec<T>>,
}

impl<T> Default for ChunkedVec<T> {
    fn default() -> ChunkedVec<T> {
        ChunkedVec { chunks: Vec::new() }
    }
}

impl<T: Copy> ChunkedVec<T> {
    pub(crate) fn len(&self) -> usize {
        match self.chunks.split_last() {
            Some((last, full)) => full.len() * CHUNK_ELEMENTS + last.len(),
            None => 0,
        }
    }

    pub(crate) fn push(&mut self, element: T) {
        match self.chunks.last_mut() {
            Some(last) if last.len() < CHUNK_ELEMENTS => last.push(element),
            _ => {
                let mut chunk = Vec::with_capacity(CHUNK_ELEMENTS);
                chunk.push(element);
                self.chunks.push(chunk);
            }
        }
    }

    pub(crate) fn get(&self, number: usize) -> Option<T> {
        let chunk = self.chunks.get(number / CHUNK_ELEMENTS)?;
        chunk.get(number % CHUNK_ELEMENTS).copied()
    }

    /// An element that exists.
    pub(crate) fn at(&self, number: usize) -> T {
        self.chunks[number / CHUNK_ELEMENTS][number % CHUNK_ELEMENTS]
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
