//! Checks a repository: everything that the checkpoints refer to must exist and, on request, every byte of every
//! file must be what was written.
//!
//! A check continues after a problem, so that one run reports the whole extent.

use std::collections::BTreeSet;

use crate::error::RepoError;
use crate::format::config;
use crate::format::file_hash::FileHash;
use crate::format::image_record::ImageId;
use crate::format::manifest::CheckpointId;
use crate::images::file::ImageState;
use crate::index::file::check_sections;
use crate::index::in_memory::Index;
use crate::index::mark_bitmaps::Mark;
use crate::maintenance::mark::mark_used;
use crate::maintenance::problem::Problem;
use crate::maintenance::scrub::{PackFile, scrub_packs};
use crate::progress::Progress;
use crate::repository::{Repository, read_key};
use crate::store::local::{Area, CONFIG, LocalStore};
use crate::store::lock::EXCLUSIVE_WAIT;

/// What a check examined and found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// The problems, sorted by file, each once.
    pub problems: Vec<Problem>,
    /// Number of checkpoints.
    pub checkpoints: u64,
    /// Number of index files.
    pub index_files: u64,
    /// Number of packs.
    pub packs: u64,
    /// Number of indexed images.
    pub images: u64,
    /// Number of blobs in the index.
    pub blobs: u64,
    /// Bytes of all packs.
    pub pack_bytes: u64,
    /// Packs that no index file describes, of unfinished checkpoints. Prune removes them.
    pub unindexed_packs: u64,
    /// Bytes of packs that were read and verified.
    pub bytes_read: u64,
}

