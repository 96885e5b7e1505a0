//! The stream of device state that `xen-save-devices-state` writes: checking it, and turning it
//! into a migration stream that a fresh QEMU accepts.
//!
//! ```text
//! raw:     "QEVM" be32 3 | SECTION_FULL ... FOOTER | SECTION_FULL ... FOOTER | ... | EOF
//! wrapped: "QEVM" be32 3 | CONFIGURATION machine | the sections as they were | EOF | VMDESCRIPTION "{}"
//! section: 0x04 be32 section-id, u8 length, name, be32 instance, be32 version, data | 0x7e be32 section-id
//! ```
//!
//! A section does not give the length of its data; only the device that reads it knows it. Its end can be found by
//! its footer alone, and the data may hold the same bytes by chance or by the guest's action. `walk` finds a way
//! from the first section to the end. That proves that the stream is whole, but not its contents. A guest that
//! controls a buffer of a device can make up sections, unless the names that the stream should have are known
//! ([`validate_like`]).
//!
//! Format: QEMU, `docs/devel/migration/main.rst` and `migration/savevm.c`.

mod walk;

use std::ops::Range;

use walk::{Section, VERSIONS_BYTES, Way, walk, word};

const MAGIC: &[u8; 4] = b"QEVM";
const VERSION: u32 = 3;
const HEADER_BYTES: usize = 8;

const EOF: u8 = 0x00;
const SECTION_FULL: u8 = 0x04;
const VMDESCRIPTION: u8 = 0x06;
const CONFIGURATION: u8 = 0x07;
const FOOTER: u8 = 0x7e;
/// A footer: its type and the section's number.
const FOOTER_BYTES: usize = 5;

/// A description of the sections that describes none: what QEMU reads past when it loads a stream.
pub const DESCRIPTION: &[u8] = b"\x06\0\0\0\x02{}";

/// Longest name of a machine type accepted.
const MACHINE_BYTES_MAX: usize = 128;

/// Why a stream of device state cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceStateError {
    /// It does not begin as QEMU's streams do.
    #[error("the device state does not begin with QEMU's mark, version 3, but with {start:02x?}")]
    NotQemu {
        /// The first bytes.
        start: Vec<u8>,
    },
    /// It breaks off or was damaged.
    #[error(
        "the device state ({bytes} bytes) is not whole: {whole_sections} sections can be followed, \
         then neither another one nor the end comes"
    )]
    NotWhole {
        /// Length of the stream.
        bytes: usize,
        /// How many sections could be followed.
        whole_sections: usize,
    },
    /// It already has a configuration section, or RAM in it.
    #[error(
        "the device state begins with section type {kind:#04x}, not with the state of a device"
    )]
    OtherSection {
        /// The section type.
        kind: u8,
    },
    /// The machine type cannot be written into a stream.
    #[error("{machine:?} is no machine type")]
    Machine {
        /// The given machine type.
        machine: String,
    },
}

/// The contents of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Names of the sections in their order, such as `0000:00:02.0/virtio-net`.
    pub sections: Vec<String>,
    /// Length of the stream.
    pub bytes: u64,
}

/// The state of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSection {
    /// Its number in the stream.
    pub number: u32,
    /// The device, such as `cpu`.
    pub name: String,
    /// The number among several devices of that name.
    pub instance: u32,
    /// The version of its data.
    pub version: u32,
    /// Where in the stream that is.
    pub data: Range<usize>,
}

/// Checks that `raw` is a whole stream.
pub fn validate(raw: &[u8]) -> Result<Summary, DeviceStateError> {
    summary(raw, None)
}

/// Validates as [`validate`], for a VM whose device state had the sections `known` before. If the stream can be read as
/// exactly these sections, it is read so, whatever the guest wrote into the buffers of its devices.
pub fn validate_like(raw: &[u8], known: &[String]) -> Result<Summary, DeviceStateError> {
    summary(raw, Some(known))
}

fn summary(raw: &[u8], known: Option<&[String]>) -> Result<Summary, DeviceStateError> {
    let way = follow(raw, |rest| rest == [EOF], known)?;
    let name = |section: &Section<'_>| section.head.name.to_owned();
    Ok(Summary {
        sections: way.sections.iter().map(name).collect(),
        bytes: raw.len() as u64,
    })
}

