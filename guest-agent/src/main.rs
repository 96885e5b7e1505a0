//! Stillframe's agent for Linux guests. It answers the host over a port of virtio-serial: which pages are free, how memory is
//! used, and what the time is.
//!
//! ```text
//!   port ──> lines ──> requests ──> free_pages, memory, clock
//! ```
//!
//! The protocol is that of QEMU's own agent (`docs/interop/qemu-ga-ref`), with two commands more. Nothing that the host sends
//! has it read other files, or run programs. It is optional: `qemu-ga` does for guests up to 4 GiB, where its configuration
//! lets the host read files.

mod clock;
mod free_pages;
mod lines;
mod memory;
mod port;
mod requests;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use crate::port::{Port, PortError};

/// Tells the host which pages of this guest are free, how memory is used, and what the time is.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The port. Without, that of the name org.stillframe.agent.0: `qemu-system-x86_64 ... -device virtio-serial
    /// -chardev socket,id=stillframe,path=SOCKET,server=on,wait=off
    /// -device virtserialport,chardev=stillframe,name=org.stillframe.agent.0`.
    port: Option<PathBuf>,
}

fn main() -> ExitCode {
    match serve(&Arguments::parse()) {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("stillframe-guest-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Answers requests for ever.
fn serve(arguments: &Arguments) -> Result<std::convert::Infallible, PortError> {
    let mut port = match &arguments.port {
        Some(path) => Port::open(path)?,
        None => Port::named()?,
    };
    loop {
        let line = port.line()?;
        port.send(&requests::answer(&line))?;
    }
}
