//! `migrate` of a VM that `watch` takes checkpoints of: the watch migrates it. If that fails, its checkpoints go on.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stillframe_harness::cli::{Stillframe, refusal};
use stillframe_harness::fault;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::health::{self, expect_untouched, expect_whole};
use stillframe_harness::migration::{Migration, Order};
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_harness::serial::Serial;

/// A guest, and the watch of it.
struct Watched {
    guest: Guest,
    stillframe: Stillframe,
    watch: Running,
}

impl Watched {
    fn start(name: &str, more: &[&str]) -> Result<Watched> {
        Watched::of(Setup::small(Kind::Private, name), more)
    }

    fn of(setup: Setup, more: &[&str]) -> Result<Watched> {
        let guest = setup.booted()?;
        let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
        let pid = guest.pid_text();
        let line = ["watch", "--json", "--pid", &pid, "--every", "300ms"];
        let watch = Running::start(stillframe.command(&[&line, more].concat())?)?;
        let mut watched = Watched {
            guest,
            stillframe,
            watch,
        };
        watched.goes_on()?;
        Ok(watched)
    }

    /// Waits for two more checkpoints. Returns the reports of all checkpoints since the last call.
    fn goes_on(&mut self) -> Result<Vec<Value>> {
        let before = self.watch.results()?.len();
        let mut reports = self.watch.wait_results(before + 2)?;
        Ok(reports.split_off(before))
    }

    /// The control socket of the watch.
    fn socket(&self) -> Result<PathBuf> {
        let folder = Stillframe::runtime_folder();
        let start = format!("{}-", self.guest.pid());
        let names = fs::read_dir(&folder)?.flatten().map(|entry| entry.path());
        let mut sockets = names.filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&start) && name.ends_with(".watch")
        });
        sockets.next().context("there is no control socket")
    }

    /// Starts a migration that takes long, and waits until the destination has started its QEMU.
    fn migrate_slowly(&self, name: &str) -> Result<(Order, Migration)> {
        let mut order = Order::of(&self.guest, name);
        order.migrate = ["--mode=pre-copy", "--bandwidth=1M"]
            .map(str::to_owned)
            .to_vec();
        let migration = order.start(&self.stillframe, self.guest.pid())?;
        let qmp = order.files().0.display().to_string();
        let deadline = Instant::now() + PATIENCE;
        while health::processes_with(&qmp)? == 0 {
            ensure!(Instant::now() < deadline, "{}", migration.source.err());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok((order, migration))
    }

    /// The VM runs here, and there is none at the destination.
    fn runs_only_here(&self, order: &Order) -> Result<()> {
        let qmp = order.files().0.display().to_string();
        ensure!(health::processes_with(&qmp)? == 0, "a QEMU is left");
        self.guest.serial.wait_more(3, PATIENCE)?;
        Ok(())
    }
}

/// A destination that looks for the VM's checkpoint in this repository.
fn seeded_receiver(order: &Order, from: &Stillframe) -> Result<Command> {
    let words = [order.new_vm(), vec!["--seed".to_owned()]].concat();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    order.receiver(from, "127.0.0.1:0", &words)
}

/// An address at which nothing listens.
fn nowhere() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

