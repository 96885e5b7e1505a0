//! Finding the sections of a stream, which does not say where one ends.
//!
//! A section ends with its footer, `7e` and its number; behind it another section or the end begins. The data of a
//! device may hold the same bytes, by chance or because the guest wrote them there. So there may be several ways to
//! the end. The search does not try them one by one:
//!
//! 1. All places where a section could end are found in one scan.
//! 2. From the last to the first, each is marked if the end of the stream can be reached from it. For that it
//!    suffices to know, for each number, the furthest marked place with that footer.
//! 3. From the first section on, the nearest marked place is taken each time. That never leads to a dead end.
//!
//! So the work is proportional to the length of the stream, whatever the guest wrote. The stream does not show
//! which of several ways is the true one. With the names that it is expected to have, the search finds a way that
//! has exactly these.

use std::collections::HashMap;
use std::ops::Range;

use super::{FOOTER, FOOTER_BYTES, HEADER_BYTES, SECTION_FULL};

/// Instance and version of a section, behind its name.
pub(super) const VERSIONS_BYTES: usize = 8;
/// Upper bound on the places marked with expected names, for each byte of the stream. A name may be expected
/// several times, so that one place counts several times.
const PLACES_PER_BYTE_MAX: usize = 64;

/// The begin of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head<'a> {
    /// Where it begins.
    pub(super) start: usize,
    pub(super) number: u32,
    pub(super) name: &'a str,
    /// Where the device's data begin.
    pub(super) data_at: usize,
}

impl<'a> Head<'a> {
    /// The section that begins at `start`, if one could.
    pub(super) fn read(raw: &'a [u8], start: usize) -> Option<Head<'a>> {
        const NAME_AT: usize = 6;
        let head = raw.get(start..)?;
        if *head.first()? != SECTION_FULL {
            return None;
        }
        let number = word(head, 1)?;
        let name_bytes = usize::from(*head.get(5)?);
        let name = std::str::from_utf8(head.get(NAME_AT..NAME_AT + name_bytes)?).ok()?;
        let is_plain = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
        if name.is_empty() || !name.bytes().all(is_plain) {
            return None;
        }
        Some(Head {
            start,
            number,
            name,
            data_at: start + NAME_AT + name_bytes + VERSIONS_BYTES,
        })
    }

    /// The nearest place at which it could end.
    fn end_from(&self) -> usize {
        self.data_at + FOOTER_BYTES
    }
}

/// A section and the data that its device saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Section<'a> {
    pub(super) head: Head<'a>,
    pub(super) data: Range<usize>,
}

/// A whole way through a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Way<'a> {
    pub(super) sections: Vec<Section<'a>>,
    /// Where the end begins.
    pub(super) end: usize,
}

/// A place at which a section could end.
struct Place<'a> {
    /// The number in the footer before it.
    footer: u32,
    /// Behind the footer.
    at: usize,
    /// The head of the section that begins there; `None` for the end of the stream.
    next: Option<Head<'a>>,
}

/// The sections that may follow each section: all, or the sections of a list, each at its own step.
struct Order<'k> {
    steps: Option<HashMap<&'k str, Vec<usize>>>,
    /// The step at which the end comes.
    last: usize,
}

impl<'k> Order<'k> {
    fn any() -> Order<'k> {
        Order {
            steps: None,
            last: 0,
        }
    }

    fn of(names: &'k [String]) -> Order<'k> {
        let mut steps: HashMap<&str, Vec<usize>> = HashMap::new();
        for (step, name) in names.iter().enumerate() {
            steps.entry(name).or_default().push(step);
        }
        Order {
            steps: Some(steps),
            last: names.len(),
        }
    }

    /// The steps at which a section of this name may come.
    fn steps_of(&self, name: &str) -> &[usize] {
        match &self.steps {
            Some(steps) => steps.get(name).map_or(&[], Vec::as_slice),
            None => &[0],
        }
    }

    fn after(&self, step: usize) -> usize {
        step + usize::from(self.steps.is_some())
    }
}

