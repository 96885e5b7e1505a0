//! Queries git for measured commits, and for changes of the code since.

use crate::run::output;
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Minimum number of hexadecimal digits that name a commit.
const COMMIT_DIGITS_MIN: usize = 7;

/// Prefix of the line of a commit; the files that it touched follow.
const COMMIT_MARK: &str = "commit:";

/// Unit tests, which change no measurement; those of `tests/`, which measure, are no part of a source folder.
const TESTS: [&str; 2] = [
    ":(exclude,glob)**/src/**/tests.rs",
    ":(exclude,glob)**/src/**/tests/**",
];

/// The history that ends in HEAD.
pub trait History {
    /// Whether HEAD has this file or folder.
    fn has_path(&self, path: &str) -> bool;

    /// The changes of `paths` since `commit`, apart from files of unit tests.
    fn since(&self, commit: &str, paths: &[String]) -> Result<Since>;
}

/// The changes of some files since a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Since {
    /// The commit is not in the history.
    UnknownCommit,
    /// No later commit has touched the files.
    Unchanged,
    /// Later commits have touched the files.
    Changed {
        /// The number of these commits.
        commits: usize,
        /// The file that was touched first.
        first_path: String,
    },
}

/// The git history of a repository.
pub struct GitHistory {
    root: PathBuf,
    /// Full names of HEAD and its ancestors.
    commits: Vec<String>,
    /// Files of HEAD.
    files: Vec<String>,
}

impl GitHistory {
    /// Reads the names of all commits and files.
    pub fn read(root: &Path) -> Result<Self> {
        let commits = git(root, &["rev-list", "HEAD"])?;
        let files = git(
            root,
            &["ls-tree", "-r", "-z", "--name-only", "--full-tree", "HEAD"],
        )?;
        Ok(Self {
            root: root.to_owned(),
            commits: commits.lines().map(str::to_owned).collect(),
            files: files.split_terminator('\0').map(str::to_owned).collect(),
        })
    }

    /// Whether this is the full or shortened name of exactly one commit.
    fn has_commit(&self, commit: &str) -> bool {
        let named = |full: &&String| full.starts_with(commit);
        commit.len() >= COMMIT_DIGITS_MIN && self.commits.iter().filter(named).count() == 1
    }
}

impl History for GitHistory {
    fn has_path(&self, path: &str) -> bool {
        let is_or_holds = |file: &String| {
            let rest = file.strip_prefix(path);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.files.iter().any(is_or_holds)
    }

    fn since(&self, commit: &str, paths: &[String]) -> Result<Since> {
        if !self.has_commit(commit) {
            return Ok(Since::UnknownCommit);
        }
        let format = format!("--format={COMMIT_MARK}%H");
        let range = format!("{commit}..HEAD");
        let mut arguments = vec!["-c", "core.quotePath=off", "log"];
        // By default a merge lists no file, not even one that differs from all its parents.
        arguments.extend(["--reverse", "--diff-merges=combined", "--name-only"]);
        arguments.extend([format.as_str(), range.as_str(), "--"]);
        let literal: Vec<String> = paths
            .iter()
            .map(|path| format!(":(literal){path}"))
            .collect();
        arguments.extend(literal.iter().map(String::as_str));
        arguments.extend(TESTS);
        let log = git(&self.root, &arguments)?;
        let lines = || log.lines().filter(|line| !line.is_empty());
        let is_commit = |line: &&str| line.starts_with(COMMIT_MARK);
        let commits = lines().filter(is_commit).count();
        if commits == 0 {
            return Ok(Since::Unchanged);
        }
        let first_path = lines().find(|line| !is_commit(line)).unwrap_or_default();
        Ok(Since::Changed {
            commits,
            first_path: first_path.to_owned(),
        })
    }
}

fn git(root: &Path, arguments: &[&str]) -> Result<String> {
    output(Command::new("git").args(arguments).current_dir(root))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::fs;

    /// A new repository in an empty folder.
    pub struct Sample(pub tempfile::TempDir);

    impl Sample {
        pub fn new() -> Self {
            let sample = Self(tempfile::tempdir().unwrap());
            sample.git(&["init", "--quiet", "--initial-branch=main"]);
            sample
        }

        pub fn root(&self) -> &Path {
            self.0.path()
        }

        /// Runs git in this repository, without user settings.
        pub fn git(&self, arguments: &[&str]) -> String {
            let mut command = Command::new("git");
            for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
                command.env_remove(name);
            }
            command
                .env("GIT_CONFIG_GLOBAL", "/dev/null")
                .env("GIT_CONFIG_SYSTEM", "/dev/null")
                .args(["-c", "user.name=a", "-c", "user.email=a@example.org"])
                .args(arguments)
                .current_dir(self.root());
            output(&mut command).unwrap().trim().to_owned()
        }

        /// Commits a change of a file; returns the name of the commit.
        pub fn commit(&self, path: &str, text: &str) -> String {
            let file = self.root().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
            self.git(&["add", "--all"]);
            self.git(&["commit", "--quiet", "--message", path]);
            self.git(&["rev-parse", "HEAD"])
        }
    }

