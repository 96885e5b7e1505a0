//! A repository's files in a local directory: the only place that touches the file system.
//!
//! Files are created atomically: written under `tmp/`, fsynced, renamed to their final name, and the directory
//! fsynced, in this order. Key files, packs, index files and manifests never change after that and are only
//! removed; each is named by a hash of its bytes. `config` never changes either, and is created only if it is
//! absent.
//!
//! Four kinds of files are replaced as a whole under a fixed name. A working set is a hint on which nothing
//! depends. The file of an image says where that is now. A lock is replaced by its owner only, and a lease by the process that restores its VM. Locks and
//! leases are not fsynced: after a crash of the machine their processes are gone.
//!
//! A store therefore offers: create if absent (`config`), atomic replace of a whole object, read of a range,
//! list, remove, length, and time of change (the age of locks). A list must include an object as soon as it is
//! written.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

use rustix::fs::OFlags;
use stillframe_fault::{self as fault, Point};

use crate::crypto::random;
use crate::error::RepoError;
use crate::store::rate_limiter::RateLimiter;
use crate::sync::lock;

/// The folders of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Area {
    Keys,
    Packs,
    Index,
    Manifests,
    WorkingSets,
    Images,
    Locks,
    Leases,
    Temporary,
}

impl Area {
    pub(crate) const ALL: [Area; 9] = [
        Area::Keys,
        Area::Packs,
        Area::Index,
        Area::Manifests,
        Area::WorkingSets,
        Area::Images,
        Area::Locks,
        Area::Leases,
        Area::Temporary,
    ];

    /// The fault point just before a file gets its name.
    fn made(self) -> Option<Point> {
        match self {
            Area::Keys => Some(Point::KeyWrite),
            Area::Packs => Some(Point::StorePack),
            Area::Index => Some(Point::StoreIndex),
            Area::Manifests => Some(Point::StoreManifest),
            Area::WorkingSets => Some(Point::StoreWorkingSet),
            Area::Images => Some(Point::StoreImage),
            Area::Locks => Some(Point::LockTake),
            Area::Leases => Some(Point::LeaseTake),
            Area::Temporary => None,
        }
    }

    /// The fault point just before a file is removed.
    fn removed(self) -> Option<Point> {
        match self {
            Area::Keys => Some(Point::KeyRemove),
            Area::Packs => Some(Point::PruneRemove),
            Area::Index => Some(Point::IndexRemove),
            Area::Manifests => Some(Point::ForgetRemove),
            Area::Locks => Some(Point::LockEnd),
            Area::Leases => Some(Point::LeaseEnd),
            Area::WorkingSets | Area::Images | Area::Temporary => None,
        }
    }

    /// The folder's name.
    pub(crate) fn folder(self) -> &'static str {
        match self {
            Area::Keys => "keys",
            Area::Packs => "packs",
            Area::Index => "index",
            Area::Manifests => "manifests",
            Area::WorkingSets => "working-sets",
            Area::Images => "images",
            Area::Locks => "locks",
            Area::Leases => "leases",
            Area::Temporary => "tmp",
        }
    }
}

/// The name of the file that makes a directory a repository.
pub(crate) const CONFIG: &str = "config";

/// The extension of an unfinished lock or lease file.
pub(crate) const UNFINISHED_LOCK: &str = "new";

/// Only the owner has access: a party that can read key files can try guessed passwords on them.
const PRIVATE_FOLDER: u32 = 0o700;
const PRIVATE_FILE: u32 = 0o600;

/// The directory of one repository.
pub(crate) struct LocalStore {
    root: PathBuf,
    pub(crate) rate_limiter: RateLimiter,
    /// Folders of packs whose names this process knows to be durable.
    durable_folders: Mutex<HashSet<PathBuf>>,
    #[cfg(test)]
    pub(crate) faults: crate::tests::faults::Faults,
}

