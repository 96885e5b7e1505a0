//! The memory of the indexes of a repository, the time of lookups, and the rate of checkpoints in a large
//! repository: `cargo xtask bench index`.
//!
//! Prints one JSON value a line. Each repository is filled in one process and opened in another, whose C library
//! returns freed memory at once, so that the remaining memory is in use.

mod sample;

use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use stillframe_page::hash::{ContentHasher, ContentId};
use stillframe_repo::{Password, Put, Repository, Writer};

use sample::{manifest, words};

const PAGE: usize = 4096;

/// Bytes of a blob. A part of an index file describes as many of them as of pages, and they are written in a
/// fraction of the time.
const BLOB: usize = 512;

/// Blobs of a checkpoint of the large repository: its index file is as long as those of a first checkpoint of many
/// GiB.
const LARGE_CHECKPOINT: u64 = 440_000;
/// Blobs of the large repository: 25 million.
const LARGE: u64 = 57 * LARGE_CHECKPOINT;

/// New blobs of a checkpoint of a watch, and the blobs of 64 checkpoints and of 16.
const WATCH_CHECKPOINT: u64 = 1 << 12;
const WATCH_LONG: u64 = 64 * WATCH_CHECKPOINT;
const WATCH_SHORT: u64 = 16 * WATCH_CHECKPOINT;

/// Number of lookups of each kind.
const LOOKUPS: usize = 1 << 18;

/// Pages of a checkpoint in the large repository, and number of comparisons of two such checkpoints.
const PAGES: u64 = 1 << 13;
const COMPARISONS: u64 = 61;

/// These variables tell the second process what to do with which repository.
const TASK: &str = "STILLFRAME_BENCH_INDEX_TASK";
const PLACE: &str = "STILLFRAME_BENCH_INDEX_PLACE";
const WAIT: Duration = Duration::from_secs(10);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A blob like no other.
fn blob(number: u64) -> [u8; BLOB] {
    let mut blob = [0; BLOB];
    blob[..8].copy_from_slice(&number.to_le_bytes());
    blob
}

/// A page like no other, which does not compress.
fn page(number: u64) -> Vec<u8> {
    let words = words(number << 32).take(PAGE / 8);
    words.flat_map(u64::to_le_bytes).collect()
}

fn fill(place: &Path, blobs: u64, a_checkpoint: u64) -> Result<()> {
    let mut repo = Repository::init(place, &Password::new("bench"))?;
    for first in (0..blobs).step_by(a_checkpoint as usize) {
        let mut writer = repo.begin(WAIT)?;
        for number in first..first + a_checkpoint {
            writer.put_unnamed(&blob(number))?;
        }
        writer.commit(manifest())?;
    }
    Ok(())
}

/// Resident memory of this process, now (`VmRSS`) or at most (`VmHWM`).
fn memory_bytes(field: &str) -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kib.ok_or("no such field")?.trim().parse::<f64>()? * 1024.0)
}

/// Looks blobs up, in this order. Returns how many exist, and the nanoseconds of a lookup.
fn look_up(
    writer: &Writer<'_>,
    hasher: &ContentHasher,
    numbers: impl Iterator<Item = u64>,
) -> Result<(usize, f64)> {
    let ids: Vec<ContentId> = numbers.map(|number| hasher.id(&blob(number))).collect();
    let begin = Instant::now();
    let mut found = 0;
    for id in &ids {
        found += usize::from(writer.contains(id)?);
    }
    let ns = begin.elapsed().as_secs_f64() * 1e9;
    Ok((found, ns / ids.len() as f64))
}

/// Prints the memory that a repository takes that is opened to write.
fn opened(place: &Path) -> Result<()> {
    let mut repo = Repository::open(place, &Password::new("bench"))?;
    let before = memory_bytes("VmRSS")?;
    let writer = repo.begin(WAIT)?;
    let grown_bytes = memory_bytes("VmRSS")? - before;
    drop(writer);
    println!("{{\"index\":\"opened\",\"grown_bytes\":{grown_bytes}}}");
    Ok(())
}

/// Prints the memory that the index of a writer takes with full caches, and the time of its lookups.
fn writer_index(place: &Path) -> Result<()> {
    let mut repo = Repository::open(place, &Password::new("bench"))?;
    let hasher = repo.hasher();
    let before = memory_bytes("VmRSS")?;
    let begin = Instant::now();
    let writer = repo.begin(WAIT)?;
    let begin_ms = begin.elapsed().as_secs_f64() * 1e3;
    let begun_bytes = memory_bytes("VmRSS")? - before;
    let (found, absent_ns) = look_up(&writer, &hasher, LARGE..LARGE + LOOKUPS as u64)?;
    assert_eq!(found, 0);
    let third = LARGE / 3;
    let (found, in_order_ns) = look_up(&writer, &hasher, third..third + LOOKUPS as u64)?;
    assert_eq!(found, LOOKUPS);
    let random = words(1).map(|word| word % LARGE).take(LOOKUPS);
    let (found, random_ns) = look_up(&writer, &hasher, random)?;
    assert_eq!(found, LOOKUPS);
    drop(writer);
    let grown_bytes = memory_bytes("VmRSS")? - before;
    let peak_bytes = memory_bytes("VmHWM")? - before;
    println!(
        "{{\"index\":\"writer\",\"blobs\":{LARGE},\"begin_ms\":{begin_ms:.1},\"begun_bytes\":{begun_bytes},\"grown_bytes\":{grown_bytes},\"peak_bytes\":{peak_bytes},\"absent_ns\":{absent_ns:.0},\"in_order_ns\":{in_order_ns:.0},\"random_ns\":{random_ns:.0}}}"
    );
    Ok(())
}

