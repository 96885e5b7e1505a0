//! Where the other side listens: `HOST`, `HOST:PORT`, `[IPV6]:PORT`.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Not registered by any other program at IANA as of 2026.
pub const DEFAULT_PORT: u16 = 7411;

/// Why a text is no address.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{text:?} is no address: it has to be HOST, HOST:PORT or [IPV6]:PORT")]
pub struct AddressError {
    text: String,
}

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// A host name or an IP address, without brackets.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        let error = || AddressError {
            text: text.to_owned(),
        };
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or_else(error)?;
                let port = match port {
                    "" => None,
                    port => Some(port.strip_prefix(':').ok_or_else(error)?),
                };
                (host, port)
            }
            // An IPv6 address without brackets has more than one colon, and no port.
            None if text.matches(':').count() > 1 => (text, None),
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        if !crate::authority::is_name(host) {
            return Err(error());
        }
        let port = port.map_or(Ok(DEFAULT_PORT), str::parse);
        Ok(Address {
            host: host.to_owned(),
            port: port.map_err(|_| error())?,
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(out, "[{}]:{}", self.host, self.port),
            false => write!(out, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<(String, u16)> {
        let address: Address = text.parse().ok()?;
        assert_eq!(address.to_string().parse(), Ok(address.clone()));
        Some((address.host, address.port))
    }

    #[test]
    fn addresses_are_read() {
        let is = |host: &str, port| Some((host.to_owned(), port));
        assert_eq!(parsed("b.example"), is("b.example", DEFAULT_PORT));
        assert_eq!(parsed("b.example:80"), is("b.example", 80));
        assert_eq!(parsed("10.0.0.2:0"), is("10.0.0.2", 0));
        assert_eq!(parsed("::1"), is("::1", DEFAULT_PORT));
        assert_eq!(parsed("[fe80::1]"), is("fe80::1", DEFAULT_PORT));
        assert_eq!(parsed("[fe80::1]:9"), is("fe80::1", 9));
        for wrong in [
            "", ":1", "b:", "b:x", "b:65536", "[::1", "[::1]9", "a b", "-", "a/b:1", "[b",
        ] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }
}
