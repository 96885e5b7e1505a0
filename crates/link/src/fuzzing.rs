//! The part of the link that the fuzz targets reach.

use crate::preface::{self, Answer};

/// Reads the beginning of these bytes as a preface and as an answer to one.
pub fn preface(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk() else {
        return;
    };
    if let Some(versions) = preface::read_hello(bytes) {
        assert_eq!(preface::hello(&versions), *bytes);
    }
    if let Some(answer) = Answer::read(bytes) {
        assert_eq!(Answer::read(&answer.write()), Some(answer));
    }
}
