//! Kept memory templates: listing them, checking that their files are unchanged, and removing them.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};
use serde::{Deserialize, Serialize};
use stillframe_repo::BlockTable;
use stillframe_sys::private_dir::{Access, PrivateDir};

use super::{LOCK, TemplateError, failed};

/// The start of the name of a template's directory while the template is made.
pub(super) const PARTIAL: &str = "partial-";
/// The file that records the others' identity when they were written.
const RECORD: &str = "template.json";
/// Upper bound on that file's length, in bytes.
const RECORD_BYTES_MAX: u64 = 1 << 20;
/// Digits of a repository's id, and of a checkpoint's.
const ID_DIGITS: [usize; 2] = [32, 64];

/// The memory template of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptTemplate {
    /// The directory's name: repository and checkpoint, with a `-` between.
    pub name: String,
    /// The size of the template, in bytes.
    pub bytes: u64,
    /// When a clone was started from it last.
    pub used: SystemTime,
}

impl KeptTemplate {
    /// The name of a checkpoint's template.
    pub fn name_of(repository: &str, checkpoint: &str) -> String {
        format!("{repository}-{checkpoint}")
    }

    /// The repository's id, and the checkpoint's.
    pub fn ids(&self) -> (&str, &str) {
        self.name.split_once('-').unwrap_or_default()
    }
}

/// What a file of a template is to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Content<'t> {
    /// The file's name.
    pub file: String,
    /// Its pages, and the name of the block or the disk.
    pub table: &'t BlockTable,
    /// Its length, in bytes.
    pub bytes: u64,
}

/// One file of a template.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileRecord {
    block: String,
    bytes: u64,
    device: u64,
    inode: u64,
    /// Seconds and nanoseconds: any change of content, owner or mode through the file system moves it.
    changed: (i64, i64),
}

impl FileRecord {
    fn of(block: &str, file: &Metadata) -> FileRecord {
        FileRecord {
            block: block.to_owned(),
            bytes: file.len(),
            device: file.dev(),
            inode: file.ino(),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }
}

/// The templates in a directory; none where there is no such directory.
///
/// # Errors
/// [`TemplateError::Private`] where it is not its owner's alone.
pub fn kept(folder: &Path) -> Result<Vec<KeptTemplate>, TemplateError> {
    match PrivateDir::open(folder)? {
        Some(folder) => all_in(&folder),
        None => Ok(Vec::new()),
    }
}

/// Removes the `unwanted` templates in a directory. Running clones keep their mappings.
///
/// # Errors
/// [`TemplateError::Busy`] while clones are started from them; [`TemplateError::Private`].
pub fn drop_kept(
    folder: &Path,
    mut unwanted: impl FnMut(&KeptTemplate) -> bool,
) -> Result<Vec<KeptTemplate>, TemplateError> {
    let Some(opened) = PrivateDir::open(folder)? else {
        return Ok(Vec::new());
    };
    let mut dropped = all_in(&opened)?;
    dropped.retain(|template| unwanted(template));
    if dropped.is_empty() {
        return Ok(dropped);
    }
    let Some(_lock) = opened.lock_file(LOCK, false)? else {
        return Err(TemplateError::Busy {
            path: folder.to_owned(),
        });
    };
    remove_leftovers(&opened)?;
    for template in &dropped {
        opened.remove_directory(&template.name)?;
    }
    Ok(dropped)
}

/// Only what has a template's name: the user may have named a directory that holds other things.
pub(super) fn all_in(folder: &PrivateDir) -> Result<Vec<KeptTemplate>, TemplateError> {
    let mut all = Vec::new();
    for name in folder.names()?.into_iter().filter(|name| is_template(name)) {
        let Some(template) = folder.directory(&name)? else {
            continue;
        };
        let examine = failed("examine", template.path());
        let itself = rustix::fs::fstat(&template).map_err(|errno| examine(errno.into()))?;
        let mut bytes = 0;
        for file in template.names()? {
            let file = template.file(&file, Access::Read)?;
            let metadata = file.map(|file| file.metadata()).transpose();
            bytes += metadata
                .map_err(&examine)?
                .map_or(0, |file| file.blocks() * 512);
        }
        let seconds = u64::try_from(itself.st_mtime).unwrap_or_default();
        all.push(KeptTemplate {
            used: SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds),
            bytes,
            name,
        });
    }
    Ok(all)
}

