//! Exit codes, and which error ends with which. `help` has the same list for users.

use std::error::Error;

use stillframe_engine::attach::AttachError;
use stillframe_engine::capture::devices::DevicesError;
use stillframe_engine::checkpoint::CheckpointError;
use stillframe_engine::clones::CloneError;
use stillframe_engine::export::ExportError;
use stillframe_engine::guardian::GuardianError;
use stillframe_engine::import::ImportError;
use stillframe_engine::populate::eager::PopulateError;
use stillframe_engine::populate::lazy::FillError;
use stillframe_engine::restore::RestoreError;
use stillframe_engine::rewind::RewindError;
use stillframe_engine::source::SourceError;
use stillframe_engine::template::TemplateError;
use stillframe_engine::verify::VerifyError;
use stillframe_repo::{ErrorClass, RepoError};

use crate::error::CommandError;
use crate::output::OutputError;
use crate::password::PasswordError;

/// How the program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// All done.
    Done = 0,
    /// Failed, in none of the ways below.
    Failed = 1,
    /// Asked wrongly; clap ends with the same code.
    Usage = 2,
    /// The repository is damaged.
    Damaged = 3,
    /// The password opens no key of the repository.
    WrongPassword = 4,
    /// The VM was not found, or cannot be checkpointed right.
    Unsuitable = 5,
    /// Another process holds the repository.
    Locked = 6,
}

impl Exit {
    /// The number.
    pub fn code(self) -> i32 {
        self as i32
    }

    /// What a failure ends with: the first error of the chain that says.
    pub fn of(error: &anyhow::Error) -> Exit {
        error.chain().find_map(judge).unwrap_or(Exit::Failed)
    }
}

