//! Reads the content of the frames of external packs.

use crate::error::RepoError;
use crate::format::image_record::ImageId;
use crate::images::Images;
use crate::images::file::OpenImage;
use crate::pack::external_frame::ExternalPlace;

/// Number of images that a reader keeps open.
const IMAGES_OPEN: usize = 16;

/// Reads the content of such frames; the state of one thread.
#[derive(Default)]
pub(crate) struct ExternalReader {
    /// The images in use; the last one was used last.
    open: Vec<OpenImage>,
}

impl ExternalReader {
    /// Reads the content of a frame from its image into `plain`.
    pub(crate) fn read(
        &mut self,
        images: &Images,
        place: ExternalPlace,
        bytes: usize,
        plain: &mut Vec<u8>,
    ) -> Result<(), RepoError> {
        plain.resize(bytes, 0);
        self.use_image(images, place.image)?
            .read(plain, place.offset)
    }

    /// The error that a block of the image that was used last has other contents.
    pub(crate) fn changed(&self) -> RepoError {
        let what = "it is not as it was indexed";
        self.open.last().map_or(
            RepoError::Image {
                path: String::new(),
                what: what.into(),
            },
            |image| image.unusable(what),
        )
    }

    /// Closes all: after a failure they may be on a file system that is gone.
    pub(crate) fn close(&mut self) {
        self.open.clear();
    }

    fn use_image(&mut self, images: &Images, id: ImageId) -> Result<&OpenImage, RepoError> {
        let at = self.open.iter().position(|image| image.record.id == id);
        let image = match at {
            Some(at) => self.open.remove(at),
            None => images.open(id)?,
        };
        if self.open.len() >= IMAGES_OPEN {
            self.open.remove(0);
        }
        self.open.push(image);
        Ok(&self.open[self.open.len() - 1])
    }
}
