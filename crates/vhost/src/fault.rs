//! What goes wrong outside, counted by kind and said once for each kind.
//!
//! Law: what a front end or a guest does wrong, however often, is a line for each kind of it and no more.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// What can be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// A message that cannot be taken apart; the connection ends.
    Message,
    /// A request that is not known, or was not offered.
    Unknown,
    /// A request that does not fit the device, the rings or the memory.
    Refused,
    /// A ring that makes no sense.
    Ring,
    /// A device that cannot work on a queue.
    Device,
}

impl Fault {
    const ALL: [Self; 5] = [Self::Message, Self::Unknown, Self::Refused, Self::Ring, Self::Device];
}

/// How often each was seen.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    counts: [AtomicU64; Fault::ALL.len()],
}

impl Faults {
    /// Counts one, and says it if it is the first of its kind.
    pub(crate) fn note(&self, fault: Fault, what: &dyn fmt::Display) {
        if self.count_of(fault).fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!("vhost-user: {what} (more of this kind are counted, and not said)");
        }
    }

    /// So many were seen.
    pub(crate) fn count(&self, fault: Fault) -> u64 {
        self.count_of(fault).load(Ordering::Relaxed)
    }

    fn count_of(&self, fault: Fault) -> &AtomicU64 {
        let [message, unknown, refused, ring, device] = &self.counts;
        match fault {
            Fault::Message => message,
            Fault::Unknown => unknown,
            Fault::Refused => refused,
            Fault::Ring => ring,
            Fault::Device => device,
        }
    }
}
