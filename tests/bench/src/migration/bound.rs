//! A lower bound on what a migration has to send: what the guest's memory consists of.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::Result;

const PAGE: usize = 4096;
/// Bytes that are compressed together.
const GROUP: usize = 1 << 20;
/// Zstandard's level, its own default.
const LEVEL: i32 = 3;

/// Bytes of all pages in a file of `mapped-ram`, each content once and compressed; zeros take none. What the guest writes
/// meanwhile would come on top.
pub fn unique_bytes(file: &Path) -> Result<u64> {
    let mut file = File::open(file)?;
    let (mut seen, mut group, mut total) = (HashSet::new(), Vec::new(), 0);
    let mut piece = Vec::with_capacity(GROUP);
    loop {
        piece.clear();
        file.by_ref().take(GROUP as u64).read_to_end(&mut piece)?;
        for page in piece.chunks(PAGE) {
            let is_new = page.iter().any(|&byte| byte != 0) && seen.insert(page.to_vec());
            if is_new {
                group.extend_from_slice(page);
            }
        }
        let is_last = piece.is_empty();
        if group.len() >= GROUP || is_last {
            total += zstd::bulk::compress(&group, LEVEL)?.len() as u64;
            group.clear();
        }
        if is_last {
            return Ok(total);
        }
    }
}
