//! The checkpoint selector: it finds the checkpoint that a typed name means: a whole id, the start of one,
//! `latest`, `latest~2`.

use std::collections::BTreeSet;

use crate::error::RepoError;
use crate::format::manifest::{CheckpointId, Manifest};
use crate::repository::Repository;

/// A parsed name.
#[derive(Debug, PartialEq, Eq)]
enum Name {
    /// Ids that start with these digits.
    Prefix(String),
    /// The n-th before the newest.
    Latest(usize),
}

fn parse(name: &str) -> Result<Name, RepoError> {
    let bad = || RepoError::BadName { name: name.into() };
    if let Some(rest) = name.strip_prefix("latest") {
        return match rest.strip_prefix('~') {
            None if rest.is_empty() => Ok(Name::Latest(0)),
            Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => {
                digits.parse().map(Name::Latest).map_err(|_| bad())
            }
            _ => Err(bad()),
        };
    }
    let prefix = name.to_ascii_lowercase();
    let is_hex = !prefix.is_empty() && prefix.bytes().all(|b| b.is_ascii_hexdigit());
    match is_hex && prefix.len() <= 64 {
        true => Ok(Name::Prefix(prefix)),
        false => Err(bad()),
    }
}

impl Repository {
    /// The checkpoint a name means: a whole id, the start of one, `latest`, or `latest~N` for the
    /// N-th before that. With `vm`, only checkpoints of the VM of that label count.
    pub fn resolve(
        &self,
        name: &str,
        vm: Option<&str>,
    ) -> Result<(CheckpointId, Manifest), RepoError> {
        match parse(name)? {
            Name::Prefix(prefix) => self.resolve_prefix(name, &prefix, vm),
            Name::Latest(back) => self.resolve_latest(name, back, vm),
        }
    }

    fn resolve_prefix(
        &self,
        name: &str,
        prefix: &str,
        vm: Option<&str>,
    ) -> Result<(CheckpointId, Manifest), RepoError> {
        let mut found = Vec::new();
        for id in self.checkpoint_ids()? {
            if !id.to_hex().starts_with(prefix) {
                continue;
            }
            if let Some(manifest) = self.read_manifest(&id)?
                && vm.is_none_or(|label| label == manifest.vm)
            {
                found.push((id, manifest));
            }
        }
        match found.len() {
            0 => Err(not_found(name, vm)),
            1 => Ok(found.remove(0)),
            _ => {
                let mut candidates: Vec<CheckpointId> = found.iter().map(|(id, _)| *id).collect();
                candidates.sort_unstable();
                Err(RepoError::Ambiguous {
                    name: name.into(),
                    candidates,
                })
            }
        }
    }

    fn resolve_latest(
        &self,
        name: &str,
        back: usize,
        vm: Option<&str>,
    ) -> Result<(CheckpointId, Manifest), RepoError> {
        let mut found = self.summaries()?;
        found.retain(|summary| vm.is_none_or(|label| label == summary.vm));
        let labels: BTreeSet<&str> = found.iter().map(|summary| summary.vm.as_str()).collect();
        if labels.len() > 1 {
            return Err(RepoError::SeveralVms {
                labels: labels.into_iter().map(Into::into).collect(),
            });
        }
        let at = found.len().checked_sub(back.saturating_add(1));
        let id = at
            .map(|at| found[at].id)
            .ok_or_else(|| not_found(name, vm))?;
        Ok((id, self.manifest(&id)?))
    }
}

fn not_found(name: &str, vm: Option<&str>) -> RepoError {
    RepoError::NotFound {
        name: name.into(),
        vm: vm.map(Into::into),
    }
}
