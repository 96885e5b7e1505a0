//! Migrations of a VM whose memory is partly in a file that both hosts reach: of its pages only the place is sent.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use stillframe_harness::cli::{Stillframe, count};
use stillframe_harness::golden;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::migration::{Arrived, Order};
use stillframe_harness::running::{PATIENCE, Running};

/// MiB of files that the guest has read, and the pages of these.
const FILES_MIB: u64 = 24;
const FILES_PAGES: u64 = FILES_MIB << 8;

/// A guest that has read all files of an image.
struct Reader {
    guest: Guest,
    stillframe: Stillframe,
    image: PathBuf,
    // After the guest: ends last.
    folder: tempfile::TempDir,
}

impl Reader {
    fn boot(name: &str) -> Result<Reader> {
        let folder = tempfile::tempdir()?;
        let image = folder.path().join("golden.img");
        golden::make_image(&image, FILES_MIB)?;
        let drive = format!("file={},if=virtio,format=raw,readonly=on", image.display());
        let setup = Setup::small(Kind::Private, name).with_drivers("sf.read=0:vda");
        let guest = setup.with(&["-drive", &drive]).boot()?;
        golden::wait_read(&guest)?;
        Ok(Reader {
            guest,
            stillframe: Stillframe::init(&folder.path().join("repo"))?,
            image,
            folder,
        })
    }

    /// A migration whose destination has this file in place of the image.
    fn order(&self, name: &str, here: Option<&Path>) -> Order {
        let mut order = Order::of(&self.guest, name);
        let image = self.image.display();
        let shared = ["--verify".to_owned(), format!("--shared-image={image}")];
        order.migrate.extend(shared);
        let here = here.map(|here| format!("--shared-image={image}={}", here.display()));
        order.receive.extend(here);
        order
    }

    /// A copy of the image in which one block in `one_of` is another.
    fn spoilt(&self, one_of: u64) -> Result<PathBuf> {
        let copy = self.folder.path().join("copy.img");
        fs::copy(&self.image, &copy)?;
        let file = File::options().write(true).open(&copy)?;
        for block in (0..file.metadata()?.len() / 4096).step_by(one_of as usize) {
            file.write_all_at(b"another", block * 4096 + 1000)?;
        }
        Ok(copy)
    }
}

/// Pages in the image, and those of them that the destination did not find. All memory is equal, and the guest works.
fn counted(arrived: &Arrived) -> Result<(u64, u64)> {
    arrived.vm.serial.wait_ticks(3, PATIENCE)?;
    let report = &arrived.report;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    let of = |name| count(&arrived.sent, "pages", name);
    Ok((of("in_image")?, of("not_in_image")?))
}

#[test]
fn what_both_hosts_have_in_a_file_is_not_sent() -> Result<()> {
    let reader = Reader::boot("shared")?;
    let bytes = |arrived: &Arrived| arrived.sent["bytes_sent"].as_u64().context("no bytes");
    let mut all = Order::of(&reader.guest, "all");
    all.migrate.push("--mode=pre-copy".to_owned());
    let all = all.perform(&reader.stillframe, reader.guest.pid())?;
    let (without, mut running) = (bytes(&all)?, all);
    for mode in ["pre-copy", "hybrid"] {
        let mut order = reader.order(mode, Some(&reader.image));
        order.migrate.push(format!("--mode={mode}"));
        let arrived = order.perform(&reader.stillframe, running.vm.pid)?;
        let (in_image, not) = counted(&arrived)?;
        ensure!(in_image > FILES_PAGES / 4 * 3, "{}", arrived.sent);
        ensure!(not == 0, "{}", arrived.sent);
        // Files compress to a third at best.
        let saved = without.saturating_sub(bytes(&arrived)?);
        ensure!(saved > (FILES_MIB << 20) / 4, "{without}: {}", arrived.sent);
        running = arrived;
    }
    Ok(())
}

