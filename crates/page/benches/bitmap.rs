//! Finding the dirty pages: the two-level bitmap against a scan bit by bit, on 4 GiB of guest memory (FITDOC,
//! figure 7). Run it with `cargo xtask bench bitmap`.
//!
//! Prints one JSON value a line: each distribution with both times in microseconds (median of many
//! scans, in turns), then the claim. Asserts nothing but that both find the same.

mod dice;

use std::hint::black_box;
use std::ops::Range;
use std::time::Instant;

use stillframe_page::bitmap::DirtyBitmap;

use dice::Dice;

/// 4 GiB of 4 KiB pages.
const PAGES: u64 = 1 << 20;
/// FITDOC found all dirty pages below 512 MiB.
const LOW_PAGES: u64 = 1 << 17;
const SCANS: usize = 101;

/// `count` dirty pages below `end`, in runs of 1 to `run` pages.
fn dirty(end: u64, count: u64, run: u64) -> DirtyBitmap {
    let mut dice = Dice(11);
    let mut bitmap = DirtyBitmap::new(PAGES);
    while bitmap.count() < count {
        let start = dice.below(end);
        let left = count - bitmap.count();
        let length = (1 + dice.below(run)).min(left).min(end - start);
        bitmap.set_range(start..start + length);
    }
    bitmap
}

fn dense() -> DirtyBitmap {
    let mut bitmap = DirtyBitmap::new(PAGES);
    bitmap.set_range(0..PAGES);
    bitmap
}

/// The plain bitmap, one bit a page, as Xen hands it over.
fn plain(bitmap: &DirtyBitmap) -> Vec<u8> {
    let mut bytes = vec![0; (PAGES / 8) as usize];
    for page in (0..PAGES).filter(|&page| bitmap.get(page)) {
        bytes[(page / 8) as usize] |= 1 << (page % 8);
    }
    bytes
}

/// Bit by bit.
fn scan_bits(bytes: &[u8], found: &mut Vec<Range<u64>>) {
    found.clear();
    let mut start = None;
    for page in 0..PAGES {
        let dirty = bytes[(page / 8) as usize] >> (page % 8) & 1 == 1;
        match (dirty, start) {
            (true, None) => start = Some(page),
            (false, Some(from)) => {
                found.push(from..page);
                start = None;
            }
            _ => {}
        }
    }
    if let Some(from) = start {
        found.push(from..PAGES);
    }
}

fn scan_levels(bitmap: &DirtyBitmap, found: &mut Vec<Range<u64>>) {
    found.clear();
    found.extend(bitmap.ranges());
}

fn median_us(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Both medians in microseconds, measured in turns.
fn measure(bitmap: &DirtyBitmap) -> (f64, f64) {
    let bytes = plain(bitmap);
    let (mut slow, mut fast) = (Vec::new(), Vec::new());
    let (mut by_bits, mut by_levels) = (Vec::new(), Vec::new());
    for _ in 0..SCANS {
        let begin = Instant::now();
        scan_bits(black_box(&bytes), &mut by_bits);
        slow.push(begin.elapsed().as_secs_f64() * 1e6);
        let begin = Instant::now();
        scan_levels(black_box(bitmap), &mut by_levels);
        fast.push(begin.elapsed().as_secs_f64() * 1e6);
        assert_eq!(by_bits, by_levels);
    }
    (median_us(slow), median_us(fast))
}

fn main() {
    // The dirty pages of a kernel compile (table I), all below 512 MiB; then the extremes.
    let cases = [
        ("paper", dirty(LOW_PAGES, 26_298, 16)),
        ("paper, idle", dirty(LOW_PAGES, 482, 16)),
        ("sparse", dirty(PAGES, PAGES / 1000, 1)),
        ("random", dirty(PAGES, PAGES / 10, 1)),
        ("dense", dense()),
    ];
    let mut ratio = 0.0;
    for (name, bitmap) in &cases {
        let (slow, fast) = measure(bitmap);
        println!(
            "{{\"distribution\":\"{name}\",\"dirty_pages\":{},\"runs\":{},\"bit_by_bit_us\":{slow:.2},\"two_levels_us\":{fast:.2},\"ratio\":{:.1}}}",
            bitmap.count(),
            bitmap.ranges().count(),
            slow / fast
        );
        if *name == "paper" {
            ratio = slow / fast;
        }
    }
    println!("{{\"claim\":\"bitmap-scan-ratio\",\"value\":{ratio:.1}}}");
}
