//! Placing pages: as copies, as zeros, or by mapping pages that are present.
//!
//! A call may stop early because another thread changes the memory (`EAGAIN`). It is then repeated for the rest, after
//! reading the event that the other thread waits for: otherwise both would wait for each other.

use std::ops::Range;
use std::time::{Duration, Instant};

use limosa_page::{BrokenInvariant, PAGE_SIZE, PageNumber, PageRange, invariant, to_usize};
use rustix::io::Errno;

use super::handler::kernel;
use super::{FaultBlock, FaultError, FaultHandler};
use crate::userfaultfd::{Progress, Userfaultfd};

/// How long changes of the memory may prevent placing pages.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Result of placing pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedPages {
    /// The pages that were placed, from the first requested one on.
    pub placed: PageRange,
    /// The host page behind them that was present already, where the call ended; `None`: all were placed.
    pub present: Option<PageRange>,
}

impl FaultHandler {
    /// Fills missing pages, `first` and those behind it, with a copy of `contents`, which are whole host pages, and
    /// wakes threads that wait for them. Ends at a page that is present already.
    ///
    /// # Errors
    /// Pages that cannot be placed ([`FaultError::Pages`]), [`FaultError::NoMemory`], [`FaultError::Busy`],
    /// [`FaultError::Gone`].
    #[allow(unsafe_code, reason = "names a slice to the kernel")]
    pub fn copy(&self, block: usize, first: PageNumber, contents: &[u8]) -> Result<PlacedPages, FaultError> {
        let length = contents.len() as u64;
        let pages = PageRange::starting_at(first, length / PAGE_SIZE);
        if !length.is_multiple_of(PAGE_SIZE) {
            return Err(FaultError::Pages { block, pages, why: "the contents are not whole pages" });
        }
        self.place(block, pages, "UFFDIO_COPY", |fd, at, done| {
            // `place` does not call again once all addresses are done.
            let rest = &contents[to_usize(done)..];
            // SAFETY: a slice is readable.
            unsafe { fd.copy(at.start, rest.as_ptr(), rest.len() as u64) }
        })
    }

    /// Fills missing pages with zeros, and wakes threads that wait for them. Ends at a page that is present already.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    #[allow(unsafe_code, reason = "names a mapping of zeros to the kernel")]
    pub fn zero(&self, block: usize, pages: PageRange) -> Result<PlacedPages, FaultError> {
        let huge = self.layout().block(block).map_or(PAGE_SIZE, |block| block.page_size);
        if huge == PAGE_SIZE {
            return self.place(block, pages, "UFFDIO_ZEROPAGE", |fd, at, _| fd.zero(at));
        }
        // The kernel has no zero call for huge pages of the pool: a page of zeros is copied, one by one.
        let zeros = self.zeros(huge)?;
        self.place(block, pages, "UFFDIO_COPY of zeros", |fd, at, _| {
            let length = (zeros.len() as u64).min(at.end.saturating_sub(at.start));
            // SAFETY: the mapping is readable and at least that long.
            unsafe { fd.copy(at.start, zeros.start(), length) }
        })
    }

    /// Maps pages that were written through another mapping of the same memory, and wakes threads that wait for them:
    /// for blocks in [`FaultMode::Minor`](super::FaultMode::Minor). Ends at a page that is mapped already.
    ///
    /// # Errors
    /// As [`copy`](Self::copy); [`FaultError::Kernel`] with `EFAULT` if a page has not been written.
    pub fn map_present(&self, block: usize, pages: PageRange) -> Result<PlacedPages, FaultError> {
        self.place(block, pages, "UFFDIO_CONTINUE", |fd, at, _| fd.map_present(at))
    }

    /// Makes all threads that wait for these pages try again; a page that is still missing is reported again.
    ///
    /// # Errors
    /// [`FaultError::Pages`], or an error of the kernel.
    pub fn wake(&self, block: usize, pages: PageRange) -> Result<(), FaultError> {
        let (_, addresses) = self.addresses(block, pages)?;
        self.fd().wake(addresses).map_err(|error| kernel(block, pages, "UFFDIO_WAKE", error))
    }

