//! Counters of work done and of refused input.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of work done and of refused input since the balloon was created.
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

        /// The counters of a device.
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
    /// Arrays of page numbers that were processed.
    arrays,
    /// Time in nanoseconds to read their numbers and to merge them into runs.
    translating_ns,
    /// Pages that were put into the balloon.
    inflated_pages,
    /// Pages that were taken out of it.
    deflated_pages,
    /// Calls that gave memory back.
    discards,
    /// Bytes that they gave back.
    discarded_bytes,
    /// Such calls that failed.
    failed_discards,
    /// Statistics that were received.
    statistics,
    /// Lists of free pages that were requested.
    hint_requests,
    /// Lists that were completed.
    hint_lists,
    /// Free blocks of lists that were passed on.
    hinted_blocks,
    /// Their bytes.
    hinted_bytes,
    /// Free blocks that the guest reported by itself.
    reported_blocks,
    /// Their bytes.
    reported_bytes,
    /// Free blocks that were reported and not given back: reporting is off, or the guest wants its free pages to keep
    /// their contents.
    ignored_reports,
    /// Refused: arrays whose length is not a multiple of a page number's.
    odd_arrays,
    /// Refused: arrays with too many numbers.
    long_arrays,
    /// Refused: arrays and ids that are not in guest memory.
    unreadable_buffers,
    /// Refused: buffers of the wrong kind for their queue.
    unexpected_buffers,
    /// Left out: page numbers outside of memory.
    pages_outside,
    /// Left out: blocks that are not whole pages in one range of memory, hinted or reported.
    blocks_outside,
    /// Dropped: free blocks that do not belong to a requested list.
    stale_hints,
    /// Dropped: ids of lists that are no longer requested.
    stale_ids,
    /// Ignored: statistics of unknown kinds.
    unknown_statistics,
    /// Ignored: writes to fields of the configuration that the driver may not write.
    refused_config_writes,
}

/// One counter.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, number: u64) {
        self.0.fetch_add(number, Ordering::Relaxed);
    }

    /// Counts invalid input of a guest, and logs it the first time.
    pub(crate) fn refuse(&self, number: u64, what: &str) {
        if number > 0 && self.0.fetch_add(number, Ordering::Relaxed) == 0 {
            tracing::warn!("the guest's balloon driver: {what} (logged once, counted from now on)");
        }
    }
}
