//! An eager restore of a checkpoint whose memory is mostly in an image, against one of the same guest that stored it all: Park et
//! al. pay for exclusion when the VM is restored, because its pages are read from their places on the disk.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::Guest;

use super::{NO_DISKS, RAM_MIB, cached_bytes, checkpoint, median};
use crate::host_memory;
use crate::page::{Figure, Page};
use crate::restore::restored_with;

/// Times in milliseconds, one a turn.
#[derive(Debug, Default)]
pub(super) struct Restores {
    pub(super) without_ms: Vec<f64>,
    pub(super) with_ms: Vec<f64>,
}

impl Restores {
    /// The time with the image over that without.
    pub(super) fn ratio(&self) -> f64 {
        median(&self.with_ms) / median(&self.without_ms)
    }
}

/// Checkpoints the guest once with the image indexed and once without, ends it, and restores both in turns.
pub(super) fn measure(guest: Guest, folder: &Path, image: &Path, turns: usize) -> Result<Restores> {
    let repositories = [false, true].map(|indexed| (indexed, folder.join(format!("{indexed}"))));
    for (indexed, repository) in &repositories {
        let prepare = |stillframe: &Stillframe| {
            if *indexed {
                stillframe.ok(&["index", &image.display().to_string()])?;
            }
            Ok(())
        };
        let (_, report, _) = checkpoint(&guest, repository, &NO_DISKS, prepare)?;
        ensure!(report["parent"].is_null(), "{report}");
    }
    // The restored VM has the socket of its agent where the guest had it.
    let home = guest.folder().to_owned();
    drop(guest);
    fs::create_dir(&home)?;
    let mut restores = Restores::default();
    for _ in 0..turns {
        for (indexed, repository) in &repositories {
            // Each time: a QEMU that becomes a restored VM drops its disks from the host's page cache
            // (`block/file-posix.c`, `raw_co_invalidate_cache`).
            cache(image)?;
            cache(repository)?;
            host_memory::prepare(RAM_MIB);
            let cached = cached_bytes(image)? / image.metadata()?.len() as f64;
            ensure!(cached > 0.9, "{cached} of the image is in the page cache");
            let report = restored_with(&Stillframe::at(repository), &folder.join("x.qmp"), &[])?;
            let us = report["total_us"].as_f64().context("no time")?;
            let times = match indexed {
                true => &mut restores.with_ms,
                false => &mut restores.without_ms,
            };
            times.push(us / 1e3);
        }
    }
    fs::remove_dir_all(home)?;
    for (_, repository) in repositories {
        fs::remove_dir_all(repository)?;
    }
    Ok(restores)
}

/// Reads a file, or all files of a folder, into the host's page cache.
fn cache(path: &Path) -> Result<()> {
    if !path.is_dir() {
        io::copy(&mut fs::File::open(path)?, &mut io::sink())?;
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        cache(&entry?.path())?;
    }
    Ok(())
}

/// Adds the table.
pub(super) fn add(page: &mut Page, restores: &Restores) {
    let times = [&restores.without_ms, &restores.with_ms];
    let mut cells = times.map(|times| format!("{:.0}", median(times))).to_vec();
    cells.push(format!("{:.2}", restores.ratio()));
    page.add(&Figure {
        title: "Section 5: the restore",
        paper: "a restore takes 1.5 times as long with exclusion, in the average of five workloads.",
        ours: "`restore`, eager, of two checkpoints of the same guest: all of its memory in the repository, or most of it in the indexed image.",
        columns: &["no image, ms", "image indexed, ms", "ratio"],
        rows: &[cells],
        pictures: &[],
        differs: "Packs and image are in the host's page cache before each restore.",
    });
}
