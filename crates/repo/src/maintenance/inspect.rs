//! Describes any file of a repository, and any blob, as JSON.

use std::path::{Component, Path};
use std::time::SystemTime;

use serde_json::{Value, json};
use stillframe_page::encoding::Kind;
use stillframe_page::hash::ContentId;

use crate::error::RepoError;
use crate::format::config;
use crate::format::file_hash::FileHash;
use crate::format::image_record::ImageId;
use crate::format::layout::FORMAT_VERSION;
use crate::format::lease_record;
use crate::format::lock_record;
use crate::format::manifest::CheckpointId;
use crate::index::file::read_index_file;
use crate::index::locations::Location;
use crate::lease::is_over;
use crate::maintenance::scrub::open_directory;
use crate::pack::{Directory, KIND_EXTERNAL, PREAMBLE_BYTES};
use crate::page_table::layer::Layer;
use crate::page_table::table::{PageRef, decode_root_of_any_size, decode_segment_of_any_size};
use crate::repository::{Repository, read_key};
use crate::store::local::{Area, CONFIG};
use crate::store::lock::{age, is_stale};

/// The size of a repository.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of checkpoints.
    pub checkpoints: u64,
    /// Number of packs that the index describes.
    pub packs: u64,
    /// Bytes of those packs.
    pub pack_bytes: u64,
    /// Number of frames in them.
    pub frames: u64,
    /// Number of different blobs.
    pub blobs: u64,
    /// Bytes of those blobs before encoding.
    pub blob_bytes: u64,
    /// Number of indexed images.
    pub images: u64,
    /// Number of those blobs that are blocks of images, and of no other pack.
    pub image_blobs: u64,
    /// Number of index files.
    pub index_files: u64,
    /// Bytes of those index files.
    pub index_bytes: u64,
}

impl Repository {
    /// The size of the repository, with data that is no longer in use.
    pub fn stats(&mut self) -> Result<Stats, RepoError> {
        self.refresh_index()?;
        let packs = self.index.packs();
        let files = self.index.files();
        let in_image = |at: &Location| self.index.frame(*at).0.image.is_some();
        Ok(Stats {
            checkpoints: self.checkpoint_ids()?.len() as u64,
            packs: packs.len() as u64,
            pack_bytes: packs.iter().map(|pack| pack.file_bytes).sum(),
            frames: self.index.frames(),
            blobs: self.index.blobs(),
            blob_bytes: self.index.locations().map(|at| u64::from(at.bytes)).sum(),
            images: self.images.ids()?.len() as u64,
            image_blobs: self.index.locations().filter(in_image).count() as u64,
            index_files: files.len() as u64,
            index_bytes: files.values().map(|file| file.bytes).sum(),
        })
    }

    /// Describes a file of the repository, named by its path in it or in the file system. The described content
    /// is verified; of a pack only the directory is read.
    pub fn inspect(&self, path: &Path) -> Result<Value, RepoError> {
        let inside = path.strip_prefix(self.dir()).unwrap_or(path);
        let parts: Vec<&str> = inside
            .components()
            .filter_map(|part| match part {
                Component::Normal(name) => name.to_str(),
                _ => None,
            })
            .collect();
        match parts[..] {
            [CONFIG] => self.inspect_config(),
            ["keys", name] => self.inspect_key(name),
            ["packs", _, name] | ["packs", name] => self.inspect_pack(name),
            ["index", name] => self.inspect_index(name),
            ["manifests", name] => self.inspect_manifest(name),
            ["working-sets", name] => self.inspect_working_set(name),
            ["images", name] => self.inspect_image(name),
            ["locks", name] => self.inspect_lock(name),
            ["leases", name] => self.inspect_lease(name),
            _ => Err(not_ours(path)),
        }
    }

    fn inspect_config(&self) -> Result<Value, RepoError> {
        let id = config::decode(&self.store.read_config()?)
            .map_err(|error| RepoError::format(CONFIG, &error))?;
        Ok(
            json!({ "kind": "config", "format_version": FORMAT_VERSION, "repository": id.to_string() }),
        )
    }

