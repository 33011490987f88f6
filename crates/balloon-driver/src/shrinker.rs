//! The driver's shrinker.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

/// Takes back, when memory is short, the free blocks that the driver holds because the device has not sent DONE.
///
/// The device is not notified: the guest may write the blocks at once.
#[derive(Debug, Clone, Default)]
pub struct Shrinker {
    held: Arc<Mutex<Vec<Range<u64>>>>,
}

impl Shrinker {
    /// Takes back up to `blocks` of them, the last ones first.
    pub fn take_back(&self, blocks: usize) -> Vec<Range<u64>> {
        let mut held = self.held.lock();
        let rest = held.len().saturating_sub(blocks);
        held.split_off(rest)
    }

    /// Takes back the block at this address. Returns whether the driver held it.
    pub fn take_back_at(&self, address: u64) -> bool {
        let mut held = self.held.lock();
        let found = held.iter().position(|block| block.start == address);
        found.map(|index| held.swap_remove(index)).is_some()
    }

    /// Number of these blocks.
    pub fn held(&self) -> usize {
        self.held.lock().len()
    }

    /// Holds another block, as a driver that was moved holds those that it has hinted before.
    pub(crate) fn hold(&self, block: Range<u64>) {
        self.held.lock().push(block);
    }
}
