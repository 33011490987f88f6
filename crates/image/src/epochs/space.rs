//! The space of a log's data: segments that are used again when nothing leads to them any more.
//!
//! Law: a segment is free only when its last handle is dropped. Handles are held by epochs that the image does not have
//! durably, by readers, and by writes that were begun, however those end.

use std::sync::Arc;

use parking_lot::Mutex;

use super::format::DATA_AT;

/// Bytes of a segment.
pub(super) const SEGMENT: u64 = 1 << 20;
/// Alignment of what is allocated: that of pages and of most disks.
const ALIGNMENT: u64 = 4096;

/// A segment in use.
#[derive(Debug)]
pub(super) struct Segment {
    number: u64,
    space: Arc<Mutex<Free>>,
}

impl Drop for Segment {
    fn drop(&mut self) {
        let mut free = self.space.lock();
        free.numbers.push(self.number);
        free.used = free.used.saturating_sub(1);
    }
}

#[derive(Debug)]
struct Free {
    /// Segments that were used before.
    numbers: Vec<u64>,
    /// The first segment that was never used.
    next: u64,
    used: u64,
}

/// Allocated bytes.
#[derive(Debug, Clone)]
pub(super) struct Allocation {
    /// Offset in the log.
    pub(super) at: u64,
    /// Bytes that were asked for.
    pub(super) length: u64,
    pub(super) segment: Arc<Segment>,
}

/// The space of a log.
#[derive(Debug)]
pub(super) struct Space {
    free: Arc<Mutex<Free>>,
    /// The segment that is being filled, and how much of it is.
    filling: Mutex<Option<(Arc<Segment>, u64)>>,
    /// The most segments.
    limit: u64,
}

impl Space {
    /// Space of at most `limit` bytes.
    pub(super) fn new(limit: u64) -> Self {
        let free = Arc::new(Mutex::new(Free { numbers: Vec::new(), next: 0, used: 0 }));
        Self { free, filling: Mutex::new(None), limit: (limit / SEGMENT).max(1) }
    }

    /// Allocates `length` bytes, in pieces; `None`: there is no room.
    pub(super) fn allocate(&self, length: u64) -> Option<Vec<Allocation>> {
        self.fill(&mut self.filling.lock(), length)
    }

    /// Allocates `length` bytes in one piece, at most those of a segment; `None`: there is no room.
    pub(super) fn allocate_whole(&self, length: u64) -> Option<Allocation> {
        let mut filling = self.filling.lock();
        filling.take_if(|(_, filled)| SEGMENT.saturating_sub(*filled) < length);
        self.fill(&mut filling, length)?.pop()
    }

    fn fill(&self, filling: &mut Option<(Arc<Segment>, u64)>, length: u64) -> Option<Vec<Allocation>> {
        let (mut pieces, mut rest) = (Vec::new(), length);
        while rest > 0 {
            let (segment, filled) = match filling.take().filter(|(_, filled)| *filled < SEGMENT) {
                Some(found) => found,
                None => (self.segment()?, 0),
            };
            let length = rest.min(SEGMENT - filled);
            let at = DATA_AT + segment.number * SEGMENT + filled;
            pieces.push(Allocation { at, length, segment: Arc::clone(&segment) });
            *filling = Some((segment, filled + length.next_multiple_of(ALIGNMENT)));
            rest -= length;
        }
        Some(pieces)
    }

    fn segment(&self) -> Option<Arc<Segment>> {
        let mut free = self.free.lock();
        if free.used >= self.limit {
            return None;
        }
        let number = free.numbers.pop().unwrap_or_else(|| {
            free.next += 1;
            free.next - 1
        });
        free.used += 1;
        drop(free);
        Some(Arc::new(Segment { number, space: Arc::clone(&self.free) }))
    }

    /// Returns the bytes of all segments in use.
    pub(super) fn used(&self) -> u64 {
        self.free.lock().used.saturating_mul(SEGMENT)
    }

    /// Whether more than half of it is in use.
    pub(super) fn is_scarce(&self) -> bool {
        self.free.lock().used > self.limit / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_used_again_when_nothing_leads_to_it_and_never_before() {
        let space = Space::new(3 * SEGMENT);
        let first = space.allocate(2 * SEGMENT + 1).unwrap();
        assert_eq!(first.iter().map(|piece| piece.length).collect::<Vec<_>>(), [SEGMENT, SEGMENT, 1]);
        let second = space.allocate(5000).unwrap();
        assert_eq!((second[0].at, second.len()), (first[2].at + 4096, 1));
        assert!(space.allocate(2 * SEGMENT).is_none());
        let [one, two, three] = <[_; 3]>::try_from(first).unwrap();
        let reader = Arc::clone(&one.segment);
        drop((one, three));
        assert!(space.allocate(SEGMENT).is_none(), "a reader has it");
        drop(reader);
        let again = space.allocate(SEGMENT).unwrap();
        assert!(again.iter().all(|piece| piece.at + piece.length <= two.at || piece.at >= two.at + SEGMENT));
        assert!(space.is_scarce());
    }
}
