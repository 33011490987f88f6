//! A request, carried out on the export's disk.
//!
//! Laws: a reply has all bytes of the request exactly once. A request that has to be durable is flushed after it is
//! done. Where zeros are known they are not read, and not sent.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Instant;

use futures_util::future::try_join_all;
use limosa_image::ImageError;
use limosa_page::{error_with_causes, to_usize};
use limosa_storage::{Buffer, IoVector};

use super::admission::Action;
use super::buffers::Buffers;
use super::context::{CONTEXTS_MAX, Context, Contexts, DIRTY};
use super::image_error::of_image;
use super::input::Incoming;
use super::negotiation::Agreement;
use crate::counters::RequestKind;
use crate::medium::Medium;
use limosa_nbd::protocol::error::ErrorCode;
use limosa_nbd::protocol::reply::Subject;
use limosa_nbd::protocol::{Headers, split_u32, split_u64};

/// The shortest read that looks for holes first; a shorter one reads, and looks at the bytes.
const HOLES_FROM: usize = 64 << 10;
/// Most chunks of a reply to a read.
const PARTS_MAX: usize = 256;
/// Most extents of a reply to `BLOCK_STATUS`: each context gets an equal part of them.
const EXTENTS_MAX: usize = 32 << 10;
/// Most runs that are looked up for one `BLOCK_STATUS`: runs of one status are one extent, however many they are.
const RUNS_MAX: usize = 64 << 10;
/// Runs after which the connection's other requests have their turn: those of a raw image are found without waiting.
const RUNS_AT_ONCE: usize = 256;
/// Most bytes of a reply to `BLOCK_STATUS`.
pub(super) const STATUS_MAX: usize = EXTENTS_MAX * 16;
/// Most bytes that are prefetched for one request.
const CACHE_MAX: u64 = 32 << 20;
/// Bytes that are prefetched at once.
pub(super) const CACHE_PIECE: usize = 1 << 20;
/// Bytes that are zeroed at once: between them the request can end with its connection.
const ZERO_PIECE: u64 = 256 << 20;
/// The longest extent of a compact reply: whole blocks of any size.
const COMPACT_EXTENT_MAX: u64 = (1 << 32) - (1 << 20);

/// A part of what was read.
#[derive(Debug)]
pub(super) enum Part {
    Data { offset: u64, buffer: Buffer },
    Hole { offset: u64, length: u32 },
}

/// The contents of a reply.
#[derive(Debug)]
pub(super) enum Body {
    Done,
    Failed(ErrorCode),
    /// The bytes that were read, without gaps; of a simple reply in one piece.
    Read(Vec<Part>),
    /// Numbers of contexts, and the extents of each: lengths and statuses.
    Status(Vec<(u32, Vec<(u64, u32)>)>),
}

/// A request that is done.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) subject: Subject,
    pub(super) body: Body,
    /// Bytes that it keeps in memory until its reply is handed over.
    pub(super) held: usize,
}

/// Why a request failed.
enum Failure {
    Code(ErrorCode),
    Image(ImageError),
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Self::Image(error)
    }
}

impl From<ErrorCode> for Failure {
    fn from(code: ErrorCode) -> Self {
        Self::Code(code)
    }
}

/// Carries out a request.
/// `is_cut`: nobody waits for its reply any more, and the server for nothing else.
pub(super) async fn execute(
    agreement: Arc<Agreement>,
    buffers: Buffers,
    incoming: Incoming,
    is_cut: Arc<AtomicBool>,
) -> Finished {
    let subject = subject(agreement.headers, &incoming);
    let held = incoming.held();
    let body = match run(&agreement, &buffers, incoming, &is_cut).await {
        Ok(body) => body,
        Err(Failure::Code(code)) => Body::Failed(code),
        Err(Failure::Image(error)) => {
            let export = &agreement.export;
            if let Some(silent) = export.failures.note(Instant::now()) {
                let error = error_with_causes(&error);
                tracing::warn!(export = export.name(), error, earlier_unlogged = silent, "a request failed");
            }
            Body::Failed(of_image(&error))
        }
    };
    Finished { subject, body, held }
}

