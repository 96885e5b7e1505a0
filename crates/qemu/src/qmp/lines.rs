//! Cutting a byte stream into lines of bounded length.

use std::ops::Range;

/// Longest line accepted, in bytes. QEMU's longest replies (`query-qmp-schema`, block statistics
/// of many disks) are well under one MiB.
pub(crate) const LINE_BYTES_MAX: usize = 16 << 20;

/// A line longer than the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LineTooLong;

/// Bytes received and not yet handed out as lines.
#[derive(Debug)]
pub(crate) struct Lines {
    bytes: Vec<u8>,
    /// Start of the first line not yet handed out.
    start: usize,
    /// Everything before this was searched for a line end.
    searched: usize,
    /// Longest line handed out, in bytes.
    limit: usize,
    /// The next bytes belong to a line that is not wanted.
    skips: bool,
}

impl Lines {
    /// Lines of at most `limit` bytes each.
    pub(crate) fn new(limit: usize) -> Lines {
        Lines {
            bytes: Vec::new(),
            start: 0,
            searched: 0,
            limit,
            skips: false,
        }
    }

    /// Appends received bytes.
    pub(crate) fn push(&mut self, received: &[u8]) {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.searched -= self.start;
            self.start = 0;
        }
        self.bytes.extend_from_slice(received);
    }

    /// Where the next whole line lies, without its line end; `None` when more bytes are needed.
    pub(crate) fn next_line(&mut self) -> Result<Option<Range<usize>>, LineTooLong> {
        loop {
            let found = self.bytes[self.searched..]
                .iter()
                .position(|byte| *byte == b'\n');
            let Some(offset) = found else {
                self.searched = self.bytes.len();
                if self.skips {
                    self.start = self.searched;
                }
                return match self.bytes.len() - self.start > self.limit {
                    true => Err(LineTooLong),
                    false => Ok(None),
                };
            };
            let line = self.start..self.searched + offset;
            self.start = line.end + 1;
            self.searched = self.start;
            if std::mem::take(&mut self.skips) {
                continue;
            }
            return match line.len() > self.limit {
                true => Err(LineTooLong),
                false => Ok(Some(line)),
            };
        }
    }

    /// A line that [`Lines::next_line`] gave, until more bytes are pushed.
    pub(crate) fn at(&self, line: &Range<usize>) -> &[u8] {
        &self.bytes[line.clone()]
    }

    /// Continues behind a line that was too long, wherever it ends.
    pub(crate) fn skip_long(&mut self) {
        // A long line that came whole was taken off already.
        if self.bytes.len() - self.start > self.limit && self.searched == self.bytes.len() {
            self.skips = true;
            self.start = self.searched;
        }
    }

    /// Bytes that are kept for the next lines.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn kept_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Whether some bytes of an unfinished line lie here.
    pub(crate) fn has_partial_line(&self) -> bool {
        self.bytes.len() > self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However the bytes are cut into pieces, the lines are those of the whole.
        #[test]
        fn pieces_make_no_difference(
            text in proptest::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 0..300),
            piece_bytes in 1usize..40,
        ) {
            let mut lines = Lines::new(LINE_BYTES_MAX);
            let mut found = Vec::new();
            for piece in text.chunks(piece_bytes) {
                lines.push(piece);
                while let Some(line) = lines.next_line().expect("short lines") {
                    found.push(lines.at(&line).to_vec());
                }
            }
            let mut expected: Vec<Vec<u8>> = text.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
            let rest = expected.pop().expect("split yields at least one piece");
            prop_assert_eq!(found, expected);
            prop_assert_eq!(lines.has_partial_line(), !rest.is_empty());
        }
    }

    proptest! {
        /// Lines that are too long are passed over, wherever they are cut; the others all come, and little is
        /// kept meanwhile.
        #[test]
        fn long_lines_are_skipped(
            text in proptest::collection::vec(prop_oneof![2 => Just(b'x'), 1 => Just(b'\n')], 0..300),
            piece_bytes in 1usize..40,
        ) {
            const LIMIT: usize = 3;
            let mut lines = Lines::new(LIMIT);
            let mut found = Vec::new();
            for piece in text.chunks(piece_bytes) {
                lines.push(piece);
                prop_assert!(lines.bytes.len() <= LIMIT + piece_bytes);
                loop {
                    match lines.next_line() {
                        Ok(Some(line)) => found.push(lines.at(&line).to_vec()),
                        Ok(None) => break,
                        Err(LineTooLong) => lines.skip_long(),
                    }
                }
            }
            let mut expected: Vec<Vec<u8>> = text.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
            expected.pop();
            expected.retain(|line| line.len() <= LIMIT);
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut lines = Lines::new(LINE_BYTES_MAX);
        lines.push(&vec![b'x'; LINE_BYTES_MAX]);
        assert_eq!(lines.next_line(), Ok(None));
        lines.push(b"x");
        assert_eq!(lines.next_line(), Err(LineTooLong));
        lines.push(b"\n");
        assert_eq!(lines.next_line(), Err(LineTooLong));
    }
}
