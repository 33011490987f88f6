//! The threads that read and write files of caches.
//!
//! **Law: a read waits for other reads, and not for writes that wait.** Writes are what fills a slow disk's queue, and
//! nobody waits for them.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;

use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

/// Threads for reads and writes; one more is for reads alone, so that writes never have all.
const THREADS: usize = 3;

type Job = Box<dyn FnOnce() + Send>;

/// The threads, which last as long as the process.
#[derive(Clone)]
pub(crate) struct Files(Arc<Shared>);

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    reads: VecDeque<Job>,
    writes: VecDeque<Job>,
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = self.0.waiting.lock();
        let (reads, writes) = (waiting.reads.len(), waiting.writes.len());
        f.debug_struct("Files").field("reads", &reads).field("writes", &writes).finish()
    }
}

impl Files {
    /// Returns them; the first call starts them.
    ///
    /// # Errors
    /// The kernel's: no threads.
    pub(crate) fn threads() -> io::Result<Self> {
        static FILES: Mutex<Option<Files>> = Mutex::new(None);
        let mut files = FILES.lock();
        if let Some(files) = &*files {
            return Ok(files.clone());
        }
        let started = Self(Arc::default());
        for number in 0..=THREADS {
            let shared = Arc::clone(&started.0);
            thread::Builder::new().name("remote-files".into()).spawn(move || shared.work(number == 0))?;
        }
        Ok(files.insert(started).clone())
    }

    /// Runs a call that reads. `None`: it panicked.
    pub(crate) async fn read<T: Send + 'static>(&self, call: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (send, receive) = oneshot::channel();
        self.0.waiting.lock().reads.push_back(Box::new(move || _ = send.send(call())));
        // All, because one of them may be for reads only.
        self.0.changed.notify_all();
        receive.await.ok()
    }

    /// Runs a call that writes, when no reads wait.
    pub(crate) fn write(&self, call: impl FnOnce() + Send + 'static) {
        self.0.waiting.lock().writes.push_back(Box::new(call));
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn work(&self, only_reads: bool) {
        loop {
            let job = {
                let mut waiting = self.waiting.lock();
                loop {
                    let write = |waiting: &mut Waiting| if only_reads { None } else { waiting.writes.pop_front() };
                    if let Some(job) = waiting.reads.pop_front().or_else(|| write(&mut waiting)) {
                        break job;
                    }
                    self.changed.wait(&mut waiting);
                }
            };
            // A call that panics has lost its own caller's answer only.
            _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn reads_do_not_wait_for_writes_that_hang() {
        let files = Files::threads().unwrap();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        for _ in 0..THREADS * 2 {
            let held = Arc::clone(&held);
            files.write(move || _ = held.lock().recv());
        }
        let read = || limosa_storage::block_on(files.read(|| 7));
        assert_eq!((read(), read()), (Some(7), Some(7)));
        drop(release);
        assert_eq!(limosa_storage::block_on(files.read(|| panic!("a call of a test"))), None::<()>);
        assert_eq!(read(), Some(7));
    }
}
