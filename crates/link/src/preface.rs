//! The first bytes on a stream: what speaks there, which versions of the protocol, and whether it is let in.
//!
//! ```text
//!   the connecting side:   "stillframe link\n" | oldest u8 | newest u8
//!   the answer:            "stillframe link\n" | verdict u8 | version u8
//! ```
//!
//! The version of an answer is the agreed one, or the answering side's newest where there is none.

use std::ops::RangeInclusive;

pub(crate) const BYTES: usize = 18;
const MAGIC: [u8; 16] = *b"stillframe link\n";

/// The versions that one side speaks.
pub type Versions = RangeInclusive<u8>;

/// The answer to a connecting side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It is let in, and this version is spoken.
    Accepted { version: u8 },
    /// There is no version that both speak.
    NoVersion { newest: u8 },
    /// Its certificate is not among those that are let in.
    NotAllowed,
    /// The receiving side wants TLS.
    NeedsTls,
}

fn with_magic(a: u8, b: u8) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()] = a;
    bytes[MAGIC.len() + 1] = b;
    bytes
}

fn after_magic(bytes: &[u8; BYTES]) -> Option<(u8, u8)> {
    let (magic, rest) = bytes.split_at(MAGIC.len());
    (magic == MAGIC).then(|| (rest[0], rest[1]))
}

pub(crate) fn hello(versions: &Versions) -> [u8; BYTES] {
    with_magic(*versions.start(), *versions.end())
}

/// The versions in a preface; none if it is something else.
pub(crate) fn read_hello(bytes: &[u8; BYTES]) -> Option<Versions> {
    let (oldest, newest) = after_magic(bytes)?;
    (oldest <= newest).then_some(oldest..=newest)
}

impl Answer {
    pub fn write(self) -> [u8; BYTES] {
        match self {
            Answer::Accepted { version } => with_magic(0, version),
            Answer::NoVersion { newest } => with_magic(1, newest),
            Answer::NotAllowed => with_magic(2, 0),
            Answer::NeedsTls => with_magic(3, 0),
        }
    }

    pub fn read(bytes: &[u8; BYTES]) -> Option<Answer> {
        match after_magic(bytes)? {
            (0, version) => Some(Answer::Accepted { version }),
            (1, newest) => Some(Answer::NoVersion { newest }),
            (2, 0) => Some(Answer::NotAllowed),
            (3, 0) => Some(Answer::NeedsTls),
            _ => None,
        }
    }
}

/// The newest version that both sides speak.
pub(crate) fn agree(ours: &Versions, theirs: &Versions) -> Option<u8> {
    let newest = *ours.end().min(theirs.end());
    (ours.contains(&newest) && theirs.contains(&newest)).then_some(newest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_newest_common_version_is_agreed(a in 0..9u8, b in 0..9u8, c in 0..9u8, d in 0..9u8) {
            let (ours, theirs) = (a.min(b)..=a.max(b), c.min(d)..=c.max(d));
            let common = (0..9).rfind(|version| ours.contains(version) && theirs.contains(version));
            prop_assert_eq!(agree(&ours, &theirs), common);
            prop_assert_eq!(agree(&theirs, &ours), common);
        }

        #[test]
        fn prefaces_are_read_as_written(oldest: u8, newest: u8, version: u8, noise: [u8; BYTES]) {
            let versions = oldest..=newest;
            let read = read_hello(&hello(&versions));
            prop_assert_eq!(read, (oldest <= newest).then_some(versions));
            for answer in [
                Answer::Accepted { version },
                Answer::NoVersion { newest },
                Answer::NotAllowed,
                Answer::NeedsTls,
            ] {
                prop_assert_eq!(Answer::read(&answer.write()), Some(answer));
            }
            prop_assert_eq!(Answer::read(&noise), None);
            prop_assert_eq!(read_hello(&noise), None);
        }
    }
}
