//! Who this host is: its certificate and key, and the authority whose certificates it trusts. Three PEM files of one
//! folder.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig, version};
use thiserror::Error;
use webpki::{EndEntityCert, KeyUsage};

/// The certificate of the authority.
pub const AUTHORITY_CERTIFICATE: &str = "ca-cert.pem";
/// The authority's key; hosts do not need it.
pub const AUTHORITY_KEY: &str = "ca-key.pem";
/// The certificate of a host.
pub const CERTIFICATE: &str = "cert.pem";
/// The host's key.
pub const KEY: &str = "key.pem";

/// Why the certificate of this host cannot be used.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A file holds something else.
    #[error("{path} is no PEM file with {what}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// The expected content.
        what: &'static str,
    },
    /// Other users can read or exchange the key.
    #[error(
        "other users have access to the key {path} (mode {mode:o}, owner {owner}): chmod 600, or make a new one"
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
        /// The uid of its owner.
        owner: u32,
    },
    /// The certificate is not valid now, or was signed by another authority.
    #[error("the certificate {path} cannot be used: {why}")]
    Certificate {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The key does not belong to the certificate.
    #[error("the key and the certificate in {folder} do not fit together")]
    Mismatch {
        /// The folder.
        folder: PathBuf,
        /// The library's error.
        #[source]
        source: rustls::Error,
    },
}

/// This host towards others.
#[derive(Clone)]
pub struct Identity {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

/// Of a key, nothing is ever printed.
impl fmt::Debug for Identity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl Identity {
    /// Reads the three files.
    ///
    /// # Errors
    /// A file is missing, cannot be used, or is not safe from other users.
    pub fn load(folder: &Path) -> Result<Identity, IdentityError> {
        let files = Files::read(folder)?;
        match why_not_signed_by(&files.chain[0], &files.roots, UnixTime::now()) {
            Some(why) => Err(IdentityError::Certificate {
                path: folder.join(CERTIFICATE),
                why,
            }),
            None => files.identity(folder),
        }
    }

    /// One whose certificate the other side refuses.
    #[cfg(test)]
    pub fn load_unchecked(folder: &Path) -> Identity {
        Files::read(folder).unwrap().identity(folder).unwrap()
    }
}

struct Files {
    roots: RootCertStore,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Files {
    fn read(folder: &Path) -> Result<Files, IdentityError> {
        let mut roots = RootCertStore::empty();
        let authority_path = folder.join(AUTHORITY_CERTIFICATE);
        for certificate in certificates(&authority_path)? {
            let added = roots.add(certificate);
            added.map_err(|error| unusable(&authority_path, &error))?;
        }
        Ok(Files {
            roots,
            chain: certificates(&folder.join(CERTIFICATE))?,
            key: key(&folder.join(KEY))?,
        })
    }

    fn identity(self, folder: &Path) -> Result<Identity, IdentityError> {
        let Files { roots, chain, key } = self;
        let mismatch = |source| IdentityError::Mismatch {
            folder: folder.to_owned(),
            source,
        };
        let roots = Arc::new(roots);
        let client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&version::TLS13])
            .map_err(mismatch)?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(mismatch)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
        let verifier =
            verifier.map_err(|error| unusable(&folder.join(AUTHORITY_CERTIFICATE), &error))?;
        let server = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&version::TLS13])
            .map_err(mismatch)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(mismatch)?;
        Ok(Identity {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// At least one certificate.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let pem = read(path)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match certificates {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => Err(IdentityError::Pem {
            path: path.to_owned(),
            what: "a certificate",
        }),
    }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, IdentityError> {
    let metadata = fs::metadata(path).map_err(|source| read_failed(path, source))?;
    let own = [0, rustix::process::geteuid().as_raw()];
    if metadata.mode() & 0o077 != 0 || !own.contains(&metadata.uid()) {
        return Err(IdentityError::Exposed {
            path: path.to_owned(),
            mode: metadata.mode() & 0o777,
            owner: metadata.uid(),
        });
    }
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|_| IdentityError::Pem {
        path: path.to_owned(),
        what: "a private key",
    })
}

fn read(path: &Path) -> Result<Vec<u8>, IdentityError> {
    fs::read(path).map_err(|source| read_failed(path, source))
}

fn read_failed(path: &Path, source: io::Error) -> IdentityError {
    IdentityError::Read {
        path: path.to_owned(),
        source,
    }
}

fn unusable(path: &Path, error: &dyn std::error::Error) -> IdentityError {
    IdentityError::Certificate {
        path: path.to_owned(),
        why: error.to_string(),
    }
}

/// Whether the authority with this certificate, as PEM, signed that of a host, and both are valid at that time.
pub(crate) fn is_signed_by(host: &CertificateDer<'_>, authority_pem: &[u8], at: UnixTime) -> bool {
    let mut roots = RootCertStore::empty();
    let authorities = CertificateDer::pem_slice_iter(authority_pem).flatten();
    let (added, _) = roots.add_parsable_certificates(authorities);
    added > 0 && why_not_signed_by(host, &roots, at).is_none()
}

fn why_not_signed_by(
    host: &CertificateDer<'_>,
    roots: &RootCertStore,
    at: UnixTime,
) -> Option<String> {
    let verified = EndEntityCert::try_from(host).and_then(|certificate| {
        let algorithms = ring::default_provider()
            .signature_verification_algorithms
            .all;
        let usage = KeyUsage::client_auth();
        let verified =
            certificate.verify_for_usage(algorithms, &roots.roots, &[], at, usage, None, None);
        verified.map(|_| ())
    });
    Some(in_words(&verified.err()?))
}

fn in_words(error: &webpki::Error) -> String {
    match error {
        webpki::Error::CertExpired { .. } => "it has expired".to_owned(),
        webpki::Error::CertNotValidYet { .. } => {
            "it is not valid yet; check this host's clock".to_owned()
        }
        webpki::Error::UnknownIssuer => "another authority has signed it".to_owned(),
        other => other.to_string(),
    }
}

/// The host names that a certificate is for.
pub(crate) fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    match EndEntityCert::try_from(certificate) {
        Ok(certificate) => certificate.valid_dns_names().map(str::to_owned).collect(),
        Err(_) => Vec::new(),
    }
}
