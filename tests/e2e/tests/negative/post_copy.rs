//! A VM that runs at the destination and lacks pages: engines that die, a link that breaks, a source that is lost.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::fault;
use stillframe_harness::filling::runtime_file;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::health;
use stillframe_harness::migration::Order;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::relay::Relay;
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_harness::serial::Serial;

/// Each request for pages takes twice as long: the pages come slowly.
const DELAY: Duration = Duration::from_millis(25);
/// Post-copy, and both sides try for long to reach each other.
const MIGRATE: [&str; 3] = ["--mode=post-copy", "--verify", "--reconnect=60s"];

/// A guest that writes all the time, and a migration of it through a relay.
struct Scene {
    guest: Guest,
    stillframe: Stillframe,
    order: Order,
    relay: Relay,
    /// Where it listens, without the relay.
    listens: String,
}

impl Scene {
    /// With a destination that fails in this way.
    fn new(name: &str, fault: Option<&str>) -> Result<(Scene, Running)> {
        let setup = Setup {
            workload: Workload {
                mib: 48,
                pattern: "random",
                tick_ms: 20,
                writes_per_tick: 2000,
                share: 64,
            },
            ..Setup::small(Kind::Private, name)
        };
        let guest = setup.boot()?;
        guest.serial.wait_ticks(3, PATIENCE)?;
        let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
        let order = Order::of(&guest, name);
        let words = order.new_vm();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut receiver = order.receiver(&stillframe, "127.0.0.1:0", &words)?;
        if let Some(fault) = fault {
            receiver = fault::with_fault(&receiver, fault, guest.folder())?.0;
        }
        let (destination, at) = order.listen(receiver)?;
        let scene = Scene {
            relay: Relay::delayed(at, DELAY)?,
            guest,
            stillframe,
            order,
            listens: at.to_string(),
        };
        Ok((scene, destination))
    }

    /// Starts a source, which fails in this way.
    fn migrate(&self, words: &[&str], fault: Option<&str>) -> Result<Running> {
        let at = self.relay.address();
        let mut migrator = self
            .order
            .migrator(&self.stillframe, self.guest.pid(), at, words)?;
        if let Some(fault) = fault {
            migrator = fault::with_fault(&migrator, fault, self.guest.folder())?.0;
        }
        Running::start(migrator)
    }

    /// A destination that goes on for one that was killed.
    fn receive_again(&self) -> Result<Running> {
        let receiver = self
            .order
            .receiver(&self.stillframe, &self.listens, &["--resume"])?;
        Ok(self.order.listen(receiver)?.0)
    }

    /// The VM runs at the destination only, complete, and is what it was.
    fn expect_moved(self, mut source: Running, mut destination: Running) -> Result<()> {
        ensure!(source.wait_exit()? == Some(0), "{}", source.err());
        ensure!(destination.wait_exit()? == Some(0), "{}", destination.err());
        ensure!(!health::is_alive(self.guest.pid()), "its QEMU did not end");
        let (qmp, serial) = self.order.files();
        let serial = Serial::new(&serial);
        serial.wait_more(5, PATIENCE)?;
        for end in [".received", ".received-pages"] {
            let record = runtime_file(&qmp, end)?;
            ensure!(!record.exists(), "{} is left", record.display());
        }
        let mut monitor = Qmp::connect(&qmp)?;
        ensure!(monitor.status()? == "running");
        monitor.execute("quit", json!({}))?;
        Ok(())
    }
}

#[test]
fn a_source_whose_engine_is_killed_goes_on_when_it_is_started_again() -> Result<()> {
    let (scene, mut destination) = Scene::new("serving", None)?;
    let mut killed = scene.migrate(&MIGRATE, Some("commit.serving:kill"))?;
    ensure!(killed.wait_exit()?.is_none(), "{}", killed.err());
    destination.wait_words("the VM is paused")?;
    let mut monitor = scene.guest.second_monitor()?;
    let resumed = monitor.execute("cont", json!({}));
    ensure!(resumed.is_err(), "it would run twice, and change pages");
    ensure!(monitor.status()? == "paused");
    let resumed = scene.migrate(&["--resume"], None)?;
    scene.expect_moved(resumed, destination)
}

#[test]
fn a_destination_whose_engine_is_killed_goes_on_when_it_is_started_again() -> Result<()> {
    let (scene, mut killed) = Scene::new("filling", Some("takeover.filling:kill"))?;
    let source = scene.migrate(&MIGRATE, None)?;
    ensure!(killed.wait_exit()?.is_none(), "{}", killed.err());
    let destination = scene.receive_again()?;
    scene.expect_moved(source, destination)
}

#[test]
fn both_engines_are_killed_and_both_are_started_again() -> Result<()> {
    let (scene, mut killed) = Scene::new("both", Some("takeover.filling:kill"))?;
    let mut source = scene.migrate(&MIGRATE, None)?;
    ensure!(killed.wait_exit()?.is_none(), "{}", killed.err());
    source.kill()?;
    source.wait_exit()?;
    let destination = scene.receive_again()?;
    let source = scene.migrate(&["--resume"], None)?;
    scene.expect_moved(source, destination)
}

#[test]
fn a_link_that_breaks_again_and_again_only_takes_time() -> Result<()> {
    let (scene, mut destination) = Scene::new("link", None)?;
    let source = scene.migrate(&MIGRATE, None)?;
    destination.wait_results(2)?;
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(300));
        scene.relay.cut();
    }
    scene.expect_moved(source, destination)
}

/// Nothing can be done for it, and both sides say so.
#[test]
fn a_vm_that_loses_its_source_is_paused_and_both_sides_say_what_to_do() -> Result<()> {
    let (mut scene, mut destination) = Scene::new("lost", None)?;
    let mut source = scene.migrate(&MIGRATE, None)?;
    destination.wait_results(2)?;
    scene.guest.kill()?;
    ensure!(source.wait_exit()? == Some(1), "{}", source.err());
    ensure!(
        source.err().contains("start the VM from a checkpoint"),
        "{}",
        source.err()
    );
    ensure!(destination.wait_exit()? == Some(1), "{}", destination.err());
    ensure!(
        destination.err().contains("lacks pages"),
        "{}",
        destination.err()
    );
    let qmp = scene.order.files().0.display().to_string();
    for pid in health::pids_with(&qmp)? {
        ensure!(health::has_userfaultfd(pid)?, "it would read zeros");
        stillframe_harness::running::signal(pid as u32, "KILL")?;
    }
    Ok(())
}
