//! What the benches of this crate store.

use stillframe_repo::{Manifest, PageCounts};

/// Noise that follows from a seed (splitmix64).
pub fn words(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// A checkpoint of no VM.
pub fn manifest() -> Manifest {
    Manifest {
        vm: "bench".into(),
        time: jiff::Timestamp::now(),
        parent: None,
        tags: Default::default(),
        note: None,
        ram: Vec::new(),
        disks: Vec::new(),
        images: std::collections::BTreeSet::new(),
        streams: Default::default(),
        pages: PageCounts::default(),
        bytes_stored: 0,
        vm_record: serde_json::Value::Null,
        downtime_us: serde_json::Value::Null,
    }
}