fn is_template(name: &str) -> bool {
    let is_id = |text: &str, digits| {
        text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let [of_repository, of_checkpoint] = ID_DIGITS;
    name.split_once('-')
        .is_some_and(|(repository, checkpoint)| {
            is_id(repository, of_repository) && is_id(checkpoint, of_checkpoint)
        })
}

/// Removes the leftovers of killed processes. The lock is held.
pub(super) fn remove_leftovers(folder: &PrivateDir) -> Result<(), TemplateError> {
    for name in folder.names()? {
        if name.starts_with(PARTIAL) {
            folder.remove_directory(&name)?;
        }
    }
    Ok(())
}

/// Records the files' identity, when nothing changes them any more.
pub(super) fn record(
    template: &PrivateDir,
    contents: &[Content<'_>],
    files: &[File],
) -> Result<(), TemplateError> {
    let path = template.path().join(RECORD);
    let mut records = Vec::new();
    for (content, file) in contents.iter().zip(files) {
        let metadata = file.metadata().map_err(failed("examine", &path))?;
        records.push(FileRecord::of(&content.table.name, &metadata));
    }
    let json = serde_json::to_vec(&records);
    let json = json.map_err(|error| failed("write", &path)(error.into()))?;
    Ok(template.write(RECORD, &json)?)
}

/// The template of this name and the inodes of its files; `None` where there is none, or where a file is not
/// what was written.
pub(super) fn unchanged(
    folder: &PrivateDir,
    name: &str,
    contents: &[Content<'_>],
) -> Result<Option<(PrivateDir, Vec<u64>)>, TemplateError> {
    let Some(template) = folder.directory(name)? else {
        return Ok(None);
    };
    let Some(records) = recorded(&template)? else {
        return Ok(None);
    };
    let mut inodes = Vec::new();
    for (number, content) in contents.iter().enumerate() {
        // Refuses a file of another owner, a link, and one that others may open.
        let Some(file) = template.file(&content.file, Access::Read)? else {
            return Ok(None);
        };
        let metadata = file.metadata();
        let metadata = metadata.map_err(failed("examine", template.path()))?;
        let now = FileRecord::of(&content.table.name, &metadata);
        if records.get(number) != Some(&now) || now.bytes != content.bytes {
            return Ok(None);
        }
        inodes.push(now.inode);
    }
    Ok(Some((template, inodes)))
}

fn recorded(template: &PrivateDir) -> Result<Option<Vec<FileRecord>>, TemplateError> {
    let Some(file) = template.file(RECORD, Access::Read)? else {
        return Ok(None);
    };
    let mut json = Vec::new();
    file.take(RECORD_BYTES_MAX)
        .read_to_end(&mut json)
        .map_err(failed("read", &template.path().join(RECORD)))?;
    Ok(serde_json::from_slice(&json).ok())
}

/// Notes that it is used now.
pub(super) fn touch(template: &PrivateDir) -> Result<(), TemplateError> {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    let times = Timestamps {
        last_access: now,
        last_modification: now,
    };
    futimens(template, &times).map_err(|errno| failed("touch", template.path())(errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn only_templates_are_taken_away() {
        let root = tempfile::tempdir().unwrap();
        let folder = PrivateDir::create(&root.path().join("dir")).unwrap();
        let name = KeptTemplate::name_of(&"0a".repeat(16), &"1b".repeat(32));
        let template = folder.make_directory(&name).unwrap();
        template.write("0.ram", &[1; 5000]).unwrap();
        let own = folder.make_directory("own").unwrap();
        own.write("letter", b"dear").unwrap();
        let found = kept(folder.path()).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].ids(), (&*"0a".repeat(16), &*"1b".repeat(32)));
        assert!(found[0].bytes >= 5000);
        assert!(drop_kept(folder.path(), |_| false).unwrap().is_empty());
        let busy = folder.lock_file(LOCK, true).unwrap();
        let refused = drop_kept(folder.path(), |_| true);
        assert!(matches!(refused, Err(TemplateError::Busy { .. })));
        drop(busy);
        assert_eq!(drop_kept(folder.path(), |_| true).unwrap(), found);
        assert!(kept(folder.path()).unwrap().is_empty());
        assert_eq!(fs::read(own.path().join("letter")).unwrap(), b"dear");
        assert!(kept(&root.path().join("none")).unwrap().is_empty());
    }
}