/// Returns what the reply to a request is about.
pub(super) const fn subject(headers: Headers, incoming: &Incoming) -> Subject {
    Subject { headers, cookie: incoming.header.cookie, offset: incoming.header.offset }
}

/// Returns the kind by which a request is counted; `None`: it was refused.
pub(super) const fn kind(action: Option<&Action>) -> RequestKind {
    match action {
        Some(Action::Read { .. }) => RequestKind::Read,
        Some(Action::Write { .. }) => RequestKind::Write,
        Some(Action::WriteZeroes { .. } | Action::Trim { .. }) => RequestKind::Zero,
        Some(Action::Flush) => RequestKind::Flush,
        Some(Action::Cache { .. } | Action::BlockStatus { .. }) | None => RequestKind::Other,
    }
}

async fn run(
    agreement: &Agreement,
    buffers: &Buffers,
    incoming: Incoming,
    is_cut: &AtomicBool,
) -> Result<Body, Failure> {
    let Incoming { header, action, payload } = incoming;
    let medium = &agreement.medium;
    let (disk, offset) = (medium.disk(), header.offset);
    let at = medium.place(offset);
    let fua = match action? {
        Action::Read { length, whole } => return read(agreement, buffers, offset, (length, whole)).await,
        Action::BlockStatus { length, one } => return block_status(agreement, offset, length, one, payload).await,
        Action::Write { fua } => {
            if let Some(payload) = payload {
                disk.write(at, payload.clone().into()).await?;
                buffers.give_back(payload);
            }
            fua
        }
        Action::Flush => {
            disk.flush().await?;
            false
        }
        Action::Trim { length, fua } => {
            if length > 0 {
                disk.discard(at, length).await?;
            }
            fua
        }
        Action::Cache { length } => {
            prefetch(medium, offset, length.min(CACHE_MAX)).await?;
            false
        }
        Action::WriteZeroes { length, fua, unmap, fast } => {
            if length > 0 && fast {
                if !disk.write_zeroes_fast(at, length, unmap).await? {
                    return Err(ErrorCode::NotSupported.into());
                }
            } else {
                let mut pos = 0;
                while pos < length {
                    let piece = (length - pos).min(ZERO_PIECE);
                    disk.write_zeroes(medium.place(offset + pos), piece, unmap).await?;
                    pos += piece;
                    if pos < length && (is_cut.load(Ordering::Acquire) || agreement.export.is_cut()) {
                        return Err(ErrorCode::Shutdown.into());
                    }
                }
            }
            fua
        }
    };
    if fua {
        disk.flush().await?;
    }
    Ok(Body::Done)
}

async fn read(
    agreement: &Agreement,
    buffers: &Buffers,
    offset: u64,
    (length, whole): (usize, bool),
) -> Result<Body, Failure> {
    let medium = &agreement.medium;
    if length == 0 {
        return Ok(Body::Done);
    }
    if agreement.headers.has_chunks() && !whole && length >= HOLES_FROM {
        let parts = parts(medium, offset, length).await?;
        let parts = parts.into_iter().map(|(offset, length, zero)| read_part(medium, buffers, offset, (length, zero)));
        return Ok(Body::Read(try_join_all(parts).await?));
    }
    let buffer = buffers.take(length);
    medium.disk().read(medium.place(offset), buffer.clone().into()).await?;
    if agreement.headers.has_chunks() && buffer.is_zero() {
        // At most `MAX_PAYLOAD`.
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        return Ok(Body::Read(vec![Part::Hole { offset, length }]));
    }
    Ok(Body::Read(vec![Part::Data { offset, buffer }]))
}

