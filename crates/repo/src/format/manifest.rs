//! Manifests: what a checkpoint consists of. The manifest is written last; until then the checkpoint does not
//! exist.
//!
//! The sealed body is JSON, compressed. Unknown fields are refused, because a program that does not know a field
//! might prune the blobs that it refers to. `vm_record` and `downtime_us` are free-form and refer to no blobs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stillframe_page::encoding::{Compression, Decoder, Encoder};
use stillframe_page::hash::ContentId;

use crate::format::annotation::{Note, Tags};
use crate::format::id_text::{self, HexId, ids as ids_text};
use crate::format::image_record::ImageId;
use crate::format::layout::{Cursor, FormatError};

/// Maximum length in bytes of a manifest that is read or written.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// Manifests are short, and a watch writes many.
const COMPRESSION: Compression = Compression::Zstd(3);

/// Maximum number of pages of a RAM block: 2 TiB of 4 KiB pages. The root of its table fits the largest blob.
pub const PAGES_MAX: u64 = 1 << 29;

/// Maximum number of layers of a page table that is read; this program writes at most 33.
const LAYERS_MAX: usize = 1024;

/// The id of a checkpoint: the keyed hash of its manifest file, and the file's name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CheckpointId(pub [u8; 32]);

impl CheckpointId {
    /// 64 lower-case hexadecimal digits.
    pub fn to_hex(&self) -> String {
        ContentId(self.0).to_hex()
    }

    /// The inverse of [`CheckpointId::to_hex`].
    pub fn from_hex(text: &str) -> Option<CheckpointId> {
        ContentId::from_hex(text).map(|id| CheckpointId(id.0))
    }
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ContentId(self.0).fmt(f)
    }
}

impl fmt::Debug for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckpointId({self})")
    }
}

/// A checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The label of the VM.
    pub vm: String,
    /// When the VM was paused for it.
    pub time: Timestamp,
    /// The checkpoint before this one. Informative: it need not exist any more.
    pub parent: Option<CheckpointId>,
    /// The words by which users find it.
    #[serde(default, skip_serializing_if = "Tags::is_empty")]
    pub tags: Tags,
    /// A sentence that a user wrote about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// The page tables of the RAM blocks.
    pub ram: Vec<BlockTable>,
    /// The disks whose content was taken at the same moment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskTable>,
    /// The images outside of the repository that may have some of its pages. Without these it may not be readable.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub images: BTreeSet<ImageId>,
    /// Byte strings, such as `device-state`.
    pub streams: BTreeMap<String, Stream>,
    /// What the capture counted.
    pub pages: PageCounts,
    /// Bytes of packs and index files that were written for it; set by the commit.
    pub bytes_stored: u64,
    /// The engine's record of the VM.
    pub vm_record: serde_json::Value,
    /// The engine's record of the pause.
    pub downtime_us: serde_json::Value,
}

/// The content of one disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskTable {
    /// The length of the disk in bytes. The last page of the table is filled up with zeros.
    pub bytes: u64,
    /// QEMU's bitmap that has recorded what was written to the disk since, if it is there still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// Its page table, with the name of the device that the disk belongs to.
    pub table: BlockTable,
}

/// The page table of one RAM block, or of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockTable {
    /// QEMU's name of the block; of a disk, that of its device.
    pub name: String,
    /// Length of a page in bytes.
    pub page_bytes: u32,
    /// Number of pages.
    pub pages: u64,
    /// The root of its table (see [`crate::page_table::table`]).
    #[serde(with = "id_text")]
    pub root: ContentId,
    /// The changes since the table was written, oldest first (see [`crate::page_table::layer`]).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerRef>,
}

/// A layer over a page table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRef {
    /// Its blob.
    #[serde(with = "id_text")]
    pub id: ContentId,
    /// 0 for the changes of one checkpoint, more for several merged. Never rises along the list.
    pub level: u8,
}

/// A byte string, cut into blobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// Its length in bytes.
    pub bytes: u64,
    /// Its pieces, in order.
    #[serde(with = "ids_text")]
    pub pieces: Vec<ContentId>,
}

/// What the capture counted, in pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageCounts {
    /// Pages of all RAM blocks.
    pub total: u64,
    /// Pages examined for this checkpoint, each counted once.
    pub captured: u64,
    /// Copies of pages stored. A page that was copied in the bulk phase, and again after a write, is counted
    /// twice, here and below.
    pub new: u64,
    /// Pages that the repository already had.
    pub duplicate: u64,
    /// Pages of zeros.
    pub zero: u64,
    /// Pages stored as a delta.
    pub delta: u64,
    /// Pages that were written but have the same content as before.
    pub unchanged: u64,
    /// Pages that were not examined, because the guest called them free: zeros, whatever they held.
    #[serde(default)]
    pub free: u64,
}

