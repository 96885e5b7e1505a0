//! How a new QEMU is started; shared by `restore` and `clone`.

use std::path::PathBuf;

use clap::Args;

/// What a recorded VM does not decide by itself.
#[derive(Debug, Clone, Default, Args)]
pub struct StartArgs {
    /// Run this QEMU instead of the recorded program
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Start QEMU as root, not as the user that the VM ran as
    #[arg(long)]
    pub as_root: bool,
    /// Start QEMU without the security label that confined the VM (SELinux, AppArmor)
    #[arg(long)]
    pub without_label: bool,
    /// Start QEMU in the control group of this command, not in the one that the VM was in
    #[arg(long)]
    pub without_group: bool,
    /// Run the programs that the VM's command line names (network scripts, helpers)
    #[arg(long)]
    pub allow_commands: bool,
}
