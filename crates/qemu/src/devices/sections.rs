//! The sections of a device state, as the last guard: they show changes that the tree of devices does not show.

use std::collections::BTreeMap;

use crate::device_state::{self, DeviceStateError};

/// Sections that QEMU writes or not for the same devices (`migration/global_state.c`).
const SOMETIMES: &[&str] = &["globalstate"];

const SECTION_FULL: u8 = 0x04;
const FOOTER: u8 = 0x7e;
/// A footer: its type and the section's number.
const FOOTER_BYTES: usize = 5;
/// The magic and the version of a stream.
const HEADER_BYTES: usize = 8;

/// Bytes compared by [`Sections::could_be_of`] before it gives up; some hundred times a stream.
const BYTES_MAX: usize = 1 << 28;

/// The sections of a device state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sections {
    /// In their order.
    heads: Vec<SectionHead>,
}

/// What identifies a section.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct SectionHead {
    name: String,
    instance: u32,
}

impl Sections {
    /// Reads a device state.
    ///
    /// # Errors
    /// It is not whole.
    pub fn of(raw: &[u8]) -> Result<Sections, DeviceStateError> {
        let sections = device_state::sections(raw)?;
        Ok(Sections {
            heads: sections
                .into_iter()
                .map(|section| SectionHead {
                    name: section.name,
                    instance: section.instance,
                })
                .collect(),
        })
    }

    /// A section that one of two device states has and the other has not; none when both come from the
    /// same devices.
    pub fn difference<'a>(&'a self, other: &'a Sections) -> Option<&'a str> {
        let count = |heads: &'a [SectionHead]| {
            let mut counts: BTreeMap<&SectionHead, i64> = BTreeMap::new();
            for head in heads {
                *counts.entry(head).or_default() += 1;
            }
            counts
        };
        let mut counts = count(&self.heads);
        for (head, times) in count(&other.heads) {
            *counts.entry(head).or_default() -= times;
        }
        let differing = counts.into_iter().filter(|(_, times)| *times != 0);
        let mut names = differing.map(|(head, _)| head.name.as_str());
        names.find(|name| !SOMETIMES.contains(name))
    }

    /// Whether `raw` can be read as a device state of these very sections. A section's end is found by its footer
    /// alone. A guest can place footers and heads of sections in the buffers of its devices, so that a stream can
    /// be read in several ways. The true way is always one of them.
    pub fn could_be_of(&self, raw: &[u8]) -> bool {
        // Per number of a section, the first place where the data of one may begin. A later place with
        // the same number leads nowhere that the first one does not lead to.
        let mut starts: BTreeMap<[u8; 4], usize> = BTreeMap::new();
        let Some(first) = self.heads.first() else {
            return false;
        };
        starts.extend(head_at(raw, HEADER_BYTES, first));
        let mut budget = BYTES_MAX;
        for index in 0..self.heads.len() {
            let Some(from) = starts.values().min().copied() else {
                return false;
            };
            let Some(left) = budget.checked_sub(raw.len().saturating_sub(from)) else {
                return false;
            };
            budget = left;
            let mut next: BTreeMap<[u8; 4], usize> = BTreeMap::new();
            for at in from..raw.len().saturating_sub(FOOTER_BYTES) {
                if raw[at] != FOOTER {
                    continue;
                }
                let number = [raw[at + 1], raw[at + 2], raw[at + 3], raw[at + 4]];
                if starts.get(&number).is_none_or(|start| *start > at) {
                    continue;
                }
                let end = at + FOOTER_BYTES;
                match self.heads.get(index + 1) {
                    Some(head) => {
                        if let Some((number, start)) = head_at(raw, end, head) {
                            next.entry(number).or_insert(start);
                        }
                    }
                    None if raw[end..] == [0] => return true,
                    None => {}
                }
            }
            starts = next;
        }
        false
    }
}

/// The number of the section with this head that begins at `at`, and where its data do.
fn head_at(raw: &[u8], at: usize, wanted: &SectionHead) -> Option<([u8; 4], usize)> {
    let SectionHead { name, instance } = wanted;
    let head = raw.get(at..)?;
    let number: [u8; 4] = head.get(1..5)?.try_into().ok()?;
    let length = usize::from(*head.get(5)?);
    let rest = head.get(6..)?.strip_prefix(name.as_bytes())?;
    let same = head[0] == SECTION_FULL
        && length == name.len()
        && rest.get(..4)? == instance.to_be_bytes().as_slice();
    // Behind the instance comes the version.
    (same && rest.len() >= 8).then_some((number, at + 6 + length + 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(number: u32, name: &str, data: &[u8]) -> Vec<u8> {
        let number = number.to_be_bytes();
        let length = u8::try_from(name.len()).expect("short name");
        let versions = [0, 0, 0, 0, 0, 0, 0, 1];
        [
            &[SECTION_FULL],
            &number[..],
            &[length],
            name.as_bytes(),
            &versions,
            data,
            &[FOOTER],
            &number[..],
        ]
        .concat()
    }

    fn stream(sections: &[Vec<u8>]) -> Vec<u8> {
        [b"QEVM\0\0\0\x03", &sections.concat()[..], &[0]].concat()
    }

    #[test]
    fn devices_that_came_or_went_show() {
        let of = |names: &[&str]| {
            let numbers = 0u32..;
            let parts: Vec<_> = numbers
                .zip(names)
                .map(|(number, name)| section(number, name, &[1, 2]))
                .collect();
            Sections::of(&stream(&parts)).expect("whole")
        };
        let before = of(&["timer", "cpu", "disk"]);
        assert_eq!(before.difference(&of(&["timer", "cpu", "disk"])), None);
        // The order does not count, and one section comes and goes by itself.
        let other = of(&["cpu", "globalstate", "timer", "disk"]);
        assert_eq!(before.difference(&other), None);
        let more = of(&["timer", "cpu", "disk", "net"]);
        assert_eq!(before.difference(&more), Some("net"));
        assert_eq!(more.difference(&before), Some("net"));
        let two = of(&["timer", "cpu", "cpu", "disk"]);
        assert_eq!(before.difference(&two), Some("cpu"));
    }

    /// A guest that writes sections into a buffer of its network card.
    #[test]
    fn a_guest_cannot_hide_or_forge_the_right_reading() {
        let forged = [
            &b"abc"[..],
            &[FOOTER, 0, 0, 0, 1],
            &section(9, "forged", b"xyz"),
            &section(1, "net", &[]),
        ]
        .concat();
        let honest = stream(&[section(0, "cpu", &[1]), section(1, "net", &[2; 90])]);
        let lying = stream(&[section(0, "cpu", &[1]), section(1, "net", &forged)]);
        let devices = Sections::of(&honest).expect("whole");
        let read = Sections::of(&lying).expect("whole");
        assert_eq!(devices.difference(&read), Some("forged"));
        assert!(devices.could_be_of(&lying));
        assert!(devices.could_be_of(&honest));
        assert!(!read.could_be_of(&honest));
        let other = stream(&[section(0, "cpu", &[1]), section(2, "disk", &forged)]);
        assert!(!devices.could_be_of(&other));
    }
}
