//! Fuzz target: what the human monitor prints, `info ramblock`, `info network` and `info roms`.
#![no_main]

use stillframe_qemu::fuzzing;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let table = String::from_utf8_lossy(bytes);
    fuzzing::other_tables(&table);
    for table in [&*table, &format!("Block Name HVA\n{table}")] {
        let blocks = fuzzing::blocks(table).unwrap_or_default();
        let bytes: u64 = blocks.iter().map(|block| block.total_bytes).sum();
        assert!(blocks.len() <= 4096 && bytes <= 64 << 40);
        for block in blocks {
            assert!(block.used_bytes <= block.total_bytes);
            assert!(block.address.checked_add(block.total_bytes).is_some());
        }
    }
});
