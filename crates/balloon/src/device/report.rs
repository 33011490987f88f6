//! The queue of free page reporting.
//!
//! **Law: a block is given back before its buffer is acknowledged, and never after:** with the acknowledgement the
//! guest may use it again.

use std::sync::atomic::Ordering;

use super::{Balloon, More, Queue};
use crate::numbers;
use crate::ring::Ring;

impl Balloon {
    /// Whether blocks that the guest reports are given back. If not, reports are only acknowledged; the guest cannot be
    /// asked to stop reporting.
    pub fn set_reporting(&self, on: bool) {
        self.reporting.store(on, Ordering::Release);
    }

    /// The last value of [`set_reporting`](Self::set_reporting).
    pub fn reporting(&self) -> bool {
        self.reporting.load(Ordering::Acquire)
    }

    pub(super) fn work_on_reports<R: Ring>(&self, state: &mut Queue, ring: &R) -> Result<More, R::Error> {
        self.give_back(state, ring, |_, chain| {
            let memory = self.guest_memory();
            let ram = memory.as_ref().map_or(&[][..], |memory| memory.ram());
            let wanted = self.reporting() && !self.keeps_free_pages();
            let (mut runs, mut bytes, mut outside, mut ignored, mut unexpected) = (Vec::new(), 0, 0, 0, 0);
            for buffer in chain {
                if !buffer.is_write_only() {
                    unexpected += 1;
                    continue;
                }
                match numbers::inside(buffer.addr().0, buffer.len().into(), ram) {
                    Some(_) if !wanted => ignored += 1,
                    Some(run) => {
                        bytes += run.end - run.start;
                        runs.push(run);
                    }
                    None => outside += 1,
                }
            }
            self.counters.reported_blocks.add(runs.len() as u64);
            self.counters.reported_bytes.add(bytes);
            self.counters.ignored_reports.add(ignored);
            self.counters.unexpected_buffers.refuse(unexpected, "reports of free pages that cannot be written");
            self.counters.blocks_outside.refuse(outside, "free blocks that are not pages of its memory");
            runs
        })
    }
}
