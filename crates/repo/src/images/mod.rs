//! Images: files outside of the repository whose blocks count as blobs of it, such as a golden image that many
//! VMs began with. The repository reads an image and verifies each block by its id; it never owns, copies or
//! prunes it.
//!
//! ```text
//! images/<id>        which file it is: path, length, time of its last change
//! packs/ab/abcd...   an external pack: for each 64 KiB or less of the image, the ids of its blocks, and the place
//! ```
//!
//! An external pack is a pack like others (`crate::pack`); but its frames have places in the image instead of
//! content. So the index, checks and prunes need no second kind of entry.
//!
//! # An image that changes
//!
//! No block is deduplicated against an image that is not as it was indexed: gone, of another length, or changed
//! since. That is inspected before each checkpoint, and again before its manifest is written. A reader tries such an image
//! nevertheless, since every block is verified.

pub(crate) mod external_reader;
pub(crate) mod file;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::crypto::Keys;
use crate::crypto::sealed_file::open_file;
use crate::error::RepoError;
use crate::format::image_record::{self, ImageId, ImageRecord};
use crate::format::layout::{FileKind, FormatError};
use crate::images::file::{ImageState, OpenImage, state_of, unusable};
use crate::store::local::{Area, LocalStore};
use crate::sync::lock;

/// Maximum length in bytes of the file of an image.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// The images of a repository.
pub(crate) struct Images {
    pub(crate) store: Arc<LocalStore>,
    pub(crate) keys: Arc<Keys>,
    /// The images that were inquired about, and whether each was as it was indexed.
    known: Mutex<HashMap<ImageId, bool>>,
}

impl Images {
    pub(crate) fn new(store: Arc<LocalStore>, keys: Arc<Keys>) -> Images {
        Images {
            store,
            keys,
            known: Mutex::default(),
        }
    }

    /// Whether an image was as it was indexed when it was last inspected.
    pub(crate) fn is_intact(&self, id: ImageId) -> bool {
        *lock(&self.known)
            .entry(id)
            .or_insert_with(|| self.inspect_one(id))
    }

    /// Inspects the images that were inquired about. Returns whether any has changed, come back or gone.
    pub(crate) fn inspect(&self) -> bool {
        let mut different = false;
        for (&id, known) in &mut *lock(&self.known) {
            let intact = self.inspect_one(id);
            different |= *known != intact;
            *known = intact;
        }
        different
    }

    fn inspect_one(&self, id: ImageId) -> bool {
        let record = self.record(id);
        record.is_ok_and(|record| state_of(&record) == ImageState::Intact)
    }

    /// What was recorded of an image.
    pub(crate) fn record(&self, id: ImageId) -> Result<ImageRecord, RepoError> {
        let name = id.to_string();
        let label = self.store.label(Area::Images, &name);
        let mut bytes = match self.store.read(Area::Images, &name, FILE_BYTES_MAX) {
            Err(error) if error.is_absent() => {
                return Err(RepoError::Damaged {
                    file: label,
                    what: "it is missing: no image has the blocks that were in it".into(),
                });
            }
            other => other?,
        };
        let record =
            open_file(FileKind::Image, &self.keys, &mut bytes).and_then(image_record::decode);
        let record = record.map_err(|error| RepoError::format(&label, &error))?;
        match record.id == id {
            true => Ok(record),
            false => Err(RepoError::format(
                &label,
                &FormatError::Mismatch { what: "its name" },
            )),
        }
    }

    /// Opens an image to read its blocks, which must be verified.
    pub(crate) fn open(&self, id: ImageId) -> Result<OpenImage, RepoError> {
        OpenImage::open(self.record(id)?)
    }

    /// The ids of all images, ascending.
    pub(crate) fn ids(&self) -> Result<Vec<ImageId>, RepoError> {
        let names = self.store.names(Area::Images)?;
        let mut ids: Vec<ImageId> = names
            .iter()
            .filter_map(|name| ImageId::from_hex(name))
            .collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// The paths of the images that are not as they were indexed.
    pub(crate) fn changed(&self) -> Result<Vec<String>, RepoError> {
        let mut changed = Vec::new();
        for id in self.ids()? {
            // Of one that cannot be read, `check` reports more.
            if let Ok(record) = self.record(id)
                && state_of(&record) != ImageState::Intact
            {
                changed.push(record.path);
            }
        }
        changed.sort_unstable();
        Ok(changed)
    }

    /// An error if one of these images is not as it was indexed.
    pub(crate) fn ensure_intact<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a ImageId>,
    ) -> Result<(), RepoError> {
        for &id in ids {
            let record = self.record(id)?;
            match state_of(&record) {
                ImageState::Intact => {}
                state => return Err(unusable(&record.path, &format!("it is {state}"))),
            }
        }
        Ok(())
    }

    /// Forgets what is known of the states of images.
    pub(crate) fn forget_known(&self) {
        lock(&self.known).clear();
    }
}
