//! In-flight areas: the buffers that a device had taken out of its rings when its server was killed.
//!
//! Shared memory that the front end keeps and passes to the next server (QEMU's docs/interop/vhost-user.rst, "Inflight
//! I/O tracking"). For every split ring it has a header of 16 bytes (features u64, version u16, descriptors u16, head
//! that was given back last u16, index of used buffers u16) and 16 bytes for each descriptor (in flight u8, 5 unused,
//! next u16, counter u64).
//!
//! **Law: at any instant at which the server may be killed, a buffer that was taken out is marked here or is not yet
//! given back in the ring, so that the next server processes it again; one that the driver sees as used is not.** The
//! order of the stores below guarantees it. The contents of the area come from the front end: they are checked before
//! use.
//!
//! An area has room for the largest possible ring, and a driver may choose a smaller one, which uses the first of the
//! area's descriptors. A larger ring does not fit, and an area that cannot be read is not an empty one: both are
//! refused.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes as _, MmapRegion, VolatileMemory as _};

use crate::QueueError;

const HEADER: usize = 16;
const ENTRY: usize = 16;
/// The distance between rings is a multiple of this.
const ALIGNMENT: usize = 64;
const VERSION: u16 = 1;

const AT_VERSION: usize = 8;
const AT_DESCRIPTORS: usize = 10;
const AT_LAST_GIVEN: usize = 12;
const AT_USED: usize = 14;

const IN_FLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// Bytes that one ring of `size` descriptors needs.
pub(crate) fn bytes_for_ring(size: u16) -> usize {
    (HEADER + ENTRY * usize::from(size)).next_multiple_of(ALIGNMENT)
}

/// The part of an area that belongs to one ring.
#[derive(Clone, Debug)]
pub(crate) struct InflightRing {
    area: Arc<MmapRegion>,
    start: usize,
    /// Number of descriptors that the area has for a ring.
    room: u16,
    /// Number of descriptors of this ring.
    size: u16,
    /// The next buffer's number in the order in which buffers were taken.
    counter: u64,
}

impl InflightRing {
    /// The part of ring number `index`, of `size` descriptors, in an area of rings of up to `room` descriptors; `None`
    /// if it does not fit.
    pub(crate) fn of(area: &Arc<MmapRegion>, index: usize, room: u16, size: u16) -> Option<Self> {
        let start = index.checked_mul(bytes_for_ring(room))?;
        let end = start.checked_add(bytes_for_ring(room))?;
        let fits = (1..=room).contains(&size) && end <= area.size();
        fits.then(|| Self { area: area.clone(), start, room, size, counter: 0 })
    }

    /// Takes over from the previous server: `used` is the index that the driver sees. Returns the buffers to be
    /// processed again, in the order in which they were taken.
    ///
    /// # Errors
    /// The area cannot be read, so it is unknown which buffers were in flight.
    pub(crate) fn take_up(&mut self, used: u16) -> Result<Vec<u16>, QueueError> {
        let (version, descriptors) = (self.load_u16(AT_VERSION), self.load_u16(AT_DESCRIPTORS));
        if version == 0 {
            // It has not been used.
            for head in 0..self.size {
                self.mark(head, false);
            }
            self.store_u16(AT_USED, used);
            self.store_u16(AT_DESCRIPTORS, self.room);
            fence(Ordering::SeqCst);
            self.store_u16(AT_VERSION, VERSION);
            return Ok(Vec::new());
        }
        if version != VERSION || descriptors != self.room {
            return Err(QueueError::Device(format!(
                "its inflight area is of version {version} and for {descriptors} descriptors, not of version {VERSION} and \
                 for {}: what it holds would be lost",
                self.room
            )));
        }
        // Buffers that were given back between the two indexes are still marked: at most as many as the ring has.
        let behind = used.wrapping_sub(self.load_u16(AT_USED)).min(self.size);
        let mut given = self.load_u16(AT_LAST_GIVEN);
        for _ in 0..behind {
            if given >= self.size {
                break;
            }
            self.mark(given, false);
            given = self.load_u16(entry(given) + NEXT);
        }
        self.store_u16(AT_USED, used);
        let mut again: Vec<(u64, u16)> =
            (0..self.size).filter(|&head| self.is_marked(head)).map(|head| (self.counter_of(head), head)).collect();
        again.sort_unstable();
        self.counter = again.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        Ok(again.into_iter().map(|(_, head)| head).collect())
    }