async fn read_part(
    medium: &Medium,
    buffers: &Buffers,
    offset: u64,
    (length, zero): (u64, bool),
) -> Result<Part, ImageError> {
    if zero {
        return Ok(Part::Hole { offset, length: u32::try_from(length).unwrap_or(u32::MAX) });
    }
    let buffer = buffers.take(to_usize(length));
    medium.disk().read(medium.place(offset), buffer.clone().into()).await?;
    Ok(Part::Data { offset, buffer })
}

/// Cuts a range into runs of contents and runs of zeros: offset, length, and whether it is zeros.
async fn parts(medium: &Medium, offset: u64, length: usize) -> Result<Vec<(u64, u64, bool)>, ImageError> {
    let end = offset + length as u64;
    let mut parts: Vec<(u64, u64, bool)> = Vec::new();
    let mut at = offset;
    while at < end {
        let run = if parts.len() < PARTS_MAX {
            let entry = medium.disk().map(medium.place(at), end - at).await?;
            (at, entry.length.clamp(1, end - at), entry.kind.is_zero())
        } else {
            (at, end - at, false)
        };
        at += run.1;
        match parts.last_mut() {
            Some(last) if last.2 == run.2 => last.1 += run.1,
            _ => parts.push(run),
        }
    }
    Ok(parts)
}

/// Reads a range, so that what is below the disk has it in its cache.
async fn prefetch(medium: &Medium, offset: u64, length: u64) -> Result<(), ImageError> {
    let scratch = Buffer::zeroed(to_usize(length).min(CACHE_PIECE));
    let (mut at, end) = (offset, offset.saturating_add(length));
    while at < end {
        let piece = scratch.slice(0..to_usize(end - at));
        at += piece.len() as u64;
        medium.disk().read(medium.place(at - piece.len() as u64), IoVector::from(piece)).await?;
    }
    Ok(())
}

/// The extents of a context.
struct Extents {
    context: Context,
    found: Vec<(u64, u32)>,
    /// It is full, or has the one extent that was asked for.
    ended: bool,
}

impl Extents {
    const fn new(context: Context) -> Self {
        Self { context, found: Vec::new(), ended: false }
    }

    /// Returns whether it needs more of the disk's map. A bitmap does not, although it may end with the range.
    const fn takes_map(&self) -> bool {
        !self.ended && !matches!(self.context, Context::DirtyBitmap(_))
    }

    /// Adds a run. `most`: extents, and bytes of one.
    fn add(&mut self, length: u64, status: u32, most: (usize, u64)) {
        if self.ended {
            return;
        }
        let full = self.found.len() >= most.0;
        match self.found.last_mut() {
            Some((before, same)) if *same == status && *before + length <= most.1 => *before += length,
            _ if full => self.ended = true,
            _ => self.found.push((length, status)),
        }
    }
}

async fn block_status(
    agreement: &Agreement,
    offset: u64,
    length: Option<u64>,
    one: bool,
    payload: Option<Buffer>,
) -> Result<Body, Failure> {
    let (medium, extended) = (&agreement.medium, agreement.headers == Headers::Extended);
    let (length, contexts) = match (length, payload) {
        (Some(length), _) => (length, agreement.contexts),
        (None, Some(payload)) => {
            let (length, contexts) = filter(agreement.contexts, &payload).ok_or(ErrorCode::Invalid)?;
            let inside = offset.checked_add(length).is_some_and(|end| end <= medium.size());
            (if inside && length > 0 { Ok(length) } else { Err(ErrorCode::Invalid) }?, contexts)
        }
        (None, None) => return Err(ErrorCode::Invalid.into()),
    };
    let each = EXTENTS_MAX / contexts.len().max(1);
    let most = (if one { 1 } else { each }, if extended { u64::MAX } else { COMPACT_EXTENT_MAX });
    let mut extents: Vec<_> = contexts.iter().map(Extents::new).collect();
    let (mut at, end) = (offset, offset + length);
    for extents in &mut extents {
        if let Context::DirtyBitmap(number) = extents.context {
            dirty_runs(agreement, number, at..end, (extents, most)).await?;
        }
    }
    for run in 1..=RUNS_MAX {
        if at >= end || !extents.iter().any(Extents::takes_map) {
            break;
        }
        if run % RUNS_AT_ONCE == 0 {
            let_others_run().await;
        }
        let mut entry = medium.disk().map(medium.place(at), end - at).await?;
        entry.length = entry.length.clamp(1, (end - at).min(most.1));
        at += entry.length;
        for extents in &mut extents {
            if let Some(status) = extents.context.status(&entry) {
                extents.add(entry.length, status, most);
            }
        }
    }
    Ok(Body::Status(extents.into_iter().map(|extents| (extents.context.id(), extents.found)).collect()))
}

