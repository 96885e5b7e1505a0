//! Cutting a byte stream into lines of bounded length.

/// Longest line accepted, in bytes. QEMU's longest replies (`query-qmp-schema`, block statistics
/// of many disks) are well under one MiB.
pub(super) const LINE_BYTES_MAX: usize = 16 << 20;

/// A line longer than [`LINE_BYTES_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineTooLong;

/// Bytes received and not yet handed out as lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    bytes: Vec<u8>,
    /// Start of the first line not yet handed out.
    start: usize,
    /// Everything before this was searched for a line end.
    searched: usize,
}

impl Lines {
    /// Appends what was received.
    pub(super) fn push(&mut self, received: &[u8]) {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.searched -= self.start;
            self.start = 0;
        }
        self.bytes.extend_from_slice(received);
    }

    /// The next whole line without its line end; `None` when more bytes are needed.
    pub(super) fn next_line(&mut self) -> Result<Option<&[u8]>, LineTooLong> {
        let found = self.bytes[self.searched..]
            .iter()
            .position(|byte| *byte == b'\n');
        let Some(offset) = found else {
            self.searched = self.bytes.len();
            let unfinished = self.bytes.len() - self.start;
            return if unfinished > LINE_BYTES_MAX {
                Err(LineTooLong)
            } else {
                Ok(None)
            };
        };
        let line = self.start..self.searched + offset;
        self.start = line.end + 1;
        self.searched = self.start;
        if line.len() > LINE_BYTES_MAX {
            return Err(LineTooLong);
        }
        Ok(Some(&self.bytes[line]))
    }

    /// Whether some bytes of an unfinished line lie here.
    pub(super) fn has_partial_line(&self) -> bool {
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
            let mut lines = Lines::default();
            let mut found = Vec::new();
            for piece in text.chunks(piece_bytes) {
                lines.push(piece);
                while let Some(line) = lines.next_line().expect("short lines") {
                    found.push(line.to_vec());
                }
            }
            let mut expected: Vec<Vec<u8>> = text.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
            let rest = expected.pop().expect("split yields at least one piece");
            prop_assert_eq!(found, expected);
            prop_assert_eq!(lines.has_partial_line(), !rest.is_empty());
        }
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut lines = Lines::default();
        lines.push(&vec![b'x'; LINE_BYTES_MAX]);
        assert_eq!(lines.next_line(), Ok(None));
        lines.push(b"x");
        assert_eq!(lines.next_line(), Err(LineTooLong));
        lines.push(b"\n");
        assert_eq!(lines.next_line(), Err(LineTooLong));
    }
}
