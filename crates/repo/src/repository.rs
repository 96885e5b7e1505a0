//! A repository: creation, opening, manifests, and the reader of its blobs.

use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stillframe_page::hash::{ContentHasher, ContentId};
use zeroize::Zeroizing;

use crate::blobs::{BlobSink, Blobs};
use crate::crypto::key_file::KEYS_MAX;
use crate::crypto::key_file::{self, Cost, Label};
use crate::crypto::sealed_file::open_file;
use crate::crypto::{Keys, MasterKey, Password, random};
use crate::error::RepoError;
use crate::format::config::{self, RepositoryId};
use crate::format::file_hash::FileHash;
use crate::format::image_record::ImageId;
use crate::format::layout::{FileKind, FormatError};
use crate::format::lock_record::LockKind;
use crate::format::manifest::Summary;
use crate::format::manifest::{self, CheckpointId, Headline, MANIFEST_BYTES_MAX, Manifest, Stream};
use crate::images::Images;
use crate::index::in_memory::Index;
use crate::index::reader::IndexReader;
use crate::index::reopening::ReopeningIndex;
use crate::index::writer_index::WriterIndex;
use crate::pack::PackLimits;
use crate::pack::packer::{self, Packer};
use crate::store::local::{Area, CONFIG, LocalStore};
use crate::store::lock::Lock;

/// Maximum length in bytes of a key file. Those of this version have up to 1.2 KB; later ones may need more.
const KEY_BYTES_MAX: u64 = 4096;

/// An open repository in a local directory.
pub struct Repository {
    pub(crate) store: Arc<LocalStore>,
    pub(crate) keys: Arc<Keys>,
    pub(crate) images: Arc<Images>,
    /// What maintenance uses: the whole index.
    pub(crate) index: Index,
    /// What writers use. It stays in memory from one to the next.
    pub(crate) writer_index: WriterIndex,
    /// [`PackLimits::STANDARD`], except in tests.
    pub(crate) pack_limits: PackLimits,
    /// Counted when it is opened: threads that write are confined later on, at times.
    sealers: usize,
    id: RepositoryId,
    keeps_lock: bool,
    /// The lock of the last writer, kept for the next.
    kept_lock: Option<Arc<Lock>>,
}

impl std::fmt::Debug for Repository {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Repository({} in {})",
            self.id,
            self.store.root().display()
        )
    }
}

impl Repository {
    /// Creates a repository in a directory that does not exist or is empty.
    pub fn init(dir: &Path, password: &Password) -> Result<Repository, RepoError> {
        Repository::init_with(dir, password, Cost::STANDARD)
    }

    /// The same, with this cost of each guess of the password.
    pub fn init_with(dir: &Path, password: &Password, cost: Cost) -> Result<Repository, RepoError> {
        Repository::init_at(LocalStore::new(dir), password, cost)
    }

    pub(crate) fn init_at(
        store: LocalStore,
        password: &Password,
        cost: Cost,
    ) -> Result<Repository, RepoError> {
        refuse_other_contents(store.root())?;
        store.create_folders()?;
        let id = RepositoryId(random()?);
        let master: MasterKey = Zeroizing::new(random()?);
        let key = key_file::wrap(&master, password, cost, id, &Label::of_now())?;
        let key_name = FileHash::of(&key).to_string();
        store.create(Area::Keys, &key_name, &key)?;
        // Last, because this file makes the directory a repository.
        if !store.create_config(&config::encode(id))? {
            store.remove(Area::Keys, &key_name)?;
            return Err(not_empty(
                store.root(),
                "another process has just created one there",
            ));
        }
        Ok(Repository::assemble(store, id, &master))
    }

    /// Opens a repository. Reads its config and key files only; the index is read when first needed.
    pub fn open(dir: &Path, password: &Password) -> Result<Repository, RepoError> {
        Repository::open_at(LocalStore::new(dir), password)
    }

    pub(crate) fn open_at(store: LocalStore, password: &Password) -> Result<Repository, RepoError> {
        let id = read_id(&store)?;
        let unlocked = unlock(&store, password, id)?;
        Ok(Repository::assemble(store, id, &unlocked.master))
    }

    /// Tries the password. Returns the key that it opens, for [`Repository::open_with`].
    pub fn unlock(dir: &Path, password: &Password) -> Result<UnlockedKey, RepoError> {
        let store = LocalStore::new(dir);
        let id = read_id(&store)?;
        Ok(UnlockedKey(unlock(&store, password, id)?.master))
    }

