//! The command line of `index`.

use std::path::PathBuf;

use clap::Args;

use super::LockArgs;

/// `index`
#[derive(Debug, Args)]
pub struct IndexArgs {
    /// Files that stay as they are: golden images, backing files
    #[arg(value_name = "IMAGE", required_unless_present = "list")]
    pub images: Vec<PathBuf>,
    /// List the indexed images
    #[arg(long, conflicts_with_all = ["images", "remove"])]
    pub list: bool,
    /// Make the repository do without these images, named by their paths or ids; the files stay
    #[arg(long)]
    pub remove: bool,
    /// How the repository is locked.
    #[command(flatten)]
    pub lock: LockArgs,
}
