//! The access trace: the pages that caused a fault, and when. The next working set is made from it.
//!
//! A page that was populated before its first access causes no fault, so a working set grows with each restore. A
//! page that is in none yet takes the position that the fill had reached at its fault. A page of the working set
//! that caused a fault came too late, and moves forward to half of that position. So it arrives in time even if the
//! guest is faster the next time.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use crate::source::WORKING_SET_PAGES_MAX as PAGES_MAX;

/// The number of a block, and a page of it.
pub(super) type Page = (usize, u64);

/// The access trace.
#[derive(Debug, Default)]
pub(super) struct AccessTrace {
    /// How much of the working set had been populated by then, and the page; in the order of faults.
    pages: Mutex<Vec<(usize, Page)>>,
}

impl AccessTrace {
    /// Records the fault of a page; `filled` pages of the working set had been populated by then.
    pub(super) fn note(&self, filled: usize, page: Page) {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        if pages.len() < PAGES_MAX {
            pages.push((filled, page));
        }
    }

    /// The next working set, where `before` is the present one; `None` without a fault.
    pub(super) fn learned(&self, before: &[Page]) -> Option<Vec<Page>> {
        let pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        (!pages.is_empty()).then(|| merge(before, pages.clone()))
    }
}

/// Each page once, at its first position: pages of the trace before the page whose position they take.
fn merge(before: &[Page], mut trace: Vec<(usize, Page)>) -> Vec<Page> {
    let known: HashSet<Page> = before.iter().copied().collect();
    for (place, page) in &mut trace {
        if known.contains(page) {
            *place /= 2;
        }
    }
    // Stable: pages with one position stay in the order of faults.
    trace.sort_by_key(|(place, _)| *place);
    let mut trace = trace.into_iter().peekable();
    let mut merged = Vec::new();
    let mut seen = HashSet::new();
    let mut add = |page| {
        if merged.len() < PAGES_MAX && seen.insert(page) {
            merged.push(page);
        }
    };
    for (place, &page) in before.iter().enumerate() {
        while let Some((_, earlier)) = trace.next_if(|(reached, _)| *reached <= place) {
            add(earlier);
        }
        add(page);
    }
    trace.for_each(|(_, page)| add(page));
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(pages: &[(usize, Page)]) -> AccessTrace {
        let trace = AccessTrace::default();
        for &(filled, page) in pages {
            trace.note(filled, page);
        }
        trace
    }

    #[test]
    fn the_first_set_is_what_was_asked_for_in_that_order() {
        let trace = trace(&[(0, (0, 9)), (0, (1, 2)), (0, (0, 9)), (0, (0, 3))]);
        assert_eq!(trace.learned(&[]), Some(vec![(0, 9), (1, 2), (0, 3)]));
        assert_eq!(AccessTrace::default().learned(&[(0, 1)]), None);
    }

    #[test]
    fn what_was_missed_goes_where_filling_was() {
        let before = [(0, 1), (0, 2), (0, 3), (0, 4)];
        let trace = trace(&[(2, (0, 7)), (4, (0, 8))]);
        let learned = vec![(0, 1), (0, 2), (0, 7), (0, 3), (0, 4), (0, 8)];
        assert_eq!(trace.learned(&before), Some(learned));
    }

    #[test]
    fn what_came_too_late_goes_to_half_of_where_filling_was() {
        let before: Vec<Page> = (0..10).map(|page| (0, page)).collect();
        // The last one is before that position already, and stays.
        let trace = trace(&[(4, (0, 9)), (4, (0, 8)), (6, (0, 2))]);
        let order = [0, 1, 9, 8, 2, 3, 4, 5, 6, 7];
        let learned = order.map(|page| (0, page)).to_vec();
        assert_eq!(trace.learned(&before), Some(learned));
    }

    #[test]
    fn it_is_bounded_and_keeps_what_comes_first() {
        let before: Vec<Page> = (0..PAGES_MAX as u64).map(|page| (0, page)).collect();
        let trace = trace(&[(10, (1, 1)), (PAGES_MAX, (1, 2))]);
        let learned = trace.learned(&before).unwrap();
        assert_eq!(learned.len(), PAGES_MAX);
        assert_eq!(learned[9..12], [(0, 9), (1, 1), (0, 10)]);
        assert!(!learned.contains(&(1, 2)));
    }
}
