//! A thread pool for blocking calls.
//!
//! **Law: polling never blocks, and a job that has begun is completed.** The first poll of a future queues its job,
//! which is executed even if the future is dropped. There is one pool per process. Threads are started when jobs wait,
//! and exit after a while without work.

use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Maximum number of threads, and so of concurrent calls.
pub(crate) const MAX_THREADS: usize = 64;
/// Time without work after which a thread exits.
const IDLE: Duration = Duration::from_secs(10);
/// Stack size of a thread, in bytes: the calls are shallow.
const STACK: usize = 256 << 10;

type Job = Box<dyn FnOnce() + Send>;

struct Pool {
    queue: Mutex<Queue>,
    work: Condvar,
    /// Notified when a thread ends.
    fewer: Condvar,
}

struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// Number of callers for whom threads without work end at once.
    retiring: usize,
}

static POOL: Pool = Pool {
    queue: Mutex::new(Queue { jobs: VecDeque::new(), threads: 0, idle: 0, retiring: 0 }),
    work: Condvar::new(),
    fewer: Condvar::new(),
};

/// Ends the threads that carry out blocking calls for the futures of this crate, and waits until they have ended. They
/// are started again when they are needed.
///
/// For a process that confines itself: rules that hold for a thread hold for the threads that it starts afterwards.
/// Requests in flight are waited for.
pub fn retire_threads() {
    let mut queue = POOL.queue.lock();
    queue.retiring += 1;
    POOL.work.notify_all();
    POOL.fewer.wait_while(&mut queue, |queue| queue.threads > 0);
    queue.retiring -= 1;
}

/// Queues a job. The caller executes it if there is no thread and none can be started.
fn queue(job: Job) {
    let mut queue = POOL.queue.lock();
    queue.jobs.push_back(job);
    if queue.idle >= queue.jobs.len() || queue.threads >= MAX_THREADS {
        drop(queue);
        POOL.work.notify_one();
        return;
    }
    queue.threads += 1;
    drop(queue);
    let thread = thread::Builder::new().name("limosa-storage".into()).stack_size(STACK);
    if thread.spawn(work).is_err() {
        let mut queue = POOL.queue.lock();
        queue.threads -= 1;
        let left = if queue.threads == 0 { queue.jobs.pop_back() } else { None };
        drop(queue);
        if let Some(job) = left {
            job();
        }
    }
}

/// Main loop of a thread.
fn work() {
    let mut queue = POOL.queue.lock();
    loop {
        if let Some(job) = queue.jobs.pop_front() {
            drop(queue);
            job();
            queue = POOL.queue.lock();
            continue;
        }
        queue.idle += 1;
        let timed_out = queue.retiring > 0 || POOL.work.wait_for(&mut queue, IDLE).timed_out();
        queue.idle -= 1;
        if (timed_out || queue.retiring > 0) && queue.jobs.is_empty() {
            queue.threads -= 1;
            POOL.fewer.notify_all();
            return;
        }
    }
}

/// The result of a job, and the task that waits for it.
struct Outcome<T> {
    result: Option<thread::Result<T>>,
    waker: Option<Waker>,
}

/// A queued job.
struct Pooled<T>(Arc<Mutex<Outcome<T>>>);

impl<T> Future for Pooled<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut outcome = self.0.lock();
        match outcome.result.take() {
            Some(Ok(result)) => Poll::Ready(result),
            Some(Err(panic)) => resume_unwind(panic),
            None => {
                outcome.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// Executes `job` on a thread of the pool. The first poll queues it.
pub(crate) async fn run<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    let outcome = Arc::new(Mutex::new(Outcome { result: None, waker: None }));
    let ours = Arc::clone(&outcome);
    queue(Box::new(move || {
        let result = catch_unwind(AssertUnwindSafe(job));
        let mut outcome = ours.lock();
        outcome.result = Some(result);
        let waker = outcome.waker.take();
        drop(outcome);
        waker.inspect(Waker::wake_by_ref);
    }));
    Pooled(outcome).await
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::mpsc::channel;
    use std::task::Poll;

    use super::*;
    use crate::block_on;

    #[test]
    fn jobs_run_in_parallel_and_return_their_results() {
        let barrier = Arc::new(Barrier::new(3));
        let mut jobs: Vec<_> = (0..3)
            .map(|number| {
                let barrier = Arc::clone(&barrier);
                Box::pin(run(move || {
                    barrier.wait();
                    number
                }))
            })
            .collect();
        // None of the three completes before all have begun.
        let mut found = Vec::new();
        block_on(std::future::poll_fn(|context| {
            jobs.retain_mut(|job| match job.as_mut().poll(context) {
                Poll::Ready(number) => {
                    found.push(number);
                    false
                }
                Poll::Pending => true,
            });
            if jobs.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        }));
        found.sort_unstable();
        assert_eq!(found, [0, 1, 2]);
    }

    #[test]
    fn threads_that_are_retired_complete_their_jobs_and_come_back() {
        let mut job = Box::pin(run(|| {
            thread::sleep(Duration::from_millis(20));
            7
        }));
        assert!(job.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        // Other tests of this process may have some started again at once.
        retire_threads();
        assert_eq!(block_on(job), 7);
        assert_eq!(block_on(run(|| 8)), 8);
    }

    #[test]
    fn a_job_whose_future_is_dropped_is_completed() {
        let (go, wait) = channel::<()>();
        let (done, finished) = channel();
        let mut job = Box::pin(run(move || {
            wait.recv().unwrap();
            done.send(7).unwrap();
        }));
        assert!(job.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(job);
        go.send(()).unwrap();
        assert_eq!(finished.recv().unwrap(), 7);
    }

    #[test]
    #[should_panic(expected = "the job's message")]
    fn a_job_that_panics_panics_where_it_is_awaited() {
        block_on(run(|| panic!("the job's message")));
    }
}
