//! `unlock`: no password for a while.

use anyhow::{Result, ensure};
use stillframe_harness::cli::Stillframe;

/// `list` of someone who knows no password.
fn list_without_password(stillframe: &Stillframe) -> Result<Option<i32>> {
    let mut command = stillframe.command(&["list", "--json"])?;
    Ok(command
        .env_remove("STILLFRAME_PASSWORD")
        .output()?
        .status
        .code())
}

/// The exit code of a wrong use of the command line: there is no password to try.
const NO_PASSWORD: Option<i32> = Some(2);

#[test]
fn an_unlocked_repository_needs_no_password_until_it_is_locked() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let other = Stillframe::init(&folder.path().join("other"))?;
    ensure!(list_without_password(&stillframe)? == NO_PASSWORD);
    ensure!(stillframe.json(&["unlock", "--for", "1h"])?["for_s"] == 3600);
    ensure!(list_without_password(&stillframe)? == Some(0));
    ensure!(list_without_password(&other)? == NO_PASSWORD);
    ensure!(stillframe.json(&["unlock", "--end"])?["was_unlocked"] == true);
    ensure!(list_without_password(&stillframe)? == NO_PASSWORD);
    ensure!(stillframe.json(&["unlock", "--end"])?["was_unlocked"] == false);
    Ok(())
}

#[test]
fn a_wrong_password_unlocks_nothing_and_the_time_ends() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut wrong = stillframe.command(&["unlock"])?;
    let output = wrong.env("STILLFRAME_PASSWORD", "wrong horse").output()?;
    ensure!(!output.status.success());
    ensure!(list_without_password(&stillframe)? == NO_PASSWORD);
    stillframe.ok(&["unlock", "--for", "2s"])?;
    ensure!(list_without_password(&stillframe)? == Some(0));
    std::thread::sleep(std::time::Duration::from_secs(3));
    ensure!(list_without_password(&stillframe)? == NO_PASSWORD);
    Ok(())
}
