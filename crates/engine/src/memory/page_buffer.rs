//! Memory for copies of guest pages.

use std::ops::{Deref, DerefMut};

use stillframe_page::PAGE;

/// Bytes of whole pages, the first of which begins where a page of the processor does.
///
/// The allocator puts large memory 16 bytes behind the beginning of a page. The kernel copies with `rep movsb`, which on some
/// processors (AMD's Zen 3 and 4) is four times as slow into such memory from the beginning of a page: glibc's bug 30994.
#[derive(Debug, Default)]
pub struct PageBuffer {
    /// A page longer than needed.
    bytes: Vec<u8>,
    start: usize,
}

impl PageBuffer {
    /// Of this many pages of zeros. The kernel gives memory when it is written.
    pub fn new(pages: usize) -> PageBuffer {
        PageBuffer::of(pages, 0)
    }

    /// Of this many pages, all of which were written once: a first write takes several times as long as a copy.
    pub fn touched(pages: usize) -> PageBuffer {
        // Zeros would come untouched from the allocator.
        PageBuffer::of(pages, 1)
    }

    fn of(pages: usize, byte: u8) -> PageBuffer {
        let bytes = vec![byte; (pages + 1) * PAGE];
        // An address that cannot be computed would only be slow.
        let start = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        PageBuffer { bytes, start }
    }

    /// Has at least this many pages; their content is lost if it had fewer.
    pub fn expect(&mut self, pages: usize) {
        if self.len() < pages * PAGE {
            *self = PageBuffer::new(pages);
        }
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let end = self.bytes.len().saturating_sub(PAGE) + self.start;
        &self.bytes[self.start..end]
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let end = self.bytes.len().saturating_sub(PAGE) + self.start;
        &mut self.bytes[self.start..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_begin_at_a_page() {
        for pages in [0, 1, 3, 256] {
            for (buffer, byte) in [(PageBuffer::new(pages), 0), (PageBuffer::touched(pages), 1)] {
                assert_eq!(*buffer, *vec![byte; pages * PAGE]);
                assert_eq!(buffer.as_ptr().addr() % PAGE, 0);
            }
        }
    }

    #[test]
    fn it_grows_and_does_not_shrink() {
        let mut buffer = PageBuffer::default();
        assert!(buffer.is_empty());
        buffer.expect(2);
        buffer[PAGE] = 7;
        buffer.expect(1);
        assert_eq!((buffer.len(), buffer[PAGE]), (2 * PAGE, 7));
        buffer.expect(3);
        assert_eq!(buffer.len(), 3 * PAGE);
        assert_eq!(buffer.as_ptr().addr() % PAGE, 0);
    }
}
