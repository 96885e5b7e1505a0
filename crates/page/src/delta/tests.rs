//! Deltas come back as they were made, whatever changed; and nothing that is read is believed.

use proptest::prelude::*;

use super::*;
use crate::difference::difference;

type Page = Box<[u8; PAGE]>;

fn page(bytes: impl Fn(usize) -> u8) -> Page {
    let mut page = Box::new([0; PAGE]);
    for (at, byte) in page.iter_mut().enumerate() {
        *byte = bytes(at);
    }
    page
}

/// One stretch of changed bytes: from, length, what is XORed to every byte, and of how many bytes
/// one is left as it is.
type Stretch = (usize, usize, u8, usize);

fn change(old: &Page, stretches: &[Stretch]) -> Page {
    let mut new = old.clone();
    for &(from, length, mask, every) in stretches {
        let end = (from + length).min(PAGE);
        for at in (from..end).filter(|at| at % every != 0) {
            new[at] ^= mask;
        }
    }
    new
}

fn stretches() -> impl Strategy<Value = Vec<Stretch>> {
    let one = (
        0..PAGE,
        prop_oneof![1..20usize, 0..PAGE],
        any::<u8>(),
        2..12usize,
    );
    prop::collection::vec(one, 0..6)
}

/// Page numbers with gaps, and old and new version of each.
fn changes() -> impl Strategy<Value = Vec<(u32, Page, Page)>> {
    let one = (1..2000u32, any::<u8>(), stretches());
    prop::collection::vec(one, 0..12).prop_map(|changes| {
        let mut number = 0;
        let changed = changes.into_iter().map(|(gap, seed, stretches)| {
            number += gap;
            let old = page(|at| (at as u8).wrapping_mul(seed));
            let new = change(&old, &stretches);
            (number, old, new)
        });
        changed.collect()
    })
}

fn encode(changes: &[(u32, Page, Page)]) -> Vec<u8> {
    let mut encoder = DeltaEncoder::new(1).unwrap();
    for (number, old, new) in changes {
        let added = encoder.add(*number, [old, new], PAGE);
        assert_eq!(added == Added::Changed, old != new);
    }
    encoder.finish().unwrap().bytes
}

proptest! {
    #[test]
    fn what_was_changed_is_changed_again(changes in changes()) {
        let delta = Delta::decode(&encode(&changes)).unwrap();
        let dirty: Vec<_> = changes.iter().filter(|(_, old, new)| old != new).collect();
        prop_assert_eq!(delta.pages().collect::<Vec<_>>(), dirty.iter().map(|(number, ..)| *number).collect::<Vec<_>>());
        for (index, (_, old, new)) in dirty.iter().enumerate() {
            let mut page = old.clone();
            delta.apply(index, &mut page);
            prop_assert!(page == *new);
            delta.apply(index, &mut page);
            prop_assert!(page == *old);
        }
        let bytes: u32 = dirty.iter().map(|(_, old, new)| difference(&old[..], &new[..]).bytes).sum();
        prop_assert_eq!(delta.bytes.len() as u32, bytes);
    }

    #[test]
    fn an_encoder_begins_anew(first in changes(), second in changes()) {
        let mut encoder = DeltaEncoder::new(1).unwrap();
        let mut last = EncodedDelta::default();
        for changes in [&first, &second] {
            for (number, old, new) in changes {
                encoder.add(*number, [old, new], PAGE);
            }
            last = encoder.finish().unwrap();
            prop_assert!(encoder.is_empty());
        }
        prop_assert_eq!(&last.bytes, &encode(&second));
        prop_assert_eq!(last.pages, Delta::decode(&last.bytes).unwrap().pages().collect::<Vec<_>>());
    }

    #[test]
    fn a_page_that_changed_too_much_leaves_no_trace(changes in changes(), bytes_max in 0..PAGE) {
        let mut encoder = DeltaEncoder::new(1).unwrap();
        let mut kept = Vec::new();
        for (number, old, new) in changes {
            let bytes = difference(&old[..], &new[..]).bytes as usize;
            let expected = match bytes {
                0 => Added::Same,
                bytes if bytes > bytes_max => Added::TooMuch,
                _ => Added::Changed,
            };
            prop_assert_eq!(encoder.add(number, [&old, &new], bytes_max), expected);
            if expected == Added::Changed {
                kept.push((number, old, new));
            }
        }
        prop_assert_eq!(encoder.finish().unwrap().bytes, encode(&kept));
    }

    #[test]
    fn hostile_bytes_are_refused_or_applied_in_bounds(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        apply_all(&bytes);
    }

    #[test]
    fn damage_is_refused_or_applied_in_bounds(
        changes in changes(), at: prop::sample::Index, bit in 0..8u32, cut: bool,
    ) {
        let mut encoded = encode(&changes);
        let at = at.index(encoded.len());
        match cut {
            true => encoded.truncate(at),
            false => encoded[at] ^= 1 << bit,
        }
        apply_all(&encoded);
    }

    #[test]
    fn masks_and_stored_bytes_are_those_of_each_byte(word: u64) {
        let expected = word.to_le_bytes();
        let mask = mask_of(word);
        for (at, byte) in expected.iter().enumerate() {
            prop_assert_eq!(mask >> at & 1 == 1, *byte != 0);
        }
        let mut into = [0; 2 * WORD_BYTES];
        let count = match mask {
            0 => 0,
            mask => store(word, mask, &mut into),
        };
        let kept: Vec<u8> = expected.into_iter().filter(|byte| *byte != 0).collect();
        prop_assert_eq!(&into[..count], &kept[..]);
    }
}

