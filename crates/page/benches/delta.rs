//! Size and speed of deltas on the six mixes of FITDOC's table I: `cargo xtask bench delta`.
//!
//! Each mix is made from the paper's histogram: as many pages (a share of the large ones) with as many changed
//! bytes. The paper's share of them is in whole words of eight; all content is noise. The paper counts the changed
//! bytes alone; this counts all that is needed to apply them.
//! Prints one JSON value a line. Asserts nothing but that every page comes back.

mod dice;

use std::time::Instant;

use stillframe_page::PAGE;
use stillframe_page::delta::{Delta, DeltaEncoder};
use stillframe_page::difference::difference;

use dice::Dice;

/// Upper ends of the table's ranges.
const RANGES: [usize; 13] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];
/// Pages encoded together.
const TOGETHER: usize = 512;
/// Of a mix with more dirty pages than this, an even share is taken.
const PAGES_MAX: usize = 16 << 10;
const ROUNDS: usize = 15;

/// A column of the table: dirty pages by range, dirty bytes, and those in whole words.
struct Mix {
    name: &'static str,
    pages: [usize; 13],
    dirty_bytes: u64,
    word_bytes: u64,
}

const MIXES: [Mix; 6] = [
    Mix {
        name: "underload",
        pages: [23, 22, 18, 59, 60, 76, 41, 37, 33, 85, 26, 1, 1],
        dirty_bytes: 67_660,
        word_bytes: 40_888,
    },
    Mix {
        name: "dbench",
        pages: [
            40, 289, 384, 588, 570, 1000, 887, 1921, 4821, 5514, 5080, 691, 854,
        ],
        dirty_bytes: 11_475_425,
        word_bytes: 4_043_960,
    },
    Mix {
        name: "k-compile",
        pages: [
            93, 65, 531, 253, 237, 398, 415, 334, 200, 425, 903, 4258, 18_186,
        ],
        dirty_bytes: 78_848_380,
        word_bytes: 68_428_456,
    },
    Mix {
        name: "npb-lu.b",
        pages: [16, 26, 23, 54, 58, 71, 43, 44, 55, 93, 208, 1654, 128_357],
        dirty_bytes: 450_396_692,
        word_bytes: 108_190_080,
    },
    Mix {
        name: "hadoop",
        pages: [
            900, 1126, 1606, 1627, 1316, 1024, 593, 553, 859, 1119, 2903, 12_432, 139_486,
        ],
        dirty_bytes: 536_244_749,
        word_bytes: 416_419_512,
    },
    Mix {
        name: "tpcw",
        pages: [
            176, 317, 573, 646, 558, 426, 383, 385, 446, 515, 567, 1367, 3579,
        ],
        dirty_bytes: 12_407_963,
        word_bytes: 3_745_856,
    },
];

/// A mask that makes a byte another one.
fn mask(dice: &mut Dice) -> u8 {
    1 + dice.below(255) as u8
}

/// Below `end`, as an index.
fn index(dice: &mut Dice, end: usize) -> usize {
    dice.below(end as u64) as usize
}

type Page = [u8; PAGE];

/// Changes `bytes` bytes of a page: runs of words, each word whole or in its low bytes only (as
/// numbers change), in the given share.
fn change(dice: &mut Dice, page: &mut Page, bytes: usize, word_share: f64) {
    let mut left = bytes;
    let mut at = index(dice, PAGE / 8);
    while left > 0 {
        // A run of 1 to 16 words, whole ones or parts.
        let whole = (dice.next() >> 11) as f64 / (1u64 << 53) as f64;
        let whole = whole < word_share && left >= 8;
        let part = if whole { 8 } else { 5 + index(dice, 3) };
        for _ in 0..1 + index(dice, 16) {
            let count = part.min(left);
            for byte in &mut page[at * 8..at * 8 + count] {
                *byte ^= mask(dice);
            }
            left -= count;
            at = (at + 1) % (PAGE / 8);
            if left == 0 {
                return;
            }
        }
        // Dense pages have no room for gaps.
        if bytes < PAGE / 2 {
            at = (at + index(dice, 8)) % (PAGE / 8);
        }
    }
}

