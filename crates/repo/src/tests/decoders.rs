//! Every decoder against untrusted bytes: it returns an error or a value, and never panics. Encoded values are
//! decoded unchanged.

use proptest::prelude::*;
use stillframe_page::GuestPage;
use stillframe_page::hash::ContentId;

use super::support::{init, test_dir};
use crate::WorkingSet;
use crate::crypto::key_file;
use crate::format::file_hash::FileHash;
use crate::format::image_record::{self, ImageId};
use crate::format::layout::{Cursor, FileKind, header, read_header};
use crate::format::{config, lock_record, manifest};
use crate::index::file::{IndexBuilder, IndexFile, check_sections, read_index_file};
use crate::index::layout::{
    Entry, Head, HeadPack, Part, decode_section, encode_section as encode_index_section,
};
use crate::pack::IndexedPack;
use crate::pack::external_frame::ExternalPlace;
use crate::pack::{Directory, Frame, KIND_EXTERNAL, decode_preamble, decode_tail};
use crate::page_table::table::{PageRef, decode_root, decode_segment, encode_root, encode_segment};
use crate::store::local::Area;

fn id() -> impl Strategy<Value = ContentId> {
    any::<[u8; 32]>().prop_map(ContentId)
}

fn directory() -> impl Strategy<Value = Directory> {
    let blobs = prop::collection::vec((id(), 1..9000_u32), 1..5);
    let frame = (0..4_u8, blobs, any::<u32>()).prop_map(|(kind, blobs, stored)| {
        let plain_bytes = blobs.iter().map(|(_, bytes)| bytes).sum();
        Frame {
            kind,
            stored_bytes: 16 + stored % (plain_bytes + 1),
            plain_bytes,
            blobs,
        }
    });
    (image(), prop::collection::vec(frame, 0..6)).prop_map(|(image, mut frames)| {
        if image.is_some() {
            frames
                .iter_mut()
                .for_each(|frame| frame.kind = KIND_EXTERNAL);
        }
        Directory { image, frames }
    })
}

fn image() -> impl Strategy<Value = Option<ImageId>> {
    prop_oneof![Just(None), any::<[u8; 16]>().prop_map(ImageId::decode),]
}

fn index_file() -> impl Strategy<Value = IndexFile> {
    let hash = || any::<[u8; 32]>().prop_map(FileHash);
    let pack = (hash(), directory()).prop_map(|(pack, directory)| IndexedPack { pack, directory });
    (
        prop::collection::vec(hash(), 0..4),
        prop::collection::vec(pack, 0..4),
    )
        .prop_map(|(supersedes, packs)| IndexFile { supersedes, packs })
}

fn head() -> impl Strategy<Value = Head> {
    let pack = (any::<[u8; 32]>(), 0..1_u32 << 30, 0..4_u32, image()).prop_map(
        |(name, file_bytes, parts, image)| HeadPack {
            pack: FileHash(name),
            file_bytes,
            parts,
            image,
        },
    );
    let names = prop::collection::vec(any::<[u8; 32]>().prop_map(FileHash), 0..4);
    let lengths = || prop::collection::vec(16..60_000_u32, 12);
    let packs = prop::collection::vec(pack, 0..4);
    (names, packs, lengths(), lengths()).prop_map(|(supersedes, packs, mut parts, sections)| {
        parts.truncate(packs.iter().map(|pack| pack.parts as usize).sum());
        Head {
            supersedes,
            packs,
            parts,
            sections,
        }
    })
}

fn part() -> impl Strategy<Value = Part> {
    let directory = directory().prop_filter("a part has frames", |it| !it.frames.is_empty());
    (0..1000_u32, 48..1_u32 << 29, directory).prop_map(|(first_frame, offset, directory)| Part {
        first_frame,
        offset,
        frames: directory.frames,
    })
}

fn section() -> impl Strategy<Value = Vec<Entry>> {
    let entries = prop::collection::btree_set((any::<u32>(), any::<u32>()), 1..20);
    entries.prop_map(|entries| {
        let entries = entries.into_iter();
        entries.map(|(key, part)| Entry { key, part }).collect()
    })
}

