//! Blocks that are kept in memory, up to a limit; the longest unused one goes first.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;

/// Blocks in memory.
#[derive(Debug)]
pub(super) struct Kept {
    limit: u64,
    used: u64,
    blocks: HashMap<u64, Block>,
    /// Blocks by the time of their last use.
    by_use: BTreeMap<u64, u64>,
    clock: u64,
    /// Bytes of blocks that no read has asked for.
    unread: u64,
}

#[derive(Debug)]
struct Block {
    bytes: Bytes,
    used_at: u64,
    is_unread: bool,
}

impl Kept {
    /// At most `limit` bytes.
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, used: 0, blocks: HashMap::new(), by_use: BTreeMap::new(), clock: 0, unread: 0 }
    }

    /// Whether more may be prefetched while these bytes are on their way: at most a half of the memory is for blocks
    /// that nobody has read.
    pub(super) fn has_room(&self, on_their_way: u64) -> bool {
        self.unread + on_their_way < self.limit / 2
    }

    pub(super) fn contains(&self, block: u64) -> bool {
        self.blocks.contains_key(&block)
    }

    /// Returns a block that a read asks for.
    pub(super) fn read(&mut self, number: u64) -> Option<Bytes> {
        let block = self.blocks.get_mut(&number)?;
        self.clock += 1;
        self.by_use.remove(&block.used_at);
        self.by_use.insert(self.clock, number);
        block.used_at = self.clock;
        if std::mem::take(&mut block.is_unread) {
            self.unread -= block.bytes.len() as u64;
        }
        Some(block.bytes.clone())
    }

    pub(super) fn insert(&mut self, number: u64, bytes: Bytes, is_unread: bool) {
        let length = bytes.len() as u64;
        if length > self.limit || self.blocks.contains_key(&number) {
            return;
        }
        while self.used + length > self.limit {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            if let Some(block) = self.blocks.remove(&oldest) {
                let gone = block.bytes.len() as u64;
                self.used -= gone;
                self.unread -= if block.is_unread { gone } else { 0 };
            }
        }
        self.clock += 1;
        self.used += length;
        self.unread += if is_unread { length } else { 0 };
        self.by_use.insert(self.clock, number);
        self.blocks.insert(number, Block { bytes, used_at: self.clock, is_unread });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_unused_block_goes_first() {
        let mut kept = Kept::new(30);
        let block = |byte: u8| Bytes::from(vec![byte; 10]);
        (0..3).for_each(|number| kept.insert(number, block(0), true));
        assert!(!kept.has_room(0));
        assert_eq!(kept.read(0), Some(block(0)));
        kept.insert(3, block(3), false);
        assert!(kept.contains(0) && !kept.contains(1) && kept.contains(2) && kept.contains(3));
        assert!(kept.has_room(0));
        kept.insert(4, Bytes::from(vec![0; 31]), false);
        assert!(!kept.contains(4));
    }

    proptest! {
        #[test]
        fn memory_and_what_is_unread_are_counted(steps: Vec<(u8, u8, bool)>) {
            let mut kept = Kept::new(1000);
            for (number, length, is_unread) in steps {
                let number = u64::from(number % 16);
                if length % 3 == 0 {
                    kept.read(number);
                } else {
                    kept.insert(number, Bytes::from(vec![0; length.into()]), is_unread);
                }
                let used: usize = kept.blocks.values().map(|block| block.bytes.len()).sum();
                let unread: usize = kept.blocks.values().filter(|block| block.is_unread).map(|block| block.bytes.len()).sum();
                prop_assert_eq!((kept.used, kept.unread), (used as u64, unread as u64));
                prop_assert!(kept.used <= 1000 && kept.by_use.len() == kept.blocks.len());
            }
        }
    }
}