impl CheckReport {
    /// Whether no problem was found.
    pub fn is_clean(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Collects problems, each once.
#[derive(Default)]
struct Findings {
    problems: BTreeSet<Problem>,
    report: CheckReport,
}

impl Findings {
    fn add(&mut self, file: impl Into<String>, what: impl Into<String>) {
        self.problems.insert(Problem {
            file: file.into(),
            what: what.into(),
        });
    }

    fn add_error(&mut self, file: impl Into<String>, error: &RepoError) {
        self.problems
            .insert(Problem::from_error(file.into(), error));
    }
}

impl Repository {
    /// Checks the repository. It always reads and verifies every small file, follows every reference, and
    /// compares the length of every pack. With `read_data` it also reads every byte of every pack, and hashes
    /// every blob again.
    ///
    /// An error means that the check could not be done; problems of the repository are in the report. A manifest
    /// that was removed by hand is not reported: its checkpoint counts as forgotten.
    pub fn check(
        &mut self,
        read_data: bool,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<CheckReport, RepoError> {
        let _lock = self.reading_lock(EXCLUSIVE_WAIT)?;
        let mut findings = Findings::default();
        self.check_config(&mut findings);
        self.check_keys(&mut findings)?;
        self.check_index(&mut findings)?;
        let packs = self.check_packs(&mut findings, progress)?;
        self.check_names(&mut findings, Area::Manifests, |name| {
            CheckpointId::from_hex(name).is_some()
        })?;
        self.check_working_sets(&mut findings)?;
        let problems = &mut findings.problems;
        let note = &mut |problem| {
            problems.insert(problem);
            Ok(())
        };
        findings.report.checkpoints = mark_used(self, note, progress)?;
        let needed = self.needed_images();
        self.index.clear_marks();
        self.check_images(&mut findings, &needed)?;
        if read_data {
            let (found, bytes_read) = scrub_packs(self, packs, &needed, progress)?;
            findings.problems.extend(found);
            findings.report.bytes_read = bytes_read;
        }
        // It may lack files that could not be read.
        self.index = Index::default();
        findings.report.problems = findings.problems.into_iter().collect();
        Ok(findings.report)
    }

    fn check_config(&self, findings: &mut Findings) {
        let read = self.store.read_config().and_then(|bytes| {
            config::decode(&bytes).map_err(|error| RepoError::format(CONFIG, &error))
        });
        match read {
            Ok(id) if id == self.id() => {}
            Ok(_) => findings.add(CONFIG, "it is that of another repository"),
            Err(error) => findings.add_error(CONFIG, &error),
        }
    }

    fn check_keys(&self, findings: &mut Findings) -> Result<(), RepoError> {
        let names = self.store.names(Area::Keys)?;
        if names.is_empty() {
            findings.add(
                Area::Keys.folder(),
                "no key file is left: no password opens the repository",
            );
        }
        for name in names {
            if let Err(error) = read_key(&self.store, &name) {
                findings.add_error(self.store.label(Area::Keys, &name), &error);
            }
        }
        Ok(())
    }

    fn check_working_sets(&self, findings: &mut Findings) -> Result<(), RepoError> {
        for name in self.store.names(Area::WorkingSets)? {
            let label = self.store.label(Area::WorkingSets, &name);
            match CheckpointId::from_hex(&name).map(|id| self.working_set(&id)) {
                None => findings.add(label, "its name is not one of this repository's"),
                Some(Err(error)) => findings.add_error(label, &error),
                Some(Ok(_)) => {}
            }
        }
        Ok(())
    }

    /// The images that have blocks which a checkpoint needs. The blobs in use must be marked.
    fn needed_images(&self) -> BTreeSet<ImageId> {
        let used = self.index.locations();
        used.filter(|&at| self.index.has(at, Mark::Used))
            .filter_map(|at| self.index.frame(at).0.image)
            .collect()
    }

    /// An image that no checkpoint needs may be gone or have changed.
    fn check_images(
        &self,
        findings: &mut Findings,
        needed: &BTreeSet<ImageId>,
    ) -> Result<(), RepoError> {
        self.check_names(findings, Area::Images, |name| {
            ImageId::from_hex(name).is_some()
        })?;
        let mut ids: BTreeSet<ImageId> = self.images.ids()?.into_iter().collect();
        findings.report.images = ids.len() as u64;
        ids.extend(needed);
        for id in ids {
            match self.image(id) {
                Err(error) => {
                    let label = self.store.label(Area::Images, &id.to_string());
                    findings.add_error(label, &error);
                }
                Ok(image) if needed.contains(&id) && image.state != ImageState::Intact => {
                    findings.add(
                        image.record.path,
                        format!("checkpoints need this image, and it is {}", image.state),
                    );
                }
                Ok(_) => {}
            }
        }
        Ok(())
    }

    /// Reads and checks all index files anew.
    fn check_index(&mut self, findings: &mut Findings) -> Result<(), RepoError> {
        self.check_names(findings, Area::Index, |name| {
            FileHash::from_name(name).is_some()
        })?;
        let store: &LocalStore = &self.store;
        self.index = Index::default();
        self.index
            .refresh_despite(store, &self.keys, &mut |name, error| {
                findings.add_error(store.label(Area::Index, &name.to_string()), &error);
                Ok(())
            })?;
        for (&name, _) in self.index.live_files() {
            // A file that is gone was merged into another meanwhile.
            if let Err(error) = check_sections(store, &self.keys, name)
                && !error.is_absent()
            {
                findings.add_error(store.label(Area::Index, &name.to_string()), &error);
            }
        }
        findings.report.index_files = self.index.files().len() as u64;
        findings.report.blobs = self.index.blobs();
        Ok(())
    }

    /// Checks that every pack exists in its full length. Returns the existing packs.
    fn check_packs(
        &self,
        findings: &mut Findings,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Vec<PackFile>, RepoError> {
        for pack in self.index.packs() {
            let name = pack.name.to_string();
            let label = self.store.label(Area::Packs, &name);
            match self.store.length(Area::Packs, &name)? {
                None => findings.add(label, "it is missing"),
                Some(bytes) if bytes != pack.file_bytes => {
                    let expected = pack.file_bytes;
                    findings.add(label, format!("it has {bytes} bytes instead of {expected}"));
                }
                Some(_) => {}
            }
        }
        let mut packs = Vec::new();
        self.visit_pack_files(progress, |file, pack| {
            let Some(pack) = pack else {
                let label = self.store.label(Area::Packs, file);
                findings.add(label, "it is not a pack, or lies in the wrong folder");
                return Ok(());
            };
            findings.report.packs += 1;
            findings.report.pack_bytes += pack.bytes;
            if self.index.pack_number(&pack.name).is_none() {
                findings.report.unindexed_packs += 1;
            }
            packs.push(pack);
            Ok(())
        })?;
        Ok(packs)
    }

    fn check_names(
        &self,
        findings: &mut Findings,
        area: Area,
        is_name: fn(&str) -> bool,
    ) -> Result<(), RepoError> {
        for name in self.store.names(area)? {
            if !is_name(&name) {
                findings.add(
                    self.store.label(area, &name),
                    "its name is not one of this repository's",
                );
            }
        }
        Ok(())
    }
}
