//! Wrong usage, help, streams, and options against the environment.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::process::Command;

use anyhow::{Result, ensure};
use stillframe_harness::cli::{PASSWORD, Stillframe, binary, refusal};
use stillframe_harness::guest::{Kind, Setup};

/// The binary with nothing of Stillframe in its environment.
fn bare(arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(binary()?);
    for name in [
        "STILLFRAME_REPOSITORY",
        "STILLFRAME_PASSWORD",
        "STILLFRAME_PASSWORD_FILE",
        "STILLFRAME_PASSWORD_COMMAND",
    ] {
        command.env_remove(name);
    }
    command.args(arguments).stdin(std::process::Stdio::null());
    Ok(command)
}

/// The commands that the help lists, but for `help` itself.
fn commands(top: &str) -> Vec<&str> {
    let listed = top.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").collect()
}

#[test]
fn every_command_helps_and_names_the_exit_codes() -> Result<()> {
    let top = bare(&["--help"])?.output()?;
    let top = String::from_utf8(top.stdout)?;
    let names = commands(&top);
    ensure!(names.len() >= 20, "{top}");
    for name in names {
        let help = bare(&[name, "--help"])?.output()?;
        let said = String::from_utf8(help.stdout)?;
        ensure!(
            help.status.success() && help.stderr.is_empty(),
            "{name}: {said}"
        );
        ensure!(
            said.contains("Exit codes:") && said.contains("Examples:"),
            "{name}: {said}"
        );
        let example = said.lines().find(|line| line.starts_with("  stillframe "));
        ensure!(
            example.is_some_and(|line| line.contains(name)),
            "{name}: {said}"
        );
    }
    let version = bare(&["--version"])?.output()?;
    ensure!(String::from_utf8(version.stdout)?.starts_with("stillframe "));
    Ok(())
}

#[test]
fn wrong_usage_ends_with_two_and_names_what_is_wrong() -> Result<()> {
    let cases: [(&[&str], &str); 15] = [
        (&["snapshot"], "unrecognized subcommand"),
        (&["list", "--every", "2s"], "--every"),
        (&["list"], "-r DIR or STILLFRAME_REPOSITORY"),
        (&["-r", "/nonexistent", "list"], "no password"),
        (&["-r", "/nonexistent", "checkpoint"], "--pid"),
        (
            &["checkpoint", "--pid", "1", "--qmp", "/x"],
            "cannot be used with",
        ),
        (&["watch", "--pid", "1"], "--every"),
        (&["watch", "--pid", "1", "--every", "2"], "--every"),
        (&["watch", "--pid", "1", "--every", "0s"], "--every"),
        (
            &["watch", "--pid", "1", "--every", "2s", "--count", "0"],
            "--count",
        ),
        (
            &["checkpoint", "--pid", "1", "--pause-limit", "soon"],
            "--pause-limit",
        ),
        (&["restore", "--resume"], "--qmp"),
        (&["restore", "--qmp", "/x"], "<ID>"),
        (&["forget", "--keep-last", "0"], "--keep-last"),
        (
            &["list", "--password-file", "/x", "--password-command", "y"],
            "cannot be used with",
        ),
    ];
    for (line, words) in cases {
        let said = refusal(&mut bare(line)?, 2)?;
        ensure!(said.contains(words), "{line:?}: {said}");
    }
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let said = stillframe.fails(&["forget"], 2)?;
    ensure!(said.contains("--keep"), "{said}");
    Ok(())
}