/// Old and new versions of a mix's dirty pages, in a random order of sizes.
fn make(mix: &Mix) -> Vec<(Page, Page)> {
    let mut dice = Dice(5);
    let all: usize = mix.pages.iter().sum();
    let share = all.div_ceil(PAGES_MAX);
    let word_share = mix.word_bytes as f64 / mix.dirty_bytes as f64;
    // The largest range is wide: its mean follows from the table's sum.
    let mut sizes = Vec::new();
    let mut low = 0;
    for (range, (&high, &pages)) in RANGES.iter().zip(&mix.pages).enumerate() {
        let mean = if range + 1 == RANGES.len() {
            let others: u64 = sizes.iter().map(|&size| size as u64).sum();
            (mix.dirty_bytes.saturating_sub(others) / pages.max(1) as u64) as usize
        } else {
            (low + 1 + high) / 2
        };
        let spread = (high - mean.min(high)).min(mean.saturating_sub(low + 1));
        for _ in 0..pages {
            let size = mean - spread + index(&mut dice, 2 * spread + 1);
            sizes.push(size.clamp(low + 1, high));
        }
        low = high;
    }
    for at in (1..sizes.len()).rev() {
        sizes.swap(at, index(&mut dice, at + 1));
    }
    let pages = sizes.into_iter().step_by(share).map(|size| {
        let mut old = [0; PAGE];
        for word in old.chunks_exact_mut(8) {
            word.copy_from_slice(&dice.next().to_le_bytes());
        }
        let mut new = old;
        change(&mut dice, &mut new, size, word_share);
        (old, new)
    });
    pages.collect()
}

struct Found {
    /// Of the changed bytes.
    ratio: f64,
    /// Of all bytes of dirty pages: encoded, and changed.
    encoded_share: f64,
    /// Bytes of dirty pages a second, one thread, in GB.
    speed: f64,
}

fn encode(
    encoder: &mut DeltaEncoder,
    together: &[(Page, Page)],
) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    for (number, (old, new)) in (0..).zip(together) {
        encoder.add(number * 3, [old, new], PAGE);
    }
    Ok(encoder.finish()?.bytes)
}

fn measure(mix: &Mix) -> Result<Found, Box<dyn std::error::Error>> {
    let pages = make(mix);
    let mut encoder = DeltaEncoder::new(1)?;
    let mut bytes = 0;
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        bytes = 0;
        let begin = Instant::now();
        for together in pages.chunks(TOGETHER) {
            bytes += encode(&mut encoder, together)?.len();
        }
        best = best.min(begin.elapsed().as_secs_f64());
    }
    for together in pages.chunks(TOGETHER) {
        let delta = Delta::decode(&encode(&mut encoder, together)?)?;
        for (index, (old, new)) in together.iter().enumerate() {
            let mut page = *old;
            delta.apply(index, &mut page);
            assert!(page == *new, "{}: a page did not come back", mix.name);
        }
    }
    let bytes = bytes as f64;
    let all = (pages.len() * PAGE) as f64;
    let changed = pages.iter().map(|(old, new)| difference(old, new).bytes);
    let changed = changed.map(f64::from).sum::<f64>();
    let found = Found {
        ratio: bytes / changed,
        encoded_share: bytes / all,
        speed: all / best / 1e9,
    };
    println!(
        "{{\"mix\":\"{}\",\"dirty_pages\":{},\"changed_bytes\":{changed},\"encoded_bytes\":{bytes},\"of_changed\":{:.4},\"of_page_granular\":{:.4},\"paper_of_page_granular\":{:.4},\"gb_per_s\":{:.2}}}",
        mix.name,
        pages.len(),
        found.ratio,
        found.encoded_share,
        mix.dirty_bytes as f64 / (mix.pages.iter().sum::<usize>() * PAGE) as f64,
        found.speed
    );
    Ok(found)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let found = MIXES
        .iter()
        .map(measure)
        .collect::<Result<Vec<Found>, _>>()?;
    let bytes = found.iter().map(|found| found.ratio).fold(0.0, f64::max);
    let slowest = found
        .iter()
        .map(|found| found.speed)
        .fold(f64::INFINITY, f64::min);
    println!("{{\"claim\":\"delta-bytes-ratio\",\"value\":{bytes:.4}}}");
    println!("{{\"claim\":\"delta-gb-per-s\",\"value\":{slowest:.2}}}");
    Ok(())
}
