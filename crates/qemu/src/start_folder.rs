//! The folder that the relative paths of a command line refer to.
//!
//! It is the process' working directory, except after `-daemonize`: then QEMU has changed to `/` once its files were
//! open (`os_setup_post` in QEMU's os-posix.c). The links in `/proc/PID/fd` still have the whole paths of these files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::arguments::{CommandLine, Properties};

/// Properties that name a file.
const FILE_PROPERTIES: [&str; 4] = ["file", "filename", "path", "mem-path"];
/// Options whose value is the name of a file.
const FILE_OPTIONS: [&str; 9] = [
    "hda", "hdb", "hdc", "hdd", "cdrom", "fda", "fdb", "pflash", "sd",
];

/// The folder in which the QEMU of this process was started; its working directory if no open file shows another.
pub(crate) fn start_folder(pid: i32, line: &CommandLine, cwd: PathBuf) -> PathBuf {
    match cwd == Path::new("/") && line.has("daemonize") {
        true => folder_shown_by(line, &open_paths(pid)).unwrap_or(cwd),
        false => cwd,
    }
}

/// The paths of the files that a process has open; none when it may not be examined.
fn open_paths(pid: i32) -> Vec<PathBuf> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    let links = descriptors
        .flatten()
        .map(|descriptor| fs::read_link(descriptor.path()));
    links.flatten().collect()
}

/// The only folder in which every relative name of the command line that is open at all is an open file. Where several
/// would do, such as that of an image and that of a backing file of the same name, it is not known: a wrong one would
/// make another file the VM's disk.
fn folder_shown_by(line: &CommandLine, open: &[PathBuf]) -> Option<PathBuf> {
    let absolute: Vec<String> = file_names(line)
        .filter(|name| Path::new(name).is_absolute())
        .collect();
    // Files that the command line names in full show nothing.
    let is_other = |path: &&PathBuf| !absolute.iter().any(|name| Path::new(name) == *path);
    let folders = |name: String| -> BTreeSet<PathBuf> {
        let open = open.iter().filter(is_other);
        open.filter_map(|path| folder_of(path, &name)).collect()
    };
    let relative = file_names(line).filter(|name| Path::new(name).is_relative());
    let shown = relative.map(folders).filter(|folders| !folders.is_empty());
    let common = shown.reduce(|one, other| &one & &other)?;
    match common.len() {
        1 => common.into_iter().next(),
        _ => None,
    }
}

/// The names of files in a command line.
fn file_names(line: &CommandLine) -> impl Iterator<Item = String> {
    line.options.iter().flat_map(|option| {
        let value = option.value().unwrap_or_default();
        let properties = Properties::parse(value, "");
        let named = properties.pairs();
        let named = named.filter(|(key, _)| FILE_PROPERTIES.contains(key));
        let mut names: Vec<String> = named.map(|(_, name)| name.to_owned()).collect();
        if FILE_OPTIONS.iter().any(|name| option.is(name)) {
            names.push(value.to_owned());
        }
        names.retain(|name| !name.is_empty());
        names
    })
}

/// The folder in which `name` is the file at `path`.
fn folder_of(path: &Path, name: &str) -> Option<PathBuf> {
    let parts = Path::new(name).components();
    let depth = parts.filter(|part| *part != Component::CurDir).count();
    let folder = path.ancestors().nth(depth)?;
    (folder.join(name) == path).then(|| folder.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(words: &str) -> Option<String> {
        let argv: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        let open = [
            "/dev/null",
            "/srv/web1/img/a.qcow2",
            "/srv/web1/b.qcow2",
            "/base/b.qcow2",
        ];
        let open = open.map(PathBuf::from);
        let found = folder_shown_by(&CommandLine::parse(&argv), &open)?;
        Some(found.display().to_string())
    }

    #[test]
    fn an_open_file_shows_where_a_daemon_was_started() {
        for drive in [
            "-drive file=img/a.qcow2,if=virtio",
            "-hda img/a.qcow2",
            "-blockdev driver=file,filename=img/a.qcow2,node-name=n",
            "-drive if=virtio,file=./img/a.qcow2",
        ] {
            let line = format!("q {drive} -daemonize -kernel vmlinuz");
            assert_eq!(folder(&line).as_deref(), Some("/srv/web1"), "{drive}");
        }
    }

    #[test]
    fn several_folders_are_narrowed_down_or_none_is_taken() {
        let folder = |drives: &str| folder(&format!("q -daemonize {drives}"));
        let web1 = Some("/srv/web1".to_owned());
        assert_eq!(folder("-hda b.qcow2"), None);
        assert_eq!(folder("-hda b.qcow2 -hdb img/a.qcow2"), web1);
        assert_eq!(folder("-hda b.qcow2 -hdb /base/b.qcow2"), web1);
        assert_eq!(folder("-hda a.qcow2 -hdb img/a.qcow2"), None);
    }

    #[test]
    fn a_name_that_is_no_open_file_shows_nothing() {
        for drive in [
            "/srv/web1/img/a.qcow2",
            "img/c.qcow2",
            "1/img/a.qcow2",
            "x/../img/a.qcow2",
            "nbd:host:1",
        ] {
            assert_eq!(folder(&format!("q -drive file={drive}")), None, "{drive}");
        }
    }
}
