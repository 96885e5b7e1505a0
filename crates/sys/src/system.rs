//! Facts about the machine this process runs on.

use std::fs;
use std::io;

/// Whether any swap space is in use by the system (any entry in `/proc/swaps`, proc(5)).
///
/// Answers yes when this cannot be found out: callers skip work only when there is certainly no swap.
pub fn has_swap() -> bool {
    match fs::read_to_string("/proc/swaps") {
        Ok(text) => text.lines().skip(1).any(|line| !line.trim().is_empty()),
        Err(_) => true,
    }
}

/// Whether the kernel merges equal pages of programs that allow it, as QEMU does (KSM:
/// `/sys/kernel/mm/ksm/run`, Documentation/admin-guide/mm/ksm.rst). No where the kernel lacks it.
pub fn merges_pages() -> bool {
    fs::read_to_string("/sys/kernel/mm/ksm/run").is_ok_and(|run| run.trim() == "1")
}

/// The machine's memory in bytes (sysinfo(2)).
pub fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into())
}

/// A value that is new with every boot of this machine (`/proc/sys/kernel/random/boot_id`), or
/// nothing when the kernel does not give one.
pub fn boot_id() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}

/// From here on no core dump contains the memory of this process. Other processes of its user can neither trace it
/// nor read its memory and environment (`PR_SET_DUMPABLE` 0, prctl(2)). Root still can. A program that is executed
/// later begins anew.
///
/// # Errors
/// None is known; a kernel that has no such call.
pub fn forbid_dumps() -> io::Result<()> {
    let none = rustix::process::DumpableBehavior::NotDumpable;
    Ok(rustix::process::set_dumpable_behavior(none)?)
}

/// The machine's name as uname(2) gives it.
pub fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_name_and_a_boot() {
        assert!(!host_name().is_empty());
        let info = fs::read_to_string("/proc/meminfo").unwrap();
        let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib: u64 = total
            .unwrap()
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .unwrap();
        assert_eq!(memory_bytes(), kib << 10);
        assert_eq!(boot_id().len(), 36);
        assert_eq!(boot_id(), boot_id());
        let swaps = fs::read_to_string("/proc/swaps").unwrap();
        assert_eq!(has_swap(), swaps.lines().count() > 1);
    }
}
