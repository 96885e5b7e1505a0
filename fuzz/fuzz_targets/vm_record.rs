//! Fuzz target: the record of a VM in a checkpoint.
#![no_main]

use stillframe_qemu::record::VmRecord;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(record) = serde_json::from_slice::<VmRecord>(bytes) {
        let again = serde_json::to_vec(&record).expect("it can be written");
        assert_eq!(
            serde_json::from_slice::<VmRecord>(&again).expect("its own"),
            record
        );
    }
});
