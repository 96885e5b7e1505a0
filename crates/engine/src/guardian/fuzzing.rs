//! The part of the guardian that the fuzz targets reach.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::wire::{Reply, Request, receive};

/// Receives messages until none comes: as the guardian, and as the engine.
pub fn messages(bytes: &[u8]) -> std::io::Result<()> {
    for as_guardian in [true, false] {
        let (mut ours, theirs) = UnixStream::pair()?;
        // More would fill the socket, which no process empties meanwhile.
        ours.write_all(&bytes[..bytes.len().min(64 << 10)])?;
        ours.shutdown(Shutdown::Write)?;
        while match as_guardian {
            true => receive::<Request>(&theirs).is_ok_and(|message| message.is_some()),
            false => receive::<Reply>(&theirs).is_ok_and(|message| message.is_some()),
        } {}
    }
    Ok(())
}
