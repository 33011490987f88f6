//! Load of one kind on a disk: a number of requests, some of them in flight at a time, a fixed step apart.
//!
//! The requests of `qemu-img bench`, so that the same load can be put on the same image by both.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt, TryStreamExt};
use limosa_page::to_u64;
use limosa_storage::{Buffer, IoVector};

use super::operation::{DiskOperation, OperationError, Progress, ProgressObserver};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::offset::GuestOffset;
use crate::setters::setters;

/// A load.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BenchOptions {
    /// Requests altogether.
    pub count: u64,
    /// Requests in flight at the same time.
    pub depth: u64,
    /// Bytes of a request.
    pub size: usize,
    /// Offset of the first request.
    pub offset: u64,
    /// Bytes from the beginning of a request to that of the next; past the end of the disk it continues at the
    /// beginning.
    pub step: u64,
    /// The byte that is written; `None`: requests read.
    pub write_pattern: Option<u8>,
    /// Flushes between requests.
    pub flush: Option<FlushEvery>,
}

impl BenchOptions {
    /// Reads of `size` bytes each, one behind the other, from the beginning of the disk on.
    #[must_use]
    pub const fn new(count: u64, depth: u64, size: usize) -> Self {
        Self { count, depth, size, offset: 0, step: to_u64(size), write_pattern: None, flush: None }
    }
}

setters!(BenchOptions { offset: u64, step: u64, write_pattern: Option<u8>, flush: Option<FlushEvery> });

/// When to flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlushEvery {
    /// Requests between two flushes.
    pub requests: u64,
    /// Whether a flush waits for the requests in flight, and further requests wait for it.
    pub drain: bool,
}

impl FlushEvery {
    /// A flush after every `requests` requests.
    #[must_use]
    pub const fn new(requests: u64, drain: bool) -> Self {
        Self { requests, drain }
    }
}

/// The result of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BenchReport {
    /// Time from the first request's beginning to the last one's end.
    pub elapsed: Duration,
    /// Requests that were carried out.
    pub requests: u64,
    /// Flushes.
    pub flushes: u64,
    /// Bytes read or written.
    pub bytes: u64,
}

/// The offsets of the requests, one after the other.
fn places(options: &BenchOptions, len: u64) -> impl FnMut() -> u64 {
    let mut next = options.offset;
    let step = options.step;
    move || {
        let at = next;
        next = at.checked_add(step).and_then(|next| next.checked_rem(len)).unwrap_or(0);
        at
    }
}

/// Puts load on a disk. Progress is counted in requests.
///
/// # Errors
/// [`OperationError`].
pub async fn bench(
    disk: &dyn Disk,
    options: &BenchOptions,
    watch: ProgressObserver<'_>,
) -> Result<BenchReport, OperationError> {
    let mut place = places(options, disk.len());
    let depth = options.depth.clamp(1, options.count.max(1));
    let mut free: Vec<Buffer> = Vec::new();
    let buffer = || {
        let buffer = Buffer::zeroed(options.size);
        if let Some(pattern) = options.write_pattern {
            buffer.copy_from(0, &vec![pattern; options.size]);
        }
        buffer
    };
    free.extend((0..depth).map(|_| buffer()));
    let request = |at: u64, buffer: Buffer| async move {
        let vector = IoVector::from(buffer.clone());
        let (doing, done) = match options.write_pattern {
            Some(_) => (DiskOperation::Writing, disk.write(GuestOffset(at), vector).await),
            None => (DiskOperation::Reading, disk.read(GuestOffset(at), vector).await),
        };
        done.map(|()| buffer).map_err(OperationError::at(doing, at))
    };
    let flush = || {
        disk.flush()
            .map(|flushed: Result<(), ImageError>| flushed.map_err(OperationError::at(DiskOperation::Flushing, 0)))
    };
    let watched = AtomicU64::new(0);
    let advance = || {
        let done = watched.fetch_add(1, Ordering::Relaxed) + 1;
        let moved = done.saturating_mul(options.size as u64);
        match watch(Progress { done, total: options.count, moved }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(OperationError::Stopped),
        }
    };

    let mut flushes = FuturesUnordered::new();
    let mut flushed = 0_u64;
    let started = Instant::now();
    let mut under_way = FuturesUnordered::new();
    let (mut begun, mut ended) = (0_u64, 0_u64);
    while ended < options.count {
        // Up to the next flush, if it must not have requests in flight.
        let drain = options.flush.filter(|flush| flush.drain && flush.requests > 0);
        let until = drain.map_or(options.count, |flush| {
            (ended / flush.requests + 1).saturating_mul(flush.requests).min(options.count)
        });
        while begun < until {
            let Some(buffer) = free.pop() else { break };
            under_way.push(request(place(), buffer));
            begun += 1;
        }
        let Some(done) = under_way.next().await else { break };
        free.push(done?);
        ended += 1;
        advance()?;
        match options.flush {
            Some(FlushEvery { requests, drain }) if requests > 0 && ended.is_multiple_of(requests) => {
                flushed += 1;
                if drain {
                    flush().await?;
                } else {
                    flushes.push(flush());
                    // Begun at once, while requests are under way.
                    while let Some(Some(done)) = flushes.next().now_or_never() {
                        done?;
                    }
                }
            }
            _ => {}
        }
    }
    flushes.try_collect::<()>().await?;
    let bytes = ended.saturating_mul(options.size as u64);
    Ok(BenchReport { elapsed: started.elapsed(), requests: ended, flushes: flushed, bytes })
}

#[cfg(test)]
mod tests;
