//! The files of the host that a VM's disks consist of.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::host_files::{FileIdentity, HostView, OpenFiles};
use super::{Monitor, MonitorError, typed, unexpected};

/// How the names of all nodes and exports of snapshots ([`super::snapshots`]) and of images that are written for a rewind
/// ([`super::rewound`]) begin. QEMU's limit is 31 bytes.
pub(super) const SNAPSHOT_PREFIX: &str = "stillframe-";

/// QEMU's block drivers that open a file or device of the host.
const HOST_DRIVERS: &[&str] = &["file", "host_device", "host_cdrom"];

/// How the names of exports begin from which images read what they lack.
pub const LAZY_EXPORT: &str = "stillframe-lazy-";

/// One file of a disk: the image the guest writes to, or one it is based on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The drive or device it belongs to, such as `virtio0`. Empty for a file that QEMU has open without showing it
    /// at a device, such as the data file beside an image.
    pub device: String,
    /// QEMU's name for the node of an image that a device uses, such as `#block123` or the name that `-blockdev`
    /// gave it. Empty for backing files, for hidden files, and in older records.
    #[serde(default)]
    pub node: String,
    /// Absolute path of the file on the host; for what is no file (`nbd://...`) QEMU's name for it.
    pub path: PathBuf,
    /// Image format or block driver, such as `qcow2`, `raw`, `file`.
    pub format: String,
    /// Whether QEMU has it open for reading only. Backing files are.
    pub read_only: bool,
    /// A throw-away file of `snapshot=on`, which is gone as soon as QEMU exits.
    pub temporary: bool,
    /// Whether it is the flash memory of the machine's firmware. QEMU carries its content in the device
    /// state, and writes it to the file when the VM runs.
    #[serde(default)]
    pub flash: bool,
    /// Whether a VM that is started from the record has it as it is then, without a comparison.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchecked: bool,
    /// Size of the disk as the guest sees it, in bytes.
    pub bytes: u64,
    /// Its file or block device at the time of the record; none for other things.
    pub identity: Option<FileIdentity>,
}

/// The image of this device.
pub fn image_of<'d>(disks: &'d [Disk], device: &str) -> Option<&'d Disk> {
    let mut images = disks.iter().filter(|disk| disk.is_image());
    images.find(|disk| disk.device == device)
}

impl Disk {
    /// Whether it is what a device uses, not a file below that.
    pub fn is_image(&self) -> bool {
        !self.node.is_empty() && !self.device.is_empty()
    }

    /// Inspects its file again. A throw-away file has no identity.
    pub(crate) fn look_again(&mut self, host: &HostView) {
        if !self.temporary {
            self.identity = host.identity(&self.path);
        }
    }
}

/// A disk as a device of the VM has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskDevice {
    /// The drive or device, as [`super::Disk`] names it.
    pub device: String,
    /// The node that the device reads and writes.
    pub node: String,
    /// The object in QEMU whose property `drive` names that node.
    pub path: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Whether a server has content that its image lacks.
    pub is_incomplete: bool,
}

/// Gives up or takes disk images (QEMU 10).
pub(super) const SET_ACTIVE: &str = "blockdev-set-active";

impl Monitor {
    /// Makes sure that [`Monitor::deactivate_disks`] is possible.
    ///
    /// # Errors
    /// [`MonitorError::TooOld`].
    pub fn expect_deactivation(&mut self) -> Result<(), MonitorError> {
        #[derive(Deserialize)]
        struct Command {
            name: String,
        }
        let commands: Vec<Command> = self.query("query-commands")?;
        match commands.iter().any(|command| command.name == SET_ACTIVE) {
            true => Ok(()),
            false => Err(MonitorError::TooOld {
                command: SET_ACTIVE,
            }),
        }
    }

    /// Gives up all disk images of a stopped VM: flushes them and releases their locks. `cont` takes them again, and
    /// fails while another process has them (`blockdev-set-active`, QEMU 10).
    ///
    /// # Errors
    /// A block job or an export uses an image. Those that were given up already are taken again by `cont`.
    pub fn deactivate_disks(&mut self) -> Result<(), MonitorError> {
        self.slow_with(SET_ACTIVE, json!({ "active": false }))
    }

