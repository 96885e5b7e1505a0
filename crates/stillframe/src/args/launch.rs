//! Options of the commands that start a new QEMU: `restore`, `clone` and `receive`.

use std::path::PathBuf;

use clap::Args;

/// How a new QEMU differs from the recorded VM.
#[derive(Debug, Clone, Default, Args)]
pub struct LaunchArgs {
    /// Replace a word of the VM's command line, such as the path of a disk, a tap or a port; may be given several times
    #[arg(long, visible_alias = "map", value_name = "OLD=NEW", value_parser = parse_replacement)]
    pub replace: Vec<(String, String)>,
    /// Use the disks although they have changed since the checkpoint; this may damage the data on them
    #[arg(long)]
    pub disks_as_they_are: bool,
    /// Run this QEMU instead of the recorded program
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Start QEMU as root, not as the user that the VM ran as
    #[arg(long)]
    pub as_root: bool,
    /// Start QEMU without the security label that confined the VM (SELinux, AppArmor)
    #[arg(long)]
    pub without_label: bool,
    /// Start QEMU in the control group of this command, not in the VM's
    #[arg(long)]
    pub without_group: bool,
    /// Run programs that the VM's command line names (network scripts, helpers)
    #[arg(long)]
    pub allow_commands: bool,
}

/// Splits `OLD=NEW` at its first `=`.
fn parse_replacement(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() => Ok((old.to_owned(), new.to_owned())),
        _ => Err(format!("'{text}' is not OLD=NEW")),
    }
}
