//! Free-page hinting: asking the guest for its unused pages.

use std::ops::Range;
use std::sync::Arc;

/// A device that asks the guest for its free pages: a balloon with free-page hinting.
///
/// No method waits for the guest or for a sink: they may be called under a lock that a sink takes.
///
/// **Law: a hint holds until the next write, and only a dirty log knows of writes.** A page was free at some moment
/// after the [request](FreePageHinting::request_list); the guest may reuse and write it at any later moment without
/// notice. So a caller that omits hinted pages starts its dirty log *before* the request, and accepts nothing more of a
/// list once it has fetched that log: the pages reported by the log may have been written after the hint.
///
/// A guest that hints pages in use loses their contents; other guests lose nothing.
///
/// # Example
///
/// A guest that answers at once.
///
/// ```
/// use std::ops::Range;
/// use std::sync::{Arc, Mutex};
/// use limosa_memory::{FreePageSink, FreePageHinting, FreePagesError};
///
/// struct HalfEmpty;
/// impl FreePageHinting for HalfEmpty {
///     fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
///         std::thread::spawn(move || {
///             to.add_range(8 << 20..16 << 20);
///             to.complete();
///         });
///         Ok(())
///     }
///     fn stop_list(&self) {}
///     fn return_pages(&self) {}
/// }
///
/// #[derive(Default)]
/// struct Sum(Mutex<u64>);
/// impl FreePageSink for Sum {
///     fn add_range(&self, range: Range<u64>) {
///         *self.0.lock().unwrap() += range.end - range.start;
///     }
///     fn complete(&self) {}
/// }
///
/// let sum = Arc::new(Sum::default());
/// HalfEmpty.request_list(sum.clone())?;
/// # Ok::<(), FreePagesError>(())
/// ```
pub trait FreePageHinting: Send + Sync {
    /// Requests a new list, and ends any earlier request. Every range of it was free at some moment after the call. The
    /// ranges are sent to `to` on another thread until [`stop_list`](Self::stop_list),
    /// [`return_pages`](Self::return_pages) or the end of the list; a few may arrive even after that.
    ///
    /// # Errors
    /// The guest cannot be asked now.
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError>;

    /// Ends the list: the guest keeps the reported pages free until [`return_pages`](Self::return_pages). Ranges may
    /// still be in flight: the sink decides, under a lock of its own, which ones it accepts.
    fn stop_list(&self);

    /// Returns the pages to the guest. Does nothing if it has them.
    fn return_pages(&self);
}

/// The receiver of a list of free pages. Called by one thread at a time, in the order of the list. A sink that is
/// dropped before the list is complete ends it: its sender cannot continue, and nobody must wait for it.
pub trait FreePageSink: Send + Sync {
    /// Receives a range of guest-physical bytes that were free: in any order, and with any numbers, because the guest
    /// is not trusted.
    fn add_range(&self, range: Range<u64>);

    /// Receives the end of the list.
    fn complete(&self);
}

/// The reason why the guest cannot be asked for its free pages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FreePagesError {
    /// The guest has no driver for it, or its driver did not accept the feature.
    #[error("the guest does not report its free pages: {why}")]
    NotOffered {
        /// The missing feature, and the side that lacks it.
        why: String,
    },

    /// The request failed.
    #[error("the guest could not be asked for its free pages: {why}")]
    Failed {
        /// The reason.
        why: String,
    },
}
