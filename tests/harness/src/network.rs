//! Two hosts of a test: network namespaces, joined by a link of a chosen speed. They end when dropped.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::cli::behind;

/// Where the first host's end of the link is, and the second's.
pub const ADDRESSES: [&str; 2] = ["10.78.0.1", "10.78.0.2"];
/// The names of the ends.
const ENDS: [&str; 2] = ["sflink0", "sflink1"];
/// The longest frame that a bucket of tokens must let pass: what the kernel sends in one piece.
const BURST_BYTES_MIN: u64 = 128 << 10;
/// Time in which a bucket of tokens fills. On a busy machine the kernel refills it late, and the tokens beyond its size are
/// lost. At 10 Gbit a second, 7 to 8.8 Gbit pass with a bucket of 1 ms, and 9.4 with one of 2 ms.
const BUCKET_US: u64 = 1000;
/// The same of a link that is faster than 1 Gbit a second.
const FAST_BUCKET_US: u64 = 2000;
/// Time that a full queue takes.
const QUEUE: &str = "20ms";

/// A network namespace. It ends with its holder, a process that does nothing.
#[derive(Debug)]
pub struct Namespace {
    holder: Child,
}

impl Namespace {
    fn new() -> Result<Namespace> {
        // It also ends with a test that is killed.
        let holder = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "unshare",
                "--net",
                "sleep",
                "infinity",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("unshare")?;
        let namespace = Namespace { holder };
        let own = std::fs::read_link("/proc/self/ns/net")?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::fs::read_link(namespace.file())? == own {
            ensure!(Instant::now() < deadline, "no network namespace");
            std::thread::sleep(Duration::from_millis(2));
        }
        namespace.run("ip link set lo up")?;
        Ok(namespace)
    }

    fn file(&self) -> String {
        format!("/proc/{}/ns/net", self.holder.id())
    }

    /// The words before a command line that is to run in it. The command has the process id that it would have without.
    pub fn words(&self) -> [String; 2] {
        ["nsenter".to_owned(), format!("--net={}", self.file())]
    }

    /// The command, to run in it.
    pub fn enter(&self, command: &Command) -> Command {
        let [program, file] = self.words();
        behind(&program, &[&file], command)
    }

    /// Runs a line of words in it, and returns what it printed.
    fn run(&self, line: &str) -> Result<String> {
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap_or_default());
        let done = self.enter(command.args(words)).output()?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "{line}: {said}");
        Ok(String::from_utf8(done.stdout)?)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Two hosts and the link between them.
#[derive(Debug)]
pub struct Link {
    /// The hosts, at [`ADDRESSES`].
    pub hosts: [Namespace; 2],
}

impl Link {
    /// A link as quick as this machine.
    pub fn new() -> Result<Link> {
        let hosts = [Namespace::new()?, Namespace::new()?];
        let [first, second] = &hosts;
        let [here, there] = ENDS;
        first.run(&format!("ip link add {here} type veth peer name {there}"))?;
        let holder = second.holder.id();
        first.run(&format!("ip link set {there} netns {holder}"))?;
        for ((host, end), address) in hosts.iter().zip(ENDS).zip(ADDRESSES) {
            host.run(&format!("ip addr add {address}/24 dev {end}"))?;
            host.run(&format!("ip link set {end} up"))?;
        }
        Ok(Link { hosts })
    }

    /// Limits both directions to `mbit` Mbit a second from here on.
    pub fn shape(&self, mbit: u64) -> Result<()> {
        let bucket_us = match mbit {
            0..=1000 => BUCKET_US,
            _ => FAST_BUCKET_US,
        };
        let burst = (mbit * bucket_us / 8).max(BURST_BYTES_MIN);
        for (host, end) in self.hosts.iter().zip(ENDS) {
            let line = format!(
                "tc qdisc replace dev {end} root tbf rate {mbit}mbit burst {burst} latency {QUEUE}"
            );
            host.run(&line)?;
        }
        Ok(())
    }

    /// Bytes that have crossed it in both directions, headers of the network included.
    pub fn bytes(&self) -> Result<u64> {
        let [first, _] = &self.hosts;
        let text = first.run(&format!("ip -s -j link show dev {}", ENDS[0]))?;
        let links: Value = serde_json::from_str(&text)?;
        let count = |way: &str| links[0]["stats64"][way]["bytes"].as_u64();
        match (count("rx"), count("tx")) {
            (Some(rx), Some(tx)) => Ok(rx + tx),
            _ => bail!("no counters of {}: {text}", ENDS[0]),
        }
    }
}
