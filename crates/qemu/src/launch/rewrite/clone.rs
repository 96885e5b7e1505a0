//! The other changes in the command line of a clone. Its memory begins as a private view of a file that all clones
//! share, and each clone must have its own resources of the host.

use super::{Argument, CommandLine, LaunchError, Properties, Rewriter};
use crate::launch::CloneOptions;
use crate::monitor::Disk;
use crate::record::VmRecord;

/// The machine's own memory, where the command line names none (QEMU, `MachineClass::default_ram_id`).
const DEFAULT_RAM: &str = "pc.ram";
/// Properties of another kind of memory backend that a file backend cannot have, or must not have here.
const DROPPED_PROPERTIES: &[&str] = &[
    "align",
    "hugetlb",
    "hugetlbsize",
    "mem-path",
    "pmem",
    "prealloc",
    "prealloc-threads",
    "readonly",
    "reserve",
    "rom",
    "seal",
    "share",
];

/// The RAM blocks that can begin as a view of a file: those made by a memory backend.
pub(in crate::launch) fn memory_blocks(record: &VmRecord) -> Vec<String> {
    let line = record.command_line();
    let blocks = record.ram_blocks.iter().map(|block| &block.name);
    let backed = blocks.filter(|name| {
        backend_of(&line, name).is_some() || (*name == DEFAULT_RAM && !names_memory(&line))
    });
    backed.cloned().collect()
}

/// The place of the `-object` that makes a RAM block.
fn backend_of(line: &CommandLine, block: &str) -> Option<usize> {
    let id = block.strip_prefix("/objects/").unwrap_or(block);
    line.options.iter().position(|option| {
        let Some(value) = option.value().filter(|_| option.is("object")) else {
            return false;
        };
        let properties = Properties::parse(value, "qom-type");
        let kind = properties.get("qom-type").unwrap_or_default();
        kind.starts_with("memory-backend-") && properties.get("id") == Some(id)
    })
}

/// Whether the command line gives the machine its memory.
fn names_memory(line: &CommandLine) -> bool {
    let has = |value: &str, key| Properties::parse(value, "type").get(key).is_some();
    let mut machines = line.values("machine").chain(line.values("M"));
    machines.any(|value| has(value, "memory-backend"))
        || line.values("numa").any(|value| has(value, "memdev"))
}

impl Rewriter<'_> {
    pub(super) fn make_clone(
        &mut self,
        clone: &CloneOptions,
        disks: &[Disk],
    ) -> Result<(), LaunchError> {
        self.share_memory(clone)?;
        self.overlay_disks(clone, disks)?;
        self.rename(clone.number);
        self.number_sockets(clone.number);
        self.new_generation();
        Ok(())
    }

    fn share_memory(&mut self, clone: &CloneOptions) -> Result<(), LaunchError> {
        for word in ["mem-path", "mem-prealloc"] {
            self.line.options.retain(|option| !option.is(word));
        }
        for memory in &clone.memory {
            let path = memory.file.to_str().ok_or_else(|| LaunchError::NotUtf8 {
                path: memory.file.clone(),
            })?;
            let mut properties = match backend_of(&self.line, &memory.block) {
                Some(at) => {
                    let old = self.line.options.remove(at);
                    Properties::parse(old.value().unwrap_or_default(), "qom-type")
                }
                None => {
                    let mut new = Properties::default();
                    new.set("qom-type", "memory-backend-file");
                    new.set("id", &memory.block);
                    new.set("x-use-canonical-path-for-ramblock-id", "off");
                    self.push("machine", &format!("memory-backend={}", memory.block));
                    new
                }
            };
            for key in DROPPED_PROPERTIES {
                properties.remove(key);
            }
            properties.set("qom-type", "memory-backend-file");
            properties.set("size", &memory.bytes.to_string());
            properties.set("mem-path", path);
            properties.set("share", "off");
            // Opened for reading only, and yet memory: a private view of it.
            properties.set("readonly", "on");
            properties.set("rom", "off");
            self.push("object", &properties.render("qom-type"));
            self.note(format!(
                "memory {} is a private view of {path}, which all clones share",
                memory.block
            ));
        }
        Ok(())
    }

    fn rename(&mut self, number: u32) {
        self.change_each("name", "guest", |properties| {
            let name = format!("{}-{number}", properties.get("guest")?);
            properties.set("guest", &name);
            Some(())
        });
    }

    /// Sockets that it listens on.
    fn number_sockets(&mut self, number: u32) {
        self.change_each("chardev", "backend", |properties| {
            let listens = properties.is_on("server");
            let path = properties.get("path").filter(|_| listens)?;
            let path = format!("{path}-{number}");
            properties.set("path", &path);
            Some(())
        });
    }

    /// The guest is informed that it is no longer the only one (QEMU, `docs/specs/vmgenid.rst`).
    fn new_generation(&mut self) {
        self.change_each("device", "driver", |properties| {
            let is_it = properties.get("driver") == Some("vmgenid");
            is_it.then(|| properties.set("guid", "auto"))
        });
    }

    /// Changes the properties of every option of a name, where `change` has something to change.
    pub(super) fn change_each(
        &mut self,
        option: &str,
        implied: &str,
        change: impl Fn(&mut Properties) -> Option<()>,
    ) {
        for at in 0..self.line.options.len() {
            let old = &self.line.options[at];
            let Some(value) = old.value().filter(|_| old.is(option)) else {
                continue;
            };
            let mut properties = Properties::parse(value, implied);
            if change(&mut properties).is_none() {
                continue;
            }
            let new = Argument::new(option, properties.render(implied));
            let words = format!("`{}` became `{}`", old.words(), new.words());
            self.line.options[at] = new;
            self.note(words);
        }
    }
}