    fn changed(commits: usize, first_path: &str) -> Since {
        let first_path = first_path.to_owned();
        Since::Changed {
            commits,
            first_path,
        }
    }

    #[test]
    fn changes_count_only_after_the_commit_and_in_the_paths() {
        let sample = Sample::new();
        sample.commit("code/a.rs", "1");
        let measured = sample.commit("code/b.rs", "1");
        let paths = ["code".to_owned(), "bench.rs".to_owned()];
        let since = |commit: &str| {
            GitHistory::read(sample.root())
                .unwrap()
                .since(commit, &paths)
        };
        assert_eq!(since(&measured).unwrap(), Since::Unchanged);
        sample.commit("docs/results.md", "1");
        assert_eq!(since(&measured).unwrap(), Since::Unchanged);
        sample.commit("bench.rs", "1");
        sample.commit("code/a.rs", "2");
        sample.commit("codec/a.rs", "2");
        assert_eq!(since(&measured).unwrap(), changed(2, "bench.rs"));
        assert_eq!(since(&measured[..7]).unwrap(), changed(2, "bench.rs"));
        let now = sample.git(&["rev-parse", "HEAD"]);
        assert_eq!(since(&now).unwrap(), Since::Unchanged);
    }

    #[test]
    fn unit_tests_are_no_change() {
        let sample = Sample::new();
        let measured = sample.commit("a/src/b.rs", "1");
        let since = || {
            let history = GitHistory::read(sample.root()).unwrap();
            history.since(&measured, &["a/src".to_owned()]).unwrap()
        };
        for path in ["a/src/tests.rs", "a/src/b/tests.rs", "a/src/tests/c.rs"] {
            sample.commit(path, "1");
        }
        assert_eq!(since(), Since::Unchanged);
        sample.commit("a/src/contests.rs", "1");
        assert_eq!(since(), changed(1, "a/src/contests.rs"));
    }

    #[test]
    fn a_commit_that_is_no_ancestor_of_head_is_unknown() {
        let sample = Sample::new();
        let first = sample.commit("a", "1");
        sample.git(&["switch", "--quiet", "--create", "side"]);
        let side = sample.commit("a", "2");
        sample.git(&["switch", "--quiet", "main"]);
        sample.commit("b", "1");
        let history = GitHistory::read(sample.root()).unwrap();
        let paths = ["a".to_owned()];
        assert_eq!(history.since(&first, &paths).unwrap(), Since::Unchanged);
        for unknown in [
            side.as_str(),
            "0123456789ab",
            "unknown",
            "HEAD",
            "main",
            "--all",
            "",
            &first[..6],
            &format!("{first}0"),
        ] {
            let since = history.since(unknown, &paths).unwrap();
            assert_eq!(since, Since::UnknownCommit, "{unknown:?}");
        }
    }

    #[test]
    fn a_merge_counts_with_its_commits_and_its_own_changes() {
        let sample = Sample::new();
        let measured = sample.commit("a", "1");
        sample.git(&["switch", "--quiet", "--create", "side"]);
        sample.commit("b", "1");
        sample.git(&["switch", "--quiet", "main"]);
        sample.commit("c", "1");
        sample.git(&["merge", "--quiet", "--no-commit", "side"]);
        sample.commit("d", "1");
        let history = GitHistory::read(sample.root()).unwrap();
        let since = |path: &str| history.since(&measured, &[path.to_owned()]).unwrap();
        assert_eq!(since("a"), Since::Unchanged);
        assert_eq!(since("b"), changed(1, "b"));
        assert_eq!(since("d"), changed(1, "d"));
    }

    #[test]
    fn only_files_and_folders_of_head_are_found() {
        let sample = Sample::new();
        sample.commit("gone/a.rs", "1");
        sample.git(&["rm", "--quiet", "gone/a.rs"]);
        sample.commit("crates/page/src/ü.rs", "1");
        fs::write(sample.root().join("new.rs"), "").unwrap();
        let history = GitHistory::read(sample.root()).unwrap();
        for present in ["crates", "crates/page", "crates/page/src/ü.rs"] {
            assert!(history.has_path(present), "{present}");
        }
        for missing in [
            "crate",
            "crates/page/",
            "gone",
            "gone/a.rs",
            "new.rs",
            "",
            ".",
        ] {
            assert!(!history.has_path(missing), "{missing}");
        }
    }

    #[test]
    fn a_clone_gives_the_same_changes_as_its_original() {
        let sample = Sample::new();
        let measured = sample.commit("a", "1");
        sample.commit("a", "2");
        let copy = tempfile::tempdir().unwrap();
        let place = copy.path().join("clone");
        sample.git(&["clone", "--quiet", ".", &place.to_string_lossy()]);
        let history = GitHistory::read(&place).unwrap();
        let since = history.since(&measured, &["a".to_owned()]).unwrap();
        assert_eq!(since, changed(1, "a"));
    }
}
