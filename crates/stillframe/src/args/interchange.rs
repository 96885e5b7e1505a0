//! The command lines of `export` and `import`.

use std::path::PathBuf;

use clap::Args;
use stillframe_engine::export::Format;

use super::{LockArgs, NamedCheckpoint};

/// `export`
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The checkpoint.
    #[command(flatten)]
    pub checkpoint: NamedCheckpoint,
    /// Format of the file: mapped-ram, migration, raw or elf
    #[arg(long, value_name = "FORMAT", required_unless_present = "disk")]
    pub format: Option<Format>,
    /// Write this disk, as an image, instead of memory; `show` lists them
    #[arg(long, value_name = "NAME", conflicts_with = "format")]
    pub disk: Option<String>,
    /// Format of the disk's image: raw, qcow2 or another one that qemu-img writes [default: raw]
    #[arg(
        long,
        value_name = "FORMAT",
        requires = "disk",
        conflicts_with = "format"
    )]
    pub disk_format: Option<String>,
    /// File to write, or - for standard output (migration only)
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    pub force: bool,
    /// How the repository is locked.
    #[command(flatten)]
    pub lock: LockArgs,
}

/// `import`
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Migration file that QEMU wrote, as a stream or with mapped-ram
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The VM's name in the repository [default: its -name]
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// How the repository is locked.
    #[command(flatten)]
    pub lock: LockArgs,
    /// Command line of the QEMU that wrote the file
    #[arg(last = true, required = true, num_args = 1.., value_name = "QEMU ARGS")]
    pub command: Vec<String>,
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use clap::error::ErrorKind;

    use crate::args::{Cli, Command};

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(["stillframe"].into_iter().chain(line.split_whitespace()))
    }

    #[test]
    fn what_is_exported_and_imported() {
        let refused = |line: &str| parse(line).unwrap_err().kind();
        assert_eq!(
            refused("export latest -o f"),
            ErrorKind::MissingRequiredArgument
        );
        assert_eq!(
            refused("export latest --format vmdk -o f"),
            ErrorKind::ValueValidation
        );
        assert!(parse("export latest --format elf -o f --force --vm a").is_ok());
        assert!(parse("export latest --disk virtio0 -o f").is_ok());
        assert!(parse("export latest --disk virtio0 --disk-format qcow2 -o f").is_ok());
        assert!(parse("export latest --format raw --disk-format raw -o f").is_err());
        assert_eq!(
            refused("export latest --disk virtio0 --format raw -o f"),
            ErrorKind::ArgumentConflict
        );
        assert_eq!(refused("import f"), ErrorKind::MissingRequiredArgument);
        match parse("import f --vm a -- qemu -vm -m 64").unwrap().command {
            Command::Import(args) => assert_eq!(args.command, ["qemu", "-vm", "-m", "64"]),
            other => panic!("{other:?}"),
        }
    }
}
