//! The mappings of a process, and ranges of its addresses.

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

    /// The common part of both ranges, if any.
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
    /// The file's path as the kernel names it, or a name in brackets such as `[heap]` or `[vdso]`. ` (deleted)` is
    /// appended when the file is unlinked (a memfd always is).
    pub path: Option<PathBuf>,
}

impl Mapping {
    /// Reads `START-END PERMS OFFSET MAJOR:MINOR INODE   PATH`, numbers hexadecimal but the inode.
    pub(crate) fn parse(line: &[u8]) -> Option<Mapping> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(line: &str) -> Option<Mapping> {
        Mapping::parse(line.as_bytes())
    }

    #[test]
    fn lines_of_every_kind() {
        let line = "7f8a00000000-7f8a40000000 rw-s 00100000 00:01 2049    /memfd:pc.ram (deleted)";
        let expected = Mapping {
            range: AddressRange {
                start: 0x7f8a_0000_0000,
                end: 0x7f8a_4000_0000,
            },
            readable: true,
            writable: true,
            executable: false,
            shared: true,
            file_offset: 0x10_0000,
            device: (0, 1),
            inode: 2049,
            path: Some(PathBuf::from("/memfd:pc.ram (deleted)")),
        };
        assert_eq!(parse(line), Some(expected));
        let vdso = parse("7ffd1000-7ffd3000 r-xp 00000000 00:00 0          [vdso]").unwrap();
        assert!(vdso.executable && !vdso.shared && vdso.inode == 0);
        assert_eq!(vdso.path, Some(PathBuf::from("[vdso]")));
        assert_eq!(
            parse("1000-2000 ---p 00000000 00:00 0 ").unwrap().path,
            None
        );
        assert_eq!(parse("1000-2000 ---p 00000000 00:00 0").unwrap().path, None);
        let strange = parse("1000-2000 r--p 0 fd:1f 7   /a dir/with\\012line feed").unwrap();
        assert_eq!(strange.path, Some(PathBuf::from("/a dir/with\nline feed")));
        assert_eq!(strange.device, (0xfd, 0x1f));
    }

    #[test]
    fn what_is_no_line_is_refused() {
        for line in [
            "",
            "1000-2000",
            "1000-2000 r--p",
            "x-2000 r--p 0 0:0 0",
            "1-2 r- 0 0:0 0",
        ] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(line in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = Mapping::parse(&line);
        }

        #[test]
        fn ranges_agree_with_their_addresses(a in 0..20_u64, b in 0..20_u64, c in 0..20_u64, d in 0..20_u64) {
            let (one, two) = (AddressRange { start: a, end: b }, AddressRange { start: c, end: d });
            let inside = |range: AddressRange| (0..20).filter(move |at| range.contains(*at));
            prop_assert_eq!(one.len(), inside(one).count() as u64);
            prop_assert_eq!(one.is_empty(), inside(one).count() == 0);
            let both: Vec<u64> = inside(one).filter(|at| two.contains(*at)).collect();
            let shared = one.intersect(&two);
            prop_assert_eq!(shared.map_or(Vec::new(), |range| inside(range).collect()), both);
        }
    }
}
