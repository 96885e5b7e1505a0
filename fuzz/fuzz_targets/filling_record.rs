//! Fuzz target: the record of a VM whose memory is being filled.
#![no_main]

use stillframe_engine::restore::filling_record::FillingRecord;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(record) = serde_json::from_slice::<FillingRecord>(bytes) {
        let again = serde_json::to_vec(&record).expect("it can be written");
        assert_eq!(
            serde_json::from_slice::<FillingRecord>(&again).expect("its own"),
            record
        );
    }
});