#[test]
fn options_count_more_than_the_environment() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
    let directory = |path: &std::path::Path| path.display().to_string();
    let file = directory(&folder.path().join("password"));
    // An editor ends the file with a new line, which is no part of the password.
    fs::write(&file, format!("{PASSWORD}\n"))?;
    let command = format!("echo {PASSWORD}");
    ensure!(
        bare(&["-r", &directory(&one), "init", "--password-file", &file])?
            .output()?
            .status
            .success()
    );
    let ways: [&[&str]; 3] = [
        &["list", "--password-file", &file],
        &["list", "--password-command", &command],
        &[
            "--password-command",
            &command,
            "list",
            "--repository",
            &directory(&one),
        ],
    ];
    for way in ways {
        let mut it = bare(way)?;
        // Both are wrong, and neither is asked.
        it.env("STILLFRAME_PASSWORD", "wrong")
            .env("STILLFRAME_REPOSITORY", &one);
        let output = it.output()?;
        ensure!(output.status.success(), "{way:?}: {output:?}");
    }
    for (name, value) in [
        ("STILLFRAME_PASSWORD", PASSWORD),
        ("STILLFRAME_PASSWORD_FILE", &file),
        ("STILLFRAME_PASSWORD_COMMAND", &command),
    ] {
        let output = bare(&["list", "-r", &directory(&one)])?
            .env(name, value)
            .output()?;
        ensure!(output.status.success(), "{name}: {output:?}");
        // The option names the repository, whatever the environment says.
        let mut named = bare(&["list", "-r", &directory(&one)])?;
        ensure!(
            named
                .env(name, value)
                .env("STILLFRAME_REPOSITORY", &other)
                .output()?
                .status
                .success()
        );
    }
    Ok(())
}

#[test]
fn a_password_that_cannot_be_had_is_told() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let repository = stillframe.repository().display().to_string();
    for (option, value, words) in [
        ("--password-command", "exit 7", "password command failed"),
        ("--password-file", "/dev/null", "empty password"),
    ] {
        let said = refusal(&mut bare(&["list", "-r", &repository, option, value])?, 1)?;
        ensure!(said.contains(words), "{said}");
    }
    Ok(())
}

/// Results on standard output, one line each with `--json`; everything else on standard error, and
/// with `--quiet` nothing there at all.
#[test]
fn results_and_messages_never_mix() -> Result<()> {
    let guest = Setup::small(Kind::Private, "streams").booted()?;
    let stillframe = Stillframe::at(&guest.folder().join("repo"));
    let qmp = guest.folder().join("never.qmp").display().to_string();
    let lines: [&[&str]; 11] = [
        &["init"],
        &["checkpoint", "--vm", "streams"],
        &["list"],
        &["show", "latest"],
        &["inspect", "latest"],
        &["restore", "latest", "--qmp", &qmp, "--print-command"],
        &["check", "--read-data"],
        &["forget", "--keep-last", "1"],
        &["prune"],
        &["rebuild-index"],
        &["index", "--list"],
    ];
    for line in lines {
        let quiet = [line, &["--json", "--quiet"]].concat();
        let output = stillframe.run(&quiet)?;
        ensure!(
            output.status.success() && output.stderr.is_empty(),
            "{line:?}: {output:?}"
        );
        let out = String::from_utf8(output.stdout)?;
        ensure!(
            out.ends_with('\n') && out.lines().count() == 1,
            "{line:?}: {out}"
        );
        serde_json::from_str::<serde_json::Value>(&out)?;
    }
    let output = stillframe.run(&["checkpoint", "--vm", "streams"])?;
    let (out, err) = (
        String::from_utf8(output.stdout)?,
        String::from_utf8(output.stderr)?,
    );
    ensure!(
        out.lines().count() == 1 && out.starts_with("checkpoint "),
        "{out}"
    );
    ensure!(
        err.contains("attached to process") && err.contains("detached from process"),
        "{err}"
    );
    ensure!(
        !err.contains('\r') && !err.contains('\x1b'),
        "progress without a terminal: {err:?}"
    );
    a_reader_that_leaves(&stillframe)?;
    a_result_that_cannot_be_written(&stillframe)
}

/// `stillframe list | head -0`: a broken pipe is not reported.
fn a_reader_that_leaves(stillframe: &Stillframe) -> Result<()> {
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let output = stillframe.command(&["list"])?.stdout(writer).output()?;
    ensure!(
        output.status.code() == Some(0) && output.stderr.is_empty(),
        "{output:?}"
    );
    Ok(())
}

fn a_result_that_cannot_be_written(stillframe: &Stillframe) -> Result<()> {
    let full = fs::OpenOptions::new().write(true).open("/dev/full")?;
    ensure!(
        full.metadata()?.file_type().is_char_device(),
        "/dev/full is no device"
    );
    let output = stillframe.command(&["list"])?.stdout(full).output()?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(
        output.status.code() == Some(1) && said.contains("cannot write the result"),
        "{said}"
    );
    Ok(())
}
