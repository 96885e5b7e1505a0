//! `certs`: an authority, and the certificates of hosts.

use serde_json::json;
use stillframe_link::{authority, identity};

use super::Context;
use crate::args::{CertsArgs, CertsCommand, HostArgs};
use crate::table::printable;

/// Makes a certificate.
pub fn run(context: &Context, args: &CertsArgs) -> anyhow::Result<()> {
    match &args.command {
        CertsCommand::Authority { folder } => {
            authority::make(folder)?;
            context
                .console
                .result(&json!({ "authority": folder }), || {
                    format!(
                        "made an authority in {}: keep {} secret; no host needs it",
                        printable(&folder.display().to_string()),
                        identity::AUTHORITY_KEY
                    )
                })?;
        }
        CertsCommand::Host(args) => host(context, args)?,
    }
    Ok(())
}

fn host(context: &Context, args: &HostArgs) -> anyhow::Result<()> {
    authority::make_host(&args.authority, &args.output, &args.names, args.days)?;
    let result = json!({ "host": args.output, "names": args.names, "days": args.days });
    context.console.result(&result, || {
        format!(
            "made a certificate for {} in {}: move the directory there, for --certs",
            printable(&args.names.join(", ")),
            printable(&args.output.display().to_string()),
        )
    })?;
    Ok(())
}
