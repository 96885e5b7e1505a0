//! The memory of an open repository's index, and the rate of its lookups: `cargo xtask bench index`.
//!
//! Prints one JSON value a line. The repository is filled in one process and opened in another, whose C library
//! returns freed memory at once, so that the remaining memory is in use.

mod sample;

use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use stillframe_page::hash::ContentId;
use stillframe_repo::{Password, Repository};

use sample::{manifest, words};

const PAGE: usize = 4096;
/// Different pages, of 64 checkpoints and of 16: a GiB of them, and a quarter of one.
const LARGE: u64 = 1 << 18;
const SMALL: u64 = 1 << 16;
/// These variables pass the repository to the second process.
const PLACE: &str = "STILLFRAME_BENCH_INDEX_PLACE";
const PAGES: &str = "STILLFRAME_BENCH_INDEX_PAGES";
/// New pages of each checkpoint, as in a watch.
const PAGES_A_CHECKPOINT: u64 = 1 << 12;
const WAIT: Duration = Duration::from_secs(10);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A page like no other, which does not compress.
fn page(number: u64) -> Vec<u8> {
    let words = words(number << 32).take(PAGE / 8);
    words.flat_map(u64::to_le_bytes).collect()
}

fn fill(place: &Path, pages: u64) -> Result<()> {
    let mut repo = Repository::init(place, &Password::new("bench"))?;
    for first in (0..pages).step_by(PAGES_A_CHECKPOINT as usize) {
        let mut writer = repo.begin(WAIT)?;
        for number in first..first + PAGES_A_CHECKPOINT {
            let page = page(number);
            let id = writer.hasher().id(&page);
            writer.put(id, &page)?;
        }
        writer.commit(manifest())?;
    }
    Ok(())
}

/// Resident memory of this process.
fn resident_bytes() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kib.ok_or("no VmRSS")?.trim().parse::<f64>()? * 1024.0)
}

/// The number of these pages that the index has, and the number of lookups per second.
fn look_up(repo: &mut Repository, numbers: Range<u64>) -> Result<(u64, f64)> {
    let writer = repo.begin(WAIT)?;
    let mut ids: Vec<ContentId> = numbers
        .map(|number| writer.hasher().id(&page(number)))
        .collect();
    // In no order that the processor's caches could profit from.
    ids.sort_unstable_by_key(|id| id.0);
    let begin = Instant::now();
    let mut found = 0;
    for id in &ids {
        found += u64::from(writer.contains(id)?);
    }
    Ok((found, ids.len() as f64 / begin.elapsed().as_secs_f64()))
}

/// The second process: prints the memory of a repository of `pages` pages.
fn open(place: &Path, pages: u64) -> Result<()> {
    let mut repo = Repository::open(place, &Password::new("bench"))?;
    let before = resident_bytes()?;
    let begin = Instant::now();
    drop(repo.begin(WAIT)?);
    let read_ms = begin.elapsed().as_secs_f64() * 1e3;
    let grown_bytes = resident_bytes()? - before;
    let (found, there) = look_up(&mut repo, 0..pages)?;
    assert_eq!(found, pages);
    let (found, absent) = look_up(&mut repo, pages..2 * pages)?;
    assert_eq!(found, 0);
    println!(
        "{{\"blobs\":{pages},\"grown_bytes\":{grown_bytes},\"read_ms\":{read_ms:.1},\"found_a_second\":{there:.0},\"not_found_a_second\":{absent:.0}}}"
    );
    Ok(())
}

/// Memory of an open repository of `pages` pages.
fn measure(pages: u64) -> Result<f64> {
    let dir = tempfile::tempdir()?;
    let place = dir.path().join("repository");
    fill(&place, pages)?;
    let said = Command::new(std::env::current_exe()?)
        .env(PLACE, &place)
        .env(PAGES, pages.to_string())
        .env("MALLOC_MMAP_THRESHOLD_", "65536")
        .stderr(Stdio::inherit())
        .output()?
        .stdout;
    print!("{}", String::from_utf8_lossy(&said));
    let said: serde_json::Value = serde_json::from_slice(&said)?;
    Ok(said["grown_bytes"].as_f64().ok_or("no bytes")?)
}

fn main() -> Result<()> {
    if let (Some(place), Ok(pages)) = (std::env::var_os(PLACE), std::env::var(PAGES)) {
        return open(place.as_ref(), pages.parse()?);
    }
    // Two of them, because opening takes some memory for any content.
    let grown = measure(LARGE)? - measure(SMALL)?;
    let a_blob = grown / (LARGE - SMALL) as f64;
    println!("{{\"claim\":\"index-bytes-a-blob\",\"value\":{a_blob:.1}}}");
    Ok(())
}
