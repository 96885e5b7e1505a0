//! A result page: a paper's result, our measurement, a picture, and the differences with their reasons.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Value, json};

use stillframe_harness::results::{self, Claim};

/// A page being written, and the folder that it and its pictures go to.
#[derive(Debug)]
pub struct Page {
    folder: PathBuf,
    text: String,
    raw: Vec<Value>,
}

/// One table or figure of the paper.
#[derive(Debug)]
pub struct Figure<'a> {
    /// As in `Table I: changed bytes, page by page`.
    pub title: &'a str,
    /// The paper's result, in words and figures.
    pub paper: &'a str,
    /// Our result, in a sentence.
    pub ours: &'a str,
    /// Names of the columns.
    pub columns: &'a [&'a str],
    /// The rows.
    pub rows: &'a [Vec<String>],
    /// File names of pictures in the folder.
    pub pictures: &'a [&'a str],
    /// The differences from the paper's setting, and their reasons.
    pub differs: &'a str,
}

impl Page {
    /// A page in `docs/results/<bench>`, or in `folder`. `setting`: guests, host, and what is the same
    /// for all figures.
    pub fn new(
        bench: &str,
        elsewhere: Option<&Path>,
        title: &str,
        command: &str,
        setting: &str,
    ) -> Result<Page> {
        let folder = match elsewhere {
            Some(folder) => folder.to_owned(),
            None => results::folder(bench)?,
        };
        let commit = results::commit();
        Ok(Page {
            folder,
            text: format!(
                "# {title}\n\n`{command}`, commit {commit}. Raw data: `raw.jsonl`, compressed with zstd where it is long.\n\n{setting}\n"
            ),
            raw: Vec::new(),
        })
    }

    /// Where a picture goes.
    pub fn picture(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Adds one figure.
    pub fn add(&mut self, figure: &Figure<'_>) {
        let Figure {
            title,
            paper,
            ours,
            columns,
            rows,
            pictures,
            differs,
        } = figure;
        let mut text = format!("\n## {title}\n\nPaper: {paper}\n\nOurs: {ours}\n\n");
        if !rows.is_empty() {
            let _ = writeln!(
                text,
                "| {} |\n|{}",
                columns.join(" | "),
                " --- |".repeat(columns.len())
            );
            for row in *rows {
                let _ = writeln!(text, "| {} |", row.join(" | "));
            }
            text.push('\n');
        }
        for picture in *pictures {
            let _ = writeln!(text, "![{title}]({picture})\n");
        }
        let _ = writeln!(text, "What differs: {differs}");
        self.text += &text;
    }

    /// Adds the promises that this evaluation answers.
    pub fn add_claims(&mut self, claims: &[Claim], paper: &str, differs: &str) {
        let row = |claim: &Claim| {
            let holds = if claim.holds { "yes" } else { "**NO**" };
            let value = format!("{} {}", claim.value, claim.unit);
            vec![
                claim.claim.into(),
                claim.goal.to_string(),
                value,
                holds.into(),
            ]
        };
        let failed = claims.iter().filter(|claim| !claim.holds).count();
        self.add(&Figure {
            title: "What is promised",
            paper,
            ours: &format!("{failed} of {} promises do not hold.", claims.len()),
            columns: &["promise", "goal", "measured", "holds"],
            rows: &claims.iter().map(row).collect::<Vec<_>>(),
            pictures: &[],
            differs,
        });
    }

    /// Keeps something measured.
    pub fn keep(&mut self, what: &str, value: Value) {
        self.raw.push(json!({"what": what, "value": value}));
    }

    /// Writes page and raw data.
    pub fn write(self) -> Result<()> {
        fs::write(self.folder.join("README.md"), &self.text)?;
        let raw: String = self.raw.iter().map(|line| format!("{line}\n")).collect();
        results::write_text(&self.folder, "raw.jsonl", &raw)?;
        print!("{}", self.text);
        Ok(())
    }
}
