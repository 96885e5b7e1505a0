//! The rate at which pages are written to and read from a repository: `cargo bench -p stillframe-repo`.
//!
//! Prints figures, asserts nothing. The first argument may name the directory to work in (default: the temporary
//! directory), since the disk matters.

mod sample;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use stillframe_page::hash::ContentId;
use stillframe_repo::{Password, Repository};

use sample::{manifest, words};

const PAGE: usize = 4096;
const PAGES: usize = (64 << 20) / PAGE;
const WAIT: Duration = Duration::from_secs(10);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Bytes that do not compress, or (with `bits` below 8) that do.
fn memory(seed: u64, bits: u32) -> Vec<u8> {
    let mask = u64::from_le_bytes([(u16::MAX >> (16 - bits)) as u8; 8]);
    let words = words(seed).map(|word| (word & mask).to_le_bytes());
    words.take(PAGES * PAGE / 8).flatten().collect()
}

fn report(what: &str, bytes: usize, started: Instant) {
    let seconds = started.elapsed().as_secs_f64();
    let rate = bytes as f64 / seconds / 1e6;
    println!("{what:<44} {:>8.1} ms {rate:>8.0} MB/s", seconds * 1e3);
}

/// Puts a memory image page by page and commits; the ids of its pages.
fn ingest(repo: &mut Repository, what: &str, memory: &[u8]) -> Result<Vec<ContentId>> {
    let started = Instant::now();
    let mut writer = repo.begin(WAIT)?;
    let mut ids = Vec::with_capacity(PAGES);
    for page in memory.chunks(PAGE) {
        let id = writer.hasher().id(page);
        writer.put(id, page)?;
        ids.push(id);
    }
    report(&format!("{what}: hash and put"), memory.len(), started);
    let committed = writer.commit(manifest())?;
    report(
        &format!("{what}: the same and commit"),
        memory.len(),
        started,
    );
    println!(
        "{:<44} {:>8.2} of the size",
        "",
        committed.bytes_stored as f64 / memory.len() as f64
    );
    Ok(ids)
}

fn restore(repo: &mut Repository, what: &str, ids: &[ContentId], threads: usize) -> Result<()> {
    let started = Instant::now();
    let reader = repo.reader(WAIT)?;
    let wanted: Vec<(ContentId, usize)> = ids.iter().copied().zip(0..).collect();
    reader.read_sorted(wanted, threads, &|_, _| {
        Ok::<(), stillframe_repo::RepoError>(())
    })?;
    report(
        &format!("{what}: read with {threads} thread(s)"),
        ids.len() * PAGE,
        started,
    );
    Ok(())
}

fn main() -> Result<()> {
    let place = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with('-'));
    let place = place.map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = tempfile::tempdir_in(place)?;
    let mut repo = Repository::init(dir.path(), &Password::new("bench"))?;
    for (what, seed, bits) in [
        ("random", 1, 8),
        ("4 bits a byte", 2, 4),
        ("2 bits a byte", 3, 2),
    ] {
        let image = memory(seed, bits);
        let ids = ingest(&mut repo, what, &image)?;
        ingest(&mut repo, &format!("{what} again"), &image)?;
        restore(&mut repo, what, &ids, 1)?;
        restore(&mut repo, what, &ids, 2)?;
    }
    let started = Instant::now();
    const COMMITS: u32 = 500;
    for number in 0..COMMITS {
        let mut writer = repo.begin(WAIT)?;
        let page = number.to_le_bytes().repeat(1024);
        let id = writer.hasher().id(&page);
        writer.put(id, &page)?;
        writer.commit(manifest())?;
    }
    let each = started.elapsed() / COMMITS;
    println!("a checkpoint of one page, {COMMITS} in a row: {each:?} each");
    let started = Instant::now();
    drop(repo.begin(WAIT)?);
    println!("begin after that: {:?}", started.elapsed());
    let started = Instant::now();
    let mut repo = Repository::open(dir.path(), &Password::new("bench"))?;
    println!(
        "open: {:?} (of which most is the password)",
        started.elapsed()
    );
    let started = Instant::now();
    drop(repo.reader(WAIT)?);
    println!("index read from nothing: {:?}", started.elapsed());
    Ok(())
}
