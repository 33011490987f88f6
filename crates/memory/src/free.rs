//! Which pages the guest has no use for: who can ask it, and who wants to know.

use std::ops::Range;
use std::sync::Arc;

/// What can ask the guest which of its pages are free: a balloon with free-page hinting.
///
/// None of its methods waits, neither for the guest nor for a sink: they may be called under the lock that a sink
/// takes.
///
/// **Law: a hint holds until the next write, and only a dirty log knows of writes.** A page was free at some moment
/// behind the [request](FreePages::request); the guest may take it back and write it at any moment after that, without
/// a word. So a caller that leaves out what was hinted has begun to watch for writes *before* the request, and takes
/// nothing more of a list once it has read that log: what the log reports may have been written behind the hint.
///
/// A guest that says more than is so loses what it had in the pages that it called free, and no other guest loses
/// anything.
///
/// # Example
///
/// A guest that answers at once.
///
/// ```
/// use std::ops::Range;
/// use std::sync::{Arc, Mutex};
/// use limosa_memory::{FreePageSink, FreePages, FreePagesError};
///
/// struct HalfEmpty;
/// impl FreePages for HalfEmpty {
///     fn request(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
///         std::thread::spawn(move || {
///             to.free(8 << 20..16 << 20);
///             to.complete();
///         });
///         Ok(())
///     }
///     fn stop(&self) {}
///     fn done(&self) {}
/// }
///
/// #[derive(Default)]
/// struct Sum(Mutex<u64>);
/// impl FreePageSink for Sum {
///     fn free(&self, range: Range<u64>) {
///         *self.0.lock().unwrap() += range.end - range.start;
///     }
///     fn complete(&self) {}
/// }
///
/// let sum = Arc::new(Sum::default());
/// HalfEmpty.request(sum.clone())?;
/// # Ok::<(), FreePagesError>(())
/// ```
pub trait FreePages: Send + Sync {
    /// Asks for a new list, and ends any request before. Every range of it was free at some moment after this was
    /// called. The ranges are sent to `to` on another thread until [`stop`](Self::stop), [`done`](Self::done) or the
    /// end of the list; a few may come even after that.
    ///
    /// # Errors
    /// No guest can be asked now.
    fn request(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError>;

    /// The guest may stop looking; what it has reported it goes on holding back until [`done`](Self::done). Ranges may
    /// still be on their way: it is the sink that decides, under a lock of its own, what it still takes.
    fn stop(&self);

    /// The guest gets its pages back. Without effect if it has them.
    fn done(&self);
}

/// Where a list of free pages goes. Told by one thread after the other, in the order of the list. A list that is
/// dropped before it is complete is over: its sender cannot go on, and it must not be waited for.
pub trait FreePageSink: Send + Sync {
    /// Bytes of guest-physical address space that were free when they were looked at: in any order, and, of a guest
    /// that is not to be trusted, any numbers.
    fn free(&self, range: Range<u64>);

    /// That was the whole list.
    fn complete(&self);
}

/// Why the guest cannot be asked for its free pages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FreePagesError {
    /// The guest has no driver for it, or the one that it has did not take the feature.
    #[error("the guest does not report its free pages: {why}")]
    NotOffered {
        /// What is missing, and on which side.
        why: String,
    },

    /// It could not be asked.
    #[error("the guest could not be asked for its free pages: {why}")]
    Failed {
        /// The outcome.
        why: String,
    },
}