/// The destination compares each page with its id, and has those sent that its own file does not have.
#[test]
fn pages_that_differ_in_the_other_hosts_file_are_sent() -> Result<()> {
    let reader = Reader::boot("spoilt")?;
    let copy = reader.spoilt(3)?;
    let mut order = reader.order("spoilt", Some(&copy));
    // By itself it may have the rest fetched, where the machine is slow.
    order.migrate.push("--mode=pre-copy".to_owned());
    let arrived = order.perform(&reader.stillframe, reader.guest.pid())?;
    let (in_image, not) = counted(&arrived)?;
    ensure!(in_image > FILES_PAGES / 4 * 3, "{}", arrived.sent);
    let third = in_image / 3;
    ensure!((third / 2..third * 2).contains(&not), "{}", arrived.sent);
    Ok(())
}

#[test]
fn a_cut_connection_does_not_spoil_pages_of_images() -> Result<()> {
    let reader = Reader::boot("cut")?;
    let copy = reader.spoilt(5)?;
    let mut order = reader.order("cut", Some(&copy));
    let slow = ["--mode=pre-copy", "--bandwidth=4M", "--reconnect=1m"];
    order.migrate.extend(slow.map(str::to_owned));
    order.receive.push("--reconnect=1m".to_owned());
    let cuts = [1500, 1500].map(Duration::from_millis);
    let arrived = order.perform_cut(&reader.stillframe, reader.guest.pid(), &cuts)?;
    counted(&arrived)?;
    // The report is of the last connection: what came by its place before the cuts was there already.
    let seeded = count(&arrived.sent, "pages", "seeded")?;
    ensure!(seeded > FILES_PAGES / 4, "{}", arrived.sent);
    Ok(())
}

/// Another length, no such name there, or none at all: the user hears it, and the VM moves.
#[test]
fn a_file_that_the_other_host_lacks_is_named() -> Result<()> {
    let reader = Reader::boot("lacking")?;
    let shorter = reader.folder.path().join("shorter.img");
    fs::copy(&reader.image, &shorter)?;
    File::options().write(true).open(&shorter)?.set_len(4096)?;
    let gone = reader.folder.path().join("gone.img");
    let mut pid = reader.guest.pid();
    let mut running = None;
    for (number, here) in [None, Some(&shorter), Some(&gone)].into_iter().enumerate() {
        let order = reader.order(&number.to_string(), here.map(PathBuf::as_path));
        let mut migration = order.start(&reader.stillframe, pid)?;
        migration.source.wait_words("golden.img")?;
        let arrived = migration.arrive()?;
        ensure!(counted(&arrived)? == (0, 0), "{}", arrived.sent);
        pid = arrived.vm.pid;
        drop(running.replace(arrived));
    }
    Ok(())
}

/// Where pages are fetched, they come whole; the user hears it.
#[test]
fn a_mode_without_places_says_so() -> Result<()> {
    let reader = Reader::boot("fetched")?;
    let mut order = reader.order("fetched", Some(&reader.image));
    order.migrate.push("--mode=post-copy".to_owned());
    let mut migration = order.start(&reader.stillframe, reader.guest.pid())?;
    migration.source.wait_words("--shared-image is of no use")?;
    let arrived = migration.arrive()?;
    ensure!(counted(&arrived)? == (0, 0), "{}", arrived.sent);
    Ok(())
}

#[test]
fn a_file_that_cannot_be_read_ends_the_migration_and_not_the_vm() -> Result<()> {
    let reader = Reader::boot("unread")?;
    let mut order = Order::of(&reader.guest, "unread");
    order.migrate = vec!["--shared-image=/no/such/image".to_owned()];
    let migration = order.start(&reader.stillframe, reader.guest.pid())?;
    for (side, code) in [(migration.source, 1), (migration.destination, 1)] {
        let ended = side.end()?;
        ensure!(ended.code == Some(code) && ended.errors() == 1, "{ended:?}");
        ensure!(ended.err.contains("/no/such/image"), "{ended:?}");
    }
    let mut monitor = reader.guest.second_monitor()?;
    expect_untouched(&reader.guest, &mut monitor)?;
    let relative = reader.stillframe.command(&[
        "receive",
        "--listen=127.0.0.1:0",
        "--plain-text",
        "--qmp=/tmp/x",
        "--shared-image=a",
    ])?;
    let ended = Running::start(relative)?.end()?;
    ensure!(
        ended.code == Some(2) && ended.err.contains("absolute"),
        "{ended:?}"
    );
    Ok(())
}