    /// The identity of the repository in a directory; no password is needed to see it.
    pub fn id_of(dir: &Path) -> Result<RepositoryId, RepoError> {
        read_id(&LocalStore::new(dir))
    }

    /// Opens a repository with a key that a password has opened before. The key is not checked: with that of
    /// another repository, nothing can be read.
    pub fn open_with(dir: &Path, key: &UnlockedKey) -> Result<Repository, RepoError> {
        let store = LocalStore::new(dir);
        let id = read_id(&store)?;
        Ok(Repository::assemble(store, id, &key.0))
    }

    fn assemble(store: LocalStore, id: RepositoryId, master: &MasterKey) -> Repository {
        let (store, keys) = (Arc::new(store), Arc::new(Keys::derive(master)));
        let images = Arc::new(Images::new(store.clone(), keys.clone()));
        Repository {
            index: Index::default(),
            writer_index: WriterIndex::new(&images),
            images,
            pack_limits: PackLimits::STANDARD,
            sealers: packer::sealers(),
            store,
            keys,
            id,
            keeps_lock: false,
            kept_lock: None,
        }
    }

    /// What writes new packs into it.
    pub(crate) fn packer(&self) -> Result<Packer, RepoError> {
        let (store, keys) = (self.store.clone(), self.keys.clone());
        Packer::start(store, keys, self.pack_limits, self.sealers)
    }

    /// The repository's random identity.
    pub fn id(&self) -> RepositoryId {
        self.id
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        self.store.root()
    }

    /// Limits the average rate of later writes; `None`: no limit.
    pub fn limit_writes(&self, bytes_per_s: Option<NonZeroU64>) {
        self.store.rate_limiter.limit(bytes_per_s);
    }

    /// Sets whether a writer leaves its lock to the next one, which saves creating and removing a file each time.
    /// A waiting remover gets the lock when the next writer begins, or when this is called with `false`.
    pub fn keep_lock(&mut self, keep: bool) {
        self.keeps_lock = keep;
        if !keep {
            self.kept_lock = None;
        }
    }

    /// The lock for a writer.
    pub(crate) fn writing_lock(&mut self, wait: Duration) -> Result<Arc<Lock>, RepoError> {
        let kept = self.kept_lock.take().filter(|lock| lock.is_undisputed());
        let lock = match kept {
            Some(lock) => lock,
            None => Arc::new(Lock::take(&self.store, LockKind::Shared, wait)?),
        };
        self.kept_lock = self.keeps_lock.then(|| lock.clone());
        Ok(lock)
    }

    /// The hasher that makes the ids of this repository's blobs.
    pub fn hasher(&self) -> ContentHasher {
        self.keys.hasher()
    }