    /// Every file the VM's disks consist of: images, their backing files, firmware flash.
    pub fn disks(&mut self) -> Result<Vec<Disk>, MonitorError> {
        const NODES: &str = "query-named-block-nodes";
        let [drives, devices] = drives_and_devices();
        let replies = self.run_all(vec![drives, devices, (NODES, json!({}))])?;
        let [drives, devices, nodes] = <[Value; 3]>::try_from(replies)
            .map_err(|replies| unexpected(DRIVES, format!("{} replies", replies.len())))?;
        let drives: Vec<Drive> = typed(DRIVES, drives)?;
        let nodes: Vec<Node> = typed(NODES, nodes)?;
        let host = HostView::new(self.pid, &self.cwd);
        let open = OpenFiles::of(self.pid);
        Ok(gather(drives, &ids(&devices), &nodes, &host, &open))
    }

    /// The drives of the devices that have not been unplugged.
    pub(super) fn drives(&mut self) -> Result<Vec<Drive>, MonitorError> {
        let replies = self.run_all(drives_and_devices().to_vec())?;
        let [drives, devices] = <[Value; 2]>::try_from(replies)
            .map_err(|replies| unexpected(DRIVES, format!("{} replies", replies.len())))?;
        let (mut drives, ids): (Vec<Drive>, _) = (typed(DRIVES, drives)?, ids(&devices));
        drives.retain(|drive| !drive.has_left(&ids));
        Ok(drives)
    }
}

const DRIVES: &str = "query-block";

