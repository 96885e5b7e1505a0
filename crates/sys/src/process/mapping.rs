//! What a process has mapped, and ranges of its addresses.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Addresses of another process, half open. A range whose end is not above its start is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressRange {
    /// The first address.
    pub start: u64,
    /// The first address behind the range.
    pub end: u64,
}

impl AddressRange {
    /// Its size in bytes.
    pub fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether it holds no address.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the address lies inside.
    pub fn contains(&self, address: u64) -> bool {
        self.start <= address && address < self.end
    }

    /// What both ranges share, if anything.
    pub fn intersect(&self, other: &AddressRange) -> Option<AddressRange> {
        let both = AddressRange {
            start: self.start.max(other.start),
            end: self.end.min(other.end),
        };
        (!both.is_empty()).then_some(both)
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.start, self.end)
    }
}

/// One line of `/proc/PID/maps` (proc(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Where it lies.
    pub range: AddressRange,
    /// Whether the process may read it.
    pub readable: bool,
    /// Whether the process may write it.
    pub writable: bool,
    /// Whether the process may execute it.
    pub executable: bool,
    /// Whether writes reach the file and other processes (`s`), or are its own (`p`).
    pub shared: bool,
    /// Where in the file the mapping begins, in bytes.
    pub file_offset: u64,
    /// Major and minor number of the device that holds the file.
    pub device: (u32, u32),
    /// The file's inode; 0 for anonymous memory.
    pub inode: u64,
    /// The file's path as the kernel names it, ` (deleted)` appended when it is unlinked (a memfd
    /// always is), or a name in brackets such as `[heap]` or `[vdso]`.
    pub path: Option<PathBuf>,
}

impl Mapping {
    /// Reads `START-END PERMS OFFSET MAJOR:MINOR INODE   PATH`, numbers hexadecimal but the inode.
    pub(super) fn parse(line: &[u8]) -> Option<Mapping> {
        let (addresses, rest) = split_blank(line)?;
        let (permissions, rest) = split_blank(rest)?;
        let (offset, rest) = split_blank(rest)?;
        let (device, rest) = split_blank(rest)?;
        let (inode, path) = split_blank(rest).unwrap_or((rest, b""));
        let (start, end) = split_pair(addresses, '-')?;
        let (major, minor) = split_pair(device, ':')?;
        let path = path.trim_ascii_start();
        if permissions.len() < 4 {
            return None;
        }
        Some(Mapping {
            range: AddressRange { start, end },
            readable: permissions[0] == b'r',
            writable: permissions[1] == b'w',
            executable: permissions[2] == b'x',
            shared: permissions[3] == b's',
            file_offset: hexadecimal(offset)?,
            device: (u32::try_from(major).ok()?, u32::try_from(minor).ok()?),
            inode: std::str::from_utf8(inode).ok()?.parse().ok()?,
            path: (!path.is_empty()).then(|| PathBuf::from(OsString::from_vec(unescape(path)))),
        })
    }
}

fn split_blank(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|byte| *byte == b' ')?;
    Some((&text[..at], &text[at + 1..]))
}

fn split_pair(text: &[u8], separator: char) -> Option<(u64, u64)> {
    let (left, right) = std::str::from_utf8(text).ok()?.split_once(separator)?;
    Some((
        hexadecimal(left.as_bytes())?,
        hexadecimal(right.as_bytes())?,
    ))
}

fn hexadecimal(text: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok()
}

/// The kernel writes a line feed in a path as `\012`, and nothing else that way.
fn unescape(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((first, tail)) = rest.split_first() {
        if let Some(tail) = rest.strip_prefix(b"\\012") {
            out.push(b'\n');
            rest = tail;
        } else {
            out.push(*first);
            rest = tail;
        }
    }
    out
}
