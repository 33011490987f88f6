//! What has been done, and what was refused.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a balloon has done, and what it refused, since it was made.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// All of them with their names.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }

        /// The counters while they count.
        #[derive(Debug, Default)]
        pub(crate) struct AtomicCounters {
            $(pub(crate) $name: Counter,)*
        }

        impl AtomicCounters {
            pub(crate) fn read(&self) -> Counters {
                Counters { $($name: self.$name.0.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counters! {
    /// Arrays of page numbers that were carried out.
    arrays,
    /// Nanoseconds that it took to read their numbers and to join them to runs.
    translating_ns,
    /// Pages that went into the balloon.
    inflated_pages,
    /// Pages that came out of it.
    deflated_pages,
    /// Calls that gave memory back.
    discards,
    /// Bytes that they gave back.
    discarded_bytes,
    /// Such calls that the kernel refused.
    failed_discards,
    /// Statistics that came.
    statistics,
    /// Lists of free pages that were asked for.
    hint_requests,
    /// Lists that came to their end.
    hint_lists,
    /// Free blocks of lists that were passed on.
    hinted_blocks,
    /// Their bytes.
    hinted_bytes,
    /// Free blocks that the guest reported by itself.
    reported_blocks,
    /// Their bytes.
    reported_bytes,
    /// Free blocks that were reported and left alone: reporting is off, or the guest wants its free pages to keep their contents.
    ignored_reports,
    /// Refused: arrays whose bytes are no whole number of page numbers.
    odd_arrays,
    /// Refused: arrays of more numbers than one may have.
    long_arrays,
    /// Refused: arrays and ids that do not lie in guest memory.
    unreadable_buffers,
    /// Refused: buffers of a kind that does not belong on their queue.
    unexpected_buffers,
    /// Left out: page numbers of no memory.
    pages_outside,
    /// Left out: blocks that are not whole pages of one piece of memory, hinted or reported.
    blocks_outside,
    /// Dropped: free blocks that belong to no list that is wanted.
    stale_hints,
    /// Dropped: ids of lists that are not wanted any more.
    stale_ids,
    /// Ignored: statistics of unknown kinds.
    unknown_statistics,
    /// Ignored: writes to what is not the driver's in the configuration.
    refused_config_writes,
}

/// One of them.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, number: u64) {
        self.0.fetch_add(number, Ordering::Relaxed);
    }

    /// Counts what a guest should not do, and says so the first time.
    pub(crate) fn refuse(&self, number: u64, what: &str) {
        if number > 0 && self.0.fetch_add(number, Ordering::Relaxed) == 0 {
            tracing::warn!("the guest's balloon driver: {what} (said once, counted from now on)");
        }
    }
}