/// The sections of a whole stream, in their order.
pub fn sections(raw: &[u8]) -> Result<Vec<DeviceSection>, DeviceStateError> {
    let way = follow(raw, |rest| rest == [EOF], None)?;
    let describe = |section: Section<'_>| {
        let versions_at = section.head.data_at - VERSIONS_BYTES;
        DeviceSection {
            number: section.head.number,
            name: section.head.name.to_owned(),
            instance: word(raw, versions_at).unwrap_or_default(),
            version: word(raw, versions_at + 4).unwrap_or_default(),
            data: section.data,
        }
    };
    Ok(way.sections.into_iter().map(describe).collect())
}

/// Takes the description off a stream, if there is one, and returns a stream that [`validate`] takes. The inverse
/// of the additions that a migration file makes behind the device state.
pub fn unwrap(mut raw: Vec<u8>) -> Result<Vec<u8>, DeviceStateError> {
    let is_end = |rest: &[u8]| match rest {
        [EOF] => true,
        [EOF, VMDESCRIPTION, a, b, c, d, text @ ..] => {
            u32::from_be_bytes([*a, *b, *c, *d]) as usize == text.len() && is_description(text)
        }
        _ => false,
    };
    let end = follow(&raw, is_end, None)?.end;
    raw.truncate(end + 1);
    Ok(raw)
}

/// Whether it could be QEMU's description of the sections, JSON on one line. A guest that writes into a buffer of a
/// device cannot make the sections behind the buffer a part of such a text: each section has a control character.
fn is_description(text: &[u8]) -> bool {
    text.starts_with(b"{") && text.ends_with(b"}") && !text.iter().any(u8::is_ascii_control)
}

/// The sections up to the end, which begins where it is said to by `is_end`.
fn follow<'a>(
    raw: &'a [u8],
    is_end: fn(&[u8]) -> bool,
    known: Option<&[String]>,
) -> Result<Way<'a>, DeviceStateError> {
    check_header(raw)?;
    walk(raw, is_end, known).map_err(|whole_sections| DeviceStateError::NotWhole {
        bytes: raw.len(),
        whole_sections,
    })
}

/// Checks `raw` and makes it a migration stream for machine type `machine` (versioned, such as
/// `pc-q35-10.0`).
pub fn wrap(raw: &[u8], machine: &str) -> Result<Vec<u8>, DeviceStateError> {
    validate(raw)?;
    Ok([&begin(raw, machine)?, DESCRIPTION].concat())
}

/// The begin of a migration stream, of `raw`, which begins a device state. The rest of that state follows as it is, and
/// then [`DESCRIPTION`].
pub fn begin(raw: &[u8], machine: &str) -> Result<Vec<u8>, DeviceStateError> {
    check_header(raw)?;
    let refused = || DeviceStateError::Machine {
        machine: machine.to_owned(),
    };
    let plain = machine.bytes().all(|byte| byte.is_ascii_graphic());
    if machine.is_empty() || machine.len() > MACHINE_BYTES_MAX || !plain {
        return Err(refused());
    }
    let machine_bytes = u32::try_from(machine.len()).map_err(|_| refused())?;
    let (header, sections) = raw.split_at(HEADER_BYTES);
    Ok([
        header,
        &[CONFIGURATION],
        &machine_bytes.to_be_bytes(),
        machine.as_bytes(),
        sections,
    ]
    .concat())
}