fn entries(count: usize) -> impl Strategy<Value = Vec<PageRef>> {
    let entry = prop_oneof![Just(PageRef::Zero), id().prop_map(PageRef::Stored)];
    prop::collection::vec(entry, count)
}

/// Runs every decoder; each must return.
fn decode_all(bytes: &[u8]) {
    let _ = config::decode(bytes);
    let _ = key_file::decode(bytes);
    let _ = Directory::decode(bytes);
    let _ = Head::decode(bytes);
    let _ = Part::decode(bytes);
    let _ = decode_section(bytes);
    let _ = manifest::decode(bytes);
    let _ = manifest::parse(bytes);
    let _ = lock_record::decode(bytes);
    let _ = WorkingSet::decode(bytes);
    let _ = image_record::decode(bytes);
    let _ = ExternalPlace::decode(bytes);
    let _ = decode_preamble(bytes);
    let _ = read_header(&mut Cursor::new(bytes), FileKind::Pack);
    for pages in [0, 1, bytes.len() as u64, 512, u64::MAX] {
        let _ = decode_root(bytes, pages);
        let _ = decode_segment(bytes, pages);
    }
    let _ = crate::page_table::table::decode_root_of_any_size(bytes);
    let _ = crate::page_table::table::decode_segment_of_any_size(bytes);
    if let Some(tail) = bytes.first_chunk()
        && let Ok(range) = decode_tail(*tail, bytes.len() as u64)
    {
        assert!(range.end <= bytes.len() as u64);
    }
}

/// Valid bytes of some kind, to be damaged: decoders read further in them than in noise.
fn good_bytes() -> impl Strategy<Value = Vec<u8>> {
    let lock = r#"{"version":1,"kind":"shared","host":"h","machine":"m","boot":"b","pid_namespace":"p",
        "pid":1,"start_time":2,"program":"x","since":"s","refreshed":"r"}"#;
    let manifest = r#"{"vm":"a","time":"2026-01-01T00:00:00Z","parent":null,"tags":["a","b"],"note":"c",
        "ram":[],"images":["00000000000000000000000000000001"],"streams":{},
        "pages":{"total":0,"captured":0,"new":0,"duplicate":0,"zero":0,"delta":0,"unchanged":0},"bytes_stored":1,
        "vm_record":null,"downtime_us":{}}"#;
    assert!(lock_record::decode(lock.as_bytes()).is_ok());
    assert!(manifest::parse(manifest.as_bytes()).is_ok());
    let image = r#"{"id":"00000000000000000000000000000001","path":"/a","bytes":1,"modified":"2026-01-01T00:00:00Z",
        "content":"0000000000000000000000000000000000000000000000000000000000000000","blocks":1,
        "indexed":"2026-01-01T00:00:00Z"}"#;
    assert!(image_record::decode(image.as_bytes()).is_ok());
    prop_oneof![
        directory().prop_map(|directory| directory.encode()),
        head().prop_map(|head| head.encode()),
        part().prop_map(|part| part.encode()),
        section().prop_map(|entries| encode_index_section(&entries)),
        entries(9).prop_map(|entries| encode_segment(&entries)),
        entries(2).prop_map(|entries| encode_root(600, &entries)),
        Just(lock.as_bytes().to_vec()),
        Just(image.as_bytes().to_vec()),
        Just(manifest.as_bytes().to_vec()),
        Just(config::encode(config::RepositoryId([3; 16]))),
        Just(header(FileKind::Key).to_vec()),
    ]
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        decode_all(&bytes);
    }

    #[test]
    fn damaged_bytes_never_panic(
        mut bytes in good_bytes(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        decode_all(&bytes);
    }

    #[test]
    fn directories_are_decoded_as_they_were_encoded(directory in directory()) {
        let bytes = directory.encode();
        prop_assert_eq!(bytes.len(), directory.encoded_bytes());
        prop_assert_eq!(Directory::decode(&bytes).unwrap(), directory);
    }

    #[test]
    fn heads_parts_and_sections_are_decoded_as_they_were_encoded(head in head(), part in part(), section in section()) {
        prop_assert_eq!(Head::decode(&head.encode()).unwrap(), head);
        prop_assert_eq!(Part::decode(&part.encode()).unwrap(), part);
        prop_assert_eq!(decode_section(&encode_index_section(&section)).unwrap(), section);
    }

    #[test]
    fn index_files_describe_each_pack_once(
        files in prop::collection::vec(index_file(), 0..4),
        again in 0..4_usize,
        supersedes in prop::collection::vec(any::<[u8; 32]>().prop_map(FileHash), 0..4),
    ) {
        let dir = test_dir();
        let repo = init(dir.path());
        let mut merged = IndexBuilder::new(&repo.keys, supersedes.clone()).unwrap();
        for file in files.iter().chain(files.get(again)) {
            file.packs.iter().for_each(|entry| merged.add(entry));
        }
        let sealed = merged.finish();
        let name = FileHash::of(&sealed);
        repo.store.create(Area::Index, &name.to_string(), &sealed).unwrap();
        let packs = files.into_iter().flat_map(|file| file.packs).collect();
        let (read, bytes) = read_index_file(&repo.store, &repo.keys, name).unwrap();
        prop_assert_eq!(read, IndexFile { supersedes, packs });
        prop_assert_eq!(bytes, sealed.len() as u64);
        check_sections(&repo.store, &repo.keys, name).unwrap();
    }

    #[test]
    fn places_in_images_are_decoded_as_they_were_encoded(image in image(), offset in any::<u64>()) {
        if let Some(image) = image {
            let place = ExternalPlace { image, offset };
            prop_assert_eq!(ExternalPlace::decode(&place.encode()).unwrap(), place);
            prop_assert_eq!(ImageId::from_hex(&image.to_string()), Some(image));
        }
    }

    #[test]
    fn working_sets_are_decoded_as_they_were_encoded(pages in prop::collection::vec((any::<u32>(), any::<u32>()), 0..300)) {
        let pages = pages.into_iter().map(|(block, page)| GuestPage::new(block as usize, page.into()));
        let set = WorkingSet { pages: pages.collect() };
        prop_assert_eq!(WorkingSet::decode(&set.encode()).unwrap(), set);
    }

    #[test]
    fn tables_are_decoded_as_they_were_encoded(entries in (1..600_usize).prop_flat_map(entries)) {
        let pages = entries.len() as u64;
        prop_assert_eq!(&decode_segment(&encode_segment(&entries), pages).unwrap(), &entries);
        let root = encode_root(pages * 512, &entries);
        prop_assert_eq!(&decode_root(&root, pages * 512).unwrap(), &entries);
        prop_assert!(decode_root(&root, pages * 512 + 1).is_err());
    }

    #[test]
    fn a_decoded_directory_adds_up(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(directory) = Directory::decode(&bytes) {
            for frame in directory.frames {
                prop_assert_eq!(frame.blobs.iter().map(|(_, bytes)| bytes).sum::<u32>(), frame.plain_bytes);
            }
        }
    }
}

