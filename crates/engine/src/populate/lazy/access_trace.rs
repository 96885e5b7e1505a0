//! The access trace: the pages that caused a fault, and when. The next working set is made from it.
//!
//! A page that was populated before its first access causes no fault, so a working set grows with each restore. A
//! page that is in none yet takes the position that the fill had reached at its fault. A page of the working set
//! that caused a fault came too late, and moves forward to half of that position. So it arrives in time even if the
//! guest is faster the next time.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use stillframe_page::GuestPage;

use crate::source::WORKING_SET_PAGES_MAX as PAGES_MAX;

/// A fault of the guest.
#[derive(Debug, Clone, Copy)]
struct Fault {
    /// How many pages of the working set had been populated by then.
    filled: usize,
    page: GuestPage,
}

/// The access trace.
#[derive(Debug, Default)]
pub(super) struct AccessTrace {
    faults: Mutex<Vec<Fault>>,
}

impl AccessTrace {
    /// Records the fault of a page; `filled` pages of the working set had been populated by then.
    pub(super) fn note(&self, filled: usize, page: GuestPage) {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        if faults.len() < PAGES_MAX {
            faults.push(Fault { filled, page });
        }
    }

    /// The next working set, where `before` is the present one; `None` without a fault.
    pub(super) fn learned(&self, before: &[GuestPage]) -> Option<Vec<GuestPage>> {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        (!faults.is_empty()).then(|| merge(before, faults.clone()))
    }
}

/// Each page once, at its first position: pages of the trace before the page whose position they take.
fn merge(before: &[GuestPage], mut trace: Vec<Fault>) -> Vec<GuestPage> {
    let known: HashSet<GuestPage> = before.iter().copied().collect();
    for fault in &mut trace {
        if known.contains(&fault.page) {
            fault.filled /= 2;
        }
    }
    // Stable: pages with one position stay in the order of faults.
    trace.sort_by_key(|fault| fault.filled);
    let mut trace = trace.into_iter().peekable();
    let mut merged = Vec::new();
    let mut seen = HashSet::new();
    let mut add = |page| {
        if merged.len() < PAGES_MAX && seen.insert(page) {
            merged.push(page);
        }
    };
    for (place, &page) in before.iter().enumerate() {
        while let Some(earlier) = trace.next_if(|fault| fault.filled <= place) {
            add(earlier.page);
        }
        add(page);
    }
    trace.for_each(|fault| add(fault.page));
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faults of pages of the first block.
    fn trace(faults: &[[usize; 2]]) -> AccessTrace {
        let trace = AccessTrace::default();
        for &[filled, page] in faults {
            trace.note(filled, GuestPage::new(0, page as u64));
        }
        trace
    }

    fn pages(numbers: impl IntoIterator<Item = u64>) -> Vec<GuestPage> {
        let page = |number| GuestPage::new(0, number);
        numbers.into_iter().map(page).collect()
    }

    #[test]
    fn the_first_set_is_the_faults_in_their_order() {
        let trace = trace(&[[0, 9], [0, 2], [0, 9], [0, 3]]);
        trace.note(0, GuestPage::new(1, 9));
        let mut learned = pages([9, 2, 3]);
        learned.push(GuestPage::new(1, 9));
        assert_eq!(trace.learned(&[]), Some(learned));
        assert_eq!(AccessTrace::default().learned(&pages([1])), None);
    }

    #[test]
    fn a_page_that_was_in_no_set_goes_where_the_fill_was() {
        let trace = trace(&[[2, 7], [4, 8]]);
        let learned = pages([1, 2, 7, 3, 4, 8]);
        assert_eq!(trace.learned(&pages([1, 2, 3, 4])), Some(learned));
    }

    #[test]
    fn a_page_that_came_too_late_goes_to_half_of_where_the_fill_was() {
        // The last one is before that position already, and stays.
        let trace = trace(&[[4, 9], [4, 8], [6, 2]]);
        let learned = pages([0, 1, 9, 8, 2, 3, 4, 5, 6, 7]);
        assert_eq!(trace.learned(&pages(0..10)), Some(learned));
    }

    #[test]
    fn it_is_bounded_and_keeps_what_comes_first() {
        let before = pages(0..PAGES_MAX as u64);
        let (early, late) = (PAGES_MAX as u64 + 1, PAGES_MAX as u64 + 2);
        let trace = trace(&[[10, early as usize], [PAGES_MAX, late as usize]]);
        let learned = trace.learned(&before).unwrap();
        assert_eq!(learned.len(), PAGES_MAX);
        assert_eq!(learned[9..12], pages([9, early, 10]));
        assert!(!learned.contains(&GuestPage::new(0, late)));
    }
}
