//! `docs/format.md` against the code: version, cost of a password, kinds and magic numbers.

use crate::crypto::key_file::Cost;
use crate::format::annotation::{NOTE_BYTES_MAX, TAG_BYTES_MAX, TAG_PUNCTUATION, TAGS_MAX};
use crate::format::layout::{FORMAT_VERSION, FileKind, header};
use crate::page_table::layer;
use crate::page_table::table;

const DOCUMENT: &str = include_str!("../../../../docs/format.md");

/// The numbers that follow a word in the document.
fn numbers_after(word: &str) -> Vec<u32> {
    let behind = DOCUMENT
        .match_indices(word)
        .map(|(at, _)| &DOCUMENT[at + word.len()..]);
    let digits = behind.map(|rest| {
        rest.split(|c: char| !c.is_ascii_digit())
            .next()
            .unwrap_or("")
    });
    digits.filter_map(|digits| digits.parse().ok()).collect()
}

#[test]
fn the_version_is_that_of_the_code() {
    let versions = numbers_after("version ");
    assert!(
        versions.len() >= 2,
        "the title and the header name it: {versions:?}"
    );
    assert!(
        versions.iter().all(|&version| version == FORMAT_VERSION),
        "{versions:?}"
    );
}

#[test]
fn a_password_costs_what_the_document_says() {
    let Cost {
        memory_kib,
        passes,
        lanes,
    } = Cost::STANDARD;
    let words = format!("{} MiB, {passes} passes, {lanes} lanes", memory_kib / 1024);
    assert!(DOCUMENT.contains(&words), "{words}");
}

#[test]
fn tags_and_notes_have_the_bounds_of_the_document() {
    for words in [
        format!("up to {TAGS_MAX} tags of 1 to {TAG_BYTES_MAX} bytes"),
        format!("`{TAG_PUNCTUATION}`"),
        format!("1 to {NOTE_BYTES_MAX} bytes of UTF-8"),
    ] {
        assert!(DOCUMENT.contains(&words), "{words}");
    }
}

#[test]
fn kinds_and_magic_numbers_are_those_of_the_document() {
    let kinds = [
        FileKind::Config,
        FileKind::Key,
        FileKind::Pack,
        FileKind::Index,
        FileKind::Manifest,
        FileKind::WorkingSet,
        FileKind::Image,
    ];
    let mut magic: Vec<Vec<u8>> = kinds
        .iter()
        .map(|&kind| header(kind)[4..8].to_vec())
        .collect();
    magic.push(header(FileKind::Config)[..4].to_vec());
    for blob in [table::ROOT_MAGIC, table::SEGMENT_MAGIC, layer::LAYER_MAGIC] {
        magic.push(blob.to_vec());
    }
    for magic in magic {
        let quoted = format!("\"{}\"", String::from_utf8(magic).unwrap());
        assert!(DOCUMENT.contains(&quoted), "{quoted}");
    }
}
