//! Where a physical address of the guest lies in QEMU's memory: the human monitor's `gpa2hva`.

use super::{Monitor, MonitorError};

impl Monitor {
    /// The address in QEMU's memory of this physical address of the guest. `None` where the guest has no RAM.
    ///
    /// Source: QEMU, `monitor/hmp-cmds-target.c` (`hmp_gpa2hva`).
    pub(crate) fn host_address(&mut self, guest_address: u64) -> Result<Option<u64>, MonitorError> {
        Ok(parse(&self.human(&format!("gpa2hva {guest_address:#x}"))?))
    }
}

/// Reads `Host virtual address for 0x1000 (pc.ram) is 0x7f0000001000`; anything else says that there is none.
pub(crate) fn parse(answer: &str) -> Option<u64> {
    let words = answer.trim().strip_prefix("Host virtual address for ")?;
    let (_, address) = words.rsplit_once(" is 0x")?;
    let plain = address.bytes().all(|digit| digit.is_ascii_hexdigit());
    plain.then(|| u64::from_str_radix(address, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn only_an_address_is_one() {
        let found = "Host virtual address for 0x100000000 (pc.ram) is 0x7f81c0000000\r\n";
        assert_eq!(parse(found), Some(0x7f81_c000_0000));
        for none in [
            "No memory is mapped at address 0x100000000\r\n",
            "Memory at address 0xa0000 is not RAM\r\n",
            "Host virtual address for 0x0 (pc.ram) is (nil)",
            "Host virtual address for 0x0 (pc.ram) is 0x+7f",
            "",
        ] {
            assert_eq!(parse(none), None, "{none}");
        }
    }
}
