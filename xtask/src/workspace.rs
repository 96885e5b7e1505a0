//! Reads the description of this workspace from cargo.

use crate::run::{cargo, output};
use anyhow::{Context, Result};
use serde::Deserialize;
use std::path::PathBuf;
use std::process::Command;

/// Suffix of a commit name if the work tree had changes.
pub const DIRTY_MARK: &str = "-dirty";

/// The part of `cargo metadata` that is used here.
#[derive(Debug, Deserialize)]
pub struct Workspace {
    /// The folder of the workspace's Cargo.toml.
    #[serde(rename = "workspace_root")]
    pub root: PathBuf,
    /// The target directory.
    #[serde(rename = "target_directory")]
    pub target: PathBuf,
    /// The workspace's own packages.
    pub packages: Vec<Package>,
}

/// One crate of the workspace.
#[derive(Debug, Deserialize)]
pub struct Package {
    pub name: String,
    pub dependencies: Vec<Dependency>,
}

/// One dependency of a crate, of any kind (normal, dev, build).
#[derive(Debug, Deserialize)]
pub struct Dependency {
    pub name: String,
}

impl Workspace {
    /// Queries cargo.
    pub fn load() -> Result<Self> {
        let text = output(cargo().args(["metadata", "--format-version=1", "--no-deps"]))?;
        serde_json::from_str(&text).context("cannot read cargo metadata")
    }

    /// The current commit, with [`DIRTY_MARK`] if the work tree has changes outside docs/results.
    pub fn commit(&self) -> Result<String> {
        let git = |arguments: &[&str]| {
            output(Command::new("git").args(arguments).current_dir(&self.root))
        };
        let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
        let changed = git(&["status", "--porcelain", "--", ":/", ":!/docs/results"])?;
        let mark = if changed.is_empty() { "" } else { DIRTY_MARK };
        Ok(format!("{}{mark}", commit.trim()))
    }
}