    /// Calls `call` with the remaining addresses and the number of bytes done until nothing is left.
    fn place(
        &self,
        block: usize,
        pages: PageRange,
        operation: &'static str,
        call: impl Fn(&Userfaultfd, Range<u64>, u64) -> rustix::io::Result<Progress>,
    ) -> Result<PlacedPages, FaultError> {
        let (layout, addresses) = self.addresses(block, pages)?;
        let (mut at, mut idle) = (addresses.start, Idle::default());
        while at < addresses.end {
            let left = PageRange::new(pages.start.saturating_add((at - addresses.start) / PAGE_SIZE), pages.end);
            let progress = match call(self.fd(), at..addresses.end, at - addresses.start) {
                Ok(progress) => progress,
                Err(error) => return Err(kernel(block, left, operation, error)),
            };
            check_progress(progress.done, addresses.end - at)?;
            at += progress.done;
            let placed = PageRange::new(pages.start, pages.start.saturating_add((at - addresses.start) / PAGE_SIZE));
            match progress.stopped {
                Some(Errno::EXIST) => {
                    let (_, rest) = pages.split_at(placed.end);
                    let (present, _) = rest.split_at(placed.end.saturating_add(layout.host_pages()));
                    // Threads that wait for a present page were woken when it was placed, but perhaps before the page
                    // was mapped for them. Waking again costs nothing.
                    self.wake(block, present)?;
                    return Ok(PlacedPages { placed, present: Some(present) });
                }
                Some(_) if progress.done == 0 => {
                    let busy = idle.is_time_to_look() && self.drain()?;
                    idle.wait(busy).map_err(|seconds| FaultError::Busy { block, pages: left, seconds })?;
                }
                _ => idle = Idle::default(),
            }
        }
        Ok(PlacedPages { placed: pages, present: None })
    }

    fn addresses(&self, block: usize, pages: PageRange) -> Result<(&FaultBlock, Range<u64>), FaultError> {
        let refused = |why| FaultError::Pages { block, pages, why };
        let layout = self.layout().block(block).ok_or_else(|| refused("it is not registered"))?;
        Ok((layout, layout.place(pages).map_err(refused)?))
    }
}

/// Asserts that the kernel placed no more bytes than requested.
fn check_progress(done: u64, requested: u64) -> Result<(), BrokenInvariant> {
    invariant(done <= requested, "no more is placed than was requested")
}

/// Waits for a moment without changes of the memory.
///
/// A thread that discards page after page leaves only the time between two calls, about a microsecond. Retries without
/// a pause meet it, if the other thread's event is read (which lets it continue) only now and then.
#[derive(Debug, Default)]
struct Idle {
    since: Option<Instant>,
    tries: u32,
}

impl Idle {
    /// Tries between two reads of events.
    const TRIES: u32 = 64;
    /// Tries without an event after which it sleeps between tries.
    const PATIENT: u32 = 16 * Self::TRIES;

    fn is_time_to_look(&self) -> bool {
        self.tries.is_multiple_of(Self::TRIES)
    }

    /// Waits before the next try; fails with the seconds passed if they are too many.
    fn wait(&mut self, busy: bool) -> Result<(), u64> {
        let since = *self.since.get_or_insert_with(Instant::now);
        self.tries = if busy { 1 } else { self.tries.saturating_add(1) };
        if self.is_time_to_look() && since.elapsed() > CHANGE_TIMEOUT {
            return Err(since.elapsed().as_secs());
        }
        if self.tries > Self::PATIENT {
            std::thread::sleep(Duration::from_micros(50));
        } else {
            std::hint::spin_loop();
        }
        Ok(())
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "no more is placed than was requested")]
    fn more_pages_placed_than_requested_are_a_broken_invariant() {
        assert_eq!(check_progress(4096, 4096), Ok(()));
        let _ = check_progress(8192, 4096);
    }
}
