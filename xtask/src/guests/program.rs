//! Adds a program and its libraries to a Linux guest.

use super::cpio::Archive;
use super::read;
use crate::run::output;
use anyhow::{Result, bail};
use std::path::Path;
use std::process::Command;

/// Adds a program under this name, with its libraries from this machine.
pub fn add(archive: &mut Archive, program: &Path, name: &str) -> Result<()> {
    archive.program(name, &read(program)?)?;
    let ldd = output(Command::new("ldd").arg(program))?;
    let libraries = libraries(&ldd)?;
    for folder in folders(&libraries) {
        archive.folder(&folder);
    }
    for library in &libraries {
        archive.program(library.trim_start_matches('/'), &read(Path::new(library))?)?;
    }
    Ok(())
}

/// Reads lines like `libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x...)`, and that of the loader, which has one path.
fn libraries(ldd: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for line in ldd.lines() {
        if line.contains("not found") {
            bail!("a library of a guest's program is missing: {line}");
        }
        let path = line.split_whitespace().find(|word| word.starts_with('/'));
        found.extend(path.map(str::to_owned));
    }
    Ok(found)
}

/// The folders of these files, each after its parent.
fn folders(files: &[String]) -> Vec<String> {
    let mut folders = Vec::new();
    for file in files {
        let mut above: Vec<_> = Path::new(file).ancestors().skip(1).collect();
        above.reverse();
        for folder in above {
            let name = folder.display().to_string();
            let name = name.trim_start_matches('/').to_owned();
            if !name.is_empty() && !folders.contains(&name) {
                folders.push(name);
            }
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_their_folders_are_read() {
        let ldd = "\tlinux-vdso.so.1 (0x00007ffe)\n\tlibm.so.6 => /lib/x86/libm.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let found = libraries(ldd).unwrap();
        assert_eq!(found, ["/lib/x86/libm.so.6", "/lib64/ld-linux-x86-64.so.2"]);
        assert_eq!(folders(&found), ["lib", "lib/x86", "lib64"]);
        assert!(libraries("\tlibx.so.1 => not found\n").is_err());
    }
}
