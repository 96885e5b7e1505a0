//! The kernel's list of unix sockets, `/proc/net/unix` (proc_net(5)).

use std::path::{Path, PathBuf};

/// The whole list; empty when it cannot be read.
pub(crate) fn table() -> String {
    let bytes = std::fs::read("/proc/net/unix").unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The path the socket with this inode number is bound to.
pub(crate) fn bound_path(table: &str, inode: &str) -> Option<PathBuf> {
    let mut rows = table.lines().skip(1).filter_map(row);
    let found = rows.find(|row| row.inode == inode)?;
    Some(PathBuf::from(found.path))
}

/// Whether a living process listens on `path`. The list shows paths as they were given to the kernel. A relative
/// one counts when it may be `path`.
pub(crate) fn is_listening(table: &str, path: &Path) -> bool {
    const ACCEPTS_CONNECTIONS: &str = "00010000";
    let mut rows = table.lines().skip(1).filter_map(row);
    rows.any(|row| {
        let bound = Path::new(row.path);
        row.flags == ACCEPTS_CONNECTIONS
            && (path == bound || (bound.is_relative() && path.ends_with(bound)))
    })
}

struct Row<'a> {
    flags: &'a str,
    inode: &'a str,
    path: &'a str,
}

/// Number, references, protocol, flags, type, state, inode, and the path to the end of the line.
fn row(line: &str) -> Option<Row<'_>> {
    const COLUMNS: usize = 7;
    let mut rest = line;
    let mut columns = [""; COLUMNS];
    for column in &mut columns {
        let (word, after) = rest.trim_start().split_once(' ')?;
        *column = word;
        rest = after;
    }
    Some(Row {
        flags: columns[3],
        inode: columns[6],
        path: rest,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "Num       RefCount Protocol Flags    Type St Inode Path\n\
        0000000000000000: 00000002 00000000 00010000 0001 01 16170 /tmp/a b\n\
        0000000000000000: 00000002 00000000 00010000 0001 01 16171\n\
        0000000000000000: 00000002 00000000 00010000 0001 01    12 run/a.sock\n\
        0000000000000000: 00000003 00000000 00000000 0001 03 16173 /b.sock\n";

    #[test]
    fn sockets_are_found_by_inode() {
        assert_eq!(bound_path(TABLE, "16170"), Some(PathBuf::from("/tmp/a b")));
        assert_eq!(bound_path(TABLE, "12"), Some(PathBuf::from("run/a.sock")));
        assert_eq!(bound_path(TABLE, "16171"), None);
        assert_eq!(bound_path(TABLE, "1"), None);
    }

    #[test]
    fn listeners_are_found_by_path() {
        assert!(is_listening(TABLE, Path::new("/tmp/a b")));
        assert!(is_listening(TABLE, Path::new("/vm/run/a.sock")));
        assert!(!is_listening(TABLE, Path::new("/vm/xa.sock")));
        assert!(!is_listening(TABLE, Path::new("/b.sock")));
        assert!(!is_listening("", Path::new("/b.sock")));
    }
}
