//! Short forms of the stress runs: `cargo xtask bench exactness|kill|flips` runs them at length.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::databases::Database;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::random::Random;
use stillframe_harness::running::PATIENCE;
use stillframe_stress::databases;
use stillframe_stress::disk_kills::{self, Kills};
use stillframe_stress::disk_returns::{self, Returns};
use stillframe_stress::disks::{Bus, Compared, Machine, one_machine};
use stillframe_stress::exactness::Mode;
use stillframe_stress::lazy_disks::{self, Strikes, Usual};
use stillframe_stress::migrate;
use stillframe_stress::migrate::strikes::{self, Struck};
use stillframe_stress::migrate::victims::Disk;
use stillframe_stress::{exactness, flips, kill};

/// Three checkpoints of the working guest, each compared page by page in its pause, then one of the
/// paused guest compared byte by byte with the VM restored from it.
fn exact(kind: Kind) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = Setup::new(kind).boot()?;
    let (tally, _) = exactness::watch_verified(&stillframe, &guest, "300ms", 3, &Mode::new())?;
    ensure!(tally.differing == 0 && tally.pages > 0, "{tally:?}");
    guest.serial.wait_more(2, PATIENCE)?;
    let restored = exactness::compare_with_restored(&stillframe, &guest, 4, &Mode::new())?;
    ensure!(
        restored.differing == 0 && restored.pages > 0,
        "{restored:?}"
    );
    stillframe.ok(&["check", "--read-data"])?;
    Ok(())
}

/// One guest that never rests, checkpointed in every way there is.
#[test]
fn every_schedule_is_exact() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let guest = exactness::writing_all_the_time().boot()?;
    for (number, mode) in exactness::modes().iter().enumerate() {
        let place = folder.path().join(number.to_string());
        let stillframe = Stillframe::init(&place)?;
        let (tally, lines) = exactness::watch_verified(&stillframe, &guest, "50ms", 4, mode)?;
        ensure!(
            tally.differing == 0 && tally.pages > 0,
            "{mode:?} {tally:?}"
        );
        let last = &lines[3];
        // It was the requested way.
        let deltas = last["pages"]["delta"] != 0;
        ensure!(deltas == mode.contains(&"256M"), "{mode:?} {last}");
        // A guest with few pages written may itself reach each of them
        // before the engine does: then all are copied on a fault.
        let after = last["copied"]["after"] != 0 || last["copied"]["on_fault"] != 0;
        ensure!(after == mode.contains(&"copy-on-write"), "{mode:?} {last}");
        let before = last["copied"]["pre_copy"] != 0;
        ensure!(before == mode.contains(&"pre-copy"), "{mode:?} {last}");
        stillframe.ok(&["check", "--read-data"])?;
        fs::remove_dir_all(&place)?;
    }
    guest.serial.wait_more(2, PATIENCE)?;
    Ok(())
}

#[test]
fn private_memory_is_exact() -> Result<()> {
    exact(Kind::Private)
}

#[test]
fn memory_shared_by_memfd_is_exact() -> Result<()> {
    exact(Kind::Memfd)
}

#[test]
fn memory_shared_by_file_is_exact() -> Result<()> {
    exact(Kind::FileShared)
}

#[test]
fn machine_pc_is_exact() -> Result<()> {
    exact(Kind::Pc)
}

#[test]
fn two_cpus_are_exact() -> Result<()> {
    exact(Kind::TwoCpus)
}

#[test]
fn memory_on_both_sides_of_four_gib_is_exact() -> Result<()> {
    exact(Kind::FiveGib)
}

#[test]
fn a_scrolling_console_is_exact() -> Result<()> {
    exact(Kind::Console)
}

#[test]
fn a_sandboxed_qemu_is_exact() -> Result<()> {
    exact(Kind::Sandbox)
}

#[test]
fn a_guest_under_kvm_is_exact() -> Result<()> {
    if !Path::new("/dev/kvm").exists() {
        eprintln!("left out: this machine has no /dev/kvm");
        return Ok(());
    }
    exact(Kind::KvmBootSector)
}

/// The first kills of the stress run, at every moment of an engine's life.
fn survive_kills(kind: Kind, schedule: &str, seed: u64) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut guest = Setup::small(kind, "survivor").boot()?;
    let mut monitor = guest.second_monitor()?;
    let mut random = Random::new(seed);
    for number in [0, 3, 4, 6, 7, 9] {
        let moment = kill::moment(number);
        kill::strike(
            &stillframe,
            &guest,
            &mut monitor,
            schedule,
            moment,
            &mut random,
        )
        .and_then(|_| kill::aftermath(&stillframe, &mut guest))
        .with_context(|| format!("kill {number}, {moment:?}"))?;
    }
    // The last engine took back what those before it had lent QEMU.
    expect_untouched(&guest, &mut monitor)
}

#[test]
fn a_vm_with_private_memory_survives_kills_of_the_engine() -> Result<()> {
    survive_kills(Kind::Private, "pre-copy", 1)
}

