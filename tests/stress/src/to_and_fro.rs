//! A guest that moves to and fro between two taps of a bridge, with a TCP connection that must live on. All of it is in a
//! network namespace of its own, which ends with the run.

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::migration::Order;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::PATIENCE;

use crate::exactness::wait_gone;

/// The bridge, where the test listens, and the guest.
const SERVER: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";
const PORT: u16 = 9000;
/// The taps.
const TAPS: [&str; 2] = ["sftap0", "sftap1"];
/// One way through the relay.
const DELAY: Duration = Duration::from_millis(20);
/// Numbers that must come after each move.
const MORE: u64 = 20;

/// What came over the connection.
#[derive(Debug, Default)]
struct Heard {
    last: u64,
    at: Option<Instant>,
    /// The longest time between two numbers since this was last taken.
    gap: Duration,
    /// How it ended.
    end: Option<String>,
}

impl Heard {
    fn take(&mut self, line: &str) {
        match line.trim().parse::<u64>() {
            Ok(number) if number == self.last + 1 => self.last = number,
            _ => self.end = Some(format!("{line:?} after {}", self.last)),
        }
        let now = Instant::now();
        if let Some(before) = self.at.replace(now) {
            self.gap = self.gap.max(now - before);
        }
    }
}

type Shared = Arc<Mutex<Heard>>;

fn look(heard: &Shared) -> MutexGuard<'_, Heard> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

fn listen(stream: TcpStream, heard: &Shared) {
    for line in BufReader::new(stream).lines() {
        match line {
            Ok(line) => look(heard).take(&line),
            Err(error) => look(heard).end = Some(error.to_string()),
        }
    }
    look(heard).end.get_or_insert("it was closed".to_owned());
}

fn wait_for(heard: &Shared, number: u64) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let now = look(heard);
        if let Some(end) = &now.end {
            bail!("the connection is lost: {end}");
        }
        if now.last >= number {
            return Ok(());
        }
        drop(now);
        thread::sleep(Duration::from_millis(5));
    }
    bail!("no number {number} within {PATIENCE:?}")
}

/// The bridge and its taps, in the namespace of this process.
fn network() -> Result<()> {
    let address = format!("{SERVER}/24");
    let mut lines = vec![
        "link set lo up".to_owned(),
        "link add sfbr type bridge".to_owned(),
        format!("addr add {address} dev sfbr"),
        "link set sfbr up".to_owned(),
    ];
    for tap in TAPS {
        lines.push(format!("tuntap add dev {tap} mode tap"));
        lines.push(format!("link set {tap} master sfbr"));
        lines.push(format!("link set {tap} up"));
    }
    for line in lines {
        let done = Command::new("ip").args(line.split(' ')).output()?;
        ensure!(
            done.status.success(),
            "ip {line}: {}",
            String::from_utf8_lossy(&done.stderr)
        );
    }
    Ok(())
}

/// Runs in a namespace of its own.
pub fn run(moves: u32, relayed: u32) -> Result<()> {
    let done = Command::new("unshare")
        .arg("--net")
        .arg(std::env::current_exe()?)
        .args(["to-and-fro", "--inside"])
        .args([
            "--moves",
            &moves.to_string(),
            "--relayed",
            &relayed.to_string(),
        ])
        .status()?;
    ensure!(done.success(), "see above");
    Ok(())
}

/// One move of the VM of process `pid`, through a relay or not.
fn perform(
    stillframe: &Stillframe,
    order: &Order,
    pid: i32,
    relayed: bool,
) -> Result<stillframe_harness::migration::Arrived> {
    match relayed {
        true => order.perform_delayed(stillframe, pid, DELAY),
        false => order.perform(stillframe, pid),
    }
}

/// Runs in the namespace of this process.
pub fn inside(moves: u32, relayed: u32) -> Result<()> {
    network()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let listener = TcpListener::bind((SERVER, PORT))?;
    let heard = Shared::default();
    let own = heard.clone();
    thread::spawn(move || {
        if let Ok((stream, _)) = listener.accept() {
            listen(stream, &own);
        }
    });
    let netdev = format!("tap,id=n0,ifname={},script=no,downscript=no", TAPS[0]);
    let guest = Setup::small(Kind::Private, "mover")
        .with_drivers(&format!("sf.net={GUEST}:{SERVER}:{PORT}"))
        .with(&["-netdev", &netdev, "-device", "virtio-net-pci,netdev=n0"])
        .boot()?;
    wait_for(&heard, MORE)?;
    let (mut pid, mut arrived, mut raw) = (guest.pid(), None, Vec::new());
    for number in 0..moves {
        let through = number >= moves.saturating_sub(relayed);
        let (from, to) = match number % 2 {
            0 => (TAPS[0], TAPS[1]),
            _ => (TAPS[1], TAPS[0]),
        };
        let mut order = Order::of(&guest, format!("move-{number}"));
        order.receive.push(format!("--map={from}={to}"));
        look(&heard).gap = Duration::ZERO;
        let next = perform(&stillframe, &order, pid, through)?;
        let last = look(&heard).last;
        wait_for(&heard, last + MORE)?;
        wait_gone(pid)?;
        let gap = look(&heard).gap;
        let downtime = next.sent["downtime_us"].as_u64().context("downtime_us")?;
        eprintln!("{number:3} relayed {through}: down {downtime} us, longest gap {gap:?}");
        raw.push(json!({
            "move": number, "relayed": through, "gap_ms": gap.as_millis() as u64,
            "sent": next.sent, "received": next.report,
        }));
        pid = next.vm.pid;
        arrived = Some(next);
    }
    let gap_of = |through: bool| {
        let moves = raw.iter().filter(|one| one["relayed"] == through);
        moves
            .filter_map(|one| one["gap_ms"].as_u64())
            .max()
            .unwrap_or(0)
    };
    println!(
        "{moves} moves, {} numbers, no connection lost; longest gap {} ms, through the relay {} ms",
        look(&heard).last,
        gap_of(false),
        gap_of(true)
    );
    results::write_raw("to-and-fro", "moves.jsonl", &raw)?;
    let command = "cargo xtask bench to-and-fro";
    let enough = moves >= 50 && relayed >= 10;
    let lost = f64::from(u8::from(look(&heard).end.is_some()));
    let lost = Claim::new("to-and-fro-lost", Goal::Zero, lost, "connections", command);
    results::write_summary("to-and-fro", &[lost.if_enough(enough)])?;
    // Until here the connection had to live.
    drop(arrived);
    Ok(())
}
