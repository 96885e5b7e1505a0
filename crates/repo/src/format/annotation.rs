//! Tags and notes that users give a checkpoint. They are part of its manifest, so they are authenticated,
//! encrypted and final like the rest of it.

use std::collections::{BTreeSet, btree_set};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Maximum number of tags of a checkpoint.
pub const TAGS_MAX: usize = 32;

/// Maximum length of a tag in bytes.
pub const TAG_BYTES_MAX: usize = 64;

/// Maximum length of a note in bytes.
pub const NOTE_BYTES_MAX: usize = 1024;

/// Characters allowed in a tag besides ASCII letters and digits. A tag does not begin with one.
pub const TAG_PUNCTUATION: &str = "._-:/+@=";

/// Why a text is not a valid tag, note or list of tags.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AnnotationError {
    /// An empty tag.
    #[error("the tag is empty: give it a name, like nightly")]
    EmptyTag,
    /// A tag longer than [`TAG_BYTES_MAX`].
    #[error("the tag has {bytes} bytes, at most {TAG_BYTES_MAX} are allowed: shorten it")]
    LongTag {
        /// Its length.
        bytes: usize,
    },
    /// A tag that begins with punctuation.
    #[error("the tag '{tag}' begins with '{found}': begin it with a letter or a digit")]
    TagBegin {
        /// The tag.
        tag: String,
        /// Its first character.
        found: char,
    },
    /// A tag with a character that is not allowed.
    #[error(
        "the tag has the character {found:?}: use letters (a-z, A-Z), digits and {TAG_PUNCTUATION} only, and name each tag by an option of its own"
    )]
    TagCharacter {
        /// The first such character.
        found: char,
    },
    /// More tags than [`TAGS_MAX`].
    #[error("a checkpoint has at most {TAGS_MAX} tags, these are {count}: leave some out")]
    ManyTags {
        /// Number of different tags.
        count: usize,
    },
    /// An empty note.
    #[error("the note is empty: write something, or leave it out")]
    EmptyNote,
    /// A note longer than [`NOTE_BYTES_MAX`].
    #[error("the note has {bytes} bytes, at most {NOTE_BYTES_MAX} are allowed: shorten it")]
    LongNote {
        /// Its length.
        bytes: usize,
    },
    /// A note with a control character.
    #[error("the note has the control character {found:?}: write it in one line, without tabs")]
    NoteCharacter {
        /// The first such character.
        found: char,
    },
}

/// A word by which users find and keep checkpoints, such as `nightly` or `before-upgrade`. It has 1 to
/// [`TAG_BYTES_MAX`] bytes: ASCII letters, digits and [`TAG_PUNCTUATION`]. It begins with a letter or a digit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tag(String);

impl Tag {
    /// The word.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for Tag {
    type Error = AnnotationError;

    fn try_from(text: String) -> Result<Tag, AnnotationError> {
        if text.len() > TAG_BYTES_MAX {
            return Err(AnnotationError::LongTag { bytes: text.len() });
        }
        let first = text.chars().next().ok_or(AnnotationError::EmptyTag)?;
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || TAG_PUNCTUATION.contains(c);
        if let Some(found) = text.chars().find(|&c| !is_allowed(c)) {
            return Err(AnnotationError::TagCharacter { found });
        }
        match first.is_ascii_alphanumeric() {
            true => Ok(Tag(text)),
            false => Err(AnnotationError::TagBegin {
                tag: text,
                found: first,
            }),
        }
    }
}

impl FromStr for Tag {
    type Err = AnnotationError;

    fn from_str(text: &str) -> Result<Tag, AnnotationError> {
        Tag::try_from(text.to_owned())
    }
}

impl From<Tag> for String {
    fn from(tag: Tag) -> String {
        tag.0
    }
}

/// The tags of a checkpoint: up to [`TAGS_MAX`] different ones, in alphabetical order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Tag>", into = "Vec<Tag>")]
pub struct Tags(BTreeSet<Tag>);

impl Tags {
    /// Whether there are no tags.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all of `wanted` are among the tags; true for an empty list.
    pub fn has_all(&self, wanted: &[Tag]) -> bool {
        wanted.iter().all(|tag| self.0.contains(tag))
    }

    /// Whether at least one of `wanted` is among the tags.
    pub fn has_any(&self, wanted: &[Tag]) -> bool {
        wanted.iter().any(|tag| self.0.contains(tag))
    }

    /// The tags in alphabetical order.
    pub fn iter(&self) -> btree_set::Iter<'_, Tag> {
        self.0.iter()
    }
}

impl TryFrom<Vec<Tag>> for Tags {
    type Error = AnnotationError;

