//! The commands of a postcopy source before the guest runs at the destination.
//!
//! The recipe for resuming at once from a stored VM, all RAM missing: header, return path, advise, RAM START, at least
//! one discard, the package of device state. Without a discard a QEMU destination (10.0) deadlocks: its state machine
//! goes through "discard" on the way to "listening" only if a discard was seen. So every block is discarded as a whole.

use crate::command::{Command, PageSizes};
use crate::configuration::Configuration;
use crate::error::EncodeError;
use crate::ram::{self, PAGE_SIZE, RamBlock};
use limosa_page::to_u64;

/// Token of the PING in the prologue: its PONG proves the return path.
pub const PING_RETURN_PATH: u32 = 1;
/// Token of the PING inside the package: its PONG says that the devices are loaded.
pub const PING_LOADED: u32 = 3;
/// Token of the PING behind the package.
pub const PING_PACKAGED: u32 = 4;
/// Token of the PING behind the device sections of a precopy: its PONG says that everything before it is loaded, and a
/// destination of this kind then waits for [`PING_COMMIT`]. (A stock destination answers it and waits for nothing.)
pub const PING_READY: u32 = 6;
/// Token of the last PING of a precopy, which is the source's word that the destination may run the VM once the stream
/// has ended. It is not waited for.
pub const PING_COMMIT: u32 = 7;

/// Appends everything from the file header to the last discard: what a postcopy source sends before the package.
///
/// The capabilities are left out of `configuration` (neither of the validated ones goes with postcopy), and page sizes
/// are named only for blocks whose pages are larger than 4096 bytes, as a destination expects it.
///
/// `early_sections` are device sections that come before the pages ([`Event::EarlyDevice`](crate::Event::EarlyDevice)).
///
/// # Errors
/// Blocks or a configuration that the format cannot hold; no block with pages.
pub fn encode_postcopy_prologue(
    configuration: &Configuration,
    section_id: u32,
    blocks: &[RamBlock],
    early_sections: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), EncodeError> {
    let blocks = for_postcopy(blocks);
    Configuration { capabilities: Vec::new(), ..configuration.clone() }.encode(out)?;
    Command::OpenReturnPath.encode(out)?;
    Command::Ping(PING_RETURN_PATH).encode(out)?;
    let summary = blocks.iter().fold(0, |summary, block| summary | block.page_size.unwrap_or(PAGE_SIZE));
    Command::PostcopyAdvise(Some(PageSizes { summary, target: PAGE_SIZE })).encode(out)?;
    ram::encode_ram_start(section_id, &blocks, out)?;
    out.extend_from_slice(early_sections);
    encode_discards(&blocks, out)
}

/// Appends a discard of each whole block.
///
/// # Errors
/// No block has pages: without any discard the destination would hang.
pub fn encode_discards(blocks: &[RamBlock], out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let mut discards = 0u64;
    for block in blocks.iter().filter(|block| block.used_length > 0) {
        let whole = std::iter::once(0..block.used_length).collect();
        Command::RamDiscard { block: block.name.clone(), ranges: whole }.encode(out)?;
        discards += 1;
    }
    if discards == 0 {
        let rule = "postcopy needs at least one";
        return Err(EncodeError::Number { what: "number of RAM blocks with pages", value: 0, rule });
    }
    Ok(())
}

/// The package: LISTEN, the device sections, a PING of `ping` if given, RUN. `sections` is the byte run from the first
/// FULL section to the last footer, without the end byte and the description behind it.
///
/// # Errors
/// Sections beyond the 32 bits of a package's length.
pub fn postcopy_package(sections: &[u8], ping: Option<u32>) -> Result<Vec<u8>, EncodeError> {
    let mut package = Vec::with_capacity(sections.len().saturating_add(64));
    Command::PostcopyListen.encode(&mut package)?;
    package.extend_from_slice(sections);
    if let Some(token) = ping {
        Command::Ping(token).encode(&mut package)?;
    }
    Command::PostcopyRun.encode(&mut package)?;
    package_length(&package)?;
    Ok(package)
}

/// Appends the command PACKAGED and the package itself.
///
/// # Errors
/// A package beyond the 32 bits of its length.
pub fn encode_packaged(package: &[u8], out: &mut Vec<u8>) -> Result<(), EncodeError> {
    Command::Packaged { length: package_length(package)? }.encode(out)?;
    out.extend_from_slice(package);
    Ok(())
}

fn package_length(package: &[u8]) -> Result<u32, EncodeError> {
    u32::try_from(package.len()).map_err(|_| EncodeError::Number {
        what: "length of the package",
        value: to_u64(package.len()),
        rule: "at most 2^32 - 1",
    })
}

/// The blocks as a postcopy stream lists them.
fn for_postcopy(blocks: &[RamBlock]) -> Vec<RamBlock> {
    let listed = |block: &RamBlock| RamBlock {
        page_size: block.page_size.filter(|size| *size > PAGE_SIZE),
        ..RamBlock::new(block.name.clone(), block.used_length)
    };
    blocks.iter().map(listed).collect()
}
