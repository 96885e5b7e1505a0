//! A repository that goes away while it is read, and comes back.

use std::path::{Path, PathBuf};

use anyhow::Result;

/// A repository that is away, with packs that are emptied: those that are open already would still be read.
#[derive(Debug)]
pub struct Unplugged {
    there: PathBuf,
    away: PathBuf,
    /// Where they are meanwhile, and what was in them.
    packs: Vec<(PathBuf, Vec<u8>)>,
}

impl Unplugged {
    /// Takes this repository away.
    pub fn new(repository: &Path) -> Result<Unplugged> {
        let (there, away) = (repository.to_owned(), repository.with_extension("away"));
        let mut packs = packs(&there)?;
        std::fs::rename(&there, &away)?;
        for (path, _) in &mut packs {
            *path = away.join(path.strip_prefix(&there)?);
            std::fs::write(path, [])?;
        }
        Ok(Unplugged { there, away, packs })
    }

    /// Brings it back.
    pub fn plug(self) -> Result<()> {
        for (path, bytes) in &self.packs {
            std::fs::write(path, bytes)?;
        }
        Ok(std::fs::rename(&self.away, &self.there)?)
    }
}

/// All packs of a repository, and what is in them.
pub fn packs(repository: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut packs = Vec::new();
    for folder in std::fs::read_dir(repository.join("packs"))? {
        for file in std::fs::read_dir(folder?.path())? {
            let path = file?.path();
            let bytes = std::fs::read(&path)?;
            packs.push((path, bytes));
        }
    }
    Ok(packs)
}