/// Adds the runs of a bitmap of the export.
async fn dirty_runs(
    agreement: &Agreement,
    number: u8,
    range: Range<u64>,
    (extents, most): (&mut Extents, (usize, u64)),
) -> Result<(), Failure> {
    let medium = &agreement.medium;
    let name = agreement.export.bitmap_names().get(usize::from(number)).ok_or(ErrorCode::Invalid)?;
    let mut at = range.start;
    for run in 1_usize.. {
        if at >= range.end || extents.ended {
            break;
        }
        if run.is_multiple_of(RUNS_AT_ONCE) {
            let_others_run().await;
        }
        let (dirty, length) = medium.disk().dirty_run(name, medium.place(at), (range.end - at).min(most.1))?;
        extents.add(length, if dirty { DIRTY } else { 0 }, most);
        at += length;
    }
    Ok(())
}

/// Lets the other requests of the connection run.
async fn let_others_run() {
    let mut has_waited = false;
    poll_fn(|context| {
        if has_waited {
            return Poll::Ready(());
        }
        has_waited = true;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// The length and the contexts that a payload asks for. `None`: it is wrong.
fn filter(contexts: Contexts, payload: &Buffer) -> Option<(u64, Contexts)> {
    // One number for each context at most.
    if payload.len() > 8 + 4 * CONTEXTS_MAX || !payload.len().is_multiple_of(4) {
        return None;
    }
    let bytes = payload.to_vec();
    let mut bytes = bytes.as_slice();
    let length = split_u64(&mut bytes)?;
    let ids = std::iter::from_fn(|| split_u32(&mut bytes));
    let chosen = contexts.subset(ids)?;
    (!chosen.is_empty()).then_some((length, chosen))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_chooses_among_the_contexts() {
        let all: Contexts = Context::all(0).collect();
        let payload = |length: u64, ids: &[u32]| {
            let mut bytes = length.to_be_bytes().to_vec();
            ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_be_bytes()));
            filter(all, &Buffer::from_slice(&bytes))
        };
        assert_eq!(payload(7, &[2]), Some((7, [Context::AllocationDepth].into_iter().collect())));
        assert_eq!(payload(7, &[2, 1]), Some((7, all)));
        for wrong in [&[][..], &[3], &[1, 1], &[1, 2, 1]] {
            assert_eq!(payload(7, wrong), None, "{wrong:?}");
        }
        assert_eq!(filter(all, &Buffer::from_slice(&[0; 7])), None);
        assert_eq!(filter(all, &Buffer::from_slice(&[0; 13])), None);
    }

    #[test]
    fn the_map_is_read_for_contexts_that_are_not_full_and_not_for_bitmaps() {
        let (mut map, bitmap) = (Extents::new(Context::AllocationDepth), Extents::new(Context::DirtyBitmap(0)));
        assert!(map.takes_map() && !bitmap.takes_map());
        [0, 1].into_iter().for_each(|status| map.add(1, status, (1, 4)));
        assert!(!map.takes_map());
    }

    #[test]
    fn runs_of_one_status_are_one_extent_up_to_its_limit() {
        let mut extents = Extents::new(Context::Allocation);
        for (length, status) in [(1, 0), (2, 0), (4, 3), (1, 3), (1, 0)] {
            extents.add(length, status, (2, 4));
        }
        assert_eq!((extents.found, extents.ended), (vec![(3, 0), (4, 3)], true));
    }
}
