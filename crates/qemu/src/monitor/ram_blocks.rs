//! Reading the table that the human monitor prints for `info ramblock`.

use super::RamBlock;

/// Upper bound on the lines; no VM has as many blocks.
const BLOCKS_MAX: usize = 4096;

/// Upper bound on the bytes of all blocks. The engine's memory is proportional to them (a byte a page, at most).
/// The bound is four times the memory of the largest machines of today.
const BYTES_MAX: u64 = 64 << 40;

/// Reads the table; `Err` contains the part that was not understood.
///
/// A line is `NAME  4 KiB  0xOFFSET 0xUSED 0xTOTAL 0xHVA rw` (QEMU: `system/physmem.c`,
/// `ram_block_format`; the last column is missing before 8.0). Blocks without a name are not part
/// of QEMU's migration stream either (`memory_region_init_ram_nomigrate`) and are passed over.
pub(crate) fn parse(table: &str) -> Result<Vec<RamBlock>, String> {
    let mut lines = table.lines();
    let heading = lines.next().unwrap_or_default();
    if !(heading.contains("Block Name") && heading.contains("HVA")) {
        return Err(format!("heading {heading:?}"));
    }
    let mut blocks: Vec<RamBlock> = Vec::new();
    let mut bytes: u64 = 0;
    for line in lines.filter(|line| !line.trim().is_empty()) {
        if blocks.len() == BLOCKS_MAX {
            return Err(format!("more than {BLOCKS_MAX} blocks"));
        }
        let block = parse_line(line).ok_or_else(|| format!("line {line:?}"))?;
        if block.name.is_empty() {
            continue;
        }
        if blocks.iter().any(|other| other.name == block.name) {
            return Err(format!("two blocks named {:?}", block.name));
        }
        bytes = bytes.saturating_add(block.total_bytes);
        if bytes > BYTES_MAX {
            return Err(format!("blocks of more than {BYTES_MAX} bytes"));
        }
        blocks.push(block);
    }
    if blocks.is_empty() {
        return Err("no block at all".to_owned());
    }
    Ok(blocks)
}

