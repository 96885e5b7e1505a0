//! Ranges of pages and of addresses: sorted, without overlap.

use std::ops::Range;

use stillframe_page::PAGE_BYTES;
use stillframe_sys::process::AddressRange;

/// Pages of each block, in block order; each list sorted and without overlap.
pub type PageRanges = Vec<Vec<Range<u64>>>;

/// Pages in all blocks of a list.
pub fn count(ranges: &PageRanges) -> u64 {
    ranges.iter().map(|ranges| length(ranges)).sum()
}

/// Pages of one block.
pub fn length(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Divides a buffer that is as long as these pages among their ranges.
pub fn split<'b>(bytes: &'b mut [u8], ranges: &[Range<u64>]) -> Vec<&'b mut [u8]> {
    let mut rest = bytes;
    let mut parts = Vec::with_capacity(ranges.len());
    for range in ranges {
        let (part, tail) = rest.split_at_mut(((range.end - range.start) * PAGE_BYTES) as usize);
        parts.push(part);
        rest = tail;
    }
    parts
}

/// Ascending pages as ranges.
pub fn runs(pages: &[u64]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &page in pages {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => runs.push(page..page + 1),
        }
    }
    runs
}

/// All pages of these, sorted and without overlap.
pub fn union(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// The pages of `from` that are not in `what`; both sorted.
pub fn subtract(from: &[Range<u64>], what: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = Vec::new();
    let mut what = what.iter().peekable();
    for range in from {
        let mut next = range.start;
        while let Some(cut) = what.peek() {
            if cut.start >= range.end {
                break;
            }
            if next < cut.start {
                left.push(next..cut.start);
            }
            next = next.max(cut.end);
            if cut.end > range.end {
                break;
            }
            what.next();
        }
        if next < range.end {
            left.push(next..range.end);
        }
    }
    left
}

/// The pages of `one` that are in `other`, too; both sorted.
pub fn intersect(one: &[Range<u64>], other: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut both = Vec::new();
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    while let (Some(a), Some(b)) = (one.peek(), other.peek()) {
        let pages = a.start.max(b.start)..a.end.min(b.end);
        let a_is_done = a.end <= b.end;
        if !pages.is_empty() {
            both.push(pages);
        }
        match a_is_done {
            true => one.next(),
            false => other.next(),
        };
    }
    both
}

/// [`subtract`], for all blocks.
pub fn subtract_all(from: &PageRanges, what: &PageRanges) -> PageRanges {
    let both = from.iter().zip(what);
    both.map(|(from, what)| subtract(from, what)).collect()
}

/// Ascending ranges, those joined that lie no further than `gap_max` bytes apart.
pub fn join_near(ranges: Vec<AddressRange>, gap_max: u64) -> Vec<AddressRange> {
    let mut joined: Vec<AddressRange> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start - last.end <= gap_max => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use stillframe_page::bitmap::DirtyBitmap;

    use super::*;

    const GAP_MAX: u64 = 3 * PAGE_BYTES;

    fn ranges(pages: &BTreeSet<u64>) -> Vec<Range<u64>> {
        let mut bitmap = DirtyBitmap::new(300);
        for &page in pages {
            bitmap.set(page);
        }
        bitmap.ranges().collect()
    }

    proptest! {
        #[test]
        fn runs_are_those_of_a_bitmap(pages in prop::collection::btree_set(0u64..300, 0..200)) {
            let ascending: Vec<u64> = pages.iter().copied().collect();
            prop_assert_eq!(runs(&ascending), ranges(&pages));
        }

        #[test]
        fn joined_ranges_have_the_same_pages_and_small_gaps(pages in prop::collection::btree_set(0u64..300, 0..60)) {
            let bytes = |pages: Range<u64>| AddressRange {
                start: pages.start * PAGE_BYTES,
                end: pages.end * PAGE_BYTES,
            };
            let joined = join_near(ranges(&pages).into_iter().map(bytes).collect(), GAP_MAX);
            let mut left = pages.clone();
            for range in &joined {
                let within: Vec<u64> = (range.start..range.end)
                    .step_by(PAGE_BYTES as usize)
                    .map(|at| at / PAGE_BYTES)
                    .collect();
                let written: Vec<u64> = within.iter().copied().filter(|page| left.remove(page)).collect();
                prop_assert_eq!((written.first(), written.last()), (within.first(), within.last()));
                let gap = written.windows(2).map(|pair| pair[1] - pair[0] - 1).max();
                prop_assert!(gap.unwrap_or(0) * PAGE_BYTES <= GAP_MAX);
            }
            prop_assert!(left.is_empty());
            let apart = |pair: &[AddressRange]| pair[1].start - pair[0].end > GAP_MAX;
            prop_assert!(joined.windows(2).all(apart));
        }

        #[test]
        fn subtract_is_set_difference(a in prop::collection::btree_set(0u64..300, 0..200), b in prop::collection::btree_set(0u64..300, 0..200)) {
            let expected: Vec<u64> = a.difference(&b).copied().collect();
            let found: Vec<u64> = subtract(&ranges(&a), &ranges(&b)).into_iter().flatten().collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn intersect_is_set_intersection(a in prop::collection::btree_set(0u64..300, 0..200), b in prop::collection::btree_set(0u64..300, 0..200)) {
            let expected: Vec<u64> = a.intersection(&b).copied().collect();
            let found: Vec<u64> = intersect(&ranges(&a), &ranges(&b)).into_iter().flatten().collect();
            prop_assert_eq!(found, expected);
        }
    }
}
