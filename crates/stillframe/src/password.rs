//! Finds the repository's password. It is never printed and never an argument.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use stillframe_repo::Password;
use thiserror::Error;
use zeroize::Zeroizing;

use crate::args::PasswordArgs;

/// The environment variable that holds a password.
pub const PLAIN: &str = "STILLFRAME_PASSWORD";
const FILE: &str = "STILLFRAME_PASSWORD_FILE";
const COMMAND: &str = "STILLFRAME_PASSWORD_COMMAND";

/// The variables for one password: the password, a file with it, a command that prints it.
type Variables = [&'static str; 3];

const OF_REPOSITORY: Variables = [PLAIN, FILE, COMMAND];
const OF_NEW_KEY: Variables = [
    "STILLFRAME_NEW_PASSWORD",
    "STILLFRAME_NEW_PASSWORD_FILE",
    "STILLFRAME_NEW_PASSWORD_COMMAND",
];
const OF_TARGET: Variables = [
    "STILLFRAME_TO_PASSWORD",
    "STILLFRAME_TO_PASSWORD_FILE",
    "STILLFRAME_TO_PASSWORD_COMMAND",
];

/// Upper bound on a password; a longer file is a mistake.
const PASSWORD_BYTES_MAX: usize = 64 << 10;

/// Why a password cannot be read.
#[derive(Debug, Error)]
pub enum PasswordError {
    /// No source is given, and there is no terminal for a prompt.
    #[error(
        "no password: give --password-file or --password-command, set STILLFRAME_PASSWORD, STILLFRAME_PASSWORD_FILE or STILLFRAME_PASSWORD_COMMAND, or run this on a terminal (prefix these with --new- and STILLFRAME_NEW_ for a new password, with --to- and STILLFRAME_TO_ for the repository to copy to)"
    )]
    NoSource,
    /// Two environment variables are set.
    #[error("both {0} and {1} are set; unset one of them")]
    SeveralSources(&'static str, &'static str),
    /// The file cannot be read.
    #[error("cannot read the password file {}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The command cannot be run.
    #[error("cannot run the password command")]
    Command(#[source] io::Error),
    /// The command failed.
    #[error("the password command failed ({0})")]
    CommandFailed(ExitStatus),
    /// The input is too long for a password.
    #[error("{0} gives more than {PASSWORD_BYTES_MAX} bytes, which is too long for a password")]
    TooLong(&'static str),
    /// The password is empty.
    #[error("{0} gives an empty password")]
    Empty(&'static str),
    /// The terminal cannot be read.
    #[error("cannot read the password from the terminal")]
    Prompt(#[source] io::Error),
    /// The second prompt got another password.
    #[error("the two passwords differ; nothing was changed")]
    Mismatch,
}

impl PasswordError {
    /// Whether the command line or environment is wrong, not a file or command that it names.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            PasswordError::NoSource | PasswordError::SeveralSources(..)
        )
    }
}

/// The source of a password.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    Plain(OsString),
    File(PathBuf),
    Command(OsString),
    Prompt,
}

/// The password of an existing repository.
pub fn of_existing(args: &PasswordArgs) -> Result<Password, PasswordError> {
    match choose(args, OF_REPOSITORY, |name| std::env::var_os(name))? {
        Source::Prompt => prompt("Password of the repository: "),
        source => read(source),
    }
}

/// The password of the repository to copy to.
pub fn of_target(args: &PasswordArgs) -> Result<Password, PasswordError> {
    match choose(args, OF_TARGET, |name| std::env::var_os(name))? {
        Source::Prompt => prompt("Password of the repository to copy to: "),
        source => read(source),
    }
}

/// The password for a new repository; a prompt asks twice.
pub fn for_new(args: &PasswordArgs) -> Result<Password, PasswordError> {
    new(args, OF_REPOSITORY, "Password for the new repository: ")
}

