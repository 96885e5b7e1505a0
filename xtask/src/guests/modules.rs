//! Finds kernel modules and their dependencies, in load order.
//!
//! The dependencies are read from the modules: `modules.dep` is created only when a kernel is installed.

use super::cpio::Archive;
use super::read;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Prefix of the string that `modinfo -F depends` prints.
const DEPENDS: &[u8] = b"\0depends=";

/// Adds these modules and their dependencies to `modules/` of an archive, with names in load order.
pub fn add(archive: &mut Archive, modules: &Path, wanted: &[&str]) -> Result<()> {
    archive.folder("modules");
    for (number, path) in in_order(modules, wanted)?.iter().enumerate() {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        archive.program(&format!("modules/{number:02}-{name}"), &read(path)?)?;
    }
    Ok(())
}

/// The files of these modules and their dependencies, each after its dependencies. A built-in module has no file.
fn in_order(modules: &Path, wanted: &[&str]) -> Result<Vec<PathBuf>> {
    let builtin = modules.join("modules.builtin");
    let builtin = fs::read_to_string(&builtin)
        .with_context(|| format!("cannot read {}", builtin.display()))?;
    let mut search = Search {
        files: BTreeMap::new(),
        builtin: builtin
            .lines()
            .map(|line| name_of(Path::new(line)))
            .collect(),
        ordered: Vec::new(),
    };
    list(&modules.join("kernel"), &mut search.files)?;
    for name in wanted {
        search.add(name, &mut Vec::new())?;
    }
    Ok(search.ordered)
}

/// A search for modules.
struct Search {
    /// All modules by name.
    files: BTreeMap<String, PathBuf>,
    builtin: Vec<String>,
    /// The modules found, in load order.
    ordered: Vec<PathBuf>,
}

impl Search {
    /// Adds a module after its dependencies. `dependents` is the chain of modules that need it.
    fn add(&mut self, name: &str, dependents: &mut Vec<String>) -> Result<()> {
        if self.builtin.iter().any(|own| own == name) {
            return Ok(());
        }
        if dependents.iter().any(|own| own == name) {
            bail!("the kernel module {name} depends on itself");
        }
        let path = self.files.get(name).cloned();
        let path = path.with_context(|| format!("the kernel has no module {name}"))?;
        if self.ordered.contains(&path) {
            return Ok(());
        }
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let needs = depends(&bytes)
            .with_context(|| format!("{} is not a valid kernel module", path.display()))?;
        dependents.push(name.to_owned());
        for need in needs {
            self.add(&need, dependents)?;
        }
        dependents.pop();
        self.ordered.push(path);
        Ok(())
    }
}

/// Collects all modules below a folder by name.
fn list(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, files)?;
        } else if path.extension().is_some_and(|ending| ending == "ko") {
            files.insert(name_of(&path), path);
        }
    }
    Ok(())
}

/// The name of a module: hyphens of the file name become underscores.
fn name_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    stem.replace('-', "_")
}

fn depends(module: &[u8]) -> Option<Vec<String>> {
    let at = module
        .windows(DEPENDS.len())
        .position(|window| window == DEPENDS)?;
    let value = module[at + DEPENDS.len()..]
        .split(|&byte| byte == 0)
        .next()?;
    let value = std::str::from_utf8(value).ok()?;
    let names = value.split(',').filter(|name| !name.is_empty());
    Some(names.map(|name| name.replace('-', "_")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of modules, each with its dependencies.
    fn modules(of: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("kernel/drivers")).unwrap();
        fs::write(
            folder.path().join("modules.builtin"),
            "kernel/fs/ext-4.ko\n",
        )
        .unwrap();
        for (name, needs) in of {
            let bytes = format!("\x7fELF\0license=GPL\0depends={needs}\0name=x\0");
            let path = folder.path().join(format!("kernel/drivers/{name}.ko"));
            fs::write(path, bytes).unwrap();
        }
        folder
    }

    fn names(folder: &Path, wanted: &[&str]) -> Result<Vec<String>> {
        let ordered = in_order(folder, wanted)?;
        Ok(ordered.iter().map(|path| name_of(path)).collect())
    }

    #[test]
    fn each_module_comes_once_and_after_its_dependencies() {
        let folder = modules(&[
            ("disk", "bus,ring"),
            ("bus", "ring,modern-dev"),
            ("modern-dev", ""),
            ("ring", "ext_4"),
            ("other", ""),
        ]);
        assert_eq!(
            names(folder.path(), &["ext_4", "disk", "bus"]).unwrap(),
            ["ring", "modern_dev", "bus", "disk"]
        );
    }

    #[test]
    fn missing_modules_and_cycles_are_errors() {
        let folder = modules(&[("a", "b"), ("b", "a"), ("c", "d")]);
        let error = |name| names(folder.path(), &[name]).unwrap_err().to_string();
        assert!(error("a").contains("a depends on itself"));
        assert!(error("c").contains("no module d"));
        fs::write(folder.path().join("kernel/e.ko"), "\x7fELF").unwrap();
        assert!(error("e").contains("is not a valid"));
    }
}
