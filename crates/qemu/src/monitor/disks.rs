//! Which files of the host a VM's disks consist of, and what identifies their content.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// QEMU's block drivers that open a file or device of the host.
const HOST_DRIVERS: &[&str] = &["file", "host_device", "host_cdrom"];

/// One file of a disk: the image the guest writes to, or one it is based on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// The drive or device it belongs to, such as `virtio0`; empty for a file that QEMU has open
    /// without showing it at a device, such as the data file beside an image.
    pub device: String,
    /// Absolute path of the file on the host; for what is no file (`nbd://...`) QEMU's name for it.
    pub path: PathBuf,
    /// Image format or block driver, such as `qcow2`, `raw`, `file`.
    pub format: String,
    /// Whether QEMU has it open for reading only. Backing files are.
    pub read_only: bool,
    /// A throw-away file of `snapshot=on`, which is gone as soon as QEMU exits.
    pub temporary: bool,
    /// Size of the disk as the guest sees it, in bytes.
    pub bytes: u64,
    /// Its file or block device at the time of the record; none for what is neither.
    pub identity: Option<FileIdentity>,
}

/// What tells that a file is still the same and was not written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Device of the file system; for a block device the device itself.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Length in bytes; zero for a block device.
    pub bytes: u64,
    /// Time of the last change of the content, in nanoseconds since the epoch.
    pub modified_ns: i64,
}

impl FileIdentity {
    /// The identity of a regular file or block device.
    pub fn of(metadata: &Metadata) -> Option<FileIdentity> {
        let kind = metadata.file_type();
        if !(kind.is_file() || kind.is_block_device()) {
            return None;
        }
        Some(FileIdentity {
            device: if kind.is_file() {
                metadata.dev()
            } else {
                metadata.rdev()
            },
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified_ns: metadata
                .mtime()
                .saturating_mul(1_000_000_000)
                .saturating_add(metadata.mtime_nsec()),
        })
    }
}

/// One element of `query-block`.
#[derive(Debug, Deserialize)]
pub(super) struct Drive {
    #[serde(default)]
    device: String,
    qdev: Option<String>,
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

/// One element of `query-named-block-nodes`.
#[derive(Debug, Deserialize)]
pub(super) struct Node {
    drv: String,
    ro: bool,
    image: Image,
}

/// The host as the QEMU process sees it: its root directory, working directory, open files.
pub(super) struct HostView {
    root: PathBuf,
    cwd: PathBuf,
    /// Paths of open files that have been unlinked.
    unlinked: Vec<PathBuf>,
}

impl HostView {
    pub(super) fn new(pid: i32, cwd: &Path) -> HostView {
        let process = Path::new("/proc").join(pid.to_string());
        let links = fs::read_dir(process.join("fd")).into_iter().flatten();
        let targets = links
            .flatten()
            .filter_map(|fd| fs::read_link(fd.path()).ok());
        let unlinked = targets
            .filter_map(|path| Some(PathBuf::from(path.to_str()?.strip_suffix(" (deleted)")?)));
        HostView {
            unlinked: unlinked.collect(),
            root: process.join("root"),
            cwd: cwd.to_owned(),
        }
    }

    /// QEMU may live in another mount namespace or a chroot, hence by way of its own root; when
    /// that is not permitted, its files are looked for where ours are.
    fn identity(&self, path: &Path) -> Option<FileIdentity> {
        let inside = self.root.join(path.strip_prefix("/").ok()?);
        let metadata = fs::metadata(inside).or_else(|_| fs::metadata(path));
        FileIdentity::of(&metadata.ok()?)
    }

    /// QEMU makes the throw-away image of `snapshot=on` as `vl.XXXXXX` in the directory for
    /// temporary files and unlinks it at once (`block.c`, `create_tmp_file`).
    fn is_temporary(&self, path: &Path) -> bool {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("vl."))
            && self.unlinked.iter().any(|unlinked| unlinked == path)
    }
}

/// All files of all drives: each image, then what it is based on, then files that no drive shows
/// (images without a device, data files beside an image).
pub(super) fn gather(drives: Vec<Drive>, nodes: &[Node], host: &HostView) -> Vec<Disk> {
    // A file can be open more than once; one writer makes it writable.
    let mut read_only_files: BTreeMap<PathBuf, bool> = BTreeMap::new();
    for node in nodes.iter().filter(|node| is_host_file(node)) {
        let all = read_only_files
            .entry(path_of(&node.image.filename, &host.cwd))
            .or_insert(true);
        *all &= node.ro;
    }
    let disk_of = |device: &str, image: &Image, read_only: bool| {
        let path = path_of(&image.filename, &host.cwd);
        let temporary = host.is_temporary(&path);
        Disk {
            device: device.to_owned(),
            format: image.format.clone(),
            read_only: read_only_files.get(&path).copied().unwrap_or(read_only),
            temporary,
            bytes: image.bytes,
            identity: if temporary {
                None
            } else {
                host.identity(&path)
            },
            path,
        }
    };
    let mut disks: Vec<Disk> = Vec::new();
    for drive in drives {
        let device = drive.label();
        let Some(inserted) = drive.inserted else {
            continue;
        };
        let mut read_only = inserted.ro;
        let mut image = Some(&inserted.image);
        while let Some(this) = image {
            disks.push(disk_of(&device, this, read_only));
            read_only = true;
            image = this.backing.as_deref();
        }
    }
    for node in nodes.iter().filter(|node| is_host_file(node)) {
        let disk = disk_of("", &node.image, node.ro);
        if !disks.iter().any(|shown| shown.path == disk.path) {
            disks.push(disk);
        }
    }
    disks
}

fn is_host_file(node: &Node) -> bool {
    HOST_DRIVERS.contains(&node.drv.as_str())
}

impl Drive {
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
    use serde_json::json;

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
        ]);
        let node = |drv: &str, file: &str, ro: bool| json!({ "drv": drv, "ro": ro, "image": image(file, drv, Value::Null) });
        let nodes = json!([
            node("qcow2", "top.qcow2", false),
            node("file", "top.qcow2", false),
            node("file", "/base", true),
            node("file", "/data", false),
        ]);
        let host = HostView {
            root: "/nowhere".into(),
            cwd: "/cwd".into(),
            unlinked: vec![],
        };
        let drives: Vec<Drive> = serde_json::from_value(drives).expect("drives");
        let nodes: Vec<Node> = serde_json::from_value(nodes).expect("nodes");
        let disks = gather(drives, &nodes, &host);
        let seen: Vec<_> = disks
            .iter()
            .map(|disk| (&*disk.device, disk.path.to_str(), disk.read_only))
            .collect();
        assert_eq!(
            seen,
            [
                ("d0", Some("/cwd/top.qcow2"), false),
                ("d0", Some("/base"), true),
                ("", Some("/data"), false),
            ]
        );
    }
}