#[test]
fn a_watched_vm_is_migrated_by_its_watch() -> Result<()> {
    // With copy-on-write the watch attaches anew for it.
    let cases = [
        (&[][..], "--seed", Some(0), "the VM was migrated; "),
        (
            &["--schedule=copy-on-write", "--count=1000"],
            "--disks-as-they-are",
            Some(1),
            "the VM was migrated after ",
        ),
    ];
    for (more, receive, code, words) in cases {
        let watched = Watched::start("watched", more)?;
        let socket = watched.socket()?;
        let Watched {
            guest,
            stillframe,
            watch,
        } = watched;
        let ids = health::checkpoints(&stillframe)?;
        let mut order = Order::of(&guest, "moved");
        order.migrate = vec!["--verify".to_owned(), "--rehearse".to_owned()];
        order.receive.push(receive.to_owned());
        let mut migration = order.start(&stillframe, guest.pid())?;
        migration.source.wait_words("watches the VM")?;
        migration.source.wait_words("rehearsed: ")?;
        let arrived = migration.arrive()?;
        let (sent, received) = (&arrived.sent, &arrived.report);
        ensure!(sent["vm"] == "watched", "{sent}");
        ensure!(
            sent["base"].is_null() == more.contains(&"--count=1000"),
            "{sent}"
        );
        ensure!(sent["pages"]["sent"].as_u64() > Some(0), "{sent}");
        ensure!(sent["downtime_us"].as_u64() > Some(0), "{sent}");
        ensure!(received["verify"]["differing"] == 0, "{received}");
        arrived.vm.serial.wait_ticks(3, PATIENCE)?;
        let ended = watch.end()?;
        ensure!(ended.code == code, "{ended:?}");
        ensure!(ended.err.contains(words), "{ended:?}");
        ensure!(!health::is_alive(guest.pid()), "its QEMU did not end");
        ensure!(!socket.exists(), "{} is left", socket.display());
        expect_whole(&stillframe, &ids)?;
    }
    Ok(())
}

#[test]
fn a_watch_goes_on_when_its_vm_does_not_move() -> Result<()> {
    let mut watched = Watched::start("stays", &[])?;
    // Clients that say nothing, or nonsense.
    let silent = UnixStream::connect(watched.socket()?)?;
    let mut garbage = UnixStream::connect(watched.socket()?)?;
    garbage.write_all(b"{\"to\": 1}\n")?;
    let mut answer = String::new();
    garbage.read_to_string(&mut answer)?;
    ensure!(answer.contains("cannot read the request"), "{answer}");

    let order = Order::of(&watched.guest, "nowhere");
    let migrate = |at| order.migrator(&watched.stillframe, watched.guest.pid(), at, &[]);
    let said = refusal(&mut migrate(nowhere()?)?, 1)?;
    ensure!(said.contains("cannot connect"), "{said}");
    // Nothing was sent, so that the VM is attached as before.
    for report in watched.goes_on()? {
        ensure!(!report["parent"].is_null(), "{report}");
    }

    for (number, signal) in ["KILL", "INT"].into_iter().enumerate() {
        let (order, migration) = watched.migrate_slowly(signal)?;
        let second = order.migrator(&watched.stillframe, watched.guest.pid(), migration.at, &[])?;
        let said = refusal(&mut { second }, 1)?;
        ensure!(said.contains("in progress, requested by"), "{said}");
        let before = watched.watch.results()?.len();
        migration.source.signal(signal)?;
        let received = migration.destination.end()?;
        ensure!(received.code == Some(1), "{received:?}");
        let words = "which requested it, has ended";
        watched.watch.wait_words_times(words, number + 1)?;
        watched.runs_only_here(&order)?;
        watched.goes_on()?;
        let mut since = watched.watch.results()?.into_iter().skip(before);
        ensure!(since.any(|report| report["parent"].is_null()));
    }
    drop(silent);

    let last = watched.goes_on()?.pop().context("no checkpoint")?;
    watched.watch.signal("INT")?;
    let ended = watched.watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    let id = last["checkpoint"].as_str().unwrap_or_default().to_owned();
    let folder = watched.guest.folder();
    let restored = Restored::start(&watched.stillframe, &id, folder, &["--verify"])?;
    restored.serial.wait_ticks(3, PATIENCE)?;
    expect_whole(&watched.stillframe, &[id])?;
    expect_untouched(&watched.guest, &mut watched.guest.second_monitor()?)
}

#[test]
fn a_vm_runs_on_when_its_watch_is_killed_while_it_moves() -> Result<()> {
    let mut watched = Watched::start("orphan", &[])?;
    let (order, migration) = watched.migrate_slowly("killed")?;
    watched.watch.crash()?;
    let sent = migration.source.end()?;
    ensure!(sent.code == Some(1) && sent.errors() == 1, "{sent:?}");
    ensure!(sent.err.contains("and was migrating it"), "{sent:?}");
    ensure!(sent.err.contains("migrate --resume"), "{sent:?}");
    let received = migration.destination.end()?;
    ensure!(received.code == Some(1), "{received:?}");
    watched.runs_only_here(&order)?;
    // Its socket is left, and in no way.
    ensure!(watched.socket()?.exists());
    let order = Order::of(&watched.guest, "moved");
    let arrived = order.perform(&watched.stillframe, watched.guest.pid())?;
    arrived.vm.serial.wait_ticks(3, PATIENCE)?;
    Ok(())
}