/// A way to the end, as `is_end` recognises it. Of several ways it is the one whose sections have exactly the names
/// of `known`, if there is one; else the one whose first sections are the shortest. `Err` contains the number of
/// sections that could be followed.
pub(super) fn walk<'a>(
    raw: &'a [u8],
    is_end: fn(&[u8]) -> bool,
    known: Option<&[String]>,
) -> Result<Way<'a>, usize> {
    let Some(first) = Head::read(raw, HEADER_BYTES) else {
        return Err(0);
    };
    let places = places(raw, is_end);
    let as_known = known.and_then(|names| way(first, &places, &Order::of(names), raw.len()));
    let found = as_known.or_else(|| way(first, &places, &Order::any(), raw.len()));
    found.ok_or_else(|| followed(first, &places))
}

/// All places at which a section could end, in their order.
fn places(raw: &[u8], is_end: fn(&[u8]) -> bool) -> Vec<Place<'_>> {
    let footers = raw.iter().enumerate().skip(HEADER_BYTES);
    let footers = footers.filter(|(_, byte)| **byte == FOOTER);
    let place = |(footer_at, _)| {
        let at = footer_at + FOOTER_BYTES;
        let next = Head::read(raw, at);
        if next.is_none() && !raw.get(at..).is_some_and(is_end) {
            return None;
        }
        Some(Place {
            footer: word(raw, footer_at + 1)?,
            at,
            next,
        })
    };
    footers.filter_map(place).collect()
}

/// The way through `places` in this order of names, if there is one that can be found with the work allowed.
fn way<'a>(
    first: Head<'a>,
    places: &[Place<'a>],
    order: &Order<'_>,
    stream_bytes: usize,
) -> Option<Way<'a>> {
    let marked = marked(
        places,
        order,
        stream_bytes.saturating_mul(PLACES_PER_BYTE_MAX),
    )?;
    let (mut head, mut step) = (first, 0);
    order.steps_of(first.name).contains(&0).then_some(())?;
    let mut sections = Vec::new();
    loop {
        step = order.after(step);
        let from = (head.number, step, head.end_from());
        let nearest = marked.partition_point(|mark| mark.key(places) < from);
        let mark = marked.get(nearest)?;
        let place = &places[mark.place];
        if (place.footer, mark.step) != (head.number, step) {
            return None;
        }
        let data = head.data_at..place.at - FOOTER_BYTES;
        sections.push(Section { head, data });
        match place.next {
            Some(next) => head = next,
            None => {
                return Some(Way {
                    sections,
                    end: place.at,
                });
            }
        }
    }
}

/// A place from which the end can be reached, if the section that begins there is at this step.
struct Mark {
    place: usize,
    step: usize,
}

