//! Fault injection: the local store calls this before each step on the disk. Tests let it fail from the n-th step
//! on (as if the process had ended there), or record the steps to compute what a crash of the machine could leave
//! of them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::error::RepoError;
use crate::store::local::Step;

/// One recorded step.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    SyncFile(PathBuf),
    /// The path, and the contents of the file when it got its name.
    Rename(PathBuf, PathBuf, Arc<Vec<u8>>),
    Remove(PathBuf),
    CreateFolder(PathBuf),
    SyncFolder(PathBuf),
}

/// Called just before a step.
type Hook = Box<dyn FnMut(&Step<'_>) + Send>;

#[derive(Clone, Default)]
pub(crate) struct Faults {
    state: Arc<Mutex<State>>,
    hook: Arc<Mutex<Option<Hook>>>,
}

#[derive(Default)]
struct State {
    steps_left: Option<u64>,
    recovers: bool,
    fired: bool,
    record: bool,
    events: Vec<Event>,
}

impl Faults {
    /// Refuses the step after the next `steps`, and all later ones unless the disk `recovers`.
    pub(crate) fn fail_after(&self, steps: u64, recovers: bool) {
        let mut state = self.state.lock().unwrap();
        state.steps_left = Some(steps);
        state.recovers = recovers;
    }

    /// Stops refusing steps.
    pub(crate) fn heal(&self) {
        self.state.lock().unwrap().steps_left = None;
    }

    /// Whether a step has been refused.
    pub(crate) fn have_fired(&self) -> bool {
        self.state.lock().unwrap().fired
    }

    /// The same recording, for the store of another process, which has a hook of its own.
    pub(crate) fn of_another(&self) -> Faults {
        Faults {
            state: self.state.clone(),
            ..Faults::default()
        }
    }

    /// Calls this before each step from now on.
    pub(crate) fn before_each(&self, hook: impl FnMut(&Step<'_>) + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }

    /// Begins to record.
    pub(crate) fn record(&self) {
        self.state.lock().unwrap().record = true;
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.state.lock().unwrap().events.clone()
    }

    pub(crate) fn event_count(&self) -> usize {
        self.state.lock().unwrap().events.len()
    }

    pub(crate) fn step(&self, step: Step<'_>) -> Result<(), RepoError> {
        if let Some(hook) = &mut *self.hook.lock().unwrap() {
            hook(&step);
        }
        let mut state = self.state.lock().unwrap();
        let state = &mut *state;
        match &mut state.steps_left {
            Some(0) => {
                state.fired = true;
                if state.recovers {
                    state.steps_left = None;
                }
                return Err(refusal(step));
            }
            Some(left) => *left -= 1,
            None => {}
        }
        if state.record {
            let event = match step {
                Step::Write(_) => None,
                Step::SyncFile(path) => Some(Event::SyncFile(path.into())),
                Step::Rename(from, to) => {
                    let bytes = Arc::new(std::fs::read(from).unwrap());
                    Some(Event::Rename(from.into(), to.into(), bytes))
                }
                Step::Remove(path) => Some(Event::Remove(path.into())),
                Step::CreateFolder(path) => Some(Event::CreateFolder(path.into())),
                Step::SyncFolder(path) => Some(Event::SyncFolder(path.into())),
            };
            state.events.extend(event);
        }
        Ok(())
    }
}

fn refusal(step: Step<'_>) -> RepoError {
    let (doing, path): (_, &Path) = match step {
        Step::Write(path) => ("write", path),
        Step::SyncFile(path) | Step::SyncFolder(path) => ("fsync", path),
        Step::Rename(_, path) => ("rename to", path),
        Step::Remove(path) => ("remove", path),
        Step::CreateFolder(path) => ("create", path),
    };
    RepoError::io(doing, path, std::io::Error::other("injected fault"))
}