    /// Begins reading, with a shared lock as in [`Repository::begin`]. On a read-only or full file system, where
    /// no lock can be written, it reads without one. Takes the same time for any size of repository.
    pub fn reader(&mut self, wait: Duration) -> Result<Reader<'_>, RepoError> {
        let lock = self.reading_lock(wait)?;
        let on_demand = ReopeningIndex::open(&self.images)?;
        Ok(Reader {
            repository: self,
            on_demand,
            _lock: lock,
        })
    }

    pub(crate) fn reading_lock(&self, wait: Duration) -> Result<Option<Lock>, RepoError> {
        match Lock::take(&self.store, LockKind::Shared, wait) {
            Ok(lock) => Ok(Some(lock)),
            // A full disk must not prevent a restore. If another host prunes meanwhile, the index is opened anew;
            // a blob that is not found then is an error, never wrong bytes.
            Err(RepoError::ReadOnly { .. } | RepoError::NoSpace { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn refresh_index(&mut self) -> Result<(), RepoError> {
        self.index.refresh(&self.store, &self.keys)
    }

    /// The blobs of the in-memory index.
    pub(crate) fn blobs(&self) -> Blobs<'_> {
        Blobs {
            store: &self.store,
            keys: &self.keys,
            images: &self.images,
            index: IndexReader::InMemory(&self.index),
        }
    }

    /// All checkpoints, oldest first.
    pub fn manifests(&self) -> Result<Vec<(CheckpointId, Manifest)>, RepoError> {
        let mut found = Vec::new();
        for id in self.checkpoint_ids()? {
            // One that was forgotten since the folder was listed is left out.
            if let Some(manifest) = self.read_manifest(&id)? {
                found.push((id, manifest));
            }
        }
        found.sort_by_key(|(id, manifest)| (manifest.time, *id));
        Ok(found)
    }

    /// The summaries of all checkpoints, oldest first.
    pub(crate) fn summaries(&self) -> Result<Vec<Summary>, RepoError> {
        let mut found = Vec::new();
        for id in self.checkpoint_ids()? {
            if let Some(Headline { vm, time, tags }) =
                self.read_manifest_as(&id, manifest::decode_headline)?
            {
                found.push(Summary { id, vm, time, tags });
            }
        }
        found.sort_by_key(|summary| (summary.time, summary.id));
        Ok(found)
    }

    /// Whether there is a checkpoint of this id.
    pub fn has_manifest(&self, id: &CheckpointId) -> Result<bool, RepoError> {
        Ok(self.store.length(Area::Manifests, &id.to_hex())?.is_some())
    }

    /// The checkpoint of this id.
    pub fn manifest(&self, id: &CheckpointId) -> Result<Manifest, RepoError> {
        self.read_manifest(id)?.ok_or_else(|| RepoError::NotFound {
            name: id.to_hex(),
            vm: None,
        })
    }

    /// The ids of all checkpoints, in no particular order.
    pub(crate) fn checkpoint_ids(&self) -> Result<Vec<CheckpointId>, RepoError> {
        let names = self.store.names(Area::Manifests)?;
        Ok(names
            .iter()
            .filter_map(|name| CheckpointId::from_hex(name))
            .collect())
    }

    /// Reads a manifest and checks it against its name; `None` if there is none.
    pub(crate) fn read_manifest(&self, id: &CheckpointId) -> Result<Option<Manifest>, RepoError> {
        self.read_manifest_as(id, manifest::decode)
    }

    fn read_manifest_as<T>(
        &self,
        id: &CheckpointId,
        decode: fn(&[u8]) -> Result<T, FormatError>,
    ) -> Result<Option<T>, RepoError> {
        let name = id.to_hex();
        let mut bytes = match self.store.read(Area::Manifests, &name, MANIFEST_BYTES_MAX) {
            Err(error) if error.is_absent() => return Ok(None),
            other => other?,
        };
        let open = |bytes: &mut [u8]| {
            if self.keys.checkpoint_id(bytes) != id.0 {
                return Err(FormatError::Mismatch { what: "its name" });
            }
            decode(open_file(FileKind::Manifest, &self.keys, bytes)?)
        };
        open(&mut bytes)
            .map(Some)
            .map_err(|error| RepoError::format(self.store.label(Area::Manifests, &name), &error))
    }
}

/// Reads blobs. Holds a shared lock, so that no blob is pruned meanwhile.
pub struct Reader<'a> {
    repository: &'a Repository,
    on_demand: ReopeningIndex,
    _lock: Option<Lock>,
}

impl Reader<'_> {
    pub(crate) fn repository(&self) -> &Repository {
        self.repository
    }

    /// The blobs, in the form that functions on page tables take.
    pub fn blobs(&self) -> Blobs<'_> {
        Blobs {
            index: IndexReader::OnDemand(&self.on_demand),
            ..self.repository.blobs()
        }
    }

    /// The checkpoint of this id.
    pub fn manifest(&self, id: &CheckpointId) -> Result<Manifest, RepoError> {
        self.repository.manifest(id)
    }

    /// Whether the repository has a blob of this id.
    pub fn contains(&self, id: &ContentId) -> Result<bool, RepoError> {
        self.on_demand.contains(id)
    }

    /// The image that has a blob, if the blob is read from one.
    pub fn image_of(&self, id: &ContentId) -> Result<Option<ImageId>, RepoError> {
        self.on_demand.image_of(id)
    }

    /// The bytes of one blob, verified against its id.
    pub fn read(&self, id: &ContentId) -> Result<Vec<u8>, RepoError> {
        self.blobs().read(id)
    }

    /// Passes each wanted blob to `sink`, in the order of their locations, from up to `threads` threads at once,
    /// each verified against its id. See [`Blobs::read_sorted`].
    pub fn read_sorted<T: Copy + Send, E: From<RepoError> + Send>(
        &self,
        wanted: Vec<(ContentId, T)>,
        threads: usize,
        sink: BlobSink<'_, T, E>,
    ) -> Result<(), E> {
        self.blobs().read_sorted(wanted, threads, sink)
    }

    /// The bytes of a stream of a manifest, at most `limit_bytes`.
    pub fn read_stream(&self, stream: &Stream, limit_bytes: u64) -> Result<Vec<u8>, RepoError> {
        let wrong = |what: String| RepoError::Damaged {
            file: "a stream".into(),
            what,
        };
        if stream.bytes > limit_bytes {
            let what = format!(
                "it has {} bytes where {limit_bytes} are allowed",
                stream.bytes
            );
            return Err(wrong(what));
        }
        let pieces = self.blobs().read_many(&stream.pieces)?;
        let bytes = pieces.concat();
        match bytes.len() as u64 == stream.bytes {
            true => Ok(bytes),
            false => Err(wrong(format!(
                "its pieces have {} bytes instead of {}",
                bytes.len(),
                stream.bytes
            ))),
        }
    }
}