/// An operation on the disk that is about to be done; tests count, record and refuse them.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "only fault injection reads them")
)]
pub(crate) enum Step<'a> {
    Write(&'a Path),
    SyncFile(&'a Path),
    Rename(&'a Path, &'a Path),
    Remove(&'a Path),
    CreateFolder(&'a Path),
    SyncFolder(&'a Path),
}

impl LocalStore {
    pub(crate) fn new(root: &Path) -> LocalStore {
        LocalStore {
            root: root.to_owned(),
            rate_limiter: RateLimiter::default(),
            durable_folders: Mutex::default(),
            #[cfg(test)]
            faults: crate::tests::faults::Faults::default(),
        }
    }

    #[cfg(test)]
    pub(crate) fn with_faults(root: &Path, faults: crate::tests::faults::Faults) -> LocalStore {
        LocalStore {
            faults,
            ..LocalStore::new(root)
        }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The path of a file. Packs are spread over 256 folders by the first two digits of their name: a long watch
    /// makes hundreds of thousands.
    pub(crate) fn path(&self, area: Area, name: &str) -> PathBuf {
        let folder = match area {
            Area::Packs => self.pack_folder(name),
            _ => self.root.join(area.folder()),
        };
        folder.join(name)
    }

    fn pack_folder(&self, pack: &str) -> PathBuf {
        let packs = self.root.join(Area::Packs.folder());
        packs.join(pack.get(..2).unwrap_or(pack))
    }

    /// The name of a file in messages: its path in the repository.
    pub(crate) fn label(&self, area: Area, name: &str) -> String {
        let path = self.path(area, name);
        let relative = path.strip_prefix(&self.root).unwrap_or(&path);
        relative.display().to_string()
    }

    /// Creates the folders of a new repository.
    pub(crate) fn create_folders(&self) -> Result<(), RepoError> {
        // Folders above do not belong to the repository: the umask decides their mode.
        if let Some(above) = self.root.parent() {
            fs::create_dir_all(above).map_err(|error| RepoError::io("create", above, error))?;
        }
        let create = |path: &Path| {
            self.step(Step::CreateFolder(path))?;
            create_private_folder(path).map_err(|error| RepoError::io("create", path, error))
        };
        create(&self.root)?;
        for area in Area::ALL {
            create(&self.root.join(area.folder()))?;
        }
        self.sync_folder(&self.root)
    }

    /// Ensures that a folder exists and that its own name is durable. Each folder of packs is synced once:
    /// another process may have just created it, and may end before it has synced the name.
    fn ensure_folder(&self, path: &Path) -> Result<(), RepoError> {
        let parent = path.parent().unwrap_or(&self.root);
        let is_there = path.is_dir();
        // The other folders are as old as the repository.
        let is_known = || parent == self.root || lock(&self.durable_folders).contains(path);
        if is_there && is_known() {
            return Ok(());
        }
        match is_there {
            true => self.sync_folder(parent)?,
            false => self.create_folder(path)?,
        }
        lock(&self.durable_folders).insert(path.to_owned());
        Ok(())
    }

    /// Creates a missing folder durably. If its name cannot be made durable, the folder is removed again: later
    /// calls take an existing folder for durable.
    fn create_folder(&self, path: &Path) -> Result<(), RepoError> {
        self.step(Step::CreateFolder(path))?;
        match fs::DirBuilder::new().mode(PRIVATE_FOLDER).create(path) {
            Ok(()) => {}
            // Another process may have just created it, and not have synced it yet.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(RepoError::io("create", path, error)),
        }
        // `path` has a parent: it was joined from the repository's folder and a name.
        let synced = self.sync_folder(path.parent().unwrap_or(&self.root));
        if synced.is_err() {
            // Fails if another process has put a file into it and synced that.
            let _ = fs::remove_dir(path);
        }
        synced
    }

    /// The names of the files in an area, in no particular order; a missing folder counts as empty.
    pub(crate) fn names(&self, area: Area) -> Result<Vec<String>, RepoError> {
        let folder = self.root.join(area.folder());
        let mut names = Vec::new();
        if area != Area::Packs {
            read_names(&folder, &mut names)?;
            return Ok(names);
        }
        let mut groups = Vec::new();
        read_names(&folder, &mut groups)?;
        for group in groups {
            let path = folder.join(&group);
            match path.is_dir() {
                true => read_names(&path, &mut names)?,
                // Not a folder of packs; listed so that `check` can report it.
                false => names.push(group),
            }
        }
        Ok(names)
    }

    /// Length of a file in bytes, `None` if there is none of that name. Links are followed, as in reads: packs
    /// may have been moved to another disk.
    pub(crate) fn length(&self, area: Area, name: &str) -> Result<Option<u64>, RepoError> {
        Ok(metadata(&self.path(area, name))?.map(|data| data.len()))
    }

    /// When a pack was last added to or removed from a folder, `None` if there is no such folder.
    pub(crate) fn pack_folder_changed(&self, folder: u8) -> Result<Option<SystemTime>, RepoError> {
        let path = self.pack_folder(&format!("{folder:02x}"));
        let changed = metadata(&path)?.map(|data| data.modified());
        changed
            .transpose()
            .map_err(|error| RepoError::io("examine", &path, error))
    }

    /// When a file was last changed, `None` when there is none of that name.
    pub(crate) fn modified(&self, area: Area, name: &str) -> Result<Option<SystemTime>, RepoError> {
        let path = self.path(area, name);
        let changed = metadata(&path)?.map(|data| data.modified()).transpose();
        changed.map_err(|error| RepoError::io("examine", &path, error))
    }

    pub(crate) fn open(&self, area: Area, name: &str) -> Result<File, RepoError> {
        let path = self.path(area, name);
        open_file(&path).map_err(|error| RepoError::io("open", &path, error))
    }

    /// Reads the whole of a small file; `limit_bytes` bounds the memory taken.
    pub(crate) fn read(
        &self,
        area: Area,
        name: &str,
        limit_bytes: u64,
    ) -> Result<Vec<u8>, RepoError> {
        read_path(&self.path(area, name), limit_bytes)
    }

    pub(crate) fn read_config(&self) -> Result<Vec<u8>, RepoError> {
        const LIMIT_BYTES: u64 = 4096;
        read_path(&self.root.join(CONFIG), LIMIT_BYTES)
    }

    /// Writes a whole file durably, in place of one of the same name.
    pub(crate) fn create(&self, area: Area, name: &str, bytes: &[u8]) -> Result<(), RepoError> {
        let mut file = self.create_temporary()?;
        file.write(self, bytes)?;
        file.publish(self, area, name)
    }

    /// Writes the file of a lock or lease atomically, but without an fsync: after a crash of the machine its
    /// owner is gone. It does not pass through `tmp/`, which prune clears while other processes wait for their
    /// locks.
    pub(crate) fn create_passing(
        &self,
        area: Area,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), RepoError> {
        let path = self.path(area, name);
        pass(area.made(), "write", &path)?;
        let mut file = self.create_unpublished(path.with_extension(UNFINISHED_LOCK))?;
        file.write(self, bytes)?;
        file.rename(self, &path)
    }

    /// Writes the config file durably, unless there is one (`Ok(false)`).
    pub(crate) fn create_config(&self, bytes: &[u8]) -> Result<bool, RepoError> {
        let mut file = self.create_temporary()?;
        file.write(self, bytes)?;
        file.sync(self)?;
        let path = self.root.join(CONFIG);
        self.step(Step::Rename(&file.path, &path))?;
        // A link, because a rename would replace the config of another process' `init`.
        match fs::hard_link(&file.path, &path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
            Err(error) => return Err(RepoError::io("create", &path, error)),
        }
        self.sync_folder(&self.root)?;
        Ok(true)
    }

    /// A new file under `tmp/`, removed again unless it is published.
    pub(crate) fn create_temporary(&self) -> Result<TemporaryFile, RepoError> {
        let name = u128::from_le_bytes(random()?);
        self.create_unpublished(self.path(Area::Temporary, &format!("{name:032x}")))
    }

    fn create_unpublished(&self, path: PathBuf) -> Result<TemporaryFile, RepoError> {
        self.step(Step::Write(&path))?;
        let create = || {
            File::options()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(PRIVATE_FILE)
                .open(&path)
        };
        let opened = match (create(), path.parent()) {
            // Copies of a repository may have lost its empty folders.
            (Err(error), Some(folder))
                if error.kind() == io::ErrorKind::NotFound && self.root.join(CONFIG).exists() =>
            {
                self.create_folder(folder)?;
                create()
            }
            (opened, _) => opened,
        };
        let file = opened.map_err(|error| RepoError::io("create", &path, error))?;
        Ok(TemporaryFile {
            file,
            path,
            published: false,
        })
    }

    /// Removes a file; a missing one is no error.
    pub(crate) fn remove(&self, area: Area, name: &str) -> Result<(), RepoError> {
        let path = self.path(area, name);
        pass(area.removed(), "remove", &path)?;
        self.step(Step::Remove(&path))?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(RepoError::io("remove", &path, error))
            }
            _ => Ok(()),
        }
    }

    /// Makes the removals in an area durable. A copy of a repository may have lost the folder if it was empty.
    pub(crate) fn sync_area(&self, area: Area) -> Result<(), RepoError> {
        match self.sync_folder(&self.root.join(area.folder())) {
            Err(error) if error.is_absent() => Ok(()),
            synced => synced,
        }
    }

    fn sync_folder(&self, path: &Path) -> Result<(), RepoError> {
        self.step(Step::SyncFolder(path))?;
        File::open(path)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| RepoError::io("fsync", path, error))
    }

    /// The fault point: tests record every step and refuse the n-th and all after it.
    #[cfg(test)]
    fn step(&self, step: Step<'_>) -> Result<(), RepoError> {
        self.faults.step(step)
    }

    #[cfg(not(test))]
    #[expect(
        clippy::unused_self,
        clippy::unnecessary_wraps,
        reason = "the same signature as in tests"
    )]
    fn step(&self, _: Step<'_>) -> Result<(), RepoError> {
        Ok(())
    }
}

