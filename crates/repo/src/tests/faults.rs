//! Fault injection: counts, records and refuses the steps the local store takes.

use std::sync::{Arc, Mutex};

use crate::error::RepoError;
use crate::local::Step;

#[derive(Clone, Default)]
pub(crate) struct Faults {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    left: Option<u64>,
}

impl Faults {
    pub(crate) fn step(&self, step: Step<'_>) -> Result<(), RepoError> {
        let mut state = self.state.lock().unwrap();
        let _ = step;
        match &mut state.left {
            Some(0) => Err(RepoError::io(
                "write",
                "injected".as_ref(),
                std::io::Error::other("injected"),
            )),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}
