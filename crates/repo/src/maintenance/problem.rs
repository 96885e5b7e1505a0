//! What is wrong with a repository, by the file that it is wrong with.

use std::fmt;

use crate::error::RepoError;

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The file, relative to the repository.
    pub file: String,
    /// What is wrong with it.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.what)
    }
}

impl Problem {
    /// Puts an error down to the file it names, or else to `file`.
    pub(crate) fn from_error(file: String, error: &RepoError) -> Problem {
        match error {
            RepoError::Damaged { file, what } => Problem {
                file: file.clone(),
                what: what.clone(),
            },
            other => Problem {
                file,
                what: match std::error::Error::source(other) {
                    Some(cause) => format!("{other}: {cause}"),
                    None => other.to_string(),
                },
            },
        }
    }
}