#[test]
fn an_index_file_that_contradicts_itself_is_refused() {
    let pack = |parts| HeadPack {
        pack: FileHash([1; 32]),
        file_bytes: 99,
        parts,
        image: None,
    };
    let head = |parts: &[u32], count| Head {
        packs: vec![pack(count)],
        parts: parts.to_vec(),
        ..Head::default()
    };
    assert!(Head::decode(&head(&[16, 17], 2).encode()).is_ok());
    assert!(Head::decode(&head(&[16, 17], 1).encode()).is_err());
    assert!(Head::decode(&head(&[16, 17], 3).encode()).is_err());
    assert!(Head::decode(&head(&[16, 15], 2).encode()).is_err());
    let mut large = head(&[16], 1);
    large.packs[0].file_bytes = 1 << 31;
    assert!(Head::decode(&large.encode()).is_err());
    let frame = Frame {
        kind: 1,
        stored_bytes: 20,
        plain_bytes: 4,
        blobs: vec![(ContentId([3; 32]), 4)],
    };
    let part = |offset, frames: &[Frame]| Part {
        first_frame: 0,
        offset,
        frames: frames.to_vec(),
    };
    assert!(Part::decode(&part(48, std::slice::from_ref(&frame)).encode()).is_ok());
    assert!(Part::decode(&part(47, std::slice::from_ref(&frame)).encode()).is_err());
    assert!(Part::decode(&part(1 << 30, &[frame]).encode()).is_err());
    assert!(Part::decode(&part(48, &[]).encode()).is_err());
    let entry = |key, part| Entry { key, part };
    let sections = [
        [entry(1, 2), entry(1, 3)],
        [entry(1, 3), entry(1, 2)],
        [entry(2, 2); 2],
    ];
    let read = sections.map(|entries| decode_section(&encode_index_section(&entries)).is_ok());
    assert_eq!(read, [true, false, false]);
}

