//! Problems of a repository, by the file that has them.

use std::fmt;

use crate::error::RepoError;

/// A problem of a repository.
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
    /// Assigns an error to the file that it names, or else to `file`.
    pub(crate) fn from_error(file: String, error: &RepoError) -> Problem {
        match error {
            RepoError::Image { path: file, what } | RepoError::Damaged { file, what } => Problem {
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
