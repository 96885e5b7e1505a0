//! The rows of the table of missed promises.

use super::table::{Row, bare};
use anyhow::{Context, Result};
use std::fmt;

/// The columns of the table of promises that do not hold.
pub const COLUMNS: [&str; 3] = ["missed", "last measured", "what is known"];

const NEVER: &str = "never";

/// Prefix of the cell of a promise whose last figure is of another form; the commit of that figure follows.
const OTHER_FORM: &str = "not in this form at ";

/// A promise that its last measurement does not confirm.
#[derive(Debug, PartialEq)]
pub struct Missed {
    pub line: usize,
    pub claim: String,
    pub last: LastMeasured,
}

/// Why the last measurement does not confirm a promise.
#[derive(Debug, Clone, PartialEq)]
pub enum LastMeasured {
    /// There is no measurement.
    Never,
    /// The figure of this commit is for another goal or another wording of the promise.
    OtherForm(String),
    /// This figure does not meet the goal.
    Figure(f64),
}

impl LastMeasured {
    fn parse(text: &str) -> Result<Self> {
        if text == NEVER {
            return Ok(Self::Never);
        }
        if let Some(commit) = text.strip_prefix(OTHER_FORM) {
            return Ok(Self::OtherForm(commit.to_owned()));
        }
        let figure = text.parse().with_context(|| {
            format!("{text:?} is not a figure, {NEVER:?} or {OTHER_FORM:?} and a commit")
        })?;
        Ok(Self::Figure(figure))
    }
}

impl fmt::Display for LastMeasured {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => out.write_str(NEVER),
            Self::OtherForm(commit) => write!(out, "{OTHER_FORM}{commit}"),
            Self::Figure(figure) => write!(out, "{figure}"),
        }
    }
}

/// Reads a row of the table.
pub fn parse_missed(row: &Row<'_>) -> Result<Missed> {
    Ok(Missed {
        line: row.line,
        claim: bare(row.cells[0]),
        last: LastMeasured::parse(&bare(row.cells[1]))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_read_as_they_are_written() {
        for cell in ["never", "not in this form at 0123abc", "0.773", "17"] {
            assert_eq!(LastMeasured::parse(cell).unwrap().to_string(), cell);
        }
        for cell in ["", "soon", "not in this form"] {
            assert!(LastMeasured::parse(cell).is_err(), "{cell:?}");
        }
    }
}
