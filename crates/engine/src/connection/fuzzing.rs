//! The part of the connection that the fuzz targets reach.

use std::io::Cursor;

use stillframe_link::Frame;
use stillframe_page::PAGE;
use stillframe_page::encoding::Decoder;

use super::batch::Batch;
use super::framing::{Connection, Kind};
use super::image_pages::ImagePages;
use super::message::Message;
use crate::memory::BlockShape;

/// Receives frames until none comes; then reads the same bytes as the payload of each kind, whatever their check.
pub fn messages(bytes: &[u8]) {
    let mut connection = Connection::new(Cursor::new(bytes));
    while connection.receive_message().is_ok() {}
    for kind in [Kind::Control, Kind::DeviceState, Kind::Ids] {
        let payload = bytes.to_vec();
        let _ = Message::decode(Frame { kind, payload });
    }
}

/// Reads places of pages.
pub fn image_pages(bytes: &[u8]) {
    let blocks = [1, 600].map(|pages| BlockShape {
        name: String::new(),
        pages,
    });
    if let Ok(pages) = ImagePages::decode(bytes, &blocks) {
        assert!(
            pages
                .pages
                .iter()
                .all(|page| page.page < blocks[pages.block].pages)
        );
        assert_eq!(pages.encode(), bytes);
    }
}

/// Reads a batch of pages, and decodes them.
pub fn batch(bytes: &[u8]) {
    let blocks = [1, 600].map(|pages| BlockShape {
        name: String::new(),
        pages,
    });
    let Ok(batch) = Batch::decode(bytes, &blocks) else {
        return;
    };
    let pages = blocks[batch.block].pages;
    assert!(batch.numbers().is_sorted_by(|a, b| a < b));
    assert!(batch.numbers().all(|page| page < pages));
    if let Ok(mut decoder) = Decoder::new() {
        let mut buffer = Vec::new();
        if let Ok(runs) = batch.runs(&mut decoder, &mut buffer) {
            let pages = runs
                .iter()
                .flat_map(|&(first, bytes)| first..first + (bytes.len() / PAGE) as u64);
            assert!(pages.eq(batch.numbers()));
        }
    }
}
