//! The on-demand index of a long read: it is opened anew when a pack is gone.
//!
//! A reader without a lock (on a read-only or full file system) reads while another host may prune. Repacked
//! blobs then lie in another pack, which only newer index files name. The numbers of packs continue from one
//! opening to the next, so an earlier location stays valid.

use std::sync::{Arc, Mutex, RwLock};

use stillframe_page::hash::ContentId;

use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::image_record::ImageId;
use crate::images::Images;
use crate::index::on_demand::{Found, OnDemandIndex};
use crate::index::segment::IndexSegment;
use crate::pack::place::Wanted;
use crate::store::local::{Area, LocalStore};
use crate::sync::lock;

/// The current on-demand index, and the earlier ones.
pub(crate) struct ReopeningIndex {
    images: Arc<Images>,
    /// The newest last; never empty.
    all: RwLock<Vec<Arc<OnDemandIndex>>>,
    /// The index files that existed when the newest was opened.
    listed: Mutex<Vec<String>>,
}

impl ReopeningIndex {
    /// Reads the heads of the index files.
    pub(crate) fn open(images: &Arc<Images>) -> Result<ReopeningIndex, RepoError> {
        // Listed before they are read: files that appear later are new.
        let listed = list(&images.store)?;
        let on_demand = OnDemandIndex::open(images)?;
        Ok(ReopeningIndex {
            images: images.clone(),
            all: RwLock::new(vec![Arc::new(on_demand)]),
            listed: Mutex::new(listed),
        })
    }

    fn newest(&self) -> Arc<OnDemandIndex> {
        let all = self.all.read();
        let all = all.unwrap_or_else(|poisoned| poisoned.into_inner());
        all[all.len() - 1].clone()
    }

    /// The on-demand index that numbered a pack.
    fn of_pack(&self, pack: u32) -> Arc<OnDemandIndex> {
        let all = self.all.read();
        let all = all.unwrap_or_else(|poisoned| poisoned.into_inner());
        let of = all.iter().rfind(|on_demand| on_demand.first_pack() <= pack);
        of.unwrap_or(&all[0]).clone()
    }

    pub(crate) fn pack_name(&self, pack: u32) -> FileHash {
        self.of_pack(pack).pack_name(pack)
    }

    /// The location of a blob; if it is in several packs, in one that is whole.
    pub(crate) fn get(&self, id: &ContentId) -> Result<Option<Found>, RepoError> {
        let newest = self.newest();
        let found = newest.get(id);
        let stale = match &found {
            Ok(found) => !found.is_some_and(|found| found.whole),
            Err(error) => error.is_absent(),
        };
        match stale && self.renew(newest.first_pack())? {
            true => self.newest().get(id),
            false => found,
        }
    }

    /// Whether a blob is in a pack that is whole.
    pub(crate) fn contains(&self, id: &ContentId) -> Result<bool, RepoError> {
        let found = self.newest().get(id)?;
        Ok(found.is_some_and(|found| found.whole))
    }

    /// The image that a blob is read from.
    pub(crate) fn image_of(&self, id: &ContentId) -> Result<Option<ImageId>, RepoError> {
        let newest = self.newest();
        let found = newest.get(id)?;
        Ok(found.and_then(|found| newest.pack_image(found.place.pack)))
    }

    /// A part that was read before, if it is still cached.
    pub(crate) fn known_part(&self, part: u32) -> Option<Arc<IndexSegment>> {
        self.newest().known_part(part)
    }

    /// Locates all wanted blobs, each of which must exist.
    pub(crate) fn find_all<T: Copy>(&self, wanted: &mut [Wanted<T>]) -> Result<(), RepoError> {
        let newest = self.newest();
        let found = newest.find_all(wanted);
        let stale = match &found {
            Ok(()) => false,
            Err(error) => matches!(error, RepoError::MissingBlob { .. }) || error.is_absent(),
        };
        match stale && self.renew(newest.first_pack())? {
            true => self.newest().find_all(wanted),
            false => found,
        }
    }

    /// Opens the index anew, because this pack is gone. Returns whether there is a newer index than the one that
    /// named the pack.
    pub(crate) fn renew(&self, pack: u32) -> Result<bool, RepoError> {
        // Locked throughout: of several threads that miss a pack, one opens the index.
        let mut listed = lock(&self.listed);
        let newest = self.newest();
        if pack < newest.first_pack() {
            return Ok(true);
        }
        let names = list(&self.images.store)?;
        // Empty while the file system is away; the known index then stays valid.
        if names.is_empty() || names == *listed {
            return Ok(false);
        }
        let next = OnDemandIndex::open_after(&self.images, &newest)?;
        *listed = names;
        let all = self.all.write();
        all.unwrap_or_else(|poisoned| poisoned.into_inner())
            .push(Arc::new(next));
        Ok(true)
    }
}

fn list(store: &LocalStore) -> Result<Vec<String>, RepoError> {
    let mut names = store.names(Area::Index)?;
    names.sort_unstable();
    Ok(names)
}