impl<'a> From<&'a Reader<'_>> for Blobs<'a> {
    fn from(reader: &'a Reader<'_>) -> Blobs<'a> {
        reader.blobs()
    }
}

/// The key of a repository, unwrapped from its key file. It opens the repository without a password; wiped when
/// dropped.
pub struct UnlockedKey(MasterKey);

impl UnlockedKey {
    /// The bytes for [`UnlockedKey::from_bytes`], as secret as the password.
    pub fn bytes(&self) -> &[u8] {
        &self.0[..]
    }

    /// A key of these bytes; `None` if their number is not that of a key.
    pub fn from_bytes(bytes: &[u8]) -> Option<UnlockedKey> {
        let key = bytes.try_into().ok()?;
        Some(UnlockedKey(Zeroizing::new(key)))
    }
}

pub(crate) fn read_id(store: &LocalStore) -> Result<RepositoryId, RepoError> {
    let config = match store.read_config() {
        Err(error) if error.is_absent() => {
            let dir = store.root().to_owned();
            return Err(RepoError::NotARepository { dir });
        }
        other => other?,
    };
    config::decode(&config).map_err(|error| RepoError::format(CONFIG, &error))
}

/// The key that a password opened.
pub(crate) struct Unlocked {
    pub(crate) master: MasterKey,
    /// The name of the key file.
    pub(crate) key: String,
}

/// Tries the password on every key file. A damaged one is reported only if no other opens.
pub(crate) fn unlock(
    store: &LocalStore,
    password: &Password,
    id: RepositoryId,
) -> Result<Unlocked, RepoError> {
    let mut damaged = None;
    let mut tried = 0;
    let mut names = store.names(Area::Keys)?;
    names.sort_unstable();
    for key in names {
        match read_key(store, &key) {
            // A key file determines its cost in time and memory, and any writer of the storage can add some.
            Ok(_) if tried == KEYS_MAX => {
                return Err(RepoError::TooManyKeys {
                    keys: tried + 1,
                    limit: KEYS_MAX,
                });
            }
            Ok(file) => {
                tried += 1;
                if let Some(master) = file.unwrap(password, id)? {
                    return Ok(Unlocked { master, key });
                }
            }
            Err(error) => damaged = Some(error),
        }
    }
    Err(match damaged {
        Some(error) => error,
        None if tried == 0 => RepoError::Damaged {
            file: Area::Keys.folder().into(),
            what: "no key file is in it".into(),
        },
        None => RepoError::WrongPassword {
            dir: store.root().to_owned(),
            keys: tried,
        },
    })
}

/// Reads a key file and checks it against its name.
pub(crate) fn read_key(store: &LocalStore, name: &str) -> Result<key_file::KeyFile, RepoError> {
    let bytes = store.read(Area::Keys, name, KEY_BYTES_MAX)?;
    let decode = || {
        if FileHash::of(&bytes).to_string() != name {
            return Err(FormatError::Mismatch { what: "its name" });
        }
        key_file::decode(&bytes)
    };
    decode().map_err(|error| RepoError::format(store.label(Area::Keys, name), &error))
}

/// Refuses a directory for `init`, unless it is empty or an earlier `init` in it did not finish.
fn refuse_other_contents(dir: &Path) -> Result<(), RepoError> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(RepoError::io("list", dir, error)),
    };
    for entry in entries {
        let name = entry
            .map_err(|error| RepoError::io("list", dir, error))?
            .file_name();
        if name == CONFIG {
            return Err(not_empty(dir, "it is one already"));
        }
        if !Area::ALL.iter().any(|area| name == area.folder()) {
            let what = format!("it contains '{}'", name.display());
            return Err(not_empty(dir, &what));
        }
    }
    Ok(())
}

fn not_empty(dir: &Path, what: &str) -> RepoError {
    RepoError::NotEmpty {
        dir: dir.to_owned(),
        what: what.into(),
    }
}