/// The devices come after the drives: one that leaves in between has no drive any more.
fn drives_and_devices() -> [(&'static str, Value); 2] {
    let devices = json!({ "path": "/machine/peripheral" });
    [(DRIVES, json!({})), ("qom-list", devices)]
}

/// One element of `query-block`.
#[derive(Debug, Deserialize)]
pub(super) struct Drive {
    #[serde(default)]
    device: String,
    qdev: Option<String>,
    #[serde(default)]
    removable: bool,
    inserted: Option<Inserted>,
}

#[derive(Debug, Deserialize)]
struct Inserted {
    #[serde(rename = "node-name", default)]
    node_name: String,
    ro: bool,
    image: Image,
}

#[derive(Debug, Deserialize)]
struct Image {
    filename: String,
    format: String,
    #[serde(rename = "virtual-size")]
    bytes: u64,
    #[serde(rename = "backing-image")]
    backing: Option<Box<Image>>,
}

impl Image {
    /// Whether a file below it is an export of ours ([`LAZY_EXPORT`]). QEMU names it as a URL.
    fn needs_server(&self) -> bool {
        let below = std::iter::successors(self.backing.as_deref(), |one| one.backing.as_deref());
        let mut exports = below.filter_map(|image| image.filename.strip_prefix("nbd+unix:///"));
        exports.any(|export| export.starts_with(LAZY_EXPORT))
    }
}

/// One element of `query-named-block-nodes`.
#[derive(Debug, Deserialize)]
struct Node {
    #[serde(rename = "node-name", default)]
    name: String,
    drv: String,
    image: Image,
}

/// The devices with an id, by their ids.
fn ids(peripheral: &Value) -> BTreeSet<String> {
    let members = peripheral.as_array().into_iter().flatten();
    let names = members.filter_map(|member| member["name"].as_str());
    names.map(str::to_owned).collect()
}

/// All files of all drives: each image, then its backing files, then files that no drive shows (images without a
/// device, data files beside an image).
///
/// A drive whose device is not among `ids` any more has none: QEMU shows an unplugged device here until its memory is
/// freed, up to a second after it has left the tree of devices.
fn gather(
    drives: Vec<Drive>,
    ids: &BTreeSet<String>,
    nodes: &[Node],
    host: &HostView,
    open: &OpenFiles,
) -> Vec<Disk> {
    let disk_of = |device: &str, image: &Image, read_only: bool, flash: bool| {
        let path = path_of(&image.filename, &host.cwd);
        let temporary = open.is_temporary(&path);
        let identity = host.identity(&path).filter(|_| !temporary);
        // QEMU's report on a file below an image is not reliable: with auto-read-only it calls a file writable that
        // it has open for reading only.
        let written = identity.and_then(|identity| open.is_written(&identity));
        Disk {
            device: device.to_owned(),
            node: String::new(),
            format: image.format.clone(),
            read_only: read_only && !written.unwrap_or(false),
            temporary,
            flash,
            unchecked: false,
            bytes: image.bytes,
            identity,
            path,
        }
    };
    let mut disks: Vec<Disk> = Vec::new();
    for drive in drives.into_iter().filter(|drive| !drive.has_left(ids)) {
        let device = drive.label();
        let flash = drive.is_flash();
        let Some(inserted) = drive.inserted else {
            continue;
        };
        let mut read_only = inserted.ro;
        let mut node = inserted.node_name;
        let mut image = Some(&inserted.image);
        while let Some(this) = image {
            let disk = disk_of(&device, this, read_only, flash);
            disks.push(Disk { node, ..disk });
            node = String::new();
            read_only = true;
            image = this.backing.as_deref();
        }
    }
    for node in nodes.iter().filter(|node| is_host_file(node)) {
        let disk = disk_of("", &node.image, true, false);
        if !disks.iter().any(|shown| shown.path == disk.path) {
            disks.push(disk);
        }
    }
    disks
}

/// Whether a node or an export is of a snapshot or a rewind: other nodes of ours begin alike.
pub(super) fn is_of_snapshot(name: &str) -> bool {
    let kind = name.strip_prefix(SNAPSHOT_PREFIX);
    let kinds = [
        "filter-", "memory-", "view-", "live-", "empty-", "keeper-", "image-",
    ];
    kind.is_some_and(|kind| kinds.iter().any(|begin| kind.starts_with(begin)))
}

/// Whether it is a file of the host, and not one that a snapshot of ours keeps.
fn is_host_file(node: &Node) -> bool {
    HOST_DRIVERS.contains(&node.drv.as_str()) && !is_of_snapshot(&node.name)
}

impl Drive {
    /// QEMU names the flash devices of a PC so (`hw/i386/pc_sysfw.c`).
    fn is_flash(&self) -> bool {
        let qdev = self.qdev.as_deref().unwrap_or_default();
        qdev.starts_with("/machine/system.flash")
    }

    /// Whether its device was unplugged. QEMU names a device by its id, or by a path while it is in the tree. A
    /// drive without a name and without a device is shown only while its device leaves.
    fn has_left(&self, ids: &BTreeSet<String>) -> bool {
        let Some(qdev) = self.qdev.as_deref() else {
            return self.device.is_empty();
        };
        let path = qdev.strip_prefix("/machine/peripheral/").unwrap_or(qdev);
        let id = path.split('/').next().unwrap_or_default();
        // The path of any other device begins with a slash.
        !path.starts_with('/') && !ids.contains(id)
    }

    /// The disk, if the guest can write to it, and it stays in its device.
    pub(super) fn writable(self) -> Option<DiskDevice> {
        let device = self.label();
        let is_flash = self.is_flash();
        let qdev = self.qdev?;
        let path = match qdev.starts_with('/') {
            true => qdev,
            // The id of a device.
            false => format!("/machine/peripheral/{qdev}"),
        };
        let inserted = self.inserted.filter(|inserted| !inserted.ro)?;
        let disk = DiskDevice {
            device,
            node: inserted.node_name,
            path,
            bytes: inserted.image.bytes,
            is_incomplete: inserted.image.needs_server(),
        };
        (!is_flash && !self.removable).then_some(disk)
    }

    /// The drive's name; for a `-blockdev`, which has none, the id of its device.
    fn label(&self) -> String {
        if !self.device.is_empty() {
            return self.device.clone();
        }
        let device = self.qdev.as_deref().map(|path| {
            let path = path.strip_suffix("/virtio-backend").unwrap_or(path);
            path.strip_prefix("/machine/peripheral/").unwrap_or(path)
        });
        let node = self.inserted.as_ref().map(|inserted| &*inserted.node_name);
        device.or(node).unwrap_or_default().to_owned()
    }
}

/// The path in QEMU's name for an image: the name itself or, for `json:{...}`, the innermost file.
fn path_of(filename: &str, cwd: &Path) -> PathBuf {
    let from_json = filename.strip_prefix("json:").and_then(|text| {
        let options: Value = serde_json::from_str(text).ok()?;
        Some(innermost_file(&options)?.to_owned())
    });
    let name = from_json.as_deref().unwrap_or(filename);
    if is_protocol(name) {
        PathBuf::from(name)
    } else {
        cwd.join(name)
    }
}

fn innermost_file(options: &Value) -> Option<&str> {
    let mut options = options;
    loop {
        if let Some(filename) = options.get("filename") {
            return filename.as_str();
        }
        options = options.get("file")?;
    }
}

/// Whether a name is no path but says how to get at the image: `nbd://host`, `json:{...}`, `fat:dir`.
fn is_protocol(name: &str) -> bool {
    let before_colon = name.split_once(':').map(|(scheme, _)| scheme);
    before_colon.is_some_and(|scheme| !scheme.is_empty() && !scheme.contains('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_images() {
        let table = [
            ("/a/b.img", "/a/b.img"),
            ("b.img", "/cwd/b.img"),
            ("/a/with:colon", "/a/with:colon"),
            ("nbd://localhost/x", "nbd://localhost/x"),
            (
                r#"json:{"driver":"raw","file":{"driver":"file","filename":"x"}}"#,
                "/cwd/x",
            ),
            (
                r#"json:{"backing":{"file":{"filename":"base"}},"driver":"qcow2","file":{"driver":"file","filename":"/t/vl.1"}}"#,
                "/t/vl.1",
            ),
            (
                r#"json:{"driver":"null-co"}"#,
                r#"json:{"driver":"null-co"}"#,
            ),
            ("json:{", "json:{"),
        ];
        for (name, expected) in table {
            assert_eq!(
                path_of(name, Path::new("/cwd")),
                Path::new(expected),
                "{name}"
            );
        }
    }

    #[test]
    fn drives_of_unplugged_devices() {
        let ids = BTreeSet::from(["d0".to_owned()]);
        let table = [
            ("", Some("d0"), false),
            ("", Some("/machine/peripheral/d0/virtio-backend"), false),
            ("", Some("/machine/peripheral-anon/device[3]"), false),
            ("", Some("/machine/unattached/device[22]"), false),
            ("pflash0", Some("/machine/system.flash0"), false),
            // `-drive if=none` that no device uses.
            ("spare", None, false),
            ("", Some("d1"), true),
            ("", Some("/machine/peripheral/d1/virtio-backend"), true),
            ("named", Some("d1"), true),
            // A device without an id, and the disk of a USB stick: seen with QEMU 10.
            ("", None, true),
        ];
        for (device, qdev, expected) in table {
            let drive = json!({ "device": device, "qdev": qdev });
            let drive: Drive = serde_json::from_value(drive).expect("drive");
            assert_eq!(drive.has_left(&ids), expected, "{device} {qdev:?}");
        }
    }

    #[test]
    fn chains_and_hidden_files() {
        let image = |name: &str, format: &str, backing: Value| {
            json!({
                "filename": name, "format": format, "virtual-size": 1 << 20,
                "backing-image": backing,
            })
        };
        let drives = json!([
            { "device": "", "qdev": "/machine/peripheral/d0/virtio-backend", "inserted": {
                "node-name": "top", "ro": false,
                "image": image("top.qcow2", "qcow2", image("/base", "raw", Value::Null)),
            }},
            { "device": "cd0" },
            { "device": "left", "qdev": "hd7", "inserted": {
                "node-name": "n7", "ro": false, "image": image("/left", "raw", Value::Null),
            }},
        ]);
        let node =
            |drv: &str, file: &str| json!({ "drv": drv, "image": image(file, drv, Value::Null) });
        let nodes = json!([
            node("qcow2", "top.qcow2"),
            node("file", "top.qcow2"),
            node("file", "/base"),
            node("file", "/data"),
        ]);
        let host = HostView {
            root: "/nowhere".into(),
            cwd: "/cwd".into(),
        };
        let drives: Vec<Drive> = serde_json::from_value(drives).expect("drives");
        let nodes: Vec<Node> = serde_json::from_value(nodes).expect("nodes");
        let ids = ids(
            &json!([{"name": "type", "type": "string"}, {"name": "d0", "type": "child<virtio-blk-pci>"}]),
        );
        let disks = gather(drives, &ids, &nodes, &host, &OpenFiles::default());
        let seen: Vec<_> = disks
            .iter()
            .map(|disk| {
                let path = disk.path.to_str();
                (&*disk.device, &*disk.node, path, disk.read_only)
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("d0", "top", Some("/cwd/top.qcow2"), false),
                ("d0", "", Some("/base"), true),
                ("", "", Some("/data"), true),
            ]
        );
    }
}
