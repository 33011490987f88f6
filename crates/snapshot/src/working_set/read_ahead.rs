//! Reading a working set into the page cache, beside the guest that will touch it.
//!
//! The law: **the guest's own faults come first.** A disk serves requests in about their order, so all that is in
//! flight here is what a fault of the guest waits behind. So little is in flight, and the next piece is asked for when
//! an earlier one has come.

use std::collections::VecDeque;
use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use limosa_memory::cached_pages;
use limosa_page::PAGE_SIZE;
use rustix::fs::{Advice, fadvise};

use super::WorkingSet;
use crate::error::SnapshotError;
use crate::reader::Snapshot;

/// Bytes of one request.
const PIECE: u64 = 512 << 10;
/// Requests in flight: 1 MiB, which a disk of 100 MB/s reads in 10 ms.
const IN_FLIGHT: usize = 2;

/// A working set that is being read into the page cache by a thread. Dropping it ends the thread after its requests in
/// flight.
#[derive(Debug)]
pub struct ReadAhead {
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<ReadAheadReport>>,
}

/// The result of reading ahead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadAheadReport {
    /// Bytes that were asked for.
    pub bytes: u64,
    /// Requests for them.
    pub requests: u64,
    /// Bytes of pieces that were in the page cache already.
    pub cached_bytes: u64,
    /// How long it took.
    pub elapsed: Duration,
}

impl ReadAhead {
    /// Starts to read the pages of `set` from the file of its snapshot.
    ///
    /// # Errors
    /// The file's descriptor cannot be duplicated, or no thread be started.
    pub fn start(snapshot: &Snapshot, set: &WorkingSet) -> Result<Self, SnapshotError> {
        let failed = |error| SnapshotError::io("read it ahead", snapshot.path(), None, error);
        if let Some(why) = snapshot.not_plain_reason() {
            let what = format!("it {why}, and is never mapped, so it has nothing to be read ahead for");
            return Err(SnapshotError::Misuse { path: snapshot.path().to_path_buf(), what });
        }
        let file = File::from(snapshot.as_fd().try_clone_to_owned().map_err(failed)?);
        let plan = set.plan(snapshot.memory(), PIECE);
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&is_stopped);
        let thread = thread::Builder::new().name("read-ahead".into());
        let thread = thread.spawn(move || read(&file, plan, &stopped)).map_err(failed)?;
        Ok(Self { is_stopped, thread: Some(thread) })
    }

    /// Returns whether all of it has been read.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the reading after the requests in flight.
    #[must_use]
    pub fn stop(mut self) -> ReadAheadReport {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Reads these ranges of bytes into the page cache. What cannot be read is left to the guest's faults.
fn read(file: &File, plan: Vec<Range<u64>>, is_stopped: &AtomicBool) -> ReadAheadReport {
    let begun = Instant::now();
    let mut report = ReadAheadReport::default();
    let mut in_flight: VecDeque<Range<u64>> = VecDeque::with_capacity(IN_FLIGHT);
    for range in plan {
        if is_stopped.load(Ordering::Relaxed) {
            break;
        }
        let length = range.end - range.start;
        if cached_pages(file.as_fd(), &range).is_ok_and(|cached| cached >= length / PAGE_SIZE) {
            report.cached_bytes += length;
            continue;
        }
        if in_flight.len() >= IN_FLIGHT
            && let Some(oldest) = in_flight.pop_front()
        {
            wait(file, &oldest);
        }
        // The kernel hands the requests to the disk, and does not wait for them.
        if fadvise(file, range.start, NonZeroU64::new(length), Advice::WillNeed).is_err() {
            break;
        }
        report.bytes += length;
        report.requests += 1;
        in_flight.push_back(range);
    }
    in_flight.iter().for_each(|range| wait(file, range));
    report.elapsed = begun.elapsed();
    report
}

/// Waits until the last byte of a range has come: the requests of a range are served in order, or nearly so.
fn wait(file: &File, range: &Range<u64>) {
    let _ = file.read_at(&mut [0], range.end.saturating_sub(1));
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn all_of_the_plan_is_in_the_page_cache_afterwards_and_is_not_read_again() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 9 << 20]).unwrap();
        file.sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let plan: Vec<_> = (0..8).map(|piece| piece << 20..(piece + 1) << 20).collect();
        let is_stopped = AtomicBool::new(false);
        let first = read(&file, plan.clone(), &is_stopped);
        assert_eq!(first.bytes + first.cached_bytes, 8 << 20);
        let again = read(&file, plan.clone(), &is_stopped);
        if cached_pages(file.as_fd(), &(0..PAGE_SIZE)).is_ok() {
            assert_eq!((again.bytes, again.requests, again.cached_bytes), (0, 0, 8 << 20));
        }
        is_stopped.store(true, Ordering::Relaxed);
        assert_eq!(read(&file, plan, &is_stopped).requests, 0);
    }
}