/// Decodes the plain body of a manifest.
pub fn decode(body: &[u8]) -> Result<Manifest, FormatError> {
    parse(&unpack(body)?)
}

/// Decodes the JSON of a manifest. The result is consistent: block names are unique, and sizes are within the
/// limits.
pub fn parse(json: &[u8]) -> Result<Manifest, FormatError> {
    let manifest: Manifest = from_json(json)?;
    manifest.check().map_err(FormatError::invalid)?;
    Ok(manifest)
}

/// The JSON of a body, which is encoded like a frame.
fn unpack(body: &[u8]) -> Result<Vec<u8>, FormatError> {
    let mut cursor = Cursor::new(body);
    let (kind, bytes) = (cursor.u8()?, cursor.u32()?);
    if u64::from(bytes) > MANIFEST_BYTES_MAX {
        return Err(FormatError::invalid("its body is too long"));
    }
    let mut json = Vec::new();
    let payload = cursor.take(cursor.left())?;
    Decoder::new()
        .and_then(|mut decoder| decoder.decode(kind, payload, bytes as usize, &mut json))
        .map_err(|error| FormatError::invalid(format!("its body cannot be unpacked: {error}")))?;
    Ok(json)
}

fn from_json<T: DeserializeOwned>(json: &[u8]) -> Result<T, FormatError> {
    serde_json::from_slice(json)
        .map_err(|error| FormatError::invalid(format!("its body is not a manifest: {error}")))
}

/// The fields of a checkpoint that `forget` and `latest` need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Its id.
    pub id: CheckpointId,
    /// The label of its VM.
    pub vm: String,
    /// When it was taken.
    pub time: Timestamp,
    /// Its tags.
    pub tags: Tags,
}

/// The fields by which checkpoints are selected, decoded without the others.
#[derive(Deserialize)]
pub(crate) struct Headline {
    pub(crate) vm: String,
    pub(crate) time: Timestamp,
    #[serde(default)]
    pub(crate) tags: Tags,
}

pub(crate) fn decode_headline(body: &[u8]) -> Result<Headline, FormatError> {
    from_json(&unpack(body)?)
}

impl Manifest {
    /// Encodes the plain body.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, String> {
        self.check()?;
        let json = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        let bytes = u32::try_from(json.len()).map_err(|error| error.to_string())?;
        let mut body = vec![0];
        body.extend_from_slice(&bytes.to_le_bytes());
        let kind =
            Encoder::new(COMPRESSION).and_then(|mut encoder| encoder.encode(&json, &mut body));
        body[0] = kind.map_err(|error| error.to_string())?.number();
        Ok(body)
    }

    /// The page tables of all RAM blocks, then of all disks.
    pub fn tables(&self) -> impl Iterator<Item = (Subject, &BlockTable)> {
        let ram = self.ram.iter().map(|table| (Subject::Ram, table));
        let disks = self.disks.iter();
        ram.chain(disks.map(|disk| (Subject::Disk, &disk.table)))
    }

    /// An error that describes the first inconsistency, if there is one.
    fn check(&self) -> Result<(), String> {
        for (at, (subject, table)) in self.tables().enumerate() {
            let what = subject.named(table);
            if !table.page_bytes.is_power_of_two() || !(512..=2 << 20).contains(&table.page_bytes) {
                return Err(format!("{what} has pages of {} bytes", table.page_bytes));
            }
            if table.pages > PAGES_MAX {
                return Err(format!("{what} has too many pages"));
            }
            let layers = &table.layers;
            if layers.len() > LAYERS_MAX || !layers.is_sorted_by_key(|at| u8::MAX - at.level) {
                return Err(format!(
                    "{what} has too many layers, or has them out of order"
                ));
            }
            let mut before = self.tables().take(at);
            if before.any(|(other, named)| other == subject && named.name == table.name) {
                return Err(format!("{what} is named twice"));
            }
        }
        let length = |disk: &&DiskTable| {
            disk.bytes.div_ceil(disk.table.page_bytes.into()) != disk.table.pages
        };
        match self.disks.iter().find(length) {
            Some(disk) => Err(format!(
                "{} has {} bytes, but {} pages",
                Subject::Disk.named(&disk.table),
                disk.bytes,
                disk.table.pages
            )),
            None => Ok(()),
        }
    }
}

/// What a page table describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A RAM block.
    Ram,
    /// A disk.
    Disk,
}

impl Subject {
    /// The words for one.
    pub fn named(self, table: &BlockTable) -> String {
        let kind = match self {
            Subject::Ram => "RAM block",
            Subject::Disk => "disk",
        };
        format!("{kind} '{}'", table.name)
    }
}

impl TryFrom<String> for CheckpointId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<CheckpointId, &'static str> {
        HexId::try_from(text).map(|id| CheckpointId(id.0.0))
    }
}

impl From<CheckpointId> for String {
    fn from(id: CheckpointId) -> String {
        id.to_hex()
    }
}