fn parse_line(line: &str) -> Option<RamBlock> {
    let mut columns: Vec<&str> = line.split_whitespace().collect();
    if matches!(columns.last(), Some(&"rw" | &"ro")) {
        columns.pop();
    }
    let address = hex(columns.pop()?)?;
    let total_bytes = hex(columns.pop()?)?;
    let used_bytes = hex(columns.pop()?)?;
    let offset = hex(columns.pop()?)?;
    let unit: u64 = match columns.pop()? {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    let page_bytes = columns.pop()?.parse::<u64>().ok()?.checked_mul(unit)?;
    let name = match columns.as_slice() {
        [] => "",
        [name] => name,
        _ => return None,
    };
    let sound = page_bytes.is_power_of_two()
        && page_bytes >= 4096
        && used_bytes <= total_bytes
        && total_bytes > 0
        && address.checked_add(total_bytes).is_some()
        && offset.checked_add(total_bytes).is_some();
    sound.then(|| RamBlock {
        name: name.to_owned(),
        page_bytes,
        offset,
        used_bytes,
        total_bytes,
        address,
    })
}

fn hex(column: &str) -> Option<u64> {
    let digits = column.strip_prefix("0x")?;
    // `from_str_radix` would take a sign.
    let plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    plain.then(|| u64::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const Q35: &str = "              Block Name    PSize              Offset               Used              Total                HVA  RO\r\n                  pc.ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000 0x00007f430fe00000  rw\r\n   0000:00:01.0/vga.vram    4 KiB  0x0000000004080000 0x0000000001000000 0x0000000001000000 0x00007f4360c00000  rw\r\n    /rom@etc/acpi/tables    4 KiB  0x0000000005100000 0x0000000000020000 0x0000000000200000 0x00007f4360400000  ro\r\n";

    #[test]
    fn a_real_table() {
        let blocks = parse(Q35).expect("a table of QEMU 10.0");
        let names: Vec<&str> = blocks.iter().map(|block| block.name.as_str()).collect();
        assert_eq!(
            names,
            ["pc.ram", "0000:00:01.0/vga.vram", "/rom@etc/acpi/tables"]
        );
        assert_eq!(
            blocks[2],
            RamBlock {
                name: "/rom@etc/acpi/tables".into(),
                page_bytes: 4096,
                offset: 0x510_0000,
                used_bytes: 0x2_0000,
                total_bytes: 0x20_0000,
                address: 0x7f43_6040_0000,
            }
        );
    }

    fn with_line(line: &str) -> Result<Vec<RamBlock>, String> {
        parse(&format!("Block Name PSize Offset Used Total HVA\n{line}\n"))
    }

    #[test]
    fn lines() {
        let good = [
            ("r 2 MiB 0x0 0x200000 0x200000 0x7f0000000000", 2 << 20),
            ("r 1 GiB 0x0 0x1 0x1 0x7f0000000000 rw", 1 << 30),
        ];
        for (line, page_bytes) in good {
            let blocks = with_line(line).expect(line);
            assert_eq!(blocks[0].page_bytes, page_bytes, "{line}");
        }
        let bad = [
            "",
            "r",
            "r 4 KiB 0x0 0x2 0x1 0x7f0000000000 rw",
            "r 4 KiB 0x0 0x1 0x1 0xffffffffffffffff rw",
            "r 4 KiB 0xffffffffffffffff 0x1 0x1 0x1 rw",
            "r 3 KiB 0x0 0x1 0x1 0x7f0000000000 rw",
            "r 4 EiB 0x0 0x1 0x1 0x7f0000000000 rw",
            "r 18446744073709551615 KiB 0x0 0x1 0x1 0x1 rw",
            "r 4 KiB 0x+1 0x1 0x1 0x7f0000000000 rw",
            "r 4 KiB 0x0 0x0 0x0 0x7f0000000000 rw",
            "two names 4 KiB 0x0 0x1 0x1 0x7f0000000000 rw",
            "r 4 KiB 0x0 0x1 0x10000000000000000 0x1 rw",
            "4 KiB 0x0 0x1 0x1 0x7f0000000000 rw",
        ];
        for line in bad {
            assert!(with_line(line).is_err(), "{line}");
        }
        assert!(parse("").is_err());
        assert!(parse("unknown command: 'info ramblock'\r\n").is_err());
        let twice = "r 4 KiB 0x0 0x1 0x1 0x1\nr 4 KiB 0x0 0x1 0x1 0x1";
        assert!(with_line(twice).is_err());
    }

    #[test]
    fn an_endless_table_is_refused() {
        let mut table = String::from("Block Name HVA\n");
        for number in 0..=BLOCKS_MAX {
            table.push_str(&format!("b{number} 4 KiB 0x0 0x1000 0x1000 0x1000 rw\n"));
        }
        assert!(parse(&table).is_err());
    }

    #[test]
    fn more_memory_than_any_machine_has_is_refused() {
        let line = |name: &str, bytes: u64| format!("{name} 4 KiB 0x0 0x1000 {bytes:#x} 0x1000\n");
        let table = |lines: &[String]| format!("Block Name HVA\n{}", lines.concat());
        assert!(parse(&table(&[line("a", BYTES_MAX)])).is_ok());
        assert!(parse(&table(&[line("a", BYTES_MAX), line("b", 4096)])).is_err());
        assert!(parse(&table(&[line("a", 1 << 62)])).is_err());
    }

    proptest! {
        #[test]
        fn damaged_tables_never_panic(at in 0..Q35.len(), byte in 0u8..128, cut in 0..Q35.len()) {
            let mut table = Q35.as_bytes().to_vec();
            table[at] = byte;
            table.truncate(cut);
            if let Ok(blocks) = parse(&String::from_utf8_lossy(&table)) {
                for block in blocks {
                    prop_assert!(block.used_bytes <= block.total_bytes);
                }
            }
        }
    }
}