#[test]
fn a_manifest_with_an_unknown_field_is_refused() {
    let text = r#"{"vm":"a","time":"2026-01-01T00:00:00Z","parent":null,"ram":[],"streams":{},
        "pages":{"total":0,"captured":0,"new":0,"duplicate":0,"zero":0,"delta":0,"unchanged":0},"bytes_stored":1,
        "vm_record":null,"downtime_us":{},"deltas":[]}"#;
    let error = manifest::parse(text.as_bytes()).unwrap_err();
    assert!(error.to_string().contains("deltas"), "{error}");
}

#[test]
fn a_manifest_that_contradicts_itself_is_refused() {
    let block = |name: &str, page_bytes: u32, pages: u64| {
        format!(
            r#"{{"name":"{name}","page_bytes":{page_bytes},"pages":{pages},"root":"{:064}"}}"#,
            0
        )
    };
    let with = |ram: &[String]| {
        let text = format!(
            r#"{{"vm":"a","time":"2026-01-01T00:00:00Z","parent":null,"ram":[{}],"streams":{{}},
            "pages":{{"total":0,"captured":0,"new":0,"duplicate":0,"zero":0,"delta":0,"unchanged":0}},"bytes_stored":1,
            "vm_record":null,"downtime_us":{{}}}}"#,
            ram.join(",")
        );
        manifest::parse(text.as_bytes())
    };
    assert!(with(&[block("a", 4096, 1), block("b", 2 << 20, 9)]).is_ok());
    for bad in [
        vec![block("a", 4096, 1), block("a", 4096, 1)],
        vec![block("a", 0, 1)],
        vec![block("a", 4095, 1)],
        vec![block("a", 4096, u64::MAX)],
    ] {
        assert!(with(&bad).is_err(), "{bad:?}");
    }
}

#[test]
fn tags_and_note_are_there_within_their_bounds_or_not_at_all() {
    let with = |fields: &str| {
        let text = format!(
            r#"{{"vm":"a","time":"2026-01-01T00:00:00Z","parent":null,{fields}"ram":[],"streams":{{}},
            "pages":{{"total":0,"captured":0,"new":0,"duplicate":0,"zero":0,"delta":0,"unchanged":0}},"bytes_stored":1,
            "vm_record":null,"downtime_us":{{}}}}"#
        );
        manifest::parse(text.as_bytes())
    };
    let without = with("").unwrap();
    assert!(without.tags.is_empty() && without.note.is_none());
    // Absent fields are not written.
    let json = serde_json::to_string(&without).unwrap();
    assert!(!json.contains("tags") && !json.contains("note"), "{json}");

    let tagged = with(r#""tags":["nightly","a","nightly"],"note":"büro","#).unwrap();
    let body = tagged.encode().unwrap();
    assert_eq!(manifest::decode(&body).unwrap(), tagged);
    let json = serde_json::to_value(&tagged).unwrap();
    assert_eq!(json["tags"], serde_json::json!(["a", "nightly"]));
    assert_eq!(json["note"], "büro");
    let headline = manifest::decode_headline(&body).unwrap();
    assert_eq!(headline.tags, tagged.tags);

    let many: Vec<String> = (0..33).map(|n| format!(r#""{n}""#)).collect();
    let (long_tag, long_note) = ("x".repeat(65), "x".repeat(1025));
    for bad in [
        format!(r#""tags":[{}],"#, many.join(",")),
        format!(r#""tags":["{long_tag}"],"#),
        r#""tags":["a b"],"#.to_owned(),
        r#""tags":[""],"#.to_owned(),
        r#""tags":null,"#.to_owned(),
        format!(r#""note":"{long_note}","#),
        r#""note":"a\nb","#.to_owned(),
        r#""note":"","#.to_owned(),
    ] {
        assert!(with(&bad).is_err(), "{bad}");
    }
}
