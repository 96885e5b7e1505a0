//! The file that is written: for its owner alone, under another name until it is whole.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};
use stillframe_qemu::migration_file::MigrationFileError;
use stillframe_repo::RepoError;

use super::ExportError;

/// For the owner alone: the file holds all that the guest had in memory.
const MODE: u32 = 0o600;
const BUFFER_BYTES: usize = 1 << 20;

/// A file on its way. It is removed when dropped without [`Output::finish`].
#[derive(Debug)]
pub(super) struct Output {
    file: File,
    path: PathBuf,
    temporary: Option<PathBuf>,
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
            // What else is wrong with the path shows when the file is made.
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
        let temporary = path.with_file_name(hidden);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(MODE)
            .open(&temporary)
            .map_err(wrong)?;
        Ok(Output {
            file,
            path: path.to_owned(),
            temporary: Some(temporary),
            replace,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// For writing front to back.
    pub(super) fn buffered(&self) -> BufWriter<&File> {
        BufWriter::with_capacity(BUFFER_BYTES, &self.file)
    }

    /// What is never written is a hole.
    pub(super) fn set_length(&self, bytes: u64) -> Result<(), ExportError> {
        self.file.set_len(bytes).map_err(|error| self.wrong(error))
    }

    pub(super) fn put(&self, bytes: &[u8], at: u64) -> Result<(), ExportError> {
        self.put_io(bytes, at).map_err(|error| self.wrong(error))
    }

    pub(super) fn put_io(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    /// Reads back what was written.
    pub(super) fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, at)
    }

    /// An error of whoever wrote for this file.
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
        let Some(temporary) = &self.temporary else {
            return Ok(self.path.clone());
        };
        let flags = match self.replace {
            true => RenameFlags::empty(),
            // Somebody may have made one meanwhile.
            false => RenameFlags::NOREPLACE,
        };
        match rustix::fs::renameat_with(CWD, temporary, CWD, &self.path, flags) {
            Ok(()) => {}
            Err(rustix::io::Errno::EXIST) => return Err(exists(&self.path)),
            Err(error) => return Err(self.wrong(error.into())),
        }
        self.temporary = None;
        let folder = self
            .path
            .parent()
            .filter(|path| !path.as_os_str().is_empty());
        let folder = File::open(folder.unwrap_or(Path::new(".")));
        let synced = folder.and_then(|folder| folder.sync_all());
        synced.map_err(|error| self.wrong(error))?;
        Ok(self.path.clone())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // Nothing better can be done about a file that cannot be removed.
            let _ = fs::remove_file(temporary);
        }
    }
}

fn exists(path: &Path) -> ExportError {
    ExportError::Exists {
        file: path.to_owned(),
    }
}

/// Names the file that could not be written, or standard output.
pub(super) fn blame(file: Option<&Path>, error: ExportError) -> ExportError {
    match error {
        ExportError::Repo(RepoError::Sink { source, .. } | RepoError::PageSink { source, .. })
        | ExportError::File(MigrationFileError::Write(source)) => match file {
            Some(file) => ExportError::Write {
                file: file.to_owned(),
                source,
            },
            None => ExportError::Pipe(source),
        },
        other => other,
    }
}