/// A file being written.
pub(crate) struct TemporaryFile {
    file: File,
    path: PathBuf,
    published: bool,
}

impl TemporaryFile {
    pub(crate) fn write(&mut self, store: &LocalStore, bytes: &[u8]) -> Result<(), RepoError> {
        store.step(Step::Write(&self.path))?;
        store.rate_limiter.wait(bytes.len());
        self.file
            .write_all(bytes)
            .map_err(|error| RepoError::io("write", &self.path, error))
    }

    fn sync(&self, store: &LocalStore) -> Result<(), RepoError> {
        store.step(Step::SyncFile(&self.path))?;
        self.file
            .sync_all()
            .map_err(|error| RepoError::io("fsync", &self.path, error))
    }

    /// Gives the file its name, durably.
    pub(crate) fn publish(
        mut self,
        store: &LocalStore,
        area: Area,
        name: &str,
    ) -> Result<(), RepoError> {
        self.sync(store)?;
        let path = store.path(area, name);
        pass(area.made(), "rename to", &path)?;
        self.rename_to(store, &path)?;
        store.sync_folder(path.parent().unwrap_or(&store.root))
    }

    fn rename(mut self, store: &LocalStore, path: &Path) -> Result<(), RepoError> {
        self.rename_to(store, path)
    }

