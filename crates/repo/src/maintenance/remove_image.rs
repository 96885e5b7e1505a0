//! Removing an image from a repository.

use crate::error::RepoError;
use crate::format::image_record::ImageId;
use crate::format::lock_record::LockKind;
use crate::repository::Repository;
use crate::store::local::Area;
use crate::store::lock::{EXCLUSIVE_WAIT, Lock};

impl Repository {
    /// Makes the repository do without an image, which itself stays as it is. The next prune removes the external
    /// packs. Takes the exclusive lock.
    ///
    /// # Errors
    /// [`RepoError::ImageNeeded`] while a checkpoint may need the image.
    pub fn remove_image(&mut self, id: ImageId) -> Result<(), RepoError> {
        let lock = Lock::take(&self.store, LockKind::Exclusive, EXCLUSIVE_WAIT)?;
        let path = self.images.record(id)?.path;
        let mut needing = Vec::new();
        for checkpoint in self.checkpoint_ids()? {
            let manifest = self.read_manifest(&checkpoint)?;
            if manifest.is_some_and(|manifest| manifest.images.contains(&id)) {
                needing.push(checkpoint);
            }
        }
        if !needing.is_empty() {
            return Err(RepoError::ImageNeeded {
                path,
                checkpoints: needing,
            });
        }
        lock.assert_held()?;
        self.store.remove(Area::Images, &id.to_string())?;
        self.store.sync_area(Area::Images)?;
        self.images.forget_known();
        Ok(())
    }
}
