//! Fetching a run of blocks: one request, and others in its place if it fails or is slow.
//!
//! **Law: all attempts share one budget of time, and each continues where the last one ended.** The bytes of a request
//! are checked against what was asked for and against the pinned object before they are used.

use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::Ordering;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use futures_util::future::{Either, select};
use limosa_page::to_usize;
use object_store::{GetOptions, GetRange, GetResult, ObjectMeta};
use tokio::time::{sleep, timeout};

use super::RemoteOptions;
use super::blocks::Blocks;
use crate::budget::Budget;
use crate::counters::Tally;
use crate::error::RemoteError;
use crate::printable::printable;
use crate::store::{Store, exchange, of_client};

/// The longest run that may be hedged, in bytes.
const HEDGED_MAX: u64 = 1 << 20;

/// The longest object, in bytes: as long as a file can be. Arithmetic on offsets of blocks relies on it.
const LENGTH_MAX: u64 = i64::MAX.unsigned_abs();

/// Fetches the first block of an object that is not known yet, and learns what it is. An empty object has none.
pub(super) async fn first_block(
    store: &Store,
    options: &RemoteOptions,
    tally: &Tally,
) -> Result<(ObjectMeta, Option<Bytes>), RemoteError> {
    let mut budget = Budget::new(options.store.budget, 0);
    loop {
        match budget.attempt(None, first_attempt(store, options, tally)).await {
            Ok(found) => return Ok(found),
            Err(error) => budget.pause(error, &tally.retries).await?,
        }
    }
}

async fn first_attempt(
    store: &Store,
    options: &RemoteOptions,
    tally: &Tally,
) -> Result<(ObjectMeta, Option<Bytes>), RemoteError> {
    let silence = options.store.silence;
    let range = Some(GetRange::Bounded(0..u64::from(options.block_size)));
    let get = GetOptions { range, ..GetOptions::default() };
    let request = exchange(&tally.requests, None, store.objects().get_opts(&store.path, get));
    let got = match timeout(silence, request).await.map_err(|_| RemoteError::Silent(silence))? {
        // An empty object has no range.
        Err(RemoteError::Shorter) => {
            let head = GetOptions { head: true, ..GetOptions::default() };
            let request = exchange(&tally.requests, None, store.objects().get_opts(&store.path, head));
            let got = timeout(silence, request).await.map_err(|_| RemoteError::Silent(silence))??;
            return match got.meta.size {
                0 => Ok((got.meta, None)),
                _ => Err(RemoteError::Protocol("the beginning of the object cannot be read".to_owned())),
            };
        }
        got => got?,
    };
    let meta = got.meta.clone();
    if meta.size > LENGTH_MAX {
        return Err(RemoteError::Protocol(format!("the object is said to have {} bytes", meta.size)));
    }
    let length = meta.size.min(options.block_size.into());
    if got.range != (0..length) {
        return Err(RemoteError::Protocol(format!("asked for bytes 0 to {length}, got {:?}", got.range)));
    }
    let mut first = BytesMut::with_capacity(to_usize(length));
    receive(got, silence, tally, |bytes| {
        first.extend_from_slice(&bytes);
        if first.len() as u64 <= length { Ok(()) } else { Err(too_long()) }
    })
    .await?;
    if (first.len() as u64) < length {
        Err(too_short(first.len() as u64, length))
    } else {
        Ok((meta, Some(first.freeze())))
    }
}

/// Fetches a run of blocks, and delivers each as soon as it is there.
pub(super) async fn run(blocks: &Blocks, run: Range<u64>, is_demanded: bool) -> Result<(), RemoteError> {
    let bytes = blocks.bytes_of(&run);
    let mut budget = Budget::new(blocks.options.store.budget, bytes.start);
    let mut assembly = Assembly::new(bytes);
    while assembly.skip_delivered(blocks) {
        let block = assembly.next / blocks.block_size();
        let error = match budget.attempt(None, hedged(blocks, &mut assembly, is_demanded)).await {
            Ok(()) => return Ok(()),
            Err(RemoteError::NotFound(_)) => RemoteError::Removed,
            Err(error) => error,
        };
        if assembly.next / blocks.block_size() > block {
            budget.renew();
        }
        budget.pause(error, &blocks.tally.retries).await?;
    }
    Ok(())
}