    fn inspect_key(&self, name: &str) -> Result<Value, RepoError> {
        let key = read_key(&self.store, name)?;
        Ok(json!({
            "kind": "key file",
            "format_version": FORMAT_VERSION,
            "derivation": "argon2id",
            "memory_kib": key.cost.memory_kib,
            "passes": key.cost.passes,
            "lanes": key.cost.lanes,
            "label": key.label,
        }))
    }

    fn inspect_pack(&self, name: &str) -> Result<Value, RepoError> {
        let hash = FileHash::from_name(name).ok_or_else(|| not_ours(name.as_ref()))?;
        let length = self.store.length(Area::Packs, name)?;
        let bytes = length.ok_or_else(|| not_ours(name.as_ref()))?;
        let opened = open_directory(&self.store, &self.keys, hash, bytes)?;
        let mut description = describe_directory(&opened.directory);
        description["kind"] = json!("pack");
        description["format_version"] = json!(FORMAT_VERSION);
        description["file_bytes"] = json!(bytes);
        description["directory_bytes"] = json!(opened.end.len());
        Ok(description)
    }

    fn inspect_index(&self, name: &str) -> Result<Value, RepoError> {
        let hash = FileHash::from_name(name).ok_or_else(|| not_ours(name.as_ref()))?;
        let (file, bytes) = read_index_file(&self.store, &self.keys, hash)?;
        let supersedes: Vec<String> = file.supersedes.iter().map(FileHash::to_string).collect();
        let packs: Vec<Value> = file
            .packs
            .iter()
            .map(|entry| {
                let mut description = describe_directory(&entry.directory);
                description["pack"] = json!(entry.pack.to_string());
                description
            })
            .collect();
        Ok(json!({
            "kind": "index",
            "format_version": FORMAT_VERSION,
            "file_bytes": bytes,
            "supersedes": supersedes,
            "packs": packs,
        }))
    }

    fn inspect_manifest(&self, name: &str) -> Result<Value, RepoError> {
        let id = CheckpointId::from_hex(name).ok_or_else(|| not_ours(name.as_ref()))?;
        let manifest = self.manifest(&id)?;
        let body = serde_json::to_value(manifest).map_err(|error| RepoError::BadManifest {
            what: error.to_string(),
        })?;
        Ok(
            json!({ "kind": "manifest", "format_version": FORMAT_VERSION, "checkpoint": name, "body": body }),
        )
    }

    fn inspect_working_set(&self, name: &str) -> Result<Value, RepoError> {
        let id = CheckpointId::from_hex(name).ok_or_else(|| not_ours(name.as_ref()))?;
        let set = self
            .working_set(&id)?
            .ok_or_else(|| not_ours(name.as_ref()))?;
        let pages = set.pages.iter().map(|page| (page.block, page.page));
        let pages: Vec<(usize, u64)> = pages.collect();
        Ok(
            json!({ "kind": "working set", "format_version": FORMAT_VERSION, "checkpoint": name, "pages": pages }),
        )
    }

    fn inspect_image(&self, name: &str) -> Result<Value, RepoError> {
        let id = ImageId::from_hex(name).ok_or_else(|| not_ours(name.as_ref()))?;
        let image = self.image(id)?;
        let body = serde_json::to_value(&image.record).unwrap_or_default();
        Ok(
            json!({ "kind": "image", "format_version": FORMAT_VERSION, "state": image.state.to_string(), "body": body }),
        )
    }

    fn inspect_lock(&self, name: &str) -> Result<Value, RepoError> {
        let label = self.store.label(Area::Locks, name);
        let bytes = self
            .store
            .read(Area::Locks, name, lock_record::LOCK_BYTES_MAX)?;
        let record =
            lock_record::decode(&bytes).map_err(|error| RepoError::format(&label, &error))?;
        // By this machine's clock: an inspection writes no file to compare with.
        let age = age(&self.store, Area::Locks, name, SystemTime::now())?;
        let stale = is_stale(&record, age);
        let body = serde_json::to_value(record).unwrap_or_default();
        Ok(json!({ "kind": "lock", "stale": stale, "body": body }))
    }

