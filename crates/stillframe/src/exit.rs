//! Exit codes, and the exit code of each error. `help` has the list for users.

use std::error::Error;

use stillframe_engine::attach::AttachError;
use stillframe_engine::capture::devices::DevicesError;
use stillframe_engine::checkpoint::CheckpointError;
use stillframe_engine::clones::CloneError;
use stillframe_engine::disks::DisksError;
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

/// The exit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// Failed for a reason that has no code of its own.
    Failed = 1,
    /// Wrong usage; clap exits with the same code.
    Usage = 2,
    /// The repository is damaged.
    Damaged = 3,
    /// The password opens no key of the repository.
    WrongPassword = 4,
    /// The VM was not found, or cannot be checkpointed correctly.
    Unsuitable = 5,
    /// Another process holds the repository.
    Locked = 6,
}

impl Exit {
    /// The number.
    pub fn code(self) -> i32 {
        self as i32
    }

    /// The exit code of a failure with this number; [`Exit::Failed`] where there is none.
    fn from_code(code: i32) -> Exit {
        let all = [
            Exit::Failed,
            Exit::Usage,
            Exit::Damaged,
            Exit::WrongPassword,
            Exit::Unsuitable,
            Exit::Locked,
        ];
        let found = all.into_iter().find(|exit| exit.code() == code);
        found.unwrap_or(Exit::Failed)
    }

    /// The exit code of a failure: that of the first error in the chain that has one.
    pub fn of(error: &anyhow::Error) -> Exit {
        error.chain().find_map(of_error).unwrap_or(Exit::Failed)
    }
}

/// The exit code of one error. A `transparent` error hides its source from the chain, so the source is checked here.
fn of_error(error: &(dyn Error + 'static)) -> Option<Exit> {
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
        Some(CloneError::Restore(error)) => return of_error(error),
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
    match error.downcast_ref() {
        Some(CheckpointError::Devices(DevicesError::Unsuitable(_))) => {
            return Some(Exit::Unsuitable);
        }
        Some(CheckpointError::Disks(DisksError::Unknown { .. })) => return Some(Exit::Usage),
        _ => {}
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
        | CommandError::DisksTwice(_)
        | CommandError::NothingToForget
        | CommandError::SameMonitor
        | CommandError::NoMonitor
        | CommandError::SeveralImages(_)
        | CommandError::NothingToMeasure => Exit::Usage,
        CommandError::Problems(_) => Exit::Damaged,
        CommandError::ByWatch { exit_code, .. } => Exit::from_code(*exit_code),
        CommandError::MissingAbility(_)
        | CommandError::ProbeFailed(_)
        | CommandError::Differs(_)
        | CommandError::CountNotReached { .. }
        | CommandError::WatchSilent { .. }
        | CommandError::WatchLost { .. }
        | CommandError::NoCheckpoints
        | CommandError::NoSuchImage(_)
        | CommandError::TooManyFailures(_) => Exit::Failed,
    }
}

fn of_repo(error: &RepoError) -> Exit {
    match error {
        // A blob that a checkpoint refers to is missing; the request was correct.
        RepoError::MissingBlob { .. } => return Exit::Damaged,
        // All but the first depend on the repository, but the user has to change the command line.
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

/// The exit code of a hidden source, or of a VM that cannot be rewound.
fn of_rewind(error: &RewindError) -> Option<Exit> {
    match error {
        RewindError::Repo(error) | RewindError::Verify(VerifyError::Repo(error)) => {
            Some(of_repo(error))
        }
        RewindError::Checkpoint(error) => of_error(error),
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
        | AttachError::GivenUp
        | AttachError::Guardian(GuardianError::Injection { .. }) => Exit::Unsuitable,
        // The helper process failed, not the VM.
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
    fn repository_errors_exit_with_three_four_or_six() {
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
    fn an_unsuitable_vm_exits_with_five() {
        let unknown = TargetError::NoSuchName { name: "x".into() };
        assert_eq!(exit(AttachError::Target(unknown)), Exit::Unsuitable);
        let refused = GuardianError::Injection {
            pid: 1,
            reason: "traced".into(),
        };
        assert_eq!(exit(AttachError::Guardian(refused)), Exit::Unsuitable);
        let gone = GuardianError::Unexpected("x".into());
        assert_eq!(exit(AttachError::Guardian(gone)), Exit::Failed);
    }

    #[test]
    fn usage_errors_exit_with_two_and_others_with_one() {
        assert_eq!(exit(CommandError::NoRepository), Exit::Usage);
        let by_watch = |exit_code| CommandError::ByWatch {
            error: "x".to_owned(),
            exit_code,
        };
        assert_eq!(exit(by_watch(5)), Exit::Unsuitable);
        assert_eq!(exit(by_watch(77)), Exit::Failed);
        assert_eq!(exit(PasswordError::NoSource), Exit::Usage);
        assert_eq!(exit(PasswordError::Mismatch), Exit::Failed);
        assert_eq!(exit(Interrupted), Exit::Failed);
        assert_eq!(exit(OutputError::ReaderGone), Exit::Done);
        assert_eq!(exit(CheckpointError::RamChanged), Exit::Failed);
    }
}