/// The destination dies when it has said that it is ready: the VM may run there for all that the source knows.
#[test]
fn a_watch_that_does_not_know_where_its_vm_runs_names_the_commands() -> Result<()> {
    let watched = Watched::start("doubtful", &[])?;
    let (pid, stillframe) = (watched.guest.pid(), &watched.stillframe);
    let order = Order::of(&watched.guest, "there");
    let words = order.new_vm();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let receiver = order.receiver(stillframe, "127.0.0.1:0", &words)?;
    let folder = tempfile::tempdir()?;
    let (faulty, reached) = fault::with_fault(&receiver, "takeover.ready:kill", folder.path())?;
    let (destination, at) = order.listen(faulty)?;
    let soon = ["--reconnect", "1s"];
    let said = refusal(&mut order.migrator(stillframe, pid, at, &soon)?, 1)?;
    ensure!(reached.exists(), "the fault did not happen: {said}");
    ensure!(destination.end()?.code.is_none());
    let ended = watched.watch.end()?;
    ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
    for said in [&said, &ended.err] {
        ensure!(said.contains("migrate --resume"), "{said}");
        ensure!(said.contains("migrate --take-back"), "{said}");
    }
    ensure!(watched.guest.second_monitor()?.status()? == "paused");
    let settle = [&soon[..], &["--take-back"]].concat();
    let settled = order.migrator(stillframe, pid, at, &settle)?.output()?;
    ensure!(settled.status.success(), "{settled:?}");
    watched.guest.serial.wait_more(3, PATIENCE)?;
    Ok(())
}

/// What was written since the last checkpoint comes over the link, the rest from the repository: while the VM runs. Each
/// page has the id of the pause.
#[test]
fn only_the_increment_of_a_watched_vm_crosses_the_link() -> Result<()> {
    for (kind, mode) in [
        (Kind::Private, "--mode=pre-copy"),
        (Kind::Memfd, "--mode=hybrid"),
    ] {
        let watched = Watched::of(Setup::small(kind, "increment"), &[])?;
        let mut order = Order::of(&watched.guest, "increment-there");
        order.migrate = vec!["--verify".to_owned(), mode.to_owned()];
        order.receive.push("--seed".to_owned());
        let arrived = order.perform(&watched.stillframe, watched.guest.pid())?;
        let (sent, received) = (&arrived.sent, &arrived.report);
        ensure!(!sent["base"].is_null(), "{sent}");
        let crossed = [&received["pages"], &sent["fetched"]].map(Value::as_u64);
        let crossed: u64 = crossed.into_iter().flatten().sum();
        ensure!((1..4000).contains(&crossed), "{sent} {received}");
        // The watch knows what was there.
        ensure!(sent["pages"]["delta"].as_u64() > Some(0), "{sent}");
        ensure!(received["verify"]["differing"] == 0, "{received}");
        let filled = arrived.filled.context("it did not lack any page")?;
        ensure!(filled["pages"].as_u64() > Some(4000), "{filled}");
        arrived.vm.serial.wait_more(3, PATIENCE)?;
        ensure!(watched.watch.end()?.code == Some(0));
    }
    Ok(())
}

