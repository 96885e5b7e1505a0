//! Stillframe's agent in the guest: free pages of more memory than QEMU's agent is queried for, what memory is needed, and the
//! clock.

use anyhow::{Context, Result, ensure};
use stillframe_harness::agent::Agent;
use stillframe_harness::cli::{Stillframe, count};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

/// Pages of the files that a guest frees in a round, as a bound from below.
const FREED: u64 = 3000;

/// A guest that allocates memory and frees it again.
fn churning(setup: Setup, words: &str) -> Result<Guest> {
    let guest = setup.with_drivers(words).boot()?;
    guest.serial.wait_line("churned 1", PATIENCE)?;
    Ok(guest)
}

#[test]
fn free_pages_of_more_than_four_gib_are_left_out() -> Result<()> {
    let guest = Setup::small(Kind::FiveGib, "large").with_own_agent();
    let guest = churning(guest, "sf.churn=16")?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let watch = ["watch", "large", "--every", "500ms", "--count", "4"];
    let more = ["--free-pages", "--verify"];
    let reports = stillframe.json_lines(&[&watch[..], &more].concat())?;
    ensure!(reports.len() == 4, "{reports:?}");
    for report in &reports {
        ensure!(report["verify"]["differing"] == 0, "{report}");
        ensure!(report["free_pages"]["not_known"].is_null(), "{report}");
    }
    let first = count(&reports[0], "free_pages", "left_out")?;
    ensure!(first > FREED, "{reports:?}");
    let restored = Restored::start(&stillframe, "latest", guest.folder(), &["--verify"])?;
    restored.serial.wait_for("churned", PATIENCE)?;
    restored.serial.wait_more(2, PATIENCE)?;
    restored.crash()?;
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// For as much as that there has to be an agent that says it in few words.
#[test]
fn qemus_agent_is_not_queried_for_more_than_four_gib() -> Result<()> {
    let guest = Setup::small(Kind::FiveGib, "wordy").with_agent();
    let guest = churning(guest, "sf.churn=16 sf.rounds=1")?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let report = stillframe.json(&["checkpoint", "wordy", "--free-pages", "--verify"])?;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    ensure!(count(&report, "free_pages", "left_out")? == 0, "{report}");
    let why = report["free_pages"]["not_known"].as_str();
    let why = why.context("it was queried")?;
    ensure!(why.contains("stillframe-guest-agent does not"), "{why}");
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

#[test]
fn it_says_what_memory_is_needed_and_sets_the_clock() -> Result<()> {
    const BEHIND_S: f64 = 500.0;
    let mut setup = Setup::small(Kind::Private, "own").with_own_agent();
    setup = setup.with(&["-device", "virtio-balloon-pci,id=balloon0"]);
    setup.ram_mib = 512;
    let mut guest = churning(setup, "sf.churn=150 sf.rounds=1")?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let channel = guest.agent_path();
    Agent::connect(&channel)?.set_behind(BEHIND_S)?;
    let report = stillframe.json(&["checkpoint", "own", "--balloon=60s", "--verify"])?;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    ensure!(report["balloon"]["not_taken"].is_null(), "{report}");
    ensure!(
        count(&report, "balloon", "taken_bytes")? > FREED << 12,
        "{report}"
    );
    guest.kill()?;
    let restored = Restored::start(&stillframe, "latest", guest.folder(), &[])?;
    let behind_s = Agent::connect(&channel)?.behind_s()?;
    ensure!(behind_s.abs() < 60.0, "{behind_s} s behind");
    restored.serial.wait_more(3, PATIENCE)?;
    restored.crash()
}
