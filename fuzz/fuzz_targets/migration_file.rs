//! Fuzz target: a migration file of QEMU, to its end.
#![no_main]

use std::io::Cursor;

use stillframe_page::PAGE;
use stillframe_qemu::device_state;
use stillframe_qemu::migration_file::MigrationFile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(mut file) = MigrationFile::open(Cursor::new(bytes)) else {
        return;
    };
    let blocks = file.blocks().to_vec();
    let mut page = [0; PAGE];
    loop {
        match file.next_page(&mut page) {
            Ok(Some(found)) => assert!(found.page.page < blocks[found.page.block].pages()),
            Ok(None) => break,
            Err(_) => return,
        }
    }
    if let Ok(raw) = file.device_state(1 << 20) {
        assert!(device_state::validate(&raw).is_ok());
    }
});
