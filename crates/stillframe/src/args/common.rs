//! Options that several commands share.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;

use crate::durations;

/// Where the disks of a restored VM, or of clones, come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RestoreDisks {
    /// They are written anew, into images in this directory.
    New(PathBuf),
    /// As that, but the VM runs meanwhile.
    Lazy(PathBuf),
    /// They are the recorded ones, whatever they hold now.
    AsTheyAre,
    /// They are empty, and vanish with the VM.
    Nothing,
}

impl FromStr for RestoreDisks {
    type Err = String;

    fn from_str(text: &str) -> Result<RestoreDisks, String> {
        match text.split_once('=') {
            Some(("new", folder)) if !folder.is_empty() => Ok(RestoreDisks::New(folder.into())),
            Some(("lazy", folder)) if !folder.is_empty() => Ok(RestoreDisks::Lazy(folder.into())),
            None if text == "as-they-are" => Ok(RestoreDisks::AsTheyAre),
            None if text == "none" => Ok(RestoreDisks::Nothing),
            _ => Err("it is not new=DIR, lazy=DIR, as-they-are or none".to_owned()),
        }
    }
}

/// How a command waits for the repository.
#[derive(Debug, Clone, Args)]
pub struct LockArgs {
    /// How long to wait for another process's lock on the repository
    #[arg(long, value_name = "TIME", value_parser = durations::parse, default_value = "10s")]
    pub lock_wait: Duration,
}

/// How a guest continues from a checkpoint; shared by `restore`, `clone` and `rewind`.
#[derive(Debug, Clone, Default, Args)]
pub struct GuestArgs {
    /// Leave the guest paused; `cont` on its monitor runs it
    #[arg(long)]
    pub paused: bool,
    /// Leave the guest's clock as at the checkpoint [default: its guest agent sets the clock]
    #[arg(long)]
    pub keep_guest_clock: bool,
    /// Compare all memory with the checkpoint before the guest runs
    #[arg(long)]
    pub verify: bool,
}
