//! The guest agent (`qemu-ga`) of a VM: where it is spoken to, the guest's clock, its files, free pages
//! and memory.

use std::path::{Path, PathBuf};
use std::time::Duration;

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

/// The default name of the port at which an agent listens (qemu-ga(8)).
const PORT: &str = "org.qemu.guest_agent.0";

/// Where the agent of a VM with this command line is spoken to: a unix socket on which QEMU listens. `None`
/// where it has no such channel.
pub fn socket_path(arguments: &[String], cwd: &Path) -> Option<PathBuf> {
    let line = CommandLine::parse(arguments);
    let port = line.values("device").find_map(|value| {
        let properties = Properties::parse(value, "driver");
        let is_it = properties.get("name") == Some(PORT);
        let backend = is_it.then(|| properties.get("chardev").map(str::to_owned));
        backend.flatten()
    })?;
    let mut backends = line.values("chardev").map(Backend::from_chardev);
    let backend = backends.find(|backend| backend.id() == Some(&port))?;
    let path = backend.is_server().then(|| backend.unix_path()).flatten()?;
    Some(cwd.join(path))
}

/// A connection to an agent. Its answers are the guest's word.
#[derive(Debug)]
pub struct GuestAgent {
    channel: Channel,
}

impl GuestAgent {
    /// Connects, and makes sure that it answers.
    ///
    /// # Errors
    /// [`AgentError::Timeout`] after `limit`: there is no agent in the guest, or it has another client.
    pub fn connect(path: &Path, limit: Duration) -> Result<GuestAgent, AgentError> {
        Ok(GuestAgent {
            channel: Channel::connect(path, limit)?,
        })
    }

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

    fn path(words: &str) -> Option<PathBuf> {
        let arguments: Vec<String> = words.split(' ').map(str::to_owned).collect();
        socket_path(&arguments, Path::new("/vms"))
    }

    #[test]
    fn the_channel_of_the_agent_is_found() {
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
}
