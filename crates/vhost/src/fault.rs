//! Faults of front ends and guests, counted by kind and logged once for each kind.
//!
//! Law: a front end or a guest causes at most one line of the log for each kind of fault, however often the fault
//! occurs.

use std::error::Error;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// A message that cannot be parsed; the connection ends.
    Message,
    /// A request that is unknown, or was not offered.
    Unknown,
    /// A request that does not fit the device, the rings or the memory.
    Refused,
    /// An invalid ring.
    Ring,
    /// A device that cannot process a queue.
    Device,
}

/// An error, with its causes behind it.
pub(crate) struct WithCauses<'e>(pub(crate) &'e dyn Error);

impl fmt::Display for WithCauses<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        match self.0.source() {
            Some(cause) => write!(f, ": {}", WithCauses(cause)),
            None => Ok(()),
        }
    }
}

impl FaultKind {
    const ALL: [Self; 5] = [Self::Message, Self::Unknown, Self::Refused, Self::Ring, Self::Device];
}

/// How often each kind occurred.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    counts: [AtomicU64; FaultKind::ALL.len()],
}

impl Faults {
    /// Counts one, and logs it if it is the first of its kind.
    pub(crate) fn note(&self, fault: FaultKind, what: &dyn fmt::Display) {
        if self.count_of(fault).fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!("vhost-user: {what} (further faults of this kind are only counted)");
        }
    }

    /// How often a kind occurred.
    pub(crate) fn count(&self, fault: FaultKind) -> u64 {
        self.count_of(fault).load(Ordering::Relaxed)
    }

    fn count_of(&self, fault: FaultKind) -> &AtomicU64 {
        let [message, unknown, refused, ring, device] = &self.counts;
        match fault {
            FaultKind::Message => message,
            FaultKind::Unknown => unknown,
            FaultKind::Refused => refused,
            FaultKind::Ring => ring,
            FaultKind::Device => device,
        }
    }
}