    fn rename_to(&mut self, store: &LocalStore, path: &Path) -> Result<(), RepoError> {
        // `path` has a parent: it was joined from folder and name.
        store.ensure_folder(path.parent().unwrap_or(&store.root))?;
        store.step(Step::Rename(&self.path, path))?;
        let renamed = fs::rename(&self.path, path);
        renamed.map_err(|error| RepoError::io("rename to", path, error))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.published {
            // Prune removes a file that cannot be removed now.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Passes a fault point. An injected error is reported like one of the system.
fn pass(point: Option<Point>, doing: &'static str, path: &Path) -> Result<(), RepoError> {
    let passed = point.map_or(Ok(()), fault::at);
    passed.map_err(|error| RepoError::io(doing, path, error))
}

fn create_private_folder(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(PRIVATE_FOLDER)
        .create(path)
}

fn metadata(path: &Path) -> Result<Option<fs::Metadata>, RepoError> {
    match fs::metadata(path) {
        Ok(data) => Ok(Some(data)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(RepoError::io("examine", path, error)),
    }
}

fn read_names(folder: &Path, names: &mut Vec<String>) -> Result<(), RepoError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(RepoError::io("list", folder, error)),
    };
    for entry in entries {
        let entry = entry.map_err(|error| RepoError::io("list", folder, error))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    Ok(())
}

/// Opens a regular file for reading. Anything else is an error: a read of a pipe without a writer would block
/// forever.
fn open_file(path: &Path) -> io::Result<File> {
    let at_once = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options()
        .read(true)
        .custom_flags(at_once)
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a regular file",
        )),
    }
}

fn read_path(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, RepoError> {
    let read = || {
        let file = open_file(path)?;
        // One byte more, so that the end is found without growing the buffer.
        let expected = file.metadata()?.len().min(limit_bytes).saturating_add(1);
        let mut bytes = Vec::with_capacity(expected as usize);
        file.take(limit_bytes.saturating_add(1))
            .read_to_end(&mut bytes)?;
        if bytes.len() as u64 > limit_bytes {
            let what = format!("it is longer than {limit_bytes} bytes");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
        }
        Ok(bytes)
    };
    read().map_err(|error| RepoError::io("read", path, error))
}
