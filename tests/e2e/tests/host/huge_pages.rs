//! A guest whose memory is made of huge pages (hugetlb), which are protected as a whole: checkpoints are exact,
//! copy-on-write is refused, and the VM comes back with huge pages.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

use crate::alone;

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
const PAGE_MIB: u64 = 2;
const RAM_MIB: u32 = 192;

/// Reserves huge pages, and releases them when dropped.
struct Reserved {
    before: String,
}

impl Reserved {
    /// For a VM and the one that it is restored as.
    fn new() -> Result<Reserved> {
        let before = fs::read_to_string(RESERVED).context("this kernel has no huge pages")?;
        let wanted = before.trim().parse::<u64>()? + 2 * u64::from(RAM_MIB) / PAGE_MIB;
        let reserved = Reserved { before };
        fs::write(RESERVED, wanted.to_string())?;
        let there: u64 = fs::read_to_string(RESERVED)?.trim().parse()?;
        ensure!(there == wanted, "{there} huge pages instead of {wanted}");
        Ok(reserved)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let _ = fs::write(RESERVED, self.before.trim());
    }
}

/// What the VM's memory takes of the huge pages, in KiB.
fn huge_kib(pid: i32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("HugetlbPages:"));
    let words = line.and_then(|line| line.split_whitespace().next());
    Ok(words.context("no HugetlbPages in status")?.parse()?)
}

#[test]
fn a_guest_in_huge_pages_is_checkpointed_and_restored() -> Result<()> {
    let _alone = alone();
    let _reserved = Reserved::new()?;
    for share in ["on", "off"] {
        exact(share).with_context(|| format!("share={share}"))?;
    }
    Ok(())
}

fn exact(share: &str) -> Result<()> {
    let memory = format!(
        "memory-backend-memfd,id=mem,size={RAM_MIB}M,hugetlb=on,hugetlbsize={PAGE_MIB}M,share={share}"
    );
    let mut setup = Setup::small(Kind::Private, "huge").with(&[
        "-object",
        &memory,
        "-machine",
        "memory-backend=mem",
    ]);
    setup.ram_mib = RAM_MIB;
    let guest = setup.boot()?;
    ensure!(huge_kib(guest.pid())? > 0, "its memory is not huge");
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let pid = guest.pid_text();
    for schedule in ["auto", "pre-copy", "stop-copy"] {
        let line = [
            "watch",
            "--pid",
            &pid,
            "--every",
            "200ms",
            "--count",
            "4",
            "--verify",
            "--schedule",
            schedule,
        ];
        for report in stillframe.json_lines(&line)? {
            ensure!(report["verify"]["differing"] == 0, "{schedule}: {report}");
        }
    }
    let refused = ["checkpoint", "--pid", &pid, "--schedule", "copy-on-write"];
    let said = stillframe.fails(&refused, 5)?;
    ensure!(said.contains("pages of 2097152 bytes"), "{said}");
    let mut monitor = guest.second_monitor()?;
    expect_untouched(&guest, &mut monitor)?;
    let restored = Restored::start(&stillframe, "latest", guest.folder(), &["--verify"])?;
    restored.serial.wait_ticks(3, PATIENCE)?;
    ensure!(huge_kib(restored.pid)? > 0, "its memory is huge no more");
    let state = restored.monitor()?.execute("query-status", json!({}))?;
    ensure!(state["status"] == "running", "{state}");
    Ok(())
}
