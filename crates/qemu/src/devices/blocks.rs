//! Images of plugged devices as the `-blockdev` options that open the same ones.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::Lost;
use super::{PluggedOption, defines};
use crate::arguments::CommandLine;
use crate::monitor::{Monitor, MonitorError};

/// Image formats that are opened by no more than is seen of them.
const FORMATS: &[&str] = &["qcow2", "qed", "raw", "vdi", "vhdx", "vmdk", "vpc"];
/// Drivers that open a path of the host.
const FILES: &[&str] = &["file", "host_cdrom", "host_device"];
/// Longest chain of images.
const DEPTH_MAX: usize = 256;

/// One element of `query-named-block-nodes`.
#[derive(Debug, Clone, Deserialize)]
struct Node {
    #[serde(rename = "node-name")]
    name: String,
    drv: String,
    file: String,
    ro: bool,
    encrypted: bool,
    detect_zeroes: String,
    cache: Cache,
    image: Image,
}

#[derive(Debug, Clone, Deserialize)]
struct Cache {
    direct: bool,
    #[serde(rename = "no-flush")]
    no_flush: bool,
}

#[derive(Debug, Clone, Deserialize)]
struct Image {
    filename: String,
    #[serde(rename = "backing-filename")]
    backing: Option<String>,
}

/// One element of `query-block`.
#[derive(Debug, Deserialize)]
struct Drive {
    #[serde(default)]
    device: String,
    inserted: Option<Inserted>,
}

#[derive(Debug, Deserialize)]
struct Inserted {
    #[serde(rename = "node-name", default)]
    node: String,
}

/// `x-debug-query-block-graph` is the only command that shows the backing of a node.
#[derive(Debug, Deserialize)]
struct Graph {
    nodes: Vec<Vertex>,
    edges: Vec<Edge>,
}

#[derive(Debug, Deserialize)]
struct Vertex {
    id: u64,
    name: String,
}

#[derive(Debug, Deserialize)]
struct Edge {
    parent: u64,
    child: u64,
    name: String,
}

/// All block nodes of a VM.
#[derive(Debug)]
pub(super) struct Blocks<'c> {
    line: &'c CommandLine,
    nodes: BTreeMap<String, Node>,
    /// Edges by parent: the name of the edge, and the child.
    children: BTreeMap<String, Vec<(String, String)>>,
    /// The node of each drive that has a name.
    drives: BTreeMap<String, String>,
    /// Names of drives that have no medium, too.
    names: Vec<String>,
    /// The options so far.
    options: Vec<PluggedOption>,
    made: Vec<String>,
}

