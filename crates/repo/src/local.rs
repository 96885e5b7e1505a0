//! A repository's files in a local directory: the only place that touches the file system.
//!
//! Files are made whole or not at all: written under `tmp/`, fsynced, renamed to their final
//! name, and the directory fsynced, in this order. A file of the repository is never changed
//! after that, only removed; its name is a hash of its bytes. So nothing here needs more of a
//! store than "create if absent, read, list, remove", which object stores offer too.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::crypto::random;
use crate::error::RepoError;
use crate::pace::Pace;

/// The folders of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Area {
    Keys,
    Packs,
    Index,
    Manifests,
    WorkingSets,
    Locks,
    Leases,
    Temporary,
}

impl Area {
    pub(crate) const ALL: [Area; 8] = [
        Area::Keys,
        Area::Packs,
        Area::Index,
        Area::Manifests,
        Area::WorkingSets,
        Area::Locks,
        Area::Leases,
        Area::Temporary,
    ];

    /// The folder's name.
    pub(crate) fn folder(self) -> &'static str {
        match self {
            Area::Keys => "keys",
            Area::Packs => "packs",
            Area::Index => "index",
            Area::Manifests => "manifests",
            Area::WorkingSets => "working-sets",
            Area::Locks => "locks",
            Area::Leases => "leases",
            Area::Temporary => "tmp",
        }
    }
}

/// The name of the file that makes a directory a repository.
pub(crate) const CONFIG: &str = "config";

/// What an unfinished lock or lease file ends in.
pub(crate) const UNFINISHED_LOCK: &str = "new";

/// Key files can be tried against guessed passwords by whoever can read them.
const PRIVATE_FOLDER: u32 = 0o700;
const PRIVATE_FILE: u32 = 0o600;

/// The directory of one repository.
pub(crate) struct LocalStore {
    root: PathBuf,
    pub(crate) pace: Pace,
    #[cfg(test)]
    pub(crate) faults: crate::tests::faults::Faults,
}

/// What is about to be done to the disk; tests count, record and refuse these.
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
    SyncFolder(&'a Path),
}

impl LocalStore {
    pub(crate) fn new(root: &Path) -> LocalStore {
        LocalStore {
            root: root.to_owned(),
            pace: Pace::default(),
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

    /// Where a file lies. Packs are spread over 256 folders by the first two digits of their
    /// name: a long watch makes hundreds of thousands.
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

    /// How a file is called in messages.
    pub(crate) fn label(&self, area: Area, name: &str) -> String {
        let path = self.path(area, name);
        let relative = path.strip_prefix(&self.root).unwrap_or(&path);
        relative.display().to_string()
    }

    /// Makes the folders of a new repository.
    pub(crate) fn create_folders(&self) -> Result<(), RepoError> {
        // Folders above are no part of the repository: as the umask wants them.
        if let Some(above) = self.root.parent() {
            fs::create_dir_all(above).map_err(|error| RepoError::io("create", above, error))?;
        }
        for area in Area::ALL {
            self.create_folder(&self.root.join(area.folder()))?;
        }
        self.sync_folder(&self.root)
    }

    fn create_folder(&self, path: &Path) -> Result<(), RepoError> {
        create_private_folder(path).map_err(|error| RepoError::io("create", path, error))
    }

    /// The names of the files in an area, in no order; a folder that does not exist is empty.
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
                // Not ours; named so that `check` can tell of it.
                false => names.push(group),
            }
        }
        Ok(names)
    }

    /// Length of a file in bytes, `None` when there is none of that name.
    pub(crate) fn length(&self, area: Area, name: &str) -> Result<Option<u64>, RepoError> {
        let path = self.path(area, name);
        match fs::symlink_metadata(&path) {
            Ok(data) => Ok(Some(data.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(RepoError::io("examine", &path, error)),
        }
    }

    /// Length of a pack in bytes, `None` when it is gone. Links are followed: packs may have been
    /// moved to another disk.
    pub(crate) fn pack_bytes(&self, name: &str) -> Result<Option<u64>, RepoError> {
        let path = self.path(Area::Packs, name);
        Ok(metadata(&path)?.map(|data| data.len()))
    }

    /// When a pack last came to or went from a folder, `None` when there is no such folder.
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
        match fs::symlink_metadata(&path).and_then(|data| data.modified()) {
            Ok(at) => Ok(Some(at)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(RepoError::io("examine", &path, error)),
        }
    }

    pub(crate) fn open(&self, area: Area, name: &str) -> Result<File, RepoError> {
        let path = self.path(area, name);
        File::open(&path).map_err(|error| RepoError::io("open", &path, error))
    }

    /// The whole of a file that is meant to be small; `limit_bytes` bounds the memory taken.
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

    /// Writes a whole file durably. The same name again is the same bytes again.
    pub(crate) fn create(&self, area: Area, name: &str, bytes: &[u8]) -> Result<(), RepoError> {
        let mut file = self.create_temporary()?;
        file.write(self, bytes)?;
        file.publish(self, area, name)
    }

    /// Writes the file of a lock or lease: whole, but not forced to disk, since after a crash of the
    /// machine its holder is gone anyway. Not by way of `tmp/`, which prune clears while others wait for
    /// it.
    pub(crate) fn create_passing(
        &self,
        area: Area,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), RepoError> {
        let path = self.path(area, name);
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
        let opened = create().or_else(|error| match (error.kind(), path.parent()) {
            // Copies of a repository may have lost its empty folders.
            (io::ErrorKind::NotFound, Some(folder)) if self.root.join(CONFIG).exists() => {
                create_private_folder(folder)?;
                create()
            }
            _ => Err(error),
        });
        let file = opened.map_err(|error| RepoError::io("create", &path, error))?;
        Ok(TemporaryFile {
            file,
            path,
            published: false,
        })
    }

    /// Removes a file; one that is gone already is fine.
    pub(crate) fn remove(&self, area: Area, name: &str) -> Result<(), RepoError> {
        let path = self.path(area, name);
        self.step(Step::Remove(&path))?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(RepoError::io("remove", &path, error))
            }
            _ => Ok(()),
        }
    }

    /// Makes the removals in an area durable.
    pub(crate) fn sync_area(&self, area: Area) -> Result<(), RepoError> {
        self.sync_folder(&self.root.join(area.folder()))
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
        reason = "the shape of the tests' one"
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
        store.pace.wait(bytes.len());
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
        self.rename_to(store, &path)?;
        // `path` has a parent: it was joined from folder and name.
        let folder = path.parent().unwrap_or(&store.root);
        store.sync_folder(folder)
    }

    fn rename(mut self, store: &LocalStore, path: &Path) -> Result<(), RepoError> {
        self.rename_to(store, path)
    }

    fn rename_to(&mut self, store: &LocalStore, path: &Path) -> Result<(), RepoError> {
        store.step(Step::Rename(&self.path, path))?;
        let renamed = fs::rename(&self.path, path).or_else(|error| {
            let (io::ErrorKind::NotFound, Some(folder)) = (error.kind(), path.parent()) else {
                return Err(error);
            };
            // The first pack of its folder, or a copy that lost its empty folders.
            create_private_folder(folder)?;
            if let Some(parent) = folder.parent() {
                File::open(parent)?.sync_all()?;
            }
            fs::rename(&self.path, path)
        });
        renamed.map_err(|error| RepoError::io("rename to", path, error))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.published {
            // What cannot be removed now, prune removes.
            let _ = fs::remove_file(&self.path);
        }
    }
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

fn read_path(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, RepoError> {
    let read = || {
        let file = File::open(path)?;
        // One more, so that the end is seen without growing.
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