/// Seconds of the processor's time to hash and store pages, which other work on the machine does not change much, and
/// seconds that passed. With `known`, the ids in memory, the writer looks nothing up.
fn store(
    repo: &mut Repository,
    pages: &[Vec<u8>],
    known: Option<&HashSet<[u8; 16]>>,
) -> Result<(f64, f64)> {
    let mut writer = repo.begin(WAIT)?;
    let hasher = writer.hasher().clone();
    let begin = (cpu_s(), Instant::now());
    for page in pages {
        let id = hasher.id(page);
        let put = match known {
            None => writer.put(id, page)?,
            Some(known) => {
                assert!(!known.contains(&id.0[..16]));
                writer.put_again(id, page)?
            }
        };
        assert_eq!(put, Put::New);
    }
    // A writer that is dropped removes what it wrote, so the repository stays as it is.
    Ok((cpu_s() - begin.0, begin.1.elapsed().as_secs_f64()))
}

/// The processor's time of all threads of this process, in seconds.
fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Prints the memory that one checkpoint of many new blobs takes at most.
fn large_checkpoint(place: &Path) -> Result<()> {
    let mut repo = Repository::init(place, &Password::new("bench"))?;
    let before = memory_bytes("VmRSS")?;
    let mut writer = repo.begin(WAIT)?;
    for number in 0..LARGE_CHECKPOINT * 10 {
        writer.put_unnamed(&blob(number))?;
    }
    writer.commit(manifest())?;
    let peak_bytes = memory_bytes("VmHWM")? - before;
    println!(
        "{{\"new_blobs\":{},\"peak_bytes\":{peak_bytes}}}",
        LARGE_CHECKPOINT * 10
    );
    Ok(())
}

/// Prints the rates at which new pages are stored: with the ids in memory over with the index of a writer.
fn ingest(place: &Path) -> Result<()> {
    let mut repo = Repository::open(place, &Password::new("bench"))?;
    let hasher = repo.hasher();
    let short = |number| hasher.id(&blob(number)).0[..16].try_into();
    let known: HashSet<[u8; 16]> = (0..LARGE)
        .map(short)
        .collect::<std::result::Result<_, _>>()?;
    let (mut cpu, mut passed) = (Vec::new(), Vec::new());
    for comparison in 0..COMPARISONS {
        let first = comparison * PAGES;
        let pages: Vec<Vec<u8>> = (first..first + PAGES).map(page).collect();
        let mut seconds = [(0.0, 0.0); 2];
        for step in 0..2 {
            let with_set = (comparison + step) % 2 == 0;
            seconds[usize::from(with_set)] = store(&mut repo, &pages, with_set.then_some(&known))?;
        }
        let [index, set] = seconds;
        println!(
            "{{\"index_cpu_s\":{:.4},\"set_cpu_s\":{:.4},\"index_s\":{:.4},\"set_s\":{:.4}}}",
            index.0, set.0, index.1, set.1
        );
        cpu.push(set.0 / index.0);
        passed.push(set.1 / index.1);
    }
    let [cpu, passed] = [cpu, passed].map(median);
    println!("{{\"cpu_ratio\":{cpu:.3},\"ratio\":{passed:.3}}}");
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs a task in a process of its own. Returns a field of the last line that it prints.
fn in_process(task: &str, place: &Path, field: &str) -> Result<f64> {
    let said = Command::new(std::env::current_exe()?)
        .env(TASK, task)
        .env(PLACE, place)
        .env("MALLOC_MMAP_THRESHOLD_", "65536")
        .stderr(Stdio::inherit())
        .output()?
        .stdout;
    let said = String::from_utf8(said)?;
    print!("{said}");
    let last: serde_json::Value = serde_json::from_str(said.lines().last().unwrap_or_default())?;
    Ok(last[field].as_f64().ok_or("no such field")?)
}

/// Memory of an opened repository of `blobs` blobs.
fn opened_bytes(blobs: u64) -> Result<f64> {
    let dir = tempfile::tempdir()?;
    let place = dir.path().join("repository");
    fill(&place, blobs, WATCH_CHECKPOINT)?;
    in_process("opened", &place, "grown_bytes")
}

fn main() -> Result<()> {
    if let (Some(place), Ok(task)) = (std::env::var_os(PLACE), std::env::var(TASK)) {
        return match task.as_str() {
            "opened" => opened(place.as_ref()),
            "writer-index" => writer_index(place.as_ref()),
            "large-checkpoint" => large_checkpoint(place.as_ref()),
            _ => ingest(place.as_ref()),
        };
    }
    // Two of them, because opening takes some memory for any content.
    let grown = opened_bytes(WATCH_LONG)? - opened_bytes(WATCH_SHORT)?;
    let a_blob = grown / (WATCH_LONG - WATCH_SHORT) as f64;
    println!("{{\"claim\":\"index-bytes-a-blob\",\"value\":{a_blob:.1}}}");
    let dir = tempfile::tempdir()?;
    let place = dir.path().join("repository");
    fill(&place, LARGE, LARGE_CHECKPOINT)?;
    let a_blob = in_process("writer-index", &place, "grown_bytes")? / LARGE as f64;
    println!("{{\"claim\":\"writer-bytes-a-blob\",\"value\":{a_blob:.2}}}");
    in_process("large-checkpoint", &dir.path().join("other"), "peak_bytes")?;
    let ratio = in_process("ingest", &place, "cpu_ratio")?;
    println!("{{\"claim\":\"writer-ingest\",\"value\":{ratio}}}");
    Ok(())
}
