//! What cargo knows of this workspace.

use crate::run::{answer, cargo};
use anyhow::{Context, Result};
use serde::Deserialize;
use std::path::PathBuf;
use std::process::Command;

/// Ends the name of a commit where the work tree had changes.
pub const DIRTY_MARK: &str = "-dirty";

/// The part of `cargo metadata` that is used here.
#[derive(Debug, Deserialize)]
pub struct Workspace {
    /// The folder of the workspace's Cargo.toml.
    #[serde(rename = "workspace_root")]
    pub root: PathBuf,
    /// Where cargo builds to.
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

/// One dependency of a crate, of whatever kind (normal, dev, build).
#[derive(Debug, Deserialize)]
pub struct Dependency {
    pub name: String,
}

impl Workspace {
    /// Asks cargo.
    pub fn load() -> Result<Self> {
        let text = answer(cargo().args(["metadata", "--format-version=1", "--no-deps"]))?;
        serde_json::from_str(&text).context("cannot read cargo metadata")
    }

    /// The commit that is measured, with [`DIRTY_MARK`] when the work tree has changes. What other benches
    /// have just written is none.
    pub fn commit(&self) -> Result<String> {
        let git = |arguments: &[&str]| {
            answer(Command::new("git").args(arguments).current_dir(&self.root))
        };
        let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
        let changed = git(&["status", "--porcelain", "--", ":/", ":!/docs/results"])?;
        let mark = if changed.is_empty() { "" } else { DIRTY_MARK };
        Ok(format!("{}{mark}", commit.trim()))
    }
}
