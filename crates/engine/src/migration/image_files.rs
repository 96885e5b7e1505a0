//! The destination's side of shared images: its own files, in which it looks for pages of which only the place came.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use stillframe_page::hash::ContentHasher;
use stillframe_page::{PAGE, PAGE_BYTES};

use super::image_blocks;
use crate::connection::ConnectionError;
use crate::connection::image_pages::{ImagePage, ImagePlace};
use crate::connection::message::SharedImage;
use crate::sink::connection::transfer_hasher;

/// A file that the user lets this host read for a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalImage {
    /// Its path at the source.
    pub name: String,
    /// Its path here.
    pub path: PathBuf,
}

/// The images of a migration, in the order of the source's numbers.
pub struct ImageFiles {
    files: Vec<Option<File>>,
    hasher: ContentHasher,
}

impl ImageFiles {
    /// Opens those of the source's images that the user has named, and that are as long as they are there. What cannot be
    /// opened counts as not there: its pages come as a whole.
    pub fn open(wanted: &[SharedImage], known: &[LocalImage]) -> ImageFiles {
        let open = |image: &SharedImage| {
            let local = known.iter().find(|local| local.name == image.name)?;
            let (file, bytes) = image_blocks::open(&local.path).ok()?;
            (bytes == image.bytes).then_some(file)
        };
        ImageFiles {
            files: wanted.iter().map(open).collect(),
            hasher: transfer_hasher(),
        }
    }

    /// Which of them are there.
    pub fn there(&self) -> Vec<bool> {
        self.files.iter().map(Option::is_some).collect()
    }

    /// Reads the content of a page. Whether it is here, as the source has it.
    ///
    /// # Errors
    /// There is no such image.
    pub fn read(&self, page: &ImagePage, into: &mut [u8; PAGE]) -> Result<bool, ConnectionError> {
        let ImagePlace { image, block } = page.place;
        let file = self.files.get(image as usize).and_then(Option::as_ref);
        let file = file.ok_or_else(|| ConnectionError::Malformed {
            what: "a place in an image that is not here".to_owned(),
        })?;
        let offset = block.checked_mul(PAGE_BYTES);
        let read = offset.is_some_and(|offset| file.read_exact_at(into, offset).is_ok());
        Ok(read && self.hasher.id(into) == page.id)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn only_what_the_user_has_named_is_opened_and_only_what_is_equal_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("here.img");
        let content = [[1; PAGE], [2; PAGE]].concat();
        std::fs::write(&path, [&content[..], &[3; 100]].concat()).unwrap();
        let image = |name: &str, bytes| SharedImage {
            name: name.to_owned(),
            bytes,
        };
        let known = |name: &str, path: &Path| LocalImage {
            name: name.to_owned(),
            path: path.to_owned(),
        };
        let bytes = 2 * PAGE_BYTES + 100;
        let wanted = [
            image("/there.img", bytes),
            image("/there.img", bytes + 1),
            image("/other.img", bytes),
            image("/gone.img", bytes),
        ];
        let local = [
            known("/there.img", &path),
            known("/gone.img", &folder.path().join("gone.img")),
        ];
        let files = ImageFiles::open(&wanted, &local);
        assert_eq!(files.there(), [true, false, false, false]);
        let read = |image, block, content: u8| {
            let page = ImagePage {
                page: 7,
                place: ImagePlace { image, block },
                id: transfer_hasher().id(&[content; PAGE]),
            };
            let mut bytes = [0; PAGE];
            files
                .read(&page, &mut bytes)
                .map(|found| found.then_some(bytes))
        };
        assert_eq!(read(0, 1, 2).unwrap(), Some([2; PAGE]));
        assert_eq!(read(0, 1, 1).unwrap(), None, "it has changed");
        assert_eq!(read(0, 2, 3).unwrap(), None, "a part of a block");
        assert_eq!(read(0, u64::MAX, 1).unwrap(), None);
        assert!(read(1, 0, 1).is_err() && read(4, 0, 1).is_err());
    }
}
