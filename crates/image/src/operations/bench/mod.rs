//! Load of one kind on a disk: so many requests, so many of them under way, a fixed step apart.
//!
//! The requests of `qemu-img bench`, so that the same load can be put on the same image by both.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt, TryStreamExt};
use limosa_storage::{Buffer, IoVector};

use super::operation::{Operation, OperationError, Progress, Watch};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::offset::GuestOffset;

/// What load.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// Requests altogether.
    pub count: u64,
    /// Requests under way at the same time.
    pub depth: u64,
    /// Bytes of a request.
    pub size: usize,
    /// Where the first one begins.
    pub offset: u64,
    /// Bytes from the beginning of a request to that of the next; behind the end of the disk it goes on at its
    /// beginning.
    pub step: u64,
    /// With what to write; `None`: they read.
    pub write: Option<u8>,
    /// A flush after every so many requests.
    pub flush: Option<FlushEvery>,
}

/// When to flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushEvery {
    /// After so many requests.
    pub requests: u64,
    /// When nothing else is under way, and before anything else is begun; otherwise while requests are under way.
    pub drain: bool,
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BenchReport {
    /// How long it took, from the first request's beginning to the last one's end.
    pub elapsed: Duration,
    /// Requests that were carried out.
    pub requests: u64,
    /// Flushes besides.
    pub flushes: u64,
    /// Bytes read or written.
    pub bytes: u64,
}

/// Where the requests go: request after request.
fn places(options: &BenchOptions, len: u64) -> impl FnMut() -> u64 {
    let mut next = options.offset;
    let step = options.step;
    move || {
        let at = next;
        next = at.checked_add(step).and_then(|next| next.checked_rem(len)).unwrap_or(0);
        at
    }
}

/// Puts load on a disk. The progress that is told is in requests.
///
/// # Errors
/// [`OperationError`].
pub async fn bench(disk: &dyn Disk, options: &BenchOptions, watch: Watch<'_>) -> Result<BenchReport, OperationError> {
    let mut place = places(options, disk.len());
    let depth = options.depth.clamp(1, options.count.max(1));
    let mut free: Vec<Buffer> = Vec::new();
    let buffer = || {
        let buffer = Buffer::zeroed(options.size);
        if let Some(pattern) = options.write {
            buffer.copy_from(0, &vec![pattern; options.size]);
        }
        buffer
    };
    free.extend((0..depth).map(|_| buffer()));
    let request = |at: u64, buffer: Buffer| async move {
        let vector = IoVector::from(buffer.clone());
        let (doing, done) = match options.write {
            Some(_) => (Operation::Writing, disk.write(GuestOffset(at), vector).await),
            None => (Operation::Reading, disk.read(GuestOffset(at), vector).await),
        };
        done.map(|()| buffer).map_err(OperationError::at(doing, at))
    };
    let flush = || {
        disk.flush().map(|flushed: Result<(), ImageError>| flushed.map_err(OperationError::at(Operation::Flushing, 0)))
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
        // Up to the next flush, if nothing is to be under way during it.
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
