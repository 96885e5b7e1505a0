//! A small certificate authority: one key that signs the certificates of hosts, each for the host's names only.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData,
};
use rustls::pki_types::UnixTime;
use thiserror::Error;
use time::{Duration, OffsetDateTime};

use crate::identity::{self, AUTHORITY_CERTIFICATE, AUTHORITY_KEY, CERTIFICATE, KEY};

/// How long an authority is valid.
const AUTHORITY_DAYS: i64 = 10 * 365;
/// The clocks of two hosts differ.
const EARLIER: Duration = Duration::hours(1);
const AUTHORITY_NAME: &str = "Stillframe migration authority";

/// Why there is no certificate.
#[derive(Debug, Error)]
pub enum AuthorityError {
    /// A file exists already, or cannot be read or written.
    #[error("cannot {doing} {path}")]
    Io {
        /// The action that failed.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The certificate cannot be made.
    #[error("cannot make a certificate for {name}")]
    Make {
        /// The name.
        name: String,
        /// The library's error.
        #[source]
        source: rcgen::Error,
    },
    /// The key in the folder does not belong to the certificate beside it.
    #[error("{folder} holds no authority that was made by this program: make one in a new folder")]
    NoAuthority {
        /// The folder.
        folder: PathBuf,
    },
    /// A certificate without a name is of no use.
    #[error("a certificate needs at least one name or address of its host")]
    NoName,
}

/// Makes an authority in `folder`, which may be missing.
///
/// # Errors
/// The folder has one already, or cannot be written.
pub fn make(folder: &Path) -> Result<(), AuthorityError> {
    let failed = |source| make_failed(AUTHORITY_NAME, source);
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = params(&key).self_signed(&key).map_err(failed)?;
    create_folder(folder)?;
    write(
        &folder.join(AUTHORITY_KEY),
        key.serialize_pem().as_bytes(),
        0o600,
    )?;
    write(
        &folder.join(AUTHORITY_CERTIFICATE),
        certificate.pem().as_bytes(),
        0o644,
    )
}

/// Makes key and certificate of a host in `host_folder`, which may be missing, signed by the authority in `folder`.
/// The certificate is for these names and addresses, and valid for `days`.
///
/// # Errors
/// The host's folder has a certificate already, or there is no authority.
pub fn make_host(
    folder: &Path,
    host_folder: &Path,
    names: &[String],
    days: u32,
) -> Result<(), AuthorityError> {
    let end = now() + Duration::days(days.into());
    make_host_until(folder, host_folder, names, end)
}

pub(crate) fn make_host_until(
    folder: &Path,
    host_folder: &Path,
    names: &[String],
    end: OffsetDateTime,
) -> Result<(), AuthorityError> {
    let first = names.first().ok_or(AuthorityError::NoName)?;
    let failed = |source| make_failed(first, source);
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read_to_string(&path).map_err(|source| io_failed("read", &path, source))
    };
    let authority_pem = read(AUTHORITY_CERTIFICATE)?;
    let authority_key = KeyPair::from_pem(&read(AUTHORITY_KEY)?).map_err(failed)?;
    let issuer = Issuer::new(params(&authority_key), authority_key);

    let mut host = CertificateParams::new(names).map_err(failed)?;
    host.distinguished_name = rcgen::DistinguishedName::new();
    host.distinguished_name.push(DnType::CommonName, first);
    let begin = now() - EARLIER;
    host.not_before = begin;
    host.not_after = end;
    host.use_authority_key_identifier_extension = true;
    host.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Each host sends and receives.
    host.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = host.signed_by(&key, &issuer).map_err(failed)?;
    let begin = UnixTime::since_unix_epoch((begin - OffsetDateTime::UNIX_EPOCH).unsigned_abs());
    if !identity::is_signed_by(certificate.der(), authority_pem.as_bytes(), begin) {
        return Err(AuthorityError::NoAuthority {
            folder: folder.to_owned(),
        });
    }
    create_folder(host_folder)?;
    let file =
        |name: &str, content: &str, mode| write(&host_folder.join(name), content.as_bytes(), mode);
    file(KEY, &key.serialize_pem(), 0o600)?;
    file(CERTIFICATE, &certificate.pem(), 0o644)?;
    match folder == host_folder {
        true => Ok(()),
        false => file(AUTHORITY_CERTIFICATE, &authority_pem, 0o644),
    }
}

/// The authority with this key. Each has a name of its own: where two have one name, a certificate of the other looks
/// like a forged one.
fn params(key: &KeyPair) -> CertificateParams {
    let digest = blake3::hash(&key.subject_public_key_info()).to_hex();
    let name = format!("{AUTHORITY_NAME} {}", &digest[..8]);
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = now() - EARLIER;
    params.not_after = now() + Duration::days(AUTHORITY_DAYS);
    params
}

fn now() -> OffsetDateTime {
    OffsetDateTime::from(SystemTime::now())
}

/// Whether a name is one that a certificate can be for: a host name or an address.
pub fn is_name(name: &str) -> bool {
    name.parse::<IpAddr>().is_ok() || rustls::pki_types::DnsName::try_from(name).is_ok()
}

fn create_folder(folder: &Path) -> Result<(), AuthorityError> {
    fs::create_dir_all(folder).map_err(|source| io_failed("create", folder, source))
}

/// Writes a new file; an existing one may be in use.
fn write(path: &Path, content: &[u8], mode: u32) -> Result<(), AuthorityError> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| file.write_all(content));
    written.map_err(|source| io_failed("create", path, source))
}

fn io_failed(doing: &'static str, path: &Path, source: io::Error) -> AuthorityError {
    AuthorityError::Io {
        doing,
        path: path.to_owned(),
        source,
    }
}

fn make_failed(name: &str, source: rcgen::Error) -> AuthorityError {
    AuthorityError::Make {
        name: name.to_owned(),
        source,
    }
}