    fn inspect_lease(&self, name: &str) -> Result<Value, RepoError> {
        let label = self.store.label(Area::Leases, name);
        let bytes = self
            .store
            .read(Area::Leases, name, lease_record::LEASE_BYTES_MAX)?;
        let record =
            lease_record::decode(&bytes).map_err(|error| RepoError::format(&label, &error))?;
        let over = is_over(&record);
        let body = serde_json::to_value(record).unwrap_or_default();
        Ok(json!({ "kind": "lease", "over": over, "body": body }))
    }

    /// Describes a blob: its location and its kind. Layers, roots and segments of page tables are recognized by
    /// their magic numbers and by decoding; a page could be made to look like one.
    pub fn inspect_blob(&mut self, id: &ContentId) -> Result<Value, RepoError> {
        self.refresh_index()?;
        let at = self
            .index
            .get(id)
            .ok_or(RepoError::MissingBlob { id: *id })?;
        let bytes = self.blobs().read(id)?;
        let (pack, frame) = self.index.frame(at);
        let mut description = json!({
            "kind": "bytes",
            "blob": id.to_hex(),
            "bytes": at.bytes,
            "pack": pack.name.to_string(),
            "frame": pack.frame_number(at),
            "offset_in_frame": at.offset,
            "frame_encoding": encoding(frame.kind),
            "frame_stored_bytes": frame.stored_bytes,
            "frame_plain_bytes": frame.plain_bytes,
        });
        if let Ok((pages, segments)) = decode_root_of_any_size(&bytes) {
            description["kind"] = json!("page table root");
            description["pages"] = json!(pages);
            description["segments"] = describe_entries(&segments);
        } else if let Ok(entries) = decode_segment_of_any_size(&bytes) {
            description["kind"] = json!("page table segment");
            description["pages"] = describe_entries(&entries);
        } else if let Ok((pages, layer)) = Layer::decode_of_any_size(&bytes) {
            description["kind"] = json!("layer");
            description["block_pages"] = json!(pages);
            description["whole"] = layer
                .whole
                .iter()
                .map(|&(page, content)| json!({ "page": page, "blob": describe_entry(content) }))
                .collect();
            description["deltas"] = layer
                .parts
                .iter()
                .map(|part| json!({ "blob": part.id.to_hex(), "pages": part.pages }))
                .collect();
        }
        Ok(description)
    }
}

/// The entries, `null` for those that are all zero.
fn describe_entries(entries: &[PageRef]) -> Value {
    entries.iter().copied().map(describe_entry).collect()
}

fn describe_entry(entry: PageRef) -> Value {
    match entry {
        PageRef::Zero => Value::Null,
        PageRef::Stored(id) => json!(id.to_hex()),
    }
}

fn describe_directory(directory: &Directory) -> Value {
    let mut offset = PREAMBLE_BYTES as u64;
    let frames: Vec<Value> = directory
        .frames
        .iter()
        .map(|frame| {
            let blobs: Vec<Value> = frame
                .blobs
                .iter()
                .map(|(id, bytes)| json!({ "id": id.to_hex(), "bytes": bytes }))
                .collect();
            let description = json!({
                "offset": offset,
                "encoding": encoding(frame.kind),
                "stored_bytes": frame.stored_bytes,
                "plain_bytes": frame.plain_bytes,
                "blobs": blobs,
            });
            offset += u64::from(frame.stored_bytes);
            description
        })
        .collect();
    let mut description = json!({ "frames": frames });
    if let Some(image) = directory.image {
        description["image"] = json!(image.to_string());
    }
    description
}

fn encoding(kind: u8) -> &'static str {
    if kind == KIND_EXTERNAL {
        return "external";
    }
    match Kind::from_number(kind) {
        Ok(Kind::Zero) => "zero",
        Ok(Kind::Raw) => "raw",
        Ok(Kind::Zstd) => "zstd",
        Ok(Kind::Lz4) => "lz4",
        Err(_) => "unknown",
    }
}

fn not_ours(path: &Path) -> RepoError {
    RepoError::NoSuchFile {
        path: path.to_owned(),
    }
}
