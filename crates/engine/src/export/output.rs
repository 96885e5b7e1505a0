//! The output file: for its owner alone, and without a name until it is whole, so that nothing is left of it if
//! this process is killed. Where the file system has no unnamed files (open(2), `O_TMPFILE`), it is hidden under
//! another name instead.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, OFlags, RenameFlags, linkat, renameat_with};
use rustix::io::Errno;
use stillframe_qemu::migration_file::MigrationFileError;

use super::ExportError;

/// Mode of the file, for the owner alone: it contains all of the guest's memory.
const MODE: u32 = 0o600;
const BUFFER_BYTES: usize = 1 << 20;

/// A file on its way. It is gone when dropped without [`Output::finish`].
#[derive(Debug)]
pub(super) struct Output {
    file: File,
    path: PathBuf,
    /// Its name meanwhile.
    hidden: PathBuf,
    /// Whether it has that name.
    named: bool,
    replace: bool,
}

impl Output {
    pub(super) fn create(path: &Path, replace: bool) -> Result<Output, ExportError> {
        match fs::symlink_metadata(path) {
            Ok(found) if !found.is_file() => {
                return Err(ExportError::NoFile {
                    file: path.to_owned(),
                });
            }
            Ok(_) if !replace => return Err(exists(path)),
            // Any other fault of the path shows when the file is made.
            _ => {}
        }
        let wrong = |source| ExportError::Write {
            file: path.to_owned(),
            source,
        };
        let name = path.file_name().ok_or_else(|| ExportError::NoFile {
            file: path.to_owned(),
        })?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.partial", std::process::id()));
        let hidden = path.with_file_name(hidden);
        let (file, named) = match nameless(folder(path)) {
            Some(file) => (file, false),
            None => (
                options().create_new(true).open(&hidden).map_err(wrong)?,
                true,
            ),
        };
        Ok(Output {
            file,
            path: path.to_owned(),
            hidden,
            named,
            replace,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A path by which another process of this user reaches the file, whatever its name.
    pub(super) fn reachable(&self) -> PathBuf {
        let (process, file) = (std::process::id(), self.file.as_raw_fd());
        PathBuf::from(format!("/proc/{process}/fd/{file}"))
    }

    /// A writer from front to back.
    pub(super) fn buffered(&self) -> BufWriter<&File> {
        BufWriter::with_capacity(BUFFER_BYTES, &self.file)
    }

    /// Sets the length of the file. Ranges that are never written are holes.
    pub(super) fn set_length(&self, bytes: u64) -> Result<(), ExportError> {
        self.file.set_len(bytes).map_err(|error| self.wrong(error))
    }

    pub(super) fn put(&self, bytes: &[u8], at: u64) -> Result<(), ExportError> {
        self.put_io(bytes, at).map_err(|error| self.wrong(error))
    }

    pub(super) fn put_io(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    /// Reads back written bytes.
    pub(super) fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, at)
    }

    /// An error of the writer of this file.
    pub(super) fn blame(&self, error: ExportError) -> ExportError {
        blame(Some(&self.path), error)
    }

    pub(super) fn wrong(&self, source: io::Error) -> ExportError {
        ExportError::Write {
            file: self.path.clone(),
            source,
        }
    }

    /// It is whole: makes it durable and gives it its name, which it returns.
    pub(super) fn finish(mut self) -> Result<PathBuf, ExportError> {
        self.file.sync_all().map_err(|error| self.wrong(error))?;
        match (self.named, self.replace) {
            (false, false) => self.link(&self.path)?,
            (false, true) => {
                // A link takes no other's place.
                self.link(&self.hidden)?;
                self.named = true;
                self.rename(RenameFlags::empty())?;
            }
            (true, true) => self.rename(RenameFlags::empty())?,
            (true, false) => self.rename(RenameFlags::NOREPLACE)?,
        }
        self.named = false;
        let synced = File::open(folder(&self.path)).and_then(|folder| folder.sync_all());
        synced.map_err(|error| self.wrong(error))?;
        Ok(self.path.clone())
    }

    /// Gives the nameless file a name.
    fn link(&self, name: &Path) -> Result<(), ExportError> {
        let file = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        self.check_named(linkat(CWD, file, CWD, name, AtFlags::SYMLINK_FOLLOW))
    }

    fn rename(&self, flags: RenameFlags) -> Result<(), ExportError> {
        self.check_named(renameat_with(CWD, &self.hidden, CWD, &self.path, flags))
    }

    /// Another process may have made a file of that name meanwhile.
    fn check_named(&self, named: rustix::io::Result<()>) -> Result<(), ExportError> {
        match named {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(exists(&self.path)),
            Err(error) => Err(self.wrong(error.into())),
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.named {
            // Nothing better can be done about a file that cannot be removed.
            let _ = fs::remove_file(&self.hidden);
        }
    }
}

/// Options for reading and writing, by the owner alone.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(MODE);
    options
}

/// A file without a name; nothing where that cannot be had.
fn nameless(folder: &Path) -> Option<File> {
    let flags = OFlags::TMPFILE.bits() as i32;
    options().custom_flags(flags).open(folder).ok()
}

/// The folder of a file.
fn folder(path: &Path) -> &Path {
    let folder = path.parent().filter(|path| !path.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

fn exists(path: &Path) -> ExportError {
    ExportError::Exists {
        file: path.to_owned(),
    }
}

/// Names the file that could not be written, or standard output.
pub(super) fn blame(file: Option<&Path>, error: ExportError) -> ExportError {
    match error {
        ExportError::File(MigrationFileError::Write(source)) => match file {
            Some(file) => ExportError::Write {
                file: file.to_owned(),
                source,
            },
            None => ExportError::Pipe(source),
        },
        other => other,
    }
}
