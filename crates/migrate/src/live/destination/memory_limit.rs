//! Whether there is memory for what arrives.
//!
//! A process that goes over the limit of its control group, or over what the machine has, is killed without an error.
//! So the limits are looked at before, every few MiB, and a VM that does not fit is refused while its source still has
//! it.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use limosa_memory::{MemcgHeadroom, MemoryBlock};
use limosa_page::PAGE_SIZE;

use crate::pages::PageError;

/// Bytes between two looks.
const STEP: u64 = 64 << 20;

/// Bytes that may still be taken before the next look.
pub(super) struct MemoryLimit {
    headroom: MemcgHeadroom,
    granted: AtomicU64,
}

impl MemoryLimit {
    pub(super) fn new() -> Self {
        Self { headroom: MemcgHeadroom::of_this_process(), granted: AtomicU64::new(0) }
    }

    /// Memory that is about to be filled for the first time.
    pub(super) fn reserve(&self, bytes: u64, block: &MemoryBlock) -> Result<(), PageError> {
        // A pool of huge pages has its own limit, and answers by itself.
        if block.page_size() != PAGE_SIZE {
            return Ok(());
        }
        if self.granted.fetch_update(Relaxed, Relaxed, |granted| granted.checked_sub(bytes)).is_ok() {
            return Ok(());
        }
        let Some(left) = self.headroom.left() else {
            self.granted.store(u64::MAX / 2, Relaxed);
            return Ok(());
        };
        // Where there is swap, memory that is short is slow and no more.
        if left < bytes && !has_swap() {
            return Err(format!(
                "out of memory for RAM block {}: the limit of this process is reached (the machine's memory, or the control \
                 group's memory.max)",
                block.name()
            )
            .into());
        }
        self.granted.store((left / 2).min(STEP).saturating_sub(bytes), Relaxed);
        Ok(())
    }
}

fn has_swap() -> bool {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = text.lines().find_map(|line| line.strip_prefix("SwapFree:"));
    free.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok()).is_some_and(|free| free > 0)
}