impl<'c> Blocks<'c> {
    /// Queries QEMU with three commands.
    pub(super) fn of(
        monitor: &mut Monitor,
        line: &'c CommandLine,
    ) -> Result<Blocks<'c>, MonitorError> {
        let nodes: Vec<Node> = monitor.query("query-named-block-nodes")?;
        let drives: Vec<Drive> = monitor.query("query-block")?;
        let graph: Graph = monitor.query("x-debug-query-block-graph")?;
        let name = |id: u64| {
            let found = graph.nodes.iter().find(|vertex| vertex.id == id);
            found.map(|vertex| vertex.name.clone()).unwrap_or_default()
        };
        let mut children: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
        for edge in &graph.edges {
            let below = children.entry(name(edge.parent)).or_default();
            below.push((edge.name.clone(), name(edge.child)));
        }
        let names = drives.iter().map(|drive| drive.device.clone()).collect();
        let inserted = drives.into_iter().filter_map(|drive| {
            let node = drive.inserted?.node;
            Some((drive.device, node))
        });
        Ok(Blocks {
            line,
            drives: inserted.collect(),
            names,
            nodes: nodes
                .into_iter()
                .map(|node| (node.name.clone(), node))
                .collect(),
            children,
            options: Vec::new(),
            made: Vec::new(),
        })
    }

    /// Whether the VM still has a drive or node of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.nodes.contains_key(name) || self.names.iter().any(|drive| drive == name)
    }

    /// Makes sure that there is something for `drive=` of a device; returns its name.
    pub(super) fn follow(&mut self, drive: &str, device: &str) -> Result<String, Lost> {
        if defines(self.line, "drive", drive) || defines(self.line, "blockdev", drive) {
            return Ok(drive.to_owned());
        }
        let node = match self.drives.get(drive) {
            Some(node) => node.clone(),
            None => drive.to_owned(),
        };
        let name = match node.starts_with('#') {
            true => format!("disk-{device}"),
            false => node.clone(),
        };
        match self.build(&node, DEPTH_MAX)? {
            Value::Object(mut options) => {
                options.insert("node-name".into(), json!(name));
                self.push(&name, options);
                Ok(name)
            }
            _ => Ok(name),
        }
    }

    pub(super) fn into_options(self) -> Vec<PluggedOption> {
        self.options
    }

    fn push(&mut self, name: &str, options: Map<String, Value>) {
        self.made.push(name.to_owned());
        self.options.push(PluggedOption {
            option: "blockdev".into(),
            value: Value::Object(options).to_string(),
        });
    }

    /// The name of a node that has one, after adding the option that makes it; the options themselves
    /// of a node that has none.
    fn build(&mut self, name: &str, depth: usize) -> Result<Value, Lost> {
        if self.made.iter().any(|made| made == name) || defines(self.line, "blockdev", name) {
            return Ok(json!(name));
        }
        let lost = |what: &str| Lost::new(format!("its image {name:?} {what}"));
        let node = self.nodes.get(name).cloned();
        let node = node.ok_or_else(|| lost("is not among QEMU's block nodes"))?;
        if depth == 0 {
            return Err(lost("has too many images below it"));
        }
        if node.encrypted {
            return Err(lost("is encrypted, and QEMU does not report its key"));
        }
        let mut options = Map::new();
        options.insert("driver".into(), json!(node.drv));
        if FILES.contains(&&*node.drv) {
            let path = &node.file;
            if path.starts_with("json:") || path.starts_with("/dev/fdset/") {
                return Err(lost("was opened by more than its path"));
            }
            options.insert("filename".into(), json!(path));
        } else if FORMATS.contains(&&*node.drv) {
            self.build_format(&node, &mut options, depth)?;
        } else {
            return Err(lost(&format!("uses block driver {}", node.drv)));
        }
        options.insert("read-only".into(), json!(node.ro));
        let cache = json!({ "direct": node.cache.direct, "no-flush": node.cache.no_flush });
        options.insert("cache".into(), cache);
        if node.detect_zeroes != "off" {
            options.insert("detect-zeroes".into(), json!(node.detect_zeroes));
            options.insert("discard".into(), json!("unmap"));
        }
        if name.starts_with('#') {
            return Ok(Value::Object(options));
        }
        options.insert("node-name".into(), json!(name));
        self.push(name, options);
        Ok(json!(name))
    }

    fn build_format(
        &mut self,
        node: &Node,
        options: &mut Map<String, Value>,
        depth: usize,
    ) -> Result<(), Lost> {
        let lost = |what: &str| Lost::new(format!("its image {:?} {what}", node.name));
        if node.drv == "raw"
            && let Some(text) = node.image.filename.strip_prefix("json:")
        {
            // A part of a file.
            let said: Value = serde_json::from_str(text).map_err(|_| lost("has no plain name"))?;
            for key in ["offset", "size"] {
                if let Some(value) = said.get(key) {
                    options.insert(key.into(), value.clone());
                }
            }
        }
        for (edge, child) in self.children.get(&node.name).cloned().unwrap_or_default() {
            if !matches!(&*edge, "file" | "backing") {
                return Err(lost(&format!("has a {edge} beside it")));
            }
            let built = self.build(&child, depth - 1)?;
            options.insert(edge, built);
        }
        if !options.contains_key("file") {
            return Err(lost("has no file"));
        }
        if node.image.backing.is_some() && !options.contains_key("backing") {
            options.insert("backing".into(), Value::Null);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, drv: &str, file: &str) -> Node {
        let value = json!({
            "node-name": name, "drv": drv, "file": file, "ro": name == "base",
            "encrypted": false, "detect_zeroes": "off",
            "cache": { "direct": true, "no-flush": false, "writeback": true },
            "image": { "filename": file },
        });
        serde_json::from_value(value).expect("node")
    }

    #[test]
    fn a_chain_of_images() {
        let line = CommandLine::parse(&[]);
        let nodes = [
            node("#block1", "qcow2", "/top"),
            node("#block2", "file", "/top"),
            node("base", "raw", "/base"),
            node("#block3", "file", "/base"),
        ];
        let edge = |name: &str, child: &str| (name.to_owned(), child.to_owned());
        let mut blocks = Blocks {
            line: &line,
            nodes: nodes
                .into_iter()
                .map(|node| (node.name.clone(), node))
                .collect(),
            children: BTreeMap::from([
                (
                    "#block1".to_owned(),
                    vec![edge("file", "#block2"), edge("backing", "base")],
                ),
                ("base".to_owned(), vec![edge("file", "#block3")]),
            ]),
            drives: BTreeMap::from([edge("old", "#block1")]),
            names: vec!["old".to_owned()],
            options: Vec::new(),
            made: Vec::new(),
        };
        assert!(blocks.has("old") && blocks.has("base") && !blocks.has("none"));
        assert_eq!(blocks.follow("old", "hot").expect("followed"), "disk-hot");
        // Another device on an image that is there already.
        assert_eq!(blocks.follow("base", "two").expect("followed"), "base");
        let options = blocks.into_options();
        let values = options
            .iter()
            .map(|option| serde_json::from_str::<Value>(&option.value));
        let values: Vec<Value> = values.collect::<Result<_, _>>().expect("JSON");
        assert_eq!(values.len(), 2);
        assert_eq!(values[0]["node-name"], "base");
        assert_eq!(values[0]["file"]["filename"], "/base");
        assert_eq!(values[0]["read-only"], true);
        assert_eq!(values[1]["node-name"], "disk-hot");
        assert_eq!(values[1]["backing"], "base");
        assert_eq!(values[1]["cache"]["direct"], true);
    }

    #[test]
    fn what_cannot_be_opened_again() {
        let line = CommandLine::parse(&[]);
        let nodes = [
            node("n", "nbd", "nbd://host/x"),
            node("f", "file", "/dev/fdset/3"),
        ];
        let mut blocks = Blocks {
            line: &line,
            nodes: nodes
                .into_iter()
                .map(|node| (node.name.clone(), node))
                .collect(),
            children: BTreeMap::new(),
            drives: BTreeMap::new(),
            names: Vec::new(),
            options: Vec::new(),
            made: Vec::new(),
        };
        for name in ["n", "f", "missing"] {
            assert!(blocks.follow(name, "hot").is_err(), "{name}");
        }
    }
}
