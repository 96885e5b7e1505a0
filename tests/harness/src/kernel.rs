//! The host's kernel, made to swap, to collapse huge pages or to move pages, and its counts of that.
//! Settings are restored on drop.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The memory controller of control groups, version 1.
const MEMORY_GROUPS: &str = "/sys/fs/cgroup/memory";

/// A kernel setting, restored on drop.
#[derive(Debug)]
pub struct Setting {
    path: PathBuf,
    before: String,
}

impl Setting {
    /// Writes `value` to a file of `/sys` or `/proc/sys`.
    pub fn set(path: &str, value: &str) -> Result<Setting> {
        let path = PathBuf::from(path);
        let text = fs::read_to_string(&path)
            .with_context(|| format!("this kernel has no {}", path.display()))?;
        // `always [madvise] never`, or the value itself.
        let chosen = text.split(['[', ']']).nth(1).unwrap_or(text.trim());
        let before = chosen.to_owned();
        fs::write(&path, value).with_context(|| format!("{value} > {}", path.display()))?;
        Ok(Setting { path, before })
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        let _ = fs::write(&self.path, &self.before);
    }
}

/// 2 GiB of swap on a loop device, switched off on drop.
#[derive(Debug)]
pub struct Swap(String);

impl Swap {
    /// Switches it on; its content lies in `folder`.
    pub fn on(folder: &Path) -> Result<Swap> {
        let file = folder.join("swap").display().to_string();
        let line = format!(
            "fallocate -l 2G {file} && chmod 600 {file} && mkswap -q {file} && d=$(losetup -f --show {file}) && swapon $d && echo $d"
        );
        let output = Command::new("sh").args(["-c", &line]).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(Swap(String::from_utf8(output.stdout)?.trim().to_owned()))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let line = format!("swapoff {0}; losetup -d {0}", self.0);
        let _ = Command::new("sh").args(["-c", &line]).status();
    }
}

/// A memory limit for one process, by which the kernel swaps its pages. Only pages that the process touches
/// after it was put there count.
#[derive(Debug)]
pub struct Squeeze(PathBuf);

impl Squeeze {
    /// Puts the process into a control group of its own, without a limit.
    pub fn on(pid: i32) -> Result<Squeeze> {
        let group = Path::new(MEMORY_GROUPS).join(format!("stillframe-e2e-{pid}"));
        fs::create_dir(&group).context("no memory controller of control groups, version 1")?;
        // Where swap is too slow the process waits for the end of the squeeze.
        fs::write(group.join("memory.oom_control"), "1")?;
        fs::write(group.join("cgroup.procs"), pid.to_string())?;
        Ok(Squeeze(group))
    }

    /// Limits memory to `bytes`; -1 lifts the limit.
    pub fn limit(&self, bytes: i64) {
        // Pages that cannot be swapped now stay.
        let _ = fs::write(self.0.join("memory.limit_in_bytes"), bytes.to_string());
    }

    /// Bytes in memory now.
    pub fn usage(&self) -> Result<i64> {
        let usage = fs::read_to_string(self.0.join("memory.usage_in_bytes"))?;
        Ok(usage.trim().parse()?)
    }
}

impl Drop for Squeeze {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// A counter of `/proc/vmstat`, such as `pswpout`, since the machine started.
pub fn count(name: &str) -> Result<u64> {
    let all = fs::read_to_string("/proc/vmstat")?;
    let mut lines = all.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = value.with_context(|| format!("no {name} in /proc/vmstat"))?;
    Ok(value.trim().parse()?)
}

/// KiB of a process in anonymous huge pages.
pub fn huge_kib(pid: i32) -> Result<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let mut lines = rollup.lines();
    let huge = lines.find_map(|line| line.strip_prefix("AnonHugePages:"));
    let huge = huge.and_then(|line| line.split_whitespace().next());
    Ok(huge.context("no AnonHugePages in smaps_rollup")?.parse()?)
}