fn apply_all(encoded: &[u8]) {
    if let Ok(delta) = Delta::decode(encoded) {
        let mut page = page(|_| 0);
        for index in 0..delta.pages().count() {
            delta.apply(index, &mut page);
        }
    }
}

#[test]
fn nothing_changed_is_a_few_bytes() {
    assert_eq!(encode(&[]).len(), 1 + 3 * 3);
}

/// FITDOC's idle guest: a few bytes of a page.
#[test]
fn a_changed_byte_costs_a_few_bytes() {
    let old = page(|at| at as u8);
    let changes: Vec<_> = (0..500)
        .map(|number| (number * 7, old.clone(), change(&old, &[(1001, 1, 0x55, 8)])))
        .collect();
    let encoded = encode(&changes).len();
    assert!(encoded < 500 * 4, "{encoded}");
}

#[test]
fn parts_that_do_not_fit_together_are_refused() {
    let raw = |bytes: &[u8]| {
        let mut stream = vec![1, bytes.len() as u8, bytes.len() as u8];
        stream.extend_from_slice(bytes);
        stream
    };
    let delta = |pages: u8, streams: [Vec<u8>; 3]| [vec![pages], streams.concat()].concat();
    // One page, one run, one word, one byte.
    let good = delta(1, [raw(&[5, 1, 3, 1]), raw(&[1, 1]), raw(&[9])]);
    assert_eq!(Delta::decode(&good).unwrap().pages().next(), Some(5));
    let bad = [
        (
            "no bytes",
            delta(1, [raw(&[5, 1, 3, 1]), raw(&[1, 1]), raw(&[])]),
        ),
        (
            "no masks",
            delta(1, [raw(&[5, 1, 3, 1]), raw(&[]), raw(&[9])]),
        ),
        (
            "a mask of nothing",
            delta(1, [raw(&[5, 1, 3, 1]), raw(&[0, 1]), raw(&[])]),
        ),
        (
            "a run of nothing",
            delta(1, [raw(&[5, 1, 3, 0]), raw(&[]), raw(&[])]),
        ),
        (
            "a run too far",
            delta(1, [raw(&[5, 1, 0x80, 4, 1]), raw(&[1, 1]), raw(&[9])]),
        ),
        (
            "a page twice",
            delta(
                2,
                [raw(&[5, 1, 3, 1, 0, 1, 3, 1]), raw(&[1, 1]), raw(&[9, 9])],
            ),
        ),
        (
            "too many bytes",
            delta(1, [raw(&[5, 1, 3, 1]), raw(&[1, 1]), raw(&[9, 9])]),
        ),
        ("more behind", [good.clone(), vec![0]].concat()),
        (
            "more pages",
            delta(2, [raw(&[5, 1, 3, 1]), raw(&[1, 1]), raw(&[9])]),
        ),
        ("far too many pages", vec![0xff, 0xff, 0xff, 0xff, 0x0f]),
        ("a number too long", vec![0x80; 9]),
    ];
    for (what, bytes) in bad {
        assert!(Delta::decode(&bytes).is_err(), "{what}");
    }
}
