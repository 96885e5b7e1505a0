//! Two hosts: network namespaces, the link between them, and the certificates by which they trust each other.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use serde_json::{Value, json};
use tempfile::TempDir;

use stillframe_harness::cli::Stillframe;
use stillframe_harness::network::{ADDRESSES, Link};

/// The file names of `stillframe certs host`, and those of QEMU's `tls-creds-x509` objects at the host that sends and at the
/// other. The authority's certificate has one name in both.
const NAMES: [(&str, [&str; 2]); 2] = [
    ("cert.pem", ["client-cert.pem", "server-cert.pem"]),
    ("key.pem", ["client-key.pem", "server-key.pem"]),
];

/// Two hosts, of which the first sends.
#[derive(Debug)]
pub struct Hosts {
    /// The link between them.
    pub link: Link,
    folder: TempDir,
}

impl Hosts {
    /// Two hosts and a link as quick as this machine.
    pub fn new() -> Result<Hosts> {
        let folder = tempfile::Builder::new()
            .prefix("stillframe-hosts-")
            .tempdir()?;
        let hosts = Hosts {
            link: Link::new()?,
            folder,
        };
        // Certificates need no repository.
        let stillframe = Stillframe::at(&hosts.folder.path().join("none"));
        let authority = hosts.folder.path().join("authority").display().to_string();
        stillframe.ok(&["certs", "authority", &authority])?;
        for (side, address) in ADDRESSES.iter().enumerate() {
            let own = hosts.certificates(side);
            let output = own.display().to_string();
            let line = ["certs", "host", address, "--authority", &authority];
            stillframe.ok(&[&line[..], &["--output", &output]].concat())?;
            for (name, of_qemu) in NAMES {
                fs::copy(own.join(name), own.join(of_qemu[side]))?;
            }
        }
        Ok(hosts)
    }

    /// The directory for `--certs` of that host.
    pub fn certificates(&self, side: usize) -> PathBuf {
        self.folder.path().join(ADDRESSES[side])
    }

    /// The object by which QEMU has the certificate of that host.
    pub fn credentials(&self, side: usize, id: &str) -> Value {
        let endpoint = ["client", "server"][side];
        json!({
            "qom-type": "tls-creds-x509", "id": id, "endpoint": endpoint, "verify-peer": true,
            // QEMU 10 wants certificates that may encipher keys, which a key of an elliptic curve never does.
            "sanity-check": false,
            "dir": self.certificates(side).display().to_string(),
        })
    }
}