impl Mark {
    fn key(&self, places: &[Place<'_>]) -> (u32, usize, usize) {
        let place = &places[self.place];
        (place.footer, self.step, place.at)
    }
}

/// All places from which the end can be reached, by footer, step and place; `None` when they are more than `limit`.
fn marked(places: &[Place<'_>], order: &Order<'_>, limit: usize) -> Option<Vec<Mark>> {
    // The furthest marked place with a footer and step.
    let mut furthest: HashMap<(u32, usize), usize> = HashMap::new();
    let mut marked = Vec::new();
    let mut looked_at = 0;
    for (number, place) in places.iter().enumerate().rev() {
        let steps = match &place.next {
            Some(head) => order.steps_of(head.name),
            None => std::slice::from_ref(&order.last),
        };
        looked_at += steps.len();
        if looked_at > limit {
            return None;
        }
        for &step in steps {
            let goes_on = place.next.is_none_or(|head| {
                let furthest = furthest.get(&(head.number, order.after(step)));
                furthest.is_some_and(|&at| at >= head.end_from())
            });
            if goes_on {
                furthest.entry((place.footer, step)).or_insert(place.at);
                marked.push(Mark {
                    place: number,
                    step,
                });
            }
        }
    }
    marked.sort_unstable_by_key(|mark| mark.key(places));
    Some(marked)
}

/// How many sections can be followed, each to the nearest place at which it could end.
fn followed(first: Head<'_>, places: &[Place<'_>]) -> usize {
    let mut ends: HashMap<u32, Vec<&Place<'_>>> = HashMap::new();
    for place in places {
        ends.entry(place.footer).or_default().push(place);
    }
    let (mut head, mut count) = (first, 0);
    loop {
        let ends = ends.get(&head.number).map_or(&[][..], Vec::as_slice);
        let nearest = ends.partition_point(|place| place.at < head.end_from());
        match ends.get(nearest).and_then(|place| place.next) {
            Some(next) => (head, count) = (next, count + 1),
            None => return count,
        }
    }
}

/// A number in a stream.
pub(super) fn word(raw: &[u8], at: usize) -> Option<u32> {
    let bytes = raw.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every way is tried, one after the other.
    fn slow(
        raw: &[u8],
        is_end: fn(&[u8]) -> bool,
        head: Head<'_>,
        known: Option<&[String]>,
    ) -> Option<Vec<usize>> {
        if known.is_some_and(|known| known.first().is_none_or(|name| name != head.name)) {
            return None;
        }
        let rest = known.map(|known| &known[1..]);
        let footer = [&[FOOTER], &head.number.to_be_bytes()[..]].concat();
        for at in head.end_from()..=raw.len() {
            if raw[at - FOOTER_BYTES..at] != footer {
                continue;
            }
            if is_end(&raw[at..]) && rest.is_none_or(<[String]>::is_empty) {
                return Some(vec![at]);
            }
            let next = Head::read(raw, at);
            if let Some(mut ends) = next.and_then(|next| slow(raw, is_end, next, rest)) {
                ends.insert(0, at);
                return Some(ends);
            }
        }
        None
    }

    fn ends(way: &Way<'_>) -> Vec<usize> {
        let of = |section: &Section<'_>| section.data.end + FOOTER_BYTES;
        way.sections.iter().map(of).collect()
    }

    /// Pieces of which streams are made: there are many ways through what they make.
    fn piece() -> impl Strategy<Value = Vec<u8>> {
        let footer = (0u8..3).prop_map(|number| vec![FOOTER, 0, 0, 0, number]);
        let head = (0u8..3, prop::sample::select(vec![b'a', b'b']))
            .prop_map(|(number, name)| vec![SECTION_FULL, 0, 0, 0, number, 1, name]);
        let versions = Just(vec![0; VERSIONS_BYTES]);
        let both = (footer.clone(), head.clone(), versions.clone())
            .prop_map(|(footer, head, versions)| [footer, head, versions].concat());
        prop_oneof![
            4 => both,
            2 => footer,
            1 => head,
            1 => versions,
            1 => prop::collection::vec(any::<u8>(), 0..4),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn the_way_is_the_one_that_a_slow_search_finds(
            pieces in prop::collection::vec(piece(), 0..14),
            known in prop::collection::vec(prop::sample::select(vec!["a", "b"]), 0..5),
            number in 0u8..3,
        ) {
            let known: Vec<String> = known.into_iter().map(str::to_owned).collect();
            let begin = [b"QEVM\0\0\0\x03\x04\0\0\0\0\x01a".as_slice(), &[0; VERSIONS_BYTES]].concat();
            let raw = [begin, pieces.concat(), vec![FOOTER, 0, 0, 0, number, 0]].concat();
            let is_end = |rest: &[u8]| rest == [0];
            let first = Head::read(&raw, HEADER_BYTES).expect("a section");
            let any = slow(&raw, is_end, first, None);
            let found = walk(&raw, is_end, None);
            prop_assert_eq!(found.as_ref().ok().map(ends), any.clone());
            let as_known = slow(&raw, is_end, first, Some(&known));
            let found = walk(&raw, is_end, Some(&known));
            prop_assert_eq!(found.as_ref().ok().map(ends), as_known.or(any));
        }
    }
}
