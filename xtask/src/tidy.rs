//! `tidy`: checks rules of the source tree that the compiler does not check.
//!
//! Each rule is a function from a source or a list of crates to problems, in a module of its own. Its tests have
//! samples that must pass and samples that must fail.

mod arrows;
mod imports;
mod packages;
mod results;
mod sizes;
mod source;
mod unsafety;
mod words;

use crate::claims;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use source::Source;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// A violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Problem {
    /// Path from the root of the repository.
    place: String,
    /// Line, counted from 1; 0 for the whole file.
    line: usize,
    message: String,
    severity: Severity,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Severity {
    /// Reported; the run passes.
    Warning,
    /// Reported; the run fails.
    Error,
}

impl Problem {
    fn error(place: &str, line: usize, message: impl Into<String>) -> Self {
        Self {
            place: place.to_owned(),
            line,
            message: message.into(),
            severity: Severity::Error,
        }
    }

    fn warning(place: &str, line: usize, message: impl Into<String>) -> Self {
        Self {
            severity: Severity::Warning,
            ..Self::error(place, line, message)
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        write!(out, "{kind}: {}", self.place)?;
        if self.line > 0 {
            write!(out, ":{}", self.line)?;
        }
        write!(out, ": {}", self.message)
    }
}

/// Checks all rules and prints every problem.
///
/// # Errors
/// A problem is an error.
pub fn tidy(workspace: &Workspace) -> Result<()> {
    let mut problems = arrows::check(&workspace.packages);
    problems.extend(packages::check(&read(&workspace.root, "Cargo.lock")?));
    problems.extend(packages::check_fuzz_lock(&workspace.root));
    problems.extend(check_specification(&workspace.root)?);
    problems.extend(results::check(&workspace.root)?);

    let mut sources = Vec::new();
    for place in rust_files(&workspace.root)? {
        match Source::parse(&place, read(&workspace.root, &place)?) {
            Ok(source) => sources.push(source),
            Err(error) => problems.push(Problem::error(
                &place,
                error.span().start().line,
                format!("cannot parse: {error}"),
            )),
        }
    }
    source::mark_test_files(&mut sources);
    let (found, graphs) = imports::check(&sources);
    problems.extend(found);
    for source in &sources {
        problems.extend(words::check(source));
        problems.extend(sizes::check(source));
        problems.extend(unsafety::check(source));
    }

    for problem in &problems {
        println!("{problem}");
    }
    for (name, graph) in graphs {
        let imports::Graph {
            modules,
            arrows,
            cycles,
            upward,
        } = graph;
        println!("{name}: {modules} modules, {arrows} imports, {cycles} cycles, {upward} upward");
    }
    let errors = problems
        .iter()
        .filter(|problem| problem.severity == Severity::Error)
        .count();
    println!("tidy: {} files, {errors} errors", sources.len());
    if errors > 0 {
        bail!("tidy found {errors} errors, see above");
    }
    Ok(())
}

/// Checks SPECIFICATION.md: ids of claims must be unique, and the code of each bench must exist.
fn check_specification(root: &Path) -> Result<Vec<Problem>> {
    let place = claims::SPECIFICATION;
    let specification = claims::Specification::parse(&read(root, place)?);
    Ok(match specification {
        Err(error) => vec![Problem::error(place, 0, format!("{error:#}"))],
        Ok(specification) => specification
            .problems(|path| !path.is_empty() && root.join(path).exists())
            .into_iter()
            .map(|(line, message)| Problem::error(place, line, message))
            .collect(),
    })
}

fn read(root: &Path, place: &str) -> Result<String> {
    fs::read_to_string(root.join(place)).with_context(|| format!("cannot read {place}"))
}

/// Every Rust file below the root, by relative path.
fn rust_files(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::from(root)];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let kind = entry.file_type().context("cannot read a file type")?;
            if kind.is_dir() && !name.starts_with('.') && name != "target" {
                folders.push(entry.path());
            } else if kind.is_file() && name.ends_with(".rs") {
                let path = entry.path();
                let below = path.strip_prefix(root).unwrap_or(&path);
                files.push(below.to_string_lossy().into_owned());
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_files_are_found_except_built_and_hidden_ones() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["crates/a/src", "target/debug", ".git"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        for file in [
            "crates/a/src/lib.rs",
            "crates/a/notes.md",
            "target/debug/b.rs",
            ".git/c.rs",
        ] {
            fs::write(root.path().join(file), "").unwrap();
        }
        assert_eq!(rust_files(root.path()).unwrap(), ["crates/a/src/lib.rs"]);
    }

    #[test]
    fn a_problem_is_printed_as_editors_expect() {
        let problem = Problem::error("crates/a/src/lib.rs", 7, "is too long");
        assert_eq!(
            problem.to_string(),
            "error: crates/a/src/lib.rs:7: is too long"
        );
        let problem = Problem::warning("Cargo.lock", 0, "grows");
        assert_eq!(problem.to_string(), "warning: Cargo.lock: grows");
    }
}
