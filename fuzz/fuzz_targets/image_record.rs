//! Fuzz target: the file of an image, and the place of a frame in one.
#![no_main]

use stillframe_repo::format::image_record;
use stillframe_repo::pack::external_frame::ExternalPlace;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(record) = image_record::decode(bytes) {
        assert_eq!(image_record::decode(&record.encode()), Ok(record));
    }
    if let Ok(place) = ExternalPlace::decode(bytes) {
        assert_eq!(place.encode(), bytes);
    }
});
