//! The ids of many pages at once.
//!
//! BLAKE3 is fast where it hashes many chunks of 1 KiB side by side: 16 with AVX-512, 8 with AVX2. A page has four. So
//! chunks of several pages are hashed together, all first ones, then all second ones: those have the same number in
//! their page, which is a part of the hash.
//!
//! ```text
//!   chunk 0   page 0, page 1, ... page 15        one call each
//!   chunk 1   page 0, page 1, ... page 15
//!   ...
//!   parents   (0, 1) and (2, 3) of each page     one call
//!   roots     of each page: the id               one call
//! ```
//!
//! The tree and its flags are those of the BLAKE3 paper (sections 2.1 to 2.5), so an id is that of
//! [`super::ContentHasher::id`]. The crate offers calls for many chunks only beside its documented interface; the lock file
//! holds its version, and a property test compares each id with the documented way.

use blake3::IncrementCounter;
use blake3::platform::Platform;

use super::ContentId;
use crate::PAGE;

/// The hash of a key or a node.
pub(super) const HASH: usize = 32;
const CHUNK: usize = 1024;
const CHUNKS: usize = PAGE / CHUNK;
/// A node above two others is hashed as one block.
const NODE: usize = 2 * HASH;

/// Pages hashed at once: one of the widest vectors has a chunk of each.
const TOGETHER: usize = 16;
/// Fewer are as fast one by one.
const TOGETHER_MIN: usize = 4;

/// Flags of the BLAKE3 paper, table 3.
const CHUNK_START: u8 = 1 << 0;
const CHUNK_END: u8 = 1 << 1;
const PARENT: u8 = 1 << 2;
const ROOT: u8 = 1 << 3;
const KEYED_HASH: u8 = 1 << 4;

/// Hashes pages together, of which there are enough for that, and passes their ids on. Returns the pages that are left.
pub(super) fn hash_together<'p, 'b>(
    key: &[u32; 8],
    pages: &'p [&'b [u8; PAGE]],
    ids: &mut Vec<ContentId>,
) -> &'p [&'b [u8; PAGE]] {
    let platform = Platform::detect();
    let mut rest = pages;
    while rest.len() >= TOGETHER_MIN {
        let (group, others) = rest.split_at(rest.len().min(TOGETHER));
        hash_group(platform, key, group, ids);
        rest = others;
    }
    rest
}

/// Up to [`TOGETHER`] pages.
fn hash_group(platform: Platform, key: &[u32; 8], pages: &[&[u8; PAGE]], ids: &mut Vec<ContentId>) {
    let count = pages.len();
    let mut chunks = [[0; TOGETHER * HASH]; CHUNKS];
    for (number, hashes) in chunks.iter_mut().enumerate() {
        let inputs = pages.iter().map(|page| &page.as_chunks().0[number]);
        let inputs: Vec<&[u8; CHUNK]> = inputs.collect();
        platform.hash_many(
            &inputs,
            key,
            number as u64,
            IncrementCounter::No,
            KEYED_HASH,
            CHUNK_START,
            CHUNK_END,
            hashes,
        );
    }
    let mut parents = [0; TOGETHER * NODE];
    let hash_nodes = |nodes: &[[u8; NODE]], flags, out: &mut [u8]| {
        let nodes: Vec<&[u8; NODE]> = nodes.iter().collect();
        platform.hash_many(&nodes, key, 0, IncrementCounter::No, flags, 0, 0, out);
    };
    let chunks = chunks.each_ref().map(|hashes| hashes.as_chunks::<HASH>().0);
    let mut nodes = [[0; NODE]; 2 * TOGETHER];
    for (at, node) in nodes[..2 * count].iter_mut().enumerate() {
        let (page, first) = (at / 2, at % 2 * 2);
        node[..HASH].copy_from_slice(&chunks[first][page]);
        node[HASH..].copy_from_slice(&chunks[first + 1][page]);
    }
    hash_nodes(&nodes[..2 * count], KEYED_HASH | PARENT, &mut parents);
    let mut roots = [0; TOGETHER * HASH];
    let nodes = &parents.as_chunks().0[..count];
    hash_nodes(nodes, KEYED_HASH | PARENT | ROOT, &mut roots);
    let found = roots.as_chunks::<HASH>().0[..count].iter();
    ids.extend(found.map(|&hash| ContentId(hash)));
}