fn check_header(raw: &[u8]) -> Result<(), DeviceStateError> {
    let header = [MAGIC.as_slice(), &VERSION.to_be_bytes()].concat();
    if !raw.starts_with(&header) {
        return Err(DeviceStateError::NotQemu {
            start: raw[..raw.len().min(HEADER_BYTES)].to_vec(),
        });
    }
    match raw.get(HEADER_BYTES) {
        Some(&kind) if kind != SECTION_FULL => Err(DeviceStateError::OtherSection { kind }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn section(number: u32, name: &str, data: &[u8]) -> Vec<u8> {
        let number = number.to_be_bytes();
        let name_bytes = u8::try_from(name.len()).expect("short name");
        [
            &[SECTION_FULL],
            &number[..],
            &[name_bytes],
            name.as_bytes(),
            &[0, 0, 0, 0, 0, 0, 0, 1],
            data,
            &[FOOTER],
            &number[..],
        ]
        .concat()
    }

    fn stream(sections: &[Vec<u8>]) -> Vec<u8> {
        let header = [&MAGIC[..], &VERSION.to_be_bytes()].concat();
        [header, sections.concat(), vec![EOF]].concat()
    }

    fn sample() -> Vec<u8> {
        stream(&[
            section(0, "timer", &[1; 16]),
            section(4, "cpu_common", b"~~~~\x7e\0\0\0\x05"),
            section(46, "globalstate", &[0; 100]),
        ])
    }

    #[test]
    fn a_state_that_comes_in_pieces_is_wrapped_like_a_whole_one() {
        let raw = sample();
        let wrapped = wrap(&raw, "pc-q35-10.0").expect("wrapped");
        for cut in HEADER_BYTES..=raw.len() {
            let (first, rest) = raw.split_at(cut);
            let begun = begin(first, "pc-q35-10.0").expect("begun");
            assert_eq!([&begun, rest, DESCRIPTION].concat(), wrapped);
        }
        for cut in 0..HEADER_BYTES {
            let start = raw[..cut].to_vec();
            let refused = Err(DeviceStateError::NotQemu { start });
            assert_eq!(begin(&raw[..cut], "pc-q35-10.0"), refused);
        }
    }

    #[test]
    fn a_whole_stream() {
        let raw = sample();
        let summary = validate(&raw).expect("whole");
        assert_eq!(summary.sections, ["timer", "cpu_common", "globalstate"]);
        assert_eq!(summary.bytes, raw.len() as u64);
    }

    #[test]
    fn wrapping_adds_configuration_and_description() {
        let raw = sample();
        let wrapped = wrap(&raw, "pc-q35-10.0").expect("whole");
        let head = b"QEVM\0\0\0\x03\x07\0\0\0\x0bpc-q35-10.0\x04\0\0\0\0\x05timer";
        assert!(wrapped.starts_with(head));
        assert!(wrapped.ends_with(b"\x7e\0\0\0\x2e\0\x06\0\0\0\x02{}"));
        assert_eq!(wrapped.len(), raw.len() + 1 + 4 + 11 + 1 + 4 + 2);
        for machine in ["", "pc q35", "p\0c", &"x".repeat(129)] {
            assert!(matches!(
                wrap(&raw, machine),
                Err(DeviceStateError::Machine { .. })
            ));
        }
    }

    #[test]
    fn what_is_no_device_state() {
        assert!(matches!(
            validate(b""),
            Err(DeviceStateError::NotQemu { .. })
        ));
        assert!(matches!(
            validate(b"QEVM\0\0\0\x02\x04"),
            Err(DeviceStateError::NotQemu { .. })
        ));
        assert!(matches!(
            validate(b"QEVM\0\0\0\x03"),
            Err(DeviceStateError::NotWhole { .. })
        ));
        assert_eq!(
            validate(&wrap(&sample(), "pc").expect("whole")),
            Err(DeviceStateError::OtherSection {
                kind: CONFIGURATION
            })
        );
        // Every proper beginning of a stream is found to be cut.
        let raw = sample();
        for bytes in 0..raw.len() {
            assert!(validate(&raw[..bytes]).is_err(), "{bytes}");
        }
        let longer = [raw, vec![0]].concat();
        assert!(validate(&longer).is_err());
    }

    /// Data that resemble the footer and the head of another section, as a guest could place them. The walk must
    /// come back from the wrong choice.
    #[test]
    fn a_forged_footer_does_not_mislead() {
        let mut forged = vec![9; 3];
        forged.extend([FOOTER, 0, 0, 0, 7]);
        forged.extend(&section(9, "forged", &[])[..20]);
        let raw = stream(&[section(7, "disk", &forged), section(8, "net", &[1])]);
        assert_eq!(validate(&raw).expect("whole").sections, ["disk", "net"]);
    }

    /// Data that look like the end of the stream and a description as long as all that follows.
    #[test]
    fn a_forged_description_does_not_hide_sections() {
        let behind = section(8, "net", &[1]);
        // Behind the forged end: the real footer, the section and the real end.
        let forged_end = |bytes: usize| {
            let length = u32::try_from(bytes).expect("short").to_be_bytes();
            [&[9, FOOTER, 0, 0, 0, 7, EOF, VMDESCRIPTION], &length[..]].concat()
        };
        let description = FOOTER_BYTES + behind.len() + 1;
        let raw = stream(&[section(7, "disk", &forged_end(description)), behind]);
        assert_eq!(unwrap(raw.clone()).as_ref(), Ok(&raw));
        let described = [&raw[..raw.len() - 1], &[EOF], DESCRIPTION].concat();
        assert_eq!(unwrap(described), Ok(raw));
    }

    /// A network card's buffer of 64 KiB as a guest may fill it: 10,000 footers were the end of the search once.
    #[test]
    fn a_guest_cannot_spoil_its_own_checkpoints() {
        let names = ["timer", "e1000", "cpu", "globalstate"].map(str::to_owned);
        let forge = |number: u32| {
            [
                FOOTER,
                0,
                0,
                0,
                7,
                SECTION_FULL,
                0,
                0,
                0,
                number as u8,
                1,
                b'x',
            ]
        };
        let fills = [
            [FOOTER, 0, 0, 0, 7].repeat(13_000),
            forge(7).repeat(5_000),
            [forge(7).as_slice(), &[0; 8]].concat().repeat(3_000),
            // Sections that swallow the real ones behind them.
            [forge(8).as_slice(), &[0; 8], &[FOOTER, 0, 0, 0, 8]]
                .concat()
                .repeat(2_500),
            [forge(9).as_slice(), &[0; 8], &section(9, "cpu", &[6])]
                .concat()
                .repeat(1_500),
        ];
        for (number, fill) in fills.into_iter().enumerate() {
            let data = [fill.as_slice(), &[3; 100]].concat();
            let raw = stream(&[
                section(0, "timer", &[1; 16]),
                section(7, "e1000", &data),
                section(8, "cpu", &[5; 300]),
                section(9, "globalstate", &[0; 100]),
            ]);
            assert!(validate(&raw).is_ok(), "{number}");
            let found = validate_like(&raw, &names).expect("whole").sections;
            assert_eq!(found, names, "{number}");
            // An expected section that is not there is not found.
            let others = [&names[..], &["more".to_owned()]].concat();
            let found = validate_like(&raw, &others).expect("whole").sections;
            assert_eq!(found, validate(&raw).expect("whole").sections, "{number}");
        }
    }

    /// Names that are expected often, where the guest makes them up everywhere.
    #[test]
    fn the_work_is_bounded_for_many_processors() {
        let names = vec!["cpu".to_owned(); 300];
        let forged = [
            vec![FOOTER, 0, 0, 0, 9],
            section(9, "cpu", &[])[..17].to_vec(),
        ]
        .concat();
        let mut parts: Vec<Vec<u8>> = (0..300)
            .map(|number| section(300 + number, "cpu", &[1; 9]))
            .collect();
        let raw = stream(&parts);
        assert_eq!(validate_like(&raw, &names).expect("whole").sections, names);
        parts[150] = section(9, "cpu", &forged.repeat(50_000));
        assert!(validate_like(&stream(&parts), &names).is_ok());
    }

    #[test]
    fn many_forged_footers_end_in_bounded_work() {
        let mut forged = Vec::new();
        for _ in 0..20_000 {
            forged.extend([FOOTER, 0, 0, 0, 7]);
            forged.extend(&section(7, "x", &[])[..15]);
        }
        let mut raw = stream(&[section(7, "disk", &forged)]);
        raw.truncate(raw.len() - 3);
        assert!(validate(&raw).is_err());
    }

    proptest! {
        #[test]
        fn any_sections_are_found_again(
            sections in proptest::collection::vec(("[a-z0-9/:]{1,20}", proptest::collection::vec(any::<u8>(), 0..64)), 1..12)
        ) {
            let parts: Vec<_> = sections.iter().zip(0..).map(|((name, data), number)| section(number, name, data)).collect();
            let summary = validate(&stream(&parts)).expect("whole");
            prop_assert!(!summary.sections.is_empty());
        }

        #[test]
        fn damage_never_panics(at in 0..sample().len(), bit in 0u8..8, cut in 0..=sample().len()) {
            let mut raw = sample();
            raw[at] ^= 1 << bit;
            raw.truncate(cut);
            let _ = validate(&raw);
            let _ = wrap(&raw, "pc-q35-10.0");
        }

        #[test]
        fn noise_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..400)) {
            let raw = [&b"QEVM\0\0\0\x03\x04"[..], &noise].concat();
            let _ = validate(&raw);
        }
    }
}