    /// A buffer was taken out.
    pub(crate) fn taken(&mut self, head: u16) {
        self.store_u64(entry(head) + COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.mark(head, true);
    }

    /// A buffer is about to be given back.
    pub(crate) fn giving(&self, head: u16) {
        self.store_u16(entry(head) + NEXT, self.load_u16(AT_LAST_GIVEN));
        self.store_u16(AT_LAST_GIVEN, head);
        fence(Ordering::SeqCst);
    }

    /// A buffer was given back, and the driver sees `used` as the index.
    pub(crate) fn given(&self, head: u16, used: u16) {
        fence(Ordering::SeqCst);
        self.mark(head, false);
        fence(Ordering::SeqCst);
        self.store_u16(AT_USED, used);
    }

    /// A buffer that was taken out is available again.
    pub(crate) fn untaken(&self, head: u16) {
        self.mark(head, false);
    }

    fn mark(&self, head: u16, marked: bool) {
        if head < self.size {
            let _ = self.area.as_volatile_slice().store(
                u8::from(marked),
                self.start + entry(head) + IN_FLIGHT,
                Ordering::SeqCst,
            );
        }
    }

    fn is_marked(&self, head: u16) -> bool {
        let marked: Result<u8, _> =
            self.area.as_volatile_slice().load(self.start + entry(head) + IN_FLIGHT, Ordering::SeqCst);
        marked.is_ok_and(|marked| marked != 0)
    }

    fn counter_of(&self, head: u16) -> u64 {
        self.area.as_volatile_slice().load(self.start + entry(head) + COUNTER, Ordering::SeqCst).map_or(0, u64::from_le)
    }

    fn load_u16(&self, at: usize) -> u16 {
        self.area.as_volatile_slice().load(self.start + at, Ordering::SeqCst).map_or(0, u16::from_le)
    }

    // `of` has checked that everything is inside; a store outside has no effect.
    fn store_u16(&self, at: usize, value: u16) {
        let _ = self.area.as_volatile_slice().store(value.to_le(), self.start + at, Ordering::SeqCst);
    }

    fn store_u64(&self, at: usize, value: u64) {
        let _ = self.area.as_volatile_slice().store(value.to_le(), self.start + at, Ordering::SeqCst);
    }
}

fn entry(head: u16) -> usize {
    HEADER + ENTRY * usize::from(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIZE: u16 = 8;
    /// The part of the area for a ring, where the area is longer than needed.
    const ROOM: u16 = 16;

    fn area() -> Arc<MmapRegion> {
        Arc::new(MmapRegion::new(2 * bytes_for_ring(SIZE)).unwrap())
    }

    fn roomy() -> Arc<MmapRegion> {
        Arc::new(MmapRegion::new(2 * bytes_for_ring(ROOM)).unwrap())
    }

    #[test]
    fn a_ring_has_room_for_itself_alone() {
        let area = area();
        for (index, room, size, fits) in [
            (1, SIZE, SIZE, true),
            (1, SIZE, 4, true),
            (1, SIZE, 0, false),
            (1, SIZE, 2 * SIZE, false),
            (1, 4 * SIZE, SIZE, false),
            (2, SIZE, SIZE, false),
            (usize::MAX, SIZE, SIZE, false),
            (0, 32768, 32768, false),
        ] {
            assert_eq!(InflightRing::of(&area, index, room, size).is_some(), fits, "{index} {room} {size}");
        }
    }

    #[test]
    fn an_area_that_cannot_be_read_is_refused_and_kept() {
        let area = area();
        let mut ring = InflightRing::of(&area, 1, SIZE, 4).unwrap();
        assert!(ring.take_up(0).unwrap().is_empty());
        ring.taken(3);
        ring.store_u16(AT_DESCRIPTORS, 4);
        assert!(ring.take_up(0).unwrap_err().to_string().contains("for 4 descriptors, not of version 1 and for 8"));
        ring.store_u16(AT_DESCRIPTORS, SIZE);
        ring.store_u16(AT_VERSION, 2);
        assert!(ring.take_up(0).is_err());
        ring.store_u16(AT_VERSION, VERSION);
        assert_eq!(ring.take_up(0).unwrap(), [3]);
    }

    /// Where a server dies while it gives a buffer back.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Kill {
        BeforeTheRing,
        AfterTheRing,
        BeforeTheIndex,
    }

    proptest! {
        #[test]
        fn whatever_the_instant_what_is_not_used_is_worked_on_again_in_its_order(
            steps in prop::collection::vec((any::<bool>(), 0_u16..SIZE), 0..60),
            kill in prop::sample::select(vec![None, Some(Kill::BeforeTheRing), Some(Kill::AfterTheRing), Some(Kill::BeforeTheIndex)]),
        ) {
            let area = roomy();
            let mut ring = InflightRing::of(&area, 1, ROOM, SIZE).unwrap();
            prop_assert!(ring.take_up(65_530).unwrap().is_empty());
            let (mut used, mut out) = (65_530_u16, Vec::new());
            for (take, head) in steps {
                if take && !out.contains(&head) {
                    ring.taken(head);
                    out.push(head);
                } else if !take && out.contains(&head) {
                    ring.giving(head);
                    used = used.wrapping_add(1);
                    ring.given(head, used);
                    out.retain(|&other| other != head);
                }
            }
            if let (Some(kill), Some(&head)) = (kill, out.first()) {
                ring.giving(head);
                if kill != Kill::BeforeTheRing {
                    used = used.wrapping_add(1);
                    out.remove(0);
                }
                if kill == Kill::BeforeTheIndex {
                    ring.mark(head, false);
                }
            }
            let mut next = InflightRing::of(&area, 1, ROOM, SIZE).unwrap();
            prop_assert_eq!(next.take_up(used).unwrap(), out.clone());
            let mut third = InflightRing::of(&area, 1, ROOM, SIZE).unwrap();
            prop_assert_eq!(third.take_up(used).unwrap(), out, "and nothing changes by looking");
        }

        #[test]
        fn an_area_full_of_anything_names_descriptors_of_the_ring_only(bytes in prop::collection::vec(any::<u8>(), 272), used in any::<u16>()) {
            let area = roomy();
            area.as_volatile_slice().write_slice(&bytes, bytes_for_ring(ROOM)).unwrap();
            let mut ring = InflightRing::of(&area, 1, ROOM, SIZE).unwrap();
            ring.store_u16(AT_VERSION, VERSION);
            ring.store_u16(AT_DESCRIPTORS, ROOM);
            let again = ring.take_up(used).unwrap();
            prop_assert!(again.len() <= usize::from(SIZE) && again.iter().all(|&head| head < SIZE));
        }
    }
}
