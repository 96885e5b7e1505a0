//! Lines of the host, out of the bytes that arrive.

/// Longest line, in bytes. The longest command has two hundred.
const LINE_BYTES_MAX: usize = 4 << 10;
/// A byte that is in no text: it ends what was half sent (`guest-sync-delimited`).
pub const SENTINEL: u8 = 0xff;

/// Bytes that arrived, and are no whole line yet.
#[derive(Debug, Default)]
pub struct Lines {
    line: Vec<u8>,
    /// The line is longer than any command.
    too_long: bool,
}

impl Lines {
    /// Takes a byte. Returns the line that it ends, unless that was empty, or too long.
    pub fn push(&mut self, byte: u8) -> Option<Vec<u8>> {
        match byte {
            SENTINEL => self.clear(),
            b'\n' if self.too_long => self.clear(),
            b'\n' => return Some(std::mem::take(&mut self.line)).filter(|line| !line.is_empty()),
            _ if self.line.len() < LINE_BYTES_MAX => self.line.push(byte),
            _ => self.too_long = true,
        }
        None
    }

    /// The other end is gone, and with it the rest of its line.
    pub fn clear(&mut self) {
        *self = Lines::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Lines::default();
        bytes.iter().filter_map(|&byte| lines.push(byte)).collect()
    }

    #[test]
    fn a_sentinel_ends_what_was_half_sent() {
        assert_eq!(lines(b"a\n\nbc\xffd\n"), [b"a", b"d"]);
        assert_eq!(lines(b"\xff\xffa\n\xff"), [b"a"]);
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped() {
        let long = vec![b'x'; LINE_BYTES_MAX];
        let whole = [&long[..], b"\nb\n"].concat();
        assert_eq!(lines(&whole), [&long[..], b"b"]);
        let longer = [&long[..], b"yz\nb\n"].concat();
        assert_eq!(lines(&longer), [b"b"]);
    }
}