    /// A tag that is named twice counts once.
    fn try_from(tags: Vec<Tag>) -> Result<Tags, AnnotationError> {
        let tags = BTreeSet::from_iter(tags);
        match tags.len() {
            0..=TAGS_MAX => Ok(Tags(tags)),
            count => Err(AnnotationError::ManyTags { count }),
        }
    }
}

impl From<Tags> for Vec<Tag> {
    fn from(tags: Tags) -> Vec<Tag> {
        tags.0.into_iter().collect()
    }
}

/// A sentence about a checkpoint: 1 to [`NOTE_BYTES_MAX`] bytes of UTF-8 without control characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Note(String);

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for Note {
    type Error = AnnotationError;

    fn try_from(text: String) -> Result<Note, AnnotationError> {
        if text.is_empty() {
            return Err(AnnotationError::EmptyNote);
        }
        if text.len() > NOTE_BYTES_MAX {
            return Err(AnnotationError::LongNote { bytes: text.len() });
        }
        match text.chars().find(|c| c.is_control()) {
            Some(found) => Err(AnnotationError::NoteCharacter { found }),
            None => Ok(Note(text)),
        }
    }
}

impl FromStr for Note {
    type Err = AnnotationError;

    fn from_str(text: &str) -> Result<Note, AnnotationError> {
        Note::try_from(text.to_owned())
    }
}

impl From<Note> for String {
    fn from(note: Note) -> String {
        note.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_a_short_word() {
        let longest = "x".repeat(TAG_BYTES_MAX);
        for good in ["nightly", "7", "v1.2+rc-3", "team:web/eu@2=a_b", &longest] {
            assert_eq!(good.parse::<Tag>().unwrap().as_str(), good);
        }
        let bytes = TAG_BYTES_MAX + 1;
        let long = "x".repeat(bytes);
        assert_eq!(long.parse::<Tag>(), Err(AnnotationError::LongTag { bytes }));
        assert_eq!("".parse::<Tag>(), Err(AnnotationError::EmptyTag));
        for found in [
            ' ', ',', '\n', '\t', '\0', '\u{7f}', 'ä', '\u{a0}', '\'', '~', '*',
        ] {
            let error = format!("a{found}b").parse::<Tag>().unwrap_err();
            assert_eq!(error, AnnotationError::TagCharacter { found });
        }
        for found in TAG_PUNCTUATION.chars() {
            let tag = format!("{found}a");
            let error = tag.parse::<Tag>().unwrap_err();
            assert_eq!(error, AnnotationError::TagBegin { tag, found });
        }
    }

    #[test]
    fn a_note_is_one_line() {
        let longest = "x".repeat(NOTE_BYTES_MAX);
        for good in ["before the upgrade, büro 3", " ", &longest] {
            assert_eq!(good.parse::<Note>().unwrap().to_string(), good);
        }
        // The limit counts bytes, not characters.
        let bytes = NOTE_BYTES_MAX + 2;
        let long = "ä".repeat(bytes / 2);
        assert_eq!(
            long.parse::<Note>(),
            Err(AnnotationError::LongNote { bytes })
        );
        assert_eq!("".parse::<Note>(), Err(AnnotationError::EmptyNote));
        for found in ['\n', '\r', '\t', '\0', '\x1b', '\u{7f}', '\u{9b}'] {
            let error = format!("a{found}b").parse::<Note>().unwrap_err();
            assert_eq!(error, AnnotationError::NoteCharacter { found });
        }
    }

    #[test]
    fn tags_are_a_set_of_at_most_32() {
        let numbered = |count: usize| -> Vec<Tag> {
            (0..count)
                .map(|n| format!("{n}").parse().unwrap())
                .collect()
        };
        let mut twice = numbered(TAGS_MAX);
        twice.extend(numbered(TAGS_MAX));
        let tags = Tags::try_from(twice).unwrap();
        assert_eq!(tags.iter().count(), TAGS_MAX);
        let count = TAGS_MAX + 1;
        assert_eq!(
            Tags::try_from(numbered(count)),
            Err(AnnotationError::ManyTags { count })
        );
    }

    #[test]
    fn some_all_or_none_are_among_the_tags() {
        let tag = |text: &str| text.parse::<Tag>().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(tag);
        let tags = Tags::try_from(vec![b.clone(), a.clone()]).unwrap();
        assert!(tags.has_all(&[]) && tags.has_all(&[a.clone(), b.clone()]));
        assert!(!tags.has_all(&[a.clone(), c.clone()]));
        assert!(tags.has_any(&[c.clone(), a]));
        assert!(!tags.has_any(&[c]) && !tags.has_any(&[]));
        assert!(Tags::default().is_empty() && !tags.is_empty());
    }
}