/// Pages that are written as wholes are not sent before they would be written again; those of which little changes are.
#[test]
fn an_increment_that_is_written_again_as_a_whole_is_cut_short() -> Result<()> {
    // So that the guest is looked at several times in the first round.
    for (pattern, bandwidth, cut_short) in [
        ("sequential", "--bandwidth=10M", true),
        ("random", "--bandwidth=200K", false),
    ] {
        let setup = Setup {
            workload: Workload {
                mib: 48,
                pattern,
                tick_ms: 20,
                writes_per_tick: 2000,
                share: 4,
            },
            ..Setup::small(Kind::Private, pattern)
        };
        let watched = Watched::of(setup, &[])?;
        let mut order = Order::of(&watched.guest, format!("{pattern}-there"));
        order.migrate = vec![bandwidth.to_owned(), "--verify".to_owned()];
        order.receive.push("--seed".to_owned());
        let arrived = order.perform(&watched.stillframe, watched.guest.pid())?;
        let sent = &arrived.sent;
        ensure!(!sent["base"].is_null(), "{sent}");
        let pages = |name: &str| sent["pages"][name].as_u64().unwrap_or_default();
        let early = pages("sent") + pages("seeded") + pages("postponed");
        match cut_short {
            true => ensure!(sent["mode"] == "hybrid" && early < 48 << 6, "{sent}"),
            false => ensure!(pages("delta") > 48 << 7, "{sent}"),
        }
        let differing = &arrived.report["verify"]["differing"];
        ensure!(*differing == 0, "{}", arrived.report);
        arrived.vm.serial.wait_more(3, PATIENCE)?;
        ensure!(watched.watch.end()?.code == Some(0));
    }
    Ok(())
}

/// A VM that runs on its checkpoint is paused when its engine dies, and goes on with that checkpoint only.
#[test]
fn a_vm_that_reads_its_checkpoint_goes_on_after_a_kill() -> Result<()> {
    let watched = Watched::start("half", &[])?;
    let (pid, stillframe) = (watched.guest.pid(), &watched.stillframe);
    let order = Order::of(&watched.guest, "there");
    let receiver = seeded_receiver(&order, stillframe)?;
    let folder = tempfile::tempdir()?;
    let (faulty, reached) = fault::with_fault(&receiver, "takeover.said:kill", folder.path())?;
    let (destination, at) = order.listen(faulty)?;
    let migrated = order
        .migrator(stillframe, pid, at, &["--bandwidth=1M"])?
        .output()?;
    ensure!(
        migrated.status.success(),
        "{migrated:?}; the watch says {}",
        watched.watch.err()
    );
    let killed = destination.end()?;
    ensure!(killed.code.is_none() && reached.exists(), "{killed:?}");
    let arrived = killed.results()?.pop().context("it did not arrive")?;
    let (qmp, serial) = order.files();
    let vm = Restored {
        pid: arrived["pid"].as_i64().context("no pid")? as i32,
        qmp,
        serial: Serial::new(&serial),
    };
    let again = |from: &Stillframe, more: &[&str]| {
        let words = [&["--resume"], more].concat();
        order.receiver(from, "127.0.0.1:0", &words)
    };
    let other = Stillframe::init(&watched.guest.folder().join("other"))?;
    for mut command in [again(stillframe, &[])?, again(&other, &["--seed"])?] {
        let said = refusal(&mut command, 1)?;
        ensure!(
            said.contains("lacks pages, which are in checkpoint"),
            "{said}"
        );
    }
    let (mut destination, _) = order.listen(again(stillframe, &["--seed"])?)?;
    // It then waits for a source that may ask, which this one does not.
    destination.wait_words("complete")?;
    vm.serial.wait_more(4, PATIENCE)?;
    destination.crash()
}

/// A destination that does not have the repository gets all of the VM.
#[test]
fn a_watched_vm_comes_whole_where_its_checkpoint_is_not() -> Result<()> {
    let watched = Watched::start("whole", &[])?;
    let other = Stillframe::init(&watched.guest.folder().join("other"))?;
    let order = Order::of(&watched.guest, "there");
    let (destination, at) = order.listen(seeded_receiver(&order, &other)?)?;
    let pid = watched.guest.pid();
    let migration = order.start_source(&watched.stillframe, pid, (destination, at), at)?;
    let arrived = migration.arrive()?;
    ensure!(arrived.sent["base"].is_null(), "{}", arrived.sent);
    ensure!(
        arrived.report["pages"].as_u64() > Some(4000),
        "{}",
        arrived.report
    );
    arrived.vm.serial.wait_ticks(3, PATIENCE)?;
    Ok(())
}
