//! RAM blocks as QEMU tells them: `info ramblock`, text for people that no QMP command replaces.

use super::{Answer, Monitor, Question, hmp_answer, hmp_question};
use crate::qmp::QmpError;

/// More blocks than any machine has; the rest is not read.
const MAX_BLOCKS: usize = 4096;

/// A RAM block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamBlockInfo {
    /// The name that the stream uses, for example `pc.ram` or `0000:00:02.0/vga.vram`.
    pub name: String,
    /// Page size of its backing, in bytes: 4 KiB, or that of its huge pages.
    pub page_size: u64,
    /// Bytes in use, those that are migrated.
    pub used_length: u64,
    /// Bytes up to which it may grow.
    pub total_length: u64,
    /// Where its memory begins in QEMU's address space; `None` for a QEMU that does not say so.
    pub host_address: Option<u64>,
}

/// Reads the table of `info ramblock`: name, page size as number and unit, then offset, used and total length in
/// hexadecimal; what follows differs between versions. Lines of any other shape, such as the heading, are left out.
#[must_use]
pub fn parse_ram_blocks(table: &str) -> Vec<RamBlockInfo> {
    table.lines().filter_map(line).take(MAX_BLOCKS).collect()
}

fn line(line: &str) -> Option<RamBlockInfo> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    // A name may hold spaces: find the page size, which has exactly one shape.
    words.windows(5).enumerate().skip(1).find_map(|(at, columns)| {
        let [count, unit, offset, used, total] = columns else { return None };
        let host_address = words.get(at + columns.len()).and_then(|word| hexadecimal(word));
        let page_size = page_size(count, unit)?;
        hexadecimal(offset)?;
        let (used_length, total_length) = (hexadecimal(used)?, hexadecimal(total)?);
        let name = words.get(..at)?.join(" ");
        Some(RamBlockInfo { name, page_size, used_length, total_length, host_address })
    })
}

fn page_size(count: &str, unit: &str) -> Option<u64> {
    let shift = match unit {
        "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    count.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|size| size.is_power_of_two())
}

fn hexadecimal(word: &str) -> Option<u64> {
    u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
}

impl Monitor {
    /// All RAM blocks.
    ///
    /// # Errors
    /// The connection's.
    pub fn ram_blocks(&self) -> Result<Vec<RamBlockInfo>, QmpError> {
        let (command, arguments) = question();
        answer(self.qmp().execute(command, arguments))
    }
}

pub(super) fn question() -> Question {
    hmp_question("info ramblock")
}

pub(super) fn answer(answer: Answer) -> Result<Vec<RamBlockInfo>, QmpError> {
    hmp_answer(answer?).map(|table| parse_ram_blocks(&table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_of_the_table_are_read() {
        let with_addresses = "\
              Block Name    PSize              Offset               Used              Total                HVA  RO
                  pc.ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000 0x00007fa037e00000  rw\r
    /rom@etc/acpi/tables    4 KiB  0x0000000004080000 0x0000000000020000 0x0000000000200000 0x00007fa086a00000  ro\r
";
        let blocks = parse_ram_blocks(with_addresses);
        assert_eq!(blocks.len(), 2);
        assert_eq!((blocks[0].name.as_str(), blocks[0].page_size, blocks[0].used_length), ("pc.ram", 4096, 1 << 26));
        assert_eq!((blocks[1].used_length, blocks[1].total_length), (0x20000, 0x20_0000));
        assert_eq!(blocks[0].host_address, Some(0x7fa0_37e0_0000));
        let without = "  my mem    2 MiB  0x0 0x40000000 0x40000000\n";
        let blocks = parse_ram_blocks(without);
        assert_eq!((blocks[0].name.as_str(), blocks[0].page_size), ("my mem", 2 << 20));
        assert_eq!(blocks[0].host_address, None);
    }

    #[test]
    fn nonsense_yields_no_block_and_no_panic() {
        for text in [
            "",
            "pc.ram 4 KiB 0x0 0x1",
            "pc.ram 3 KiB 0x0 0x1 0x2",
            "pc.ram 18446744073709551615 GiB 0x0 0x1 0x2",
            "pc.ram 4 KiB 0x0 0x11111111111111111 0x2",
            "4 KiB 0x0 0x1 0x2",
        ] {
            assert_eq!(parse_ram_blocks(text), [], "{text}");
        }
    }
}
