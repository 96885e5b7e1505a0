//! Character devices: the backends of serial ports, monitors and debug consoles.
//!
//! QEMU has two spellings: `-chardev socket,id=c,path=/p,server=on` and, as the value of
//! `-serial`, `-qmp` and others, `unix:/p,server=on`. Both become the first one here.

use std::path::Path;

use super::Properties;
use super::properties::escape;

/// The host side of a character device, in the form of `-chardev`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    properties: Properties,
}

/// The value of `-serial`, `-parallel`, `-debugcon`, `-monitor` or `-qmp`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendWord {
    /// `none`: no device at all.
    Absent,
    /// `chardev:ID`: a character device defined elsewhere.
    Reference(String),
    /// A backend of its own; `mon:` before it adds a human monitor on the same backend.
    Own {
        /// The backend.
        backend: Backend,
        /// Whether `mon:` stood before it.
        with_monitor: bool,
    },
}

/// Before a backend that is shared with a monitor. QEMU takes it once; a word that has it twice must not become one
/// that has it once.
pub const MONITOR: &str = "mon:";

impl BackendWord {
    /// Reads the value (QEMU: `chardev/char.c`, `qemu_chr_parse_compat`).
    pub fn parse(word: &str) -> BackendWord {
        if word == "none" {
            return BackendWord::Absent;
        }
        if let Some(id) = word.strip_prefix("chardev:") {
            return BackendWord::Reference(id.to_owned());
        }
        let without_monitor = word.trim_start_matches(MONITOR);
        BackendWord::Own {
            backend: Backend::from_word(without_monitor),
            with_monitor: without_monitor != word,
        }
    }
}

impl Backend {
    /// A backend that swallows everything.
    pub fn null() -> Backend {
        Backend::from_chardev("null")
    }

    /// Reads the value of `-chardev`.
    pub fn from_chardev(value: &str) -> Backend {
        Backend {
            properties: Properties::parse(value, "backend"),
        }
    }

    fn from_word(word: &str) -> Backend {
        let socket = |rest: &str, more: &str| {
            let (address, options) = rest.split_once(',').unwrap_or((rest, ""));
            let (host, port) = address.rsplit_once(':').unwrap_or(("", address));
            let host = escape(host.trim_start_matches('[').trim_end_matches(']'));
            format!("socket,host={host},port={port}{more}{}", tail(options))
        };
        let text = match word.split_once(':') {
            Some(("unix", rest)) => {
                let mut properties = Properties::parse("socket", "backend");
                for (key, value) in Properties::parse(rest, "path").pairs() {
                    properties.set(key, value);
                }
                return Backend { properties };
            }
            Some(("tcp", rest)) => socket(rest, ""),
            Some(("telnet", rest)) => socket(rest, ",telnet=on"),
            Some(("tn3270", rest)) => socket(rest, ",tn3270=on"),
            Some(("websocket", rest)) => socket(rest, ",websocket=on"),
            // A file name reaches to the end of the word, commas and all.
            Some((kind @ ("file" | "pipe"), path)) => format!("{kind},path={}", escape(path)),
            Some((kind @ ("udp" | "vc" | "pty"), _)) => kind.to_owned(),
            _ if word.starts_with("/dev/parport") => format!("parallel,path={}", escape(word)),
            _ if word.starts_with("/dev/") => format!("serial,path={}", escape(word)),
            _ => escape(word),
        };
        Backend::from_chardev(&text)
    }

    /// The kind: `socket`, `file`, `stdio`, `null`, ...
    pub fn kind(&self) -> &str {
        self.properties.get("backend").unwrap_or_default()
    }

    /// The id of a `-chardev`.
    pub fn id(&self) -> Option<&str> {
        self.properties.get("id")
    }

    /// Any other property.
    pub fn property(&self, key: &str) -> Option<&str> {
        self.properties.get(key)
    }

    /// Whether it listens for a peer.
    pub fn is_server(&self) -> bool {
        self.kind() == "socket" && self.properties.is_on("server")
    }

    /// The path of a unix socket in the file system.
    pub fn unix_path(&self) -> Option<&Path> {
        if self.kind() != "socket" || self.properties.is_on("abstract") {
            return None;
        }
        self.properties.get("path").map(Path::new)
    }

    /// Host and port of a TCP socket.
    pub fn tcp_address(&self) -> Option<(&str, &str)> {
        let port = self.properties.get("port")?;
        (self.kind() == "socket").then(|| (self.properties.get("host").unwrap_or(""), port))
    }

    /// The same character device connected to `other` instead; its id and its being shared by
    /// several frontends (`mux`) stay.
    pub fn replaced_by(&self, other: &Backend) -> Backend {
        let mut properties = other.properties.clone();
        for key in ["id", "mux"] {
            if let Some(value) = self.properties.get(key) {
                properties.set(key, value);
            }
        }
        Backend { properties }
    }

    /// The same backend without `key`.
    pub fn without(&self, key: &str) -> Backend {
        let mut properties = self.properties.clone();
        properties.remove(key);
        Backend { properties }
    }

    /// The value of `-chardev`.
    pub fn to_chardev(&self) -> String {
        self.properties.render("backend")
    }
}

fn tail(options: &str) -> String {
    if options.is_empty() {
        String::new()
    } else {
        format!(",{options}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_chardevs() {
        let table = [
            ("stdio", "stdio"),
            ("null", "null"),
            ("pty", "pty"),
            ("vc:80Cx24C", "vc"),
            ("file:/a,b=c", "file,path=/a,,b=c"),
            ("pipe:/a", "pipe,path=/a"),
            (
                "unix:/a,,b,server=on,wait=off",
                "socket,path=/a,,b,server=on,wait=off",
            ),
            ("unix:/a,server,nowait", "socket,path=/a,server=on,wait=off"),
            (
                "tcp:127.0.0.1:4444,server,nowait",
                "socket,host=127.0.0.1,port=4444,server=on,wait=off",
            ),
            ("tcp::4444", "socket,host=,port=4444"),
            ("tcp:[::1]:4444", "socket,host=::1,port=4444"),
            (
                "telnet:localhost:1,server",
                "socket,host=localhost,port=1,telnet=on,server=on",
            ),
            ("udp:1.2.3.4:5@6.7.8.9:1", "udp"),
            ("/dev/ttyS0", "serial,path=/dev/ttyS0"),
            ("/dev/parport0", "parallel,path=/dev/parport0"),
            ("braille", "braille"),
        ];
        for (word, expected) in table {
            let BackendWord::Own {
                backend,
                with_monitor: false,
            } = BackendWord::parse(word)
            else {
                panic!("{word} is no backend of its own");
            };
            assert_eq!(backend.to_chardev(), expected, "{word}");
        }
    }

    #[test]
    fn words_that_are_no_backend() {
        assert_eq!(BackendWord::parse("none"), BackendWord::Absent);
        assert_eq!(
            BackendWord::parse("chardev:c0"),
            BackendWord::Reference("c0".into())
        );
        assert!(matches!(
            BackendWord::parse("mon:stdio"),
            BackendWord::Own { backend, with_monitor: true } if backend.kind() == "stdio"
        ));
    }

    #[test]
    fn replacing_keeps_id_and_mux() {
        let old = Backend::from_chardev("socket,id=c0,path=/p,server=on,mux=on");
        assert!(old.is_server());
        assert_eq!(old.unix_path(), Some(Path::new("/p")));
        assert_eq!(
            old.replaced_by(&Backend::null()).to_chardev(),
            "null,id=c0,mux=on"
        );
    }
}