/// What one error alone says. Errors that pass another one on as their own (`transparent`) hide it
/// from the chain and are opened here.
fn judge(error: &(dyn Error + 'static)) -> Option<Exit> {
    if let Some(error) = error.downcast_ref::<CommandError>() {
        return Some(of_command(error));
    }
    if let Some(error) = error.downcast_ref::<RepoError>() {
        return Some(of_repo(error));
    }
    if let Some(error) = error.downcast_ref::<AttachError>() {
        return Some(of_attach(error));
    }
    match error.downcast_ref() {
        Some(CloneError::Restore(error)) => return judge(error),
        Some(CloneError::MemoryTemplate(TemplateError::Repo(error))) => {
            return Some(of_repo(error));
        }
        Some(CloneError::MemoryTemplate(_)) | None => {}
    }
    if let Some(error) = error.downcast_ref::<RewindError>() {
        return of_rewind(error);
    }
    if let Some(OutputError::ReaderGone) = error.downcast_ref() {
        return Some(Exit::Done);
    }
    if let Some(error) = error.downcast_ref::<PasswordError>() {
        return Some(if error.is_usage() {
            Exit::Usage
        } else {
            Exit::Failed
        });
    }
    if let Some(ExportError::Repo(error) | ExportError::Checkpoint(RestoreError::Repo(error))) =
        error.downcast_ref()
    {
        return Some(of_repo(error));
    }
    if let Some(ImportError::Repo(error)) = error.downcast_ref() {
        return Some(of_repo(error));
    }
    if let Some(CheckpointError::Devices(DevicesError::Unsuitable(_))) = error.downcast_ref() {
        return Some(Exit::Unsuitable);
    }
    let hidden = match (error.downcast_ref(), error.downcast_ref()) {
        (Some(CheckpointError::Repo(error)), _) => Some(error),
        (Some(CheckpointError::Verify(VerifyError::Repo(error))), _) => Some(error),
        (_, Some(RestoreError::Repo(error))) => Some(error),
        (
            _,
            Some(RestoreError::Populate(PopulateError::Source(SourceError::Repository(error)))),
        ) => Some(error),
        (
            _,
            Some(RestoreError::Populate(PopulateError::Fill(FillError::Source(
                SourceError::Repository(error),
            )))),
        ) => Some(error),
        (_, Some(RestoreError::Verify(VerifyError::Repo(error)))) => Some(error),
        _ => None,
    };
    hidden.map(of_repo)
}

fn of_command(error: &CommandError) -> Exit {
    match error {
        CommandError::NoRepository
        | CommandError::NoVm
        | CommandError::Tags(_)
        | CommandError::NothingToForget
        | CommandError::SameMonitor
        | CommandError::NoMonitor
        | CommandError::StatsOfWhat => Exit::Usage,
        CommandError::Problems(_) => Exit::Damaged,
        CommandError::MissingAbility(_)
        | CommandError::ProbeFailed(_)
        | CommandError::Differs(_)
        | CommandError::CountNotReached { .. }
        | CommandError::TooManyFailures(_) => Exit::Failed,
    }
}

fn of_repo(error: &RepoError) -> Exit {
    match error {
        // A blob that a checkpoint refers to is missing: no request was wrong.
        RepoError::MissingBlob { .. } => return Exit::Damaged,
        // All but the first depend on what the repository holds, but only other words on the command
        // line mend them.
        RepoError::BadName { .. }
        | RepoError::Ambiguous { .. }
        | RepoError::SeveralVms { .. }
        | RepoError::NothingKept { .. } => return Exit::Usage,
        _ => {}
    }
    match error.class() {
        ErrorClass::Damaged => Exit::Damaged,
        ErrorClass::WrongPassword => Exit::WrongPassword,
        ErrorClass::Locked => Exit::Locked,
        ErrorClass::NotFound
        | ErrorClass::BadRequest
        | ErrorClass::FutureVersion
        | ErrorClass::NoSpace
        | ErrorClass::ReadOnly
        | ErrorClass::System => Exit::Failed,
    }
}

/// What it passes on as its own; and a VM that cannot be rewound.
fn of_rewind(error: &RewindError) -> Option<Exit> {
    match error {
        RewindError::Repo(error) | RewindError::Verify(VerifyError::Repo(error)) => {
            Some(of_repo(error))
        }
        RewindError::Checkpoint(error) => judge(error),
        RewindError::OtherVm { .. } => Some(Exit::Usage),
        RewindError::OtherMachine { .. }
        | RewindError::OtherDevices { .. }
        | RewindError::MoreDevices { .. }
        | RewindError::RomInRam { .. }
        | RewindError::Halted { .. } => Some(Exit::Unsuitable),
        _ => None,
    }
}

fn of_attach(error: &AttachError) -> Exit {
    match error {
        AttachError::Target(_)
        | AttachError::Monitor(_)
        | AttachError::Unsuitable(_)
        | AttachError::Tracker(_)
        | AttachError::Inhibitor(_)
        | AttachError::HalfRewound
        | AttachError::Guardian(GuardianError::Injection { .. }) => Exit::Unsuitable,
        // Our own helper process: the VM is not at fault.
        AttachError::Guardian(_) => Exit::Failed,
    }
}

#[cfg(test)]
mod tests {
    use stillframe_engine::TargetError;

    use super::*;
    use crate::interrupt::Interrupted;

    fn damaged() -> RepoError {
        RepoError::Damaged {
            file: "index/x".into(),
            what: "cut".into(),
        }
    }

    fn wrong_password() -> RepoError {
        RepoError::WrongPassword {
            dir: "/r".into(),
            keys: 1,
        }
    }

    fn exit(error: impl Into<anyhow::Error>) -> Exit {
        Exit::of(&error.into().context("some words around it"))
    }

    #[test]
    fn the_repository_says_three_four_or_six() {
        assert_eq!(exit(damaged()), Exit::Damaged);
        assert_eq!(exit(wrong_password()), Exit::WrongPassword);
        assert_eq!(
            exit(RepoError::LockLost {
                file: "locks/x".into()
            }),
            Exit::Locked
        );
        assert_eq!(
            exit(RepoError::NotARepository { dir: "/r".into() }),
            Exit::Failed
        );
        assert_eq!(exit(RepoError::BadName { name: "x".into() }), Exit::Usage);
    }

    #[test]
    fn a_repository_error_is_found_inside_every_verb() {
        assert_eq!(exit(CheckpointError::Repo(damaged())), Exit::Damaged);
        let verify = || VerifyError::Repo(damaged());
        assert_eq!(exit(CheckpointError::Verify(verify())), Exit::Damaged);
        assert_eq!(exit(RestoreError::Repo(damaged())), Exit::Damaged);
        assert_eq!(exit(RestoreError::Verify(verify())), Exit::Damaged);
        let populate = PopulateError::Source(damaged().into());
        assert_eq!(exit(RestoreError::Populate(populate)), Exit::Damaged);
        assert_eq!(exit(ExportError::Repo(damaged())), Exit::Damaged);
        let checkpoint = ExportError::Checkpoint(RestoreError::Repo(damaged()));
        assert_eq!(exit(checkpoint), Exit::Damaged);
        assert_eq!(exit(ImportError::Repo(damaged())), Exit::Damaged);
    }

    #[test]
    fn a_vm_that_cannot_be_had_says_five() {
        let nobody = TargetError::NoSuchName { name: "x".into() };
        assert_eq!(exit(AttachError::Target(nobody)), Exit::Unsuitable);
        let refused = GuardianError::Injection {
            pid: 1,
            reason: "traced".into(),
        };
        assert_eq!(exit(AttachError::Guardian(refused)), Exit::Unsuitable);
        let gone = GuardianError::Unexpected("x".into());
        assert_eq!(exit(AttachError::Guardian(gone)), Exit::Failed);
    }

    #[test]
    fn what_the_user_did_says_two_or_one() {
        assert_eq!(exit(CommandError::NoRepository), Exit::Usage);
        assert_eq!(exit(PasswordError::NoSource), Exit::Usage);
        assert_eq!(exit(PasswordError::Mismatch), Exit::Failed);
        assert_eq!(exit(Interrupted), Exit::Failed);
        assert_eq!(exit(OutputError::ReaderGone), Exit::Done);
        assert_eq!(exit(CheckpointError::RamChanged), Exit::Failed);
    }
}
