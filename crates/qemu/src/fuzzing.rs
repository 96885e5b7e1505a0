//! The parts of the crate's inside that the fuzz targets reach.

use std::path::Path;

use crate::guest_agent::channel::{AgentError, read_answer};
use crate::guest_agent::files::FileRead;
use crate::guest_agent::free_pages::{add_free, add_free_bits};
use crate::guest_agent::memory;
use crate::monitor::{RamBlock, guest_address, ram_blocks, roms_in_ram};
use crate::qmp::inbox::{EVENT_BYTES_MAX, Inbox, Lookup, REPLY_BYTES_MAX, Reply, value};
use crate::qmp::lines::Lines;
use crate::{suitability, unix_sockets, vmstate_image};

/// The lines that a monitor sends, received in pieces, while commands 1 to 9 wait for an answer.
pub fn monitor_lines(bytes: &[u8], piece_bytes: usize) {
    const LINE_BYTES_MAX: usize = 256;
    let mut lines = Lines::new(LINE_BYTES_MAX);
    let mut inbox = Inbox::default();
    for id in 1..10 {
        inbox.expect(id);
    }
    for piece in bytes.chunks(piece_bytes.max(1)) {
        lines.push(piece);
        assert!(lines.kept_bytes() <= LINE_BYTES_MAX + piece.len());
        loop {
            match lines.next_line() {
                Ok(Some(line)) => drop(inbox.sort_in(lines.at(&line))),
                Ok(None) => break,
                Err(_) => lines.skip_long(),
            }
        }
        let (events, replies) = inbox.kept_bytes();
        assert!(events <= EVENT_BYTES_MAX && replies <= REPLY_BYTES_MAX);
    }
    for id in 1..10 {
        if let Lookup::Here(Reply::Return(text)) = inbox.take(id) {
            let _ = value(text.get().as_bytes());
        }
    }
}

/// A line that a guest agent sends: as the answer to a question with a number for an answer, and one without.
pub fn agent_answer(line: &[u8]) -> Option<Result<i64, AgentError>> {
    let number = read_answer::<i64>(line, 1, "guest-get-time");
    let anything = read_answer::<()>(line, 1, "guest-set-time");
    assert_eq!(number.is_some(), anything.is_some());
    number
}

/// The same, as the answer to a read of a file: of the guest's memory, or of page flags. The number of page frames that are free by these.
pub fn agent_page_flags(line: &[u8]) -> usize {
    let mut frames = Vec::new();
    if let Some(Ok(FileRead(flags))) = read_answer::<FileRead>(line, 1, "guest-file-read") {
        add_free(0, &flags, &mut frames);
        let _ = memory::parse(&flags);
        let mut by_bits = Vec::new();
        add_free_bits(0, &flags, &mut by_bits);
        assert!(by_bits.windows(2).all(|pair| pair[0].end < pair[1].start));
        assert!(frames.windows(2).all(|pair| pair[0].end < pair[1].start));
        assert!(
            frames
                .iter()
                .all(|range| range.end * 8 <= flags.len() as u64)
        );
    }
    frames.len()
}

/// `info ramblock`.
pub fn blocks(table: &str) -> Option<Vec<RamBlock>> {
    ram_blocks::parse(table).ok()
}

/// `info roms`, and `info network`.
pub fn other_tables(table: &str) {
    let _ = roms_in_ram(table);
    let _ = guest_address::parse(table);
    let _ = suitability::check_network(table);
}

/// `/proc/net/unix`.
pub fn sockets(table: &str, path: &Path) {
    let _ = unix_sockets::is_listening(table, path);
    for inode in ["", "0", "12"] {
        let _ = unix_sockets::bound_path(table, inode);
    }
}

/// The disk image that holds a device state.
pub fn state_image(state: &[u8], tag: &str) -> Option<Vec<u8>> {
    vmstate_image::encode(state, tag)
}