/// One attempt, and a second one beside it if the first is slower than most.
async fn hedged(blocks: &Blocks, assembly: &mut Assembly, is_demanded: bool) -> Result<(), RemoteError> {
    let may_hedge = is_demanded && blocks.options.hedge && assembly.end - assembly.next <= HEDGED_MAX;
    let slow_after = if may_hedge { blocks.hedging.lock().slow_after() } else { None };
    let Some(slow_after) = slow_after else { return attempt(blocks, assembly).await };
    let mut second = Assembly::new(assembly.next - assembly.partial.len() as u64..assembly.end);
    let first = pin!(attempt(blocks, assembly));
    let first = match select(first, pin!(sleep(slow_after))).await {
        Either::Left((outcome, _)) => return outcome,
        Either::Right(((), first)) => first,
    };
    if !blocks.hedging.lock().take() {
        return first.await;
    }
    blocks.tally.hedges.add(1);
    match select(first, pin!(attempt(blocks, &mut second))).await {
        Either::Left((Ok(()), _)) => Ok(()),
        Either::Left((Err(_), second)) => second.await,
        Either::Right((Ok(()), _)) => {
            blocks.tally.hedges_won.add(1);
            Ok(())
        }
        Either::Right((Err(_), first)) => first.await,
    }
}

async fn attempt(blocks: &Blocks, assembly: &mut Assembly) -> Result<(), RemoteError> {
    let (silence, range) = (blocks.options.store.silence, assembly.next..assembly.end);
    let by_version = blocks.by_version.load(Ordering::Relaxed);
    let got = match request(blocks, &range, by_version).await {
        Err(RemoteError::Denied { .. }) if by_version => {
            // Versions may need a right of their own. The ETag, which each request names, pins the object as well.
            let got = request(blocks, &range, false).await?;
            // Not before it is known that the version was the cause: credentials may have expired.
            blocks.by_version.store(false, Ordering::Relaxed);
            got
        }
        got => got?,
    };
    blocks.pinned.check(&got.meta)?;
    if got.range != range {
        return Err(RemoteError::Protocol(format!("asked for bytes {range:?}, got {:?}", got.range)));
    }
    receive(got, silence, &blocks.tally, |bytes| assembly.push(blocks, bytes)).await?;
    if assembly.next < range.end {
        return Err(too_short(assembly.next - range.start, range.end - range.start));
    }
    Ok(())
}

async fn request(blocks: &Blocks, range: &Range<u64>, by_version: bool) -> Result<GetResult, RemoteError> {
    let (store, silence) = (&blocks.store, blocks.options.store.silence);
    let get = blocks.pinned.options(range.clone(), by_version);
    let request = exchange(&blocks.tally.requests, None, store.objects().get_opts(&store.path, get));
    timeout(silence, request).await.map_err(|_| RemoteError::Silent(silence))?
}

/// Receives a body.
async fn receive(
    got: GetResult,
    silence: std::time::Duration,
    tally: &Tally,
    mut take: impl FnMut(Bytes) -> Result<(), RemoteError>,
) -> Result<(), RemoteError> {
    let mut body = got.into_stream();
    while let Some(bytes) = timeout(silence, body.next()).await.map_err(|_| RemoteError::Silent(silence))? {
        let bytes = bytes.map_err(|error| match of_client(&error) {
            RemoteError::Protocol(why) => RemoteError::Broken(why),
            error => error,
        })?;
        tally.bytes.add(bytes.len() as u64);
        take(bytes)?;
    }
    Ok(())
}

fn too_long() -> RemoteError {
    RemoteError::Protocol("it sends more bytes than were asked for".to_owned())
}

fn too_short(got: u64, wanted: u64) -> RemoteError {
    RemoteError::Broken(printable(&format!("after {got} of {wanted} bytes"), 80))
}

/// Blocks that are put together out of a body.
struct Assembly {
    /// The offset of the next byte to come.
    next: u64,
    end: u64,
    /// The beginning of the block in which that byte is.
    partial: BytesMut,
}

impl Assembly {
    /// Bytes that begin with a block.
    fn new(bytes: Range<u64>) -> Self {
        Self { next: bytes.start, end: bytes.end, partial: BytesMut::new() }
    }

    /// Leaves out blocks that came from elsewhere. Returns whether any are missing.
    fn skip_delivered(&mut self, blocks: &Blocks) -> bool {
        while self.next < self.end && !blocks.is_pending(self.next / blocks.block_size()) {
            self.partial.clear();
            self.next = ((self.next / blocks.block_size() + 1) * blocks.block_size()).min(self.end);
        }
        self.next < self.end
    }

    fn push(&mut self, blocks: &Blocks, mut bytes: Bytes) -> Result<(), RemoteError> {
        if bytes.len() as u64 > self.end - self.next {
            return Err(too_long());
        }
        while !bytes.is_empty() {
            let block = self.next / blocks.block_size();
            let block_end = ((block + 1) * blocks.block_size()).min(self.end);
            let taken = bytes.split_to(bytes.len().min(to_usize(block_end - self.next)));
            if self.partial.is_empty() {
                self.partial.reserve(to_usize(block_end - self.next));
            }
            self.partial.extend_from_slice(&taken);
            self.next += taken.len() as u64;
            if self.next == block_end {
                let whole = std::mem::take(&mut self.partial).freeze();
                if blocks.deliver(block, &whole) {
                    blocks.cache(block, whole);
                }
            }
        }
        Ok(())
    }
}
