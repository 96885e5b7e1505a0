//! The parts of the client and of the server that the fuzz targets reach: all that they read.

use std::io::{self, Read, Write};

use crate::client::Client;
use crate::error::NbdError;
pub use crate::server::fuzzing::server;

/// A server whose bytes are given, and which takes all that is written.
struct Server<'b>(&'b [u8]);

impl Read for Server<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Server<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Negotiates with a server that sends these bytes, queries a status, reads, and writes.
pub fn client(bytes: &[u8]) {
    let Ok(mut client) = Client::over(Server(bytes), "disk", &["base:allocation"]) else {
        return;
    };
    let end = client.bytes().min(1 << 20);
    if let Ok(extents) = client.extents(0, 0..end) {
        let mut at = 0;
        for extent in extents {
            assert_eq!(extent.bytes.start, at, "extents have no gaps");
            assert!(extent.bytes.end > at, "and are not empty");
            at = extent.bytes.end;
        }
        assert_eq!(at, end, "and cover the range");
    }
    let mut at = 0;
    let read = client.read(std::iter::once(0..end), &mut |offset, bytes| {
        assert_eq!(offset, at, "bytes come in their order");
        at += bytes.len() as u64;
        Ok::<(), NbdError>(())
    });
    assert!(read.is_err() || at == end, "all bytes come");
    if let Ok(mut writer) = client.writer() {
        let first = end.min(4096);
        let wrote = writer
            .write(0, &vec![1; first as usize])
            .and_then(|()| writer.write_zeros(first..end));
        drop(wrote.and_then(|()| writer.finish()));
    }
}
