//! How much memory a Linux guest has, and needs, as its agent reads it from `/proc/meminfo`.
//!
//! Format: Linux `Documentation/filesystems/proc.rst`, "meminfo": a name, a number and `kB` a line.

use std::time::Instant;

use serde_json::Value;

use super::channel::AgentError;
use super::files::{FileRead, left};
use super::{GuestAgent, Kind};

/// The guest's file.
const MEMINFO: &str = "/proc/meminfo";
/// Bytes of it that are read; it has one or two thousand.
const BYTES_MAX: u64 = 16 << 10;
/// The command of our own agent that reads it. The answer is that of a read file.
const OWN: &str = "stillframe-memory";

/// A guest's word on its memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestMemory {
    /// What its kernel manages: RAM without the kernel itself, and without what a balloon has.
    pub total: u64,
    /// What programs can get without swapping: free memory, and the most of the page cache.
    pub available: u64,
    /// What programs have been promised (`Committed_AS`; VM-ME, section IV.A); not known from a balloon's statistics.
    pub committed: Option<u64>,
    /// What has been written to swap: space in use, or all since the boot.
    pub swapped: u64,
}

impl GuestAgent {
    /// Queries the guest's memory, until `deadline`.
    pub fn memory(&mut self, deadline: Instant) -> Result<GuestMemory, AgentError> {
        let (text, command) = match self.kind {
            Kind::Qemu => {
                let text = self.read_file(MEMINFO, deadline, |file| file.read_at(0, BYTES_MAX))?;
                (text, "guest-file-read")
            }
            Kind::Own => {
                let limit = left(deadline, OWN)?;
                let FileRead(text) = self.channel.execute(OWN, &Value::Null, limit)?;
                (text, OWN)
            }
        };
        parse(&text).ok_or_else(|| AgentError::garbled(command, &text))
    }
}

/// Reads `/proc/meminfo`. `None`: a line is missing, or its number is none.
pub(crate) fn parse(text: &[u8]) -> Option<GuestMemory> {
    let text = std::str::from_utf8(text).ok()?;
    let bytes = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(name));
        let value = lines.find_map(|rest| rest.strip_prefix(':'))?;
        let kib: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
        kib.checked_mul(1024)
    };
    let swap_free = bytes("SwapFree")?;
    Some(GuestMemory {
        total: bytes("MemTotal")?,
        available: bytes("MemAvailable")?,
        committed: Some(bytes("Committed_AS")?),
        swapped: bytes("SwapTotal")?.saturating_sub(swap_free),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "MemTotal:         996352 kB\nMemFree:          921000 kB\nMemAvailable:     854016 kB\n\
        SwapCached:            0 kB\nSwapTotal:         65536 kB\nSwapFree:          61440 kB\nCommitted_AS:      36864 kB\n";

    #[test]
    fn what_a_guest_says_of_its_memory() {
        let memory = parse(TEXT.as_bytes()).expect("read");
        assert_eq!(memory.total, 996_352 << 10);
        assert_eq!(memory.available, 834 << 20);
        assert_eq!(memory.committed, Some(36 << 20));
        assert_eq!(memory.swapped, 4 << 20);
    }

    #[test]
    fn anything_else_is_not_understood() {
        for (from, to) in [
            ("MemAvailable", "Available"),
            (" 36864 kB", " 36864"),
            (" 36864 kB", " -1 kB"),
            (" 36864 kB", " 18446744073709551615 kB"),
            ("SwapFree:", "SwapFree"),
            ("Committed_AS", "Committed_AS:"),
        ] {
            assert_eq!(parse(TEXT.replace(from, to).as_bytes()), None, "{to}");
        }
        assert_eq!(parse(b"\xff"), None);
        assert_eq!(parse(&TEXT.as_bytes()[..60]), None);
    }
}
