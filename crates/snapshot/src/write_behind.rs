//! Write-back that begins while the file is still being written.
//!
//! Without it the kernel keeps gigabytes of a fresh snapshot dirty in the page cache, and the fsync before publishing
//! has to write all of them while the job waits. A thread asks for write-back early and often instead, and the path
//! that receives pages only ever adds to a counter.
//!
//! `sync_file_range(SYNC_FILE_RANGE_WRITE)` queues the pages that are dirty now and does not wait for them. It is given
//! the whole file: the page cache keeps the dirty pages tagged, so "what was written since" costs nothing to find, and
//! no list of our own has to be right about it. It also works on a file that another process writes.

#![allow(unsafe_code)] // one system call that rustix lacks

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Bytes between two requests for write-back: large enough for sequential I/O, small against what a disk takes in a
/// second.
const STEP: u64 = 32 << 20;

/// How often a file that another process writes is looked at.
const PERIOD: Duration = Duration::from_millis(50);

/// A thread that starts write-back of one file as it grows; dropping it ends the thread (after the request under way).
#[derive(Debug)]
pub struct WriteBehind {
    write_back: Arc<WriteBack>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct WriteBack {
    /// Bytes written since the last request.
    fresh: AtomicU64,
    /// Requests made, for tests and summaries.
    requests: AtomicU64,
    ended: AtomicBool,
    due: Mutex<bool>,
    wake: Condvar,
}

impl WriteBehind {
    /// Follows a file that this process writes and reports through [`report_written`](WriteBehind::report_written).
    ///
    /// # Errors
    /// If the descriptor cannot be duplicated or the thread not be started. Going on without is always correct.
    pub fn for_own_writes(file: impl AsFd) -> io::Result<Self> {
        Self::start(file, None)
    }

    /// Follows a file that another process writes, by looking at how much of it is allocated.
    ///
    /// # Errors
    /// As [`for_own_writes`](WriteBehind::for_own_writes).
    pub fn for_other_writer(file: impl AsFd) -> io::Result<Self> {
        Self::start(file, Some(PERIOD))
    }

    fn start(file: impl AsFd, period: Option<Duration>) -> io::Result<Self> {
        let file = File::from(file.as_fd().try_clone_to_owned()?);
        let write_back = Arc::new(WriteBack {
            fresh: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            due: Mutex::new(false),
            wake: Condvar::new(),
        });
        let shared = Arc::clone(&write_back);
        let thread = std::thread::Builder::new().name("write-behind".to_owned()).spawn(move || match period {
            None => shared.follow_reports(&file),
            Some(period) => shared.follow_allocation(&file, period),
        })?;
        Ok(Self { write_back, thread: Some(thread) })
    }

    /// Reports that `bytes` were written; never blocks on the disk.
    pub fn report_written(&self, bytes: u64) {
        let before = self.write_back.fresh.fetch_add(bytes, Ordering::Relaxed);
        // Exactly one caller sees the step being crossed.
        if before < STEP && before.saturating_add(bytes) >= STEP {
            self.write_back.call();
        }
    }

    /// How often write-back was asked for.
    pub fn requests(&self) -> u64 {
        self.write_back.requests.load(Ordering::Relaxed)
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.write_back.ended.store(true, Ordering::Release);
        self.write_back.call();
        if let Some(thread) = self.thread.take() {
            // It cannot panic; and if it did, nothing depends on it.
            let _ = thread.join();
        }
    }
}

impl WriteBack {
    fn call(&self) {
        *self.due.lock() = true;
        self.wake.notify_one();
    }

    fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Sleeps until called, or for the period.
    fn sleep(&self, period: Option<Duration>) {
        let mut due = self.due.lock();
        match period {
            None => self.wake.wait_while(&mut due, |due| !*due),
            Some(period) => _ = self.wake.wait_while_for(&mut due, |due| !*due, period),
        }
        *due = false;
    }

    fn follow_reports(&self, file: &File) {
        loop {
            self.sleep(None);
            if self.ended() {
                return;
            }
            self.fresh.store(0, Ordering::Relaxed);
            if !self.request(file) {
                return;
            }
        }
    }

    fn follow_allocation(&self, file: &File, period: Duration) {
        let mut seen = 0;
        loop {
            self.sleep(Some(period));
            if self.ended() {
                return;
            }
            let Ok(stat) = rustix::fs::fstat(file) else { return };
            let allocated = stat.st_blocks.cast_unsigned().saturating_mul(512);
            // Delayed allocation counts too. A page that is overwritten does not: the fsync finds it.
            if allocated >= seen + STEP {
                seen = allocated;
                if !self.request(file) {
                    return;
                }
            }
        }
    }

    /// Starts write-back; false where the file system has none of it, so that it is not asked again.
    fn request(&self, file: &File) -> bool {
        self.requests.fetch_add(1, Ordering::Relaxed);
        // SAFETY: no memory is passed, only a descriptor that `file` keeps open, an offset and a length (0: to the
        // end).
        let done = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
        done == 0
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Instant;

    use super::*;

    fn soon(done: impl Fn() -> bool) -> bool {
        let begin = Instant::now();
        while !done() {
            if begin.elapsed() > Duration::from_secs(60) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    #[test]
    fn write_back_is_asked_for_once_each_step_and_not_before() {
        let file = tempfile::tempfile().unwrap();
        let behind = WriteBehind::for_own_writes(&file).unwrap();
        behind.report_written(STEP - 1);
        assert_eq!(behind.requests(), 0);
        behind.report_written(1);
        assert!(soon(|| behind.requests() == 1));
        behind.report_written(STEP);
        assert!(soon(|| behind.requests() == 2));
    }

    #[test]
    fn a_file_that_somebody_else_writes_is_followed() {
        let mut file = tempfile::tempfile().unwrap();
        let behind = WriteBehind::for_other_writer(&file).unwrap();
        let chunk = vec![1; 1 << 20];
        for _ in 0..40 {
            file.write_all(&chunk).unwrap();
        }
        assert!(soon(|| behind.requests() > 0));
    }

    #[test]
    fn dropping_it_ends_the_thread_also_without_a_write() {
        let file = tempfile::tempfile().unwrap();
        drop(WriteBehind::for_own_writes(&file).unwrap());
        drop(WriteBehind::for_other_writer(&file).unwrap());
    }
}
