//! The guest agents of a VM, QEMU's (`qemu-ga`) and our own: where they are spoken to, the guest's clock, its files, free
//! pages and memory.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::arguments::{Backend, CommandLine, Properties};

pub(crate) mod channel;
pub(crate) mod files;
pub(crate) mod free_pages;
pub(crate) mod memory;

pub use channel::AgentError;
use channel::Channel;
pub use free_pages::NamedFree;
pub use memory::GuestMemory;

/// The default name of the port at which QEMU's agent listens (qemu-ga(8)).
const QEMU_PORT: &str = "org.qemu.guest_agent.0";
/// The name of the port at which ours listens (`guest-agent/`).
const OWN_PORT: &str = "org.stillframe.agent.0";

/// Which agent it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `qemu-ga`.
    Qemu,
    /// Ours: it reads the kernel's files by itself.
    Own,
}

/// Where the agents of a VM are spoken to: unix sockets on which QEMU listens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentChannels {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    qemu: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    own: Option<PathBuf>,
}

impl AgentChannels {
    /// Those of a VM with this command line.
    pub fn of(arguments: &[String], cwd: &Path) -> AgentChannels {
        let line = CommandLine::parse(arguments);
        let path = |name| socket_path(&line, name).map(|path| cwd.join(path));
        AgentChannels {
            qemu: path(QEMU_PORT),
            own: path(OWN_PORT),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.qemu.is_none() && self.own.is_none()
    }

    /// Connects to our agent, or to QEMU's where ours does not answer. If there is a channel to each, each has half of
    /// `limit`.
    ///
    /// # Errors
    /// [`AgentError::NoChannel`]; [`AgentError::Timeout`] after `limit`: there is no agent in the guest, or it has
    /// another client.
    pub fn connect(&self, limit: Duration) -> Result<GuestAgent, AgentError> {
        let channels = [(&self.own, Kind::Own), (&self.qemu, Kind::Qemu)];
        let channels = channels
            .into_iter()
            .filter_map(|(path, kind)| Some((path.as_ref()?, kind)));
        let count = channels.clone().count() as u32;
        let mut last = AgentError::NoChannel;
        for (path, kind) in channels {
            match Channel::connect(path, limit / count) {
                Ok(channel) => return Ok(GuestAgent { channel, kind }),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// The socket of the port of this name.
fn socket_path(line: &CommandLine, name: &str) -> Option<PathBuf> {
    let port = line.values("device").find_map(|value| {
        let properties = Properties::parse(value, "driver");
        let is_it = properties.get("name") == Some(name);
        let backend = is_it.then(|| properties.get("chardev").map(str::to_owned));
        backend.flatten()
    })?;
    let mut backends = line.values("chardev").map(Backend::from_chardev);
    let backend = backends.find(|backend| backend.id() == Some(&port))?;
    backend
        .is_server()
        .then(|| backend.unix_path().map(PathBuf::from))
        .flatten()
}

/// A connection to an agent. Its answers are the guest's word.
#[derive(Debug)]
pub struct GuestAgent {
    channel: Channel,
    kind: Kind,
}

impl GuestAgent {
    /// The guest's clock, in nanoseconds since 1970.
    pub fn time_ns(&mut self, limit: Duration) -> Result<i64, AgentError> {
        self.channel.execute("guest-get-time", &Value::Null, limit)
    }

    /// Sets it. The agent sets its hardware clock too, and says so where it cannot: then the guest's own
    /// clock may have been set all the same.
    pub fn set_time_ns(&mut self, time_ns: i64, limit: Duration) -> Result<(), AgentError> {
        let arguments = json!({ "time": time_ns });
        self.channel.execute("guest-set-time", &arguments, limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channels(words: &str) -> AgentChannels {
        let arguments: Vec<String> = words.split(' ').map(str::to_owned).collect();
        AgentChannels::of(&arguments, Path::new("/vms"))
    }

    #[test]
    fn the_channel_of_the_agent_is_found() {
        let path = |words: &str| channels(words).qemu;
        let port = "-device virtserialport,chardev=c0,name=org.qemu.guest_agent.0";
        let socket = "-chardev socket,id=c0,path=web1.agent,server=on,wait=off";
        let other = "-chardev socket,id=c1,path=/tmp/x,server=on,wait=off";
        let found = Some(PathBuf::from("/vms/web1.agent"));
        assert_eq!(path(&format!("qemu {other} {socket} {port}")), found);
        assert_eq!(path(&format!("qemu {socket} {other} {port}")), found);
        assert_eq!(path(&format!("qemu {other} {port}")), None);
        assert_eq!(path(&format!("qemu {socket}")), None);
        let client = "-chardev socket,id=c0,path=web1.agent";
        assert_eq!(path(&format!("qemu {client} {port}")), None);
        let other_port = port.replace("guest_agent", "spice");
        assert_eq!(path(&format!("qemu {socket} {other_port}")), None);
        let json =
            r#"-device {"driver":"virtserialport","name":"org.qemu.guest_agent.0","chardev":"c0"}"#;
        assert_eq!(path(&format!("qemu {socket} {json}")), found);
    }

    #[test]
    fn there_may_be_two_agents_or_none() {
        let sockets =
            "-chardev socket,id=c0,path=a,server=on -chardev socket,id=c1,path=b,server=on";
        let qemu = "-device virtserialport,chardev=c0,name=org.qemu.guest_agent.0";
        let own = "-device virtserialport,chardev=c1,name=org.stillframe.agent.0";
        let both = channels(&format!("qemu {sockets} {qemu} {own}"));
        assert_eq!(both.qemu, Some("/vms/a".into()));
        assert_eq!(both.own, Some("/vms/b".into()));
        let one = channels(&format!("qemu {sockets} {own}"));
        assert!(one.qemu.is_none() && !one.is_empty());
        let none = channels("qemu");
        assert!(none.is_empty());
        let error = none.connect(Duration::from_secs(1)).expect_err("none");
        assert!(matches!(error, AgentError::NoChannel), "{error}");
    }
}
