//! The command line of `certs`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// `certs`
#[derive(Debug, Args)]
pub struct CertsArgs {
    /// The certificate to make.
    #[command(subcommand)]
    pub command: CertsCommand,
}

/// The certificates.
#[derive(Debug, Subcommand)]
pub enum CertsCommand {
    /// Make an authority, which signs the certificates of all hosts
    Authority {
        /// Directory to create
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Make key and certificate of a host
    Host(HostArgs),
}

/// `certs host`
#[derive(Debug, Args)]
pub struct HostArgs {
    /// Names and addresses of the host, as the other hosts call it
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
    /// Directory of the authority
    #[arg(long, value_name = "DIR")]
    pub authority: PathBuf,
    /// Directory to create, for the host
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// How long the certificate is valid
    #[arg(long, value_name = "DAYS", default_value = "730", value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub days: u32,
}
