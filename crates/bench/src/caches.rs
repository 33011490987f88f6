//! The processor's caches: how large they are, and what is in them when a run begins.
//!
//! **Cold** memory: at least twice as much as the last cache holds was written elsewhere since it was touched. **Hot**
//! memory was read, all of it, right before. Of memory larger than a cache only a part is in it then.

use std::fs;

use anyhow::Result;

use crate::frame::Frame;
use crate::raw::Mapping;

/// Assumed where the kernel does not report it, in bytes.
const UNKNOWN: u64 = 32 << 20;

/// The state of the caches for memory that is read next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caches {
    Hot,
    Cold,
}

impl Caches {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Cold => "cold",
        }
    }

    /// Has it so for `memory`. Takes and frees at least as much as `frame` says, too.
    pub(crate) fn prepare(self, memory: &Mapping, frame: &Frame) -> Result<()> {
        Frame { touch: frame.touch.max(2 * last_level()) }.touch()?;
        if self == Self::Hot {
            let lines = memory.bytes().iter().step_by(64);
            std::hint::black_box(lines.fold(0, |all, byte| all ^ byte));
        }
        Ok(())
    }
}

/// Bytes of the largest cache.
pub(crate) fn last_level() -> u64 {
    known_last_level().unwrap_or(UNKNOWN)
}

/// Bytes of the largest cache, if the kernel reports it. A virtual machine's may be one that others use, too.
pub(crate) fn known_last_level() -> Option<u64> {
    sizes().into_iter().map(|(_, bytes)| bytes).max()
}

/// Bytes of a core's own cache of the second level.
pub(crate) fn second_level() -> u64 {
    sizes().into_iter().find(|(level, _)| *level == 2).map_or(UNKNOWN, |(_, bytes)| bytes)
}

/// Level and bytes of each cache of the first core (sysfs-devices-system-cpu).
fn sizes() -> Vec<(u32, u64)> {
    let read = |index: u32, file: &str| {
        fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}")).ok()
    };
    let one = |index| Some((read(index, "level")?.trim().parse().ok()?, bytes(read(index, "size")?.trim())?));
    (0..8).map_while(one).collect()
}

/// Parses a size as the kernel prints it: `2048K`.
fn bytes(size: &str) -> Option<u64> {
    size.strip_suffix('K')?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_of_the_kernel_is_read_in_bytes() {
        assert_eq!([bytes("2048K"), bytes("48K"), bytes(""), bytes("1M")], [Some(2 << 20), Some(48 << 10), None, None]);
        assert!(last_level() >= second_level() && second_level() > 0);
    }

    #[test]
    fn memory_is_made_hot_without_being_changed() {
        let mut memory = Mapping::anonymous(1 << 20).expect("maps");
        memory.bytes_mut().fill(7);
        Caches::Hot.prepare(&memory, &Frame { touch: 1 << 20 }).expect("prepares");
        assert!(memory.bytes().iter().all(|byte| *byte == 7));
    }
}