/// A new password for `key add` or `key passwd`.
pub fn of_new_key(args: &PasswordArgs) -> Result<Password, PasswordError> {
    new(args, OF_NEW_KEY, "New password: ")
}

fn new(
    args: &PasswordArgs,
    variables: Variables,
    question: &str,
) -> Result<Password, PasswordError> {
    match choose(args, variables, |name| std::env::var_os(name))? {
        Source::Prompt => {
            let first = ask(question)?;
            match *first == *ask("Repeat the password: ")? {
                true => not_empty(first.as_bytes().to_vec(), "the terminal"),
                false => Err(PasswordError::Mismatch),
            }
        }
        source => read(source),
    }
}

/// Options first, then the environment, then the terminal. An empty variable counts as unset.
fn choose(
    args: &PasswordArgs,
    [plain, file, command]: Variables,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<Source, PasswordError> {
    if let Some(path) = &args.password_file {
        return Ok(Source::File(path.clone()));
    }
    if let Some(command) = &args.password_command {
        return Ok(Source::Command(command.into()));
    }
    let set = |name| variable(name).filter(|value| !value.is_empty());
    match (set(plain), set(file), set(command)) {
        (Some(_), Some(_), _) => Err(PasswordError::SeveralSources(plain, file)),
        (Some(_), _, Some(_)) => Err(PasswordError::SeveralSources(plain, command)),
        (_, Some(_), Some(_)) => Err(PasswordError::SeveralSources(file, command)),
        (Some(password), None, None) => Ok(Source::Plain(password)),
        (None, Some(path), None) => Ok(Source::File(path.into())),
        (None, None, Some(command)) => Ok(Source::Command(command)),
        (None, None, None) => Ok(Source::Prompt),
    }
}

fn read(source: Source) -> Result<Password, PasswordError> {
    match source {
        Source::Plain(password) => not_empty(password.into_vec(), PLAIN),
        Source::File(path) => {
            let failed = |source| PasswordError::File {
                path: path.clone(),
                source,
            };
            let file = File::open(&path).map_err(failed)?;
            from_reader(file, "the password file", failed)
        }
        Source::Command(command) => from_command(command),
        Source::Prompt => prompt("Password of the repository: "),
    }
}

fn from_command(command: OsString) -> Result<Password, PasswordError> {
    // The command inherits standard input and error, so that it can prompt its user.
    let mut child = Command::new("/bin/sh")
        .arg("-c")
        .arg(command)
        // Keeps the password out of the environment of the command.
        .env_remove(PLAIN)
        .env_remove(FILE)
        .env_remove(COMMAND)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(PasswordError::Command)?;
    let password = match child.stdout.take() {
        Some(output) => from_reader(output, "the password command", PasswordError::Command),
        None => Err(PasswordError::Empty("the password command")),
    };
    // The pipe is closed here, so that a command that writes forever ends too.
    let status = child.wait().map_err(PasswordError::Command)?;
    match status.success() {
        // A command that wrote too much failed because its pipe was closed.
        false if !matches!(password, Err(PasswordError::TooLong(_))) => {
            Err(PasswordError::CommandFailed(status))
        }
        _ => password,
    }
}

fn from_reader(
    mut reader: impl Read,
    name: &'static str,
    failed: impl Fn(io::Error) -> PasswordError,
) -> Result<Password, PasswordError> {
    // Wiped on drop and never moved: a vector that grows leaves copies in memory.
    let mut bytes = Zeroizing::new(vec![0; PASSWORD_BYTES_MAX + 1]);
    let mut read = 0;
    while read < bytes.len() {
        match reader.read(&mut bytes[read..]) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
    if read > PASSWORD_BYTES_MAX {
        return Err(PasswordError::TooLong(name));
    }
    let end = bytes[..read]
        .iter()
        .rposition(|byte| !matches!(byte, b'\n' | b'\r'));
    let password = &bytes[..end.map_or(0, |last| last + 1)];
    not_empty(password.to_vec(), name)
}

fn not_empty(bytes: Vec<u8>, name: &'static str) -> Result<Password, PasswordError> {
    match bytes.is_empty() {
        true => Err(PasswordError::Empty(name)),
        false => Ok(Password::new(bytes)),
    }
}

fn prompt(text: &str) -> Result<Password, PasswordError> {
    not_empty(ask(text)?.as_bytes().to_vec(), "the terminal")
}

fn ask(text: &str) -> Result<Zeroizing<String>, PasswordError> {
    if !io::stdin().is_terminal() {
        return Err(PasswordError::NoSource);
    }
    let typed = rpassword::prompt_password(text).map_err(PasswordError::Prompt)?;
    Ok(Zeroizing::new(typed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(args: &PasswordArgs, environment: &[(&str, &str)]) -> Result<Source, PasswordError> {
        choose(args, OF_REPOSITORY, |name| {
            environment
                .iter()
                .find(|(set, _)| *set == name)
                .map(|(_, value)| value.into())
        })
    }

    fn failure<T>(result: Result<T, PasswordError>) -> PasswordError {
        result.err().expect("this source must be refused")
    }

    #[test]
    fn options_come_before_the_environment_and_that_before_the_terminal() {
        let none = PasswordArgs::default();
        let file = PasswordArgs {
            password_file: Some("/f".into()),
            ..none.clone()
        };
        let command = PasswordArgs {
            password_command: Some("c".into()),
            ..none.clone()
        };
        let all = [(PLAIN, "p"), (FILE, "/e"), (COMMAND, "d")];
        assert_eq!(chosen(&file, &all).unwrap(), Source::File("/f".into()));
        assert_eq!(chosen(&command, &all).unwrap(), Source::Command("c".into()));
        assert_eq!(chosen(&none, &all[..1]).unwrap(), Source::Plain("p".into()));
        assert_eq!(
            chosen(&none, &all[1..2]).unwrap(),
            Source::File("/e".into())
        );
        assert_eq!(
            chosen(&none, &all[2..]).unwrap(),
            Source::Command("d".into())
        );
        assert_eq!(chosen(&none, &[]).unwrap(), Source::Prompt);
        assert_eq!(chosen(&none, &[(PLAIN, "")]).unwrap(), Source::Prompt);
    }

    #[test]
    fn two_sources_in_the_environment_are_a_usage_error() {
        let none = PasswordArgs::default();
        for pair in [[(PLAIN, "p"), (FILE, "/e")], [(FILE, "/e"), (COMMAND, "d")]] {
            assert!(failure(chosen(&none, &pair)).is_usage());
        }
    }

    #[test]
    fn trailing_line_ends_are_not_part_of_the_password() {
        // A Password does not expose its bytes, so this tests refusals: a file with only line ends is empty.
        for empty in ["", "\n", "\r\n", "\n\n"] {
            let refused = failure(from_reader(empty.as_bytes(), "it", PasswordError::Prompt));
            assert!(matches!(refused, PasswordError::Empty("it")), "{empty:?}");
        }
        assert!(from_reader(&b"a b\n"[..], "it", PasswordError::Prompt).is_ok());
        let endless = from_reader(io::repeat(b'x'), "it", PasswordError::Prompt);
        assert!(matches!(failure(endless), PasswordError::TooLong("it")));
    }

    #[test]
    fn a_command_must_succeed_and_print_a_password() {
        assert!(from_command("echo secret".into()).is_ok());
        assert!(matches!(
            failure(from_command("true".into())),
            PasswordError::Empty(_)
        ));
        let failed = failure(from_command("echo secret; exit 3".into()));
        assert!(matches!(failed, PasswordError::CommandFailed(_)));
        assert!(matches!(
            failure(from_command("yes".into())),
            PasswordError::TooLong(_)
        ));
    }

    #[test]
    fn a_missing_file_is_named() {
        let refused = failure(read(Source::File("/nonexistent/password".into())));
        assert!(refused.to_string().contains("/nonexistent/password"));
    }
}