#[test]
fn a_vm_with_shared_memory_survives_kills_of_the_engine() -> Result<()> {
    survive_kills(Kind::Memfd, "copy-on-write", 2)
}

/// One migration that is compared byte by byte, and one in each mode of the working guest, compared page by page.
fn migrated(kind: Kind) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = Setup::new(kind).boot()?;
    let (mut migrations, mut differing) = (0, 0);
    migrate::one_guest(&stillframe, &guest, 1, |_, _, tally| {
        migrations += 1;
        differing += tally.differing;
    })?;
    ensure!(
        migrations == 5 && differing == 0,
        "{migrations} {differing}"
    );
    Ok(())
}

#[test]
fn a_migration_of_private_memory_is_exact() -> Result<()> {
    migrated(Kind::Private)
}

#[test]
fn a_migration_of_memory_shared_by_file_is_exact_and_never_shares_it() -> Result<()> {
    migrated(Kind::FileShared)
}

/// A kill at each point at which the VM may be on either side, and some at random.
#[test]
fn a_vm_never_runs_twice_whatever_strikes_its_migration() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut struck = Struck::default();
    let plain = strikes::some(3);
    strikes::each(&stillframe, &plain, &[Disk::None], &mut struck)?;
    let copying = strikes::while_copying(4);
    strikes::each(&stillframe, &copying, &[Disk::Copied("qcow2")], &mut struck)?;
    ensure!(struck.wrong == 0, "{:?}", struck.raw);
    Ok(())
}

/// Disks that are written in every way: as they were in the pause, to the byte, and of one moment with the memory, which is as
/// it was, too.
#[test]
fn disks_are_of_the_moment_of_the_pause() -> Result<()> {
    let mut compared = Compared::default();
    for machine in [
        Machine::new(Bus::Virtio, "raw", 1),
        Machine::new(Bus::Scsi, "qcow2", 2),
        Machine::with_files(Bus::Virtio, "qcow2"),
        Machine::with_files(Bus::Virtio, "raw").whose_agent_lies(),
    ] {
        one_machine(machine, 2, &mut Random::new(5), &mut compared)?;
    }
    ensure!(
        compared.differing + compared.memory_differing == 0 && compared.restored == 3,
        "{compared:?}"
    );
    ensure!(compared.free > 0, "{compared:?}");
    Ok(())
}

/// The engine is killed while it copies disks in rounds, and while its filters are in QEMU: the guest goes on, and nothing of ours
/// stays.
#[test]
fn kills_while_disks_are_captured() -> Result<()> {
    let mut kills = Kills::default();
    let machine = Machine::new(Bus::Virtio, "qcow2", 2);
    disk_kills::one_machine(machine, 6, &mut Random::new(6), &mut kills)?;
    ensure!(kills.kills == 6 && kills.filters == 3, "{kills:?}");
    ensure!(kills.wrong.is_empty(), "{kills:?}");
    Ok(())
}

/// Rewinds with disks, one after a rewind that was killed, and a clone with its disks.
#[test]
fn disks_return_with_their_vm() -> Result<()> {
    let mut returns = Returns::default();
    let machine = Machine::new(Bus::Virtio, "qcow2", 2);
    let counts = (4, 1);
    disk_returns::one_machine(machine, counts, &mut Random::new(7), &mut returns)?;
    ensure!(
        returns.rewinds == 4 && returns.killed == 1 && returns.clones == 1,
        "{returns:?}"
    );
    ensure!(returns.wrong.is_empty(), "{returns:?}");
    Ok(())
}

/// Restores that fill disks while the guest runs are killed, and gone on with; one VM is killed, too.
#[test]
fn disks_that_are_filled_survive_kills() -> Result<()> {
    let mut strikes = Strikes::default();
    let machine = Machine::new(Bus::Virtio, "qcow2", 1).with_ballast(lazy_disks::BALLAST_MIB);
    let (usual, random) = (Some(Usual::GUESS), &mut Random::new(8));
    lazy_disks::one_machine(machine, usual, 3, random, &mut strikes)?;
    ensure!(
        strikes.strikes == 3 && strikes.points >= 3 && strikes.wrong.is_empty(),
        "{strikes:?}"
    );
    Ok(())
}

/// A VM goes on with the transaction after those on its disk.
#[test]
fn a_database_and_its_memory_are_of_one_instant() -> Result<()> {
    let databases = databases::series(Database::Sqlite, 2)?;
    ensure!(
        databases.raw.len() == 2 && databases.wrong.is_empty(),
        "{databases:?}"
    );
    Ok(())
}

#[test]
fn damage_at_random_places_is_found_and_never_restored_from() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = flips::sample(folder.path())?;
    let files = flips::files(stillframe.repository())?;
    let mut random = Random::new(1);
    for number in 0..40 {
        let damage = flips::Damage::random(&files, &mut random)?;
        ensure!(
            flips::found(&stillframe, &damage)?,
            "missed: {}",
            damage.describe()
        );
        if number % 8 == 0 {
            flips::restore(&stillframe, folder.path())?;
        }
        damage.undo()?;
    }
    stillframe.ok(&["check", "--read-data"])?;
    Ok(())
}
