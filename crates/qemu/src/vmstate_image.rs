//! A disk image that holds nothing but an internal snapshot of a device state. A VM that runs already can load a
//! state only from such a snapshot (`snapshot-load`).

const CLUSTER: usize = 1 << CLUSTER_BITS;
const CLUSTER_BITS: u32 = 16;
/// 16-bit refcounts.
const REFCOUNT_ORDER: u32 = 4;
const VERSION: u32 = 3;
const HEADER_BYTES: u32 = 104;
/// The disk of the image: one cluster, never written.
const DISK_BYTES: u64 = CLUSTER as u64;

const REFCOUNT_TABLE: usize = 1;
const REFCOUNTS: usize = 2;
const DISK_L1: usize = 3;
const SNAPSHOTS: usize = 4;
const STATE_L1: usize = 5;
const STATE_L2: usize = 6;
const STATE: usize = 7;

/// The longest device state that such an image can hold, in bytes: what one L2 table covers.
pub(crate) const STATE_BYTES_MAX: usize = (CLUSTER / 8) * CLUSTER;

/// Makes the image. `None` where the state is longer than [`STATE_BYTES_MAX`].
pub(crate) fn encode(state: &[u8], tag: &str) -> Option<Vec<u8>> {
    if state.len() > STATE_BYTES_MAX {
        return None;
    }
    let state_clusters = state.len().div_ceil(CLUSTER);
    let clusters = STATE + state_clusters;
    let mut image = vec![0; clusters * CLUSTER];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &header());
    put(REFCOUNT_TABLE * CLUSTER, &place(REFCOUNTS).to_be_bytes());
    for cluster in 0..clusters {
        put(REFCOUNTS * CLUSTER + 2 * cluster, &1u16.to_be_bytes());
    }
    put(SNAPSHOTS * CLUSTER, &snapshot(state.len() as u64, tag));
    // The first entry is the disk's, which has nothing in it.
    put(STATE_L1 * CLUSTER + 8, &place(STATE_L2).to_be_bytes());
    for number in 0..state_clusters {
        let at = STATE_L2 * CLUSTER + 8 * number;
        put(at, &place(STATE + number).to_be_bytes());
    }
    put(STATE * CLUSTER, state);
    Some(image)
}

/// Where a cluster begins.
fn place(cluster: usize) -> u64 {
    (cluster * CLUSTER) as u64
}

fn header() -> Vec<u8> {
    let mut header = b"QFI\xfb".to_vec();
    header.extend(VERSION.to_be_bytes());
    // No backing file: its place and length.
    header.extend(0u64.to_be_bytes());
    header.extend(0u32.to_be_bytes());
    header.extend(CLUSTER_BITS.to_be_bytes());
    header.extend(DISK_BYTES.to_be_bytes());
    // No encryption; one L1 entry.
    header.extend(0u32.to_be_bytes());
    header.extend(1u32.to_be_bytes());
    header.extend(place(DISK_L1).to_be_bytes());
    header.extend(place(REFCOUNT_TABLE).to_be_bytes());
    // Clusters of the refcount table; snapshots.
    header.extend(1u32.to_be_bytes());
    header.extend(1u32.to_be_bytes());
    header.extend(place(SNAPSHOTS).to_be_bytes());
    // No features of any kind.
    header.extend([0; 24]);
    header.extend(REFCOUNT_ORDER.to_be_bytes());
    header.extend(HEADER_BYTES.to_be_bytes());
    header
}

fn snapshot(state_bytes: u64, tag: &str) -> Vec<u8> {
    const ID: &[u8] = b"1";
    let tag = tag.as_bytes();
    let mut extra = state_bytes.to_be_bytes().to_vec();
    extra.extend(DISK_BYTES.to_be_bytes());
    // Not recorded with an instruction count.
    extra.extend(u64::MAX.to_be_bytes());
    let mut entry = place(STATE_L1).to_be_bytes().to_vec();
    entry.extend(2u32.to_be_bytes());
    entry.extend((ID.len() as u16).to_be_bytes());
    entry.extend((tag.len() as u16).to_be_bytes());
    // Times that are never read: seconds, nanoseconds, the VM's clock.
    entry.extend([0; 16]);
    // Superseded by the longer one in the extra data.
    entry.extend((state_bytes as u32).to_be_bytes());
    entry.extend((extra.len() as u32).to_be_bytes());
    entry.extend(extra);
    entry.extend(ID);
    entry.extend(tag);
    entry.resize(entry.len().next_multiple_of(8), 0);
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_lies_where_the_tables_say() {
        let state: Vec<u8> = (0..3 * CLUSTER + 5).map(|at| (at / 7) as u8).collect();
        let image = encode(&state, "tag").unwrap();
        let word = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap()) as usize;
        let table = word(64);
        let l1 = word(table);
        let l2 = word(l1 + 8);
        assert_eq!(word(l1), 0, "the disk is empty");
        let mut found = Vec::new();
        for number in 0..4 {
            let at = word(l2 + 8 * number);
            found.extend_from_slice(&image[at..at + CLUSTER]);
        }
        assert_eq!(found[..state.len()], state);
        assert_eq!(word(l2 + 8 * 4), 0);
        assert_eq!(word(table + 40), state.len());
    }

    #[test]
    fn no_more_than_the_tables_hold() {
        assert!(encode(&vec![0; STATE_BYTES_MAX + 1], "tag").is_none());
    }
}
