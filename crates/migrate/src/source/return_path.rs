//! The destination's messages on the return path, sorted for those who wait for them.
//!
//! One thread reads the return path and delivers here; the sending threads wait here, never on the socket. So a request
//! for a page is noticed while a sender is busy, and the time between the two is what the fault histogram counts.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_page::{PAGE_SIZE, PageNumber, PageRange, broken_invariant};
use limosa_stream::{RamBlock, ReturnDecoder, ReturnMessage};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::MigrateError;

/// Requests that may wait at the same time. A destination asks once for a page and has at most one fault a thread under
/// way, so a peer that lets this many pile up is not a QEMU.
const MAX_WAITING: usize = 1 << 20;

/// A run of pages that the destination's guest waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    /// Index of the RAM block.
    pub(crate) block: usize,
    /// The pages; inside the block.
    pub(crate) pages: PageRange,
    /// When it was read from the return path.
    pub(crate) arrived: Instant,
}

#[derive(Debug, Default)]
struct State {
    requests: VecDeque<Request>,
    /// Tokens of the PINGs that were answered: one bit each, of the handful that a stream has.
    pongs: u64,
    bitmap: Option<(String, Vec<u8>)>,
    resume_ack: bool,
    shut: Option<u32>,
    /// Bytes that were read behind SHUT.
    rest: Vec<u8>,
    failed: Option<MigrateError>,
    ended: bool,
    finishing: bool,
}

/// How an alert of TLS begins: its type, and the version that all records name (RFC 8446, 5.1).
const TLS_ALERT: [u8; 2] = [21, 3];

/// The sorted return path.
#[derive(Debug, Default)]
pub(crate) struct ReturnPath {
    state: Mutex<State>,
    changed: Condvar,
}

/// The reason why a waiting sender continues.
#[derive(Debug)]
pub(crate) enum Wake {
    /// A page is wanted.
    Request(Request),
    /// Nothing is wanted.
    Idle,
    /// The return path has ended: SHUT, end of stream or an error. See [`ReturnPath::outcome`].
    Ended,
}

impl ReturnPath {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Reads the return path, of a recovery or not, until SHUT, its end, or an error. Runs on its own thread.
    pub(crate) fn read_from(
        &self,
        channel: &Channel,
        blocks: &[RamBlock],
        recovery: bool,
        mut on_message: impl FnMut(&ReturnMessage),
    ) {
        let result = self.pump(channel, blocks, recovery, &mut on_message);
        let mut state = self.lock();
        state.ended = true;
        if let Err(error) = result {
            state.failed.get_or_insert(error);
        }
        drop(state);
        self.changed.notify_all();
    }

    fn pump(
        &self,
        channel: &Channel,
        blocks: &[RamBlock],
        recovery: bool,
        on_message: &mut dyn FnMut(&ReturnMessage),
    ) -> Result<(), MigrateError> {
        let largest = blocks.iter().map(|block| block.used_length / PAGE_SIZE / 8 + 8).max();
        let largest = largest.unwrap_or_default();
        let mut decoder = if recovery { ReturnDecoder::for_recovery(largest) } else { ReturnDecoder::new(largest) };
        let mut bytes = vec![0; 64 << 10];
        let (mut current, mut first) = (None, true);
        loop {
            let got = channel.read(&mut bytes)?;
            if got == 0 {
                return Ok(());
            }
            // The first byte of a peer that takes the stream for a broken handshake.
            if std::mem::take(&mut first) && bytes.get(..got).is_some_and(|said| said.starts_with(&TLS_ALERT)) {
                return Err(MigrateError::WantsTls { peer: channel.peer().to_string() });
            }
            decoder.push(bytes.get(..got).ok_or_else(|| broken_invariant("a read fills no more than its buffer"))?);
            let arrived = Instant::now();
            let mut state = self.lock();
            let mut over = false;
            // Behind the last message comes nothing that could be believed as one.
            while !over && let Some(message) = decoder.next_message()? {
                on_message(&message);
                over = deliver(&mut state, blocks, &mut current, message, arrived)?;
            }
            if over {
                state.rest = decoder.rest().to_vec();
            }
            drop(state);
            self.changed.notify_all();
            if over {
                return Ok(());
            }
        }
    }

    /// Takes the next request, waiting for one for at most `answer_timeout`. It is counted in `taken` in the same
    /// moment.
    pub(crate) fn next_request(&self, answer_timeout: Duration, taken: &AtomicU64) -> Wake {
        let begun = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(request) = state.requests.pop_front() {
                taken.fetch_add(1, Ordering::Relaxed);
                return Wake::Request(request);
            }
            if state.ended || state.finishing {
                return Wake::Ended;
            }
            let left = answer_timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Wake::Idle;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// As [`next_request`](Self::next_request), for the thread that ends the stream itself and need not count.
    pub(crate) fn wait_request(&self, answer_timeout: Duration) -> Option<Request> {
        match self.next_request(answer_timeout, &AtomicU64::new(0)) {
            Wake::Request(request) => Some(request),
            Wake::Idle | Wake::Ended => None,
        }
    }

    /// Takes the next request if one is there already.
    pub(crate) fn try_request(&self) -> Option<Request> {
        self.lock().requests.pop_front()
    }

    /// Whether the PING of this token was answered.
    pub(crate) fn has_pong(&self, token: u32) -> bool {
        bit(token).is_some_and(|bit| self.lock().pongs & bit != 0)
    }

    /// Forgets an answer to the PING of this token that came too early, and calls `then` before another one is read.
    pub(crate) fn forget_pong(&self, token: u32, then: impl FnOnce()) {
        let mut state = self.lock();
        state.pongs &= !bit(token).unwrap_or_default();
        then();
    }

    /// Whether the return path has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Fails if the return path has ended: it lasts as long as the migration.
    pub(crate) fn still_open(&self) -> Result<(), MigrateError> {
        let state = self.lock();
        let ended = state.ended || state.shut.is_some() || state.failed.is_some();
        drop(state);
        if ended { Err(self.outcome()) } else { Ok(()) }
    }

    /// Wakes every sender that waits for requests: there is no more work for them.
    pub(crate) fn finish(&self) {
        self.lock().finishing = true;
        self.changed.notify_all();
    }

    fn wait_for<T>(
        &self,
        what: &'static str,
        answer_timeout: Duration,
        mut take: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, MigrateError> {
        let begun = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(found) = take(&mut state) {
                return Ok(found);
            }
            if let Some(error) = state.failed.take() {
                return Err(error);
            }
            if state.ended {
                return Err(match state.shut {
                    None | Some(0) => MigrateError::Protocol(format!("it closed the return path before {what}")),
                    Some(status) => MigrateError::Refused { status },
                });
            }
            let left = answer_timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(MigrateError::AnswerTimedOut { what, waited: answer_timeout });
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// Waits for the answer to a PING.
    pub(crate) fn wait_pong(&self, token: u32, answer_timeout: Duration) -> Result<(), MigrateError> {
        self.wait_for("a PING", answer_timeout, |state| bit(token).filter(|bit| state.pongs & bit != 0).map(drop))
    }

    /// Waits for the bitmap of received pages of the block asked for last.
    pub(crate) fn wait_bitmap(&self, answer_timeout: Duration) -> Result<(String, Vec<u8>), MigrateError> {
        self.wait_for("the bitmap of received pages", answer_timeout, |state| state.bitmap.take())
    }

    /// Waits for the destination to agree to go on after a recovery.
    pub(crate) fn wait_resume_ack(&self, answer_timeout: Duration) -> Result<(), MigrateError> {
        self.wait_for("the resumption", answer_timeout, |state| state.resume_ack.then_some(()))
    }

    /// Waits for the destination's confirmation; `Ok` if it is that all went well.
    pub(crate) fn wait_shut(&self, answer_timeout: Duration) -> Result<(), MigrateError> {
        match self.wait_for("the end of the stream", answer_timeout, |state| state.shut)? {
            0 => Ok(()),
            status => Err(MigrateError::Refused { status }),
        }
    }

    /// Waits until the destination has ended the return path with success, and its reader has ended too. Returns the
    /// bytes behind the last message.
    pub(crate) fn wait_end(&self, answer_timeout: Duration) -> Result<Vec<u8>, MigrateError> {
        self.wait_for("the end of the stream", answer_timeout, |state| {
            (state.ended && state.shut == Some(0)).then(|| std::mem::take(&mut state.rest))
        })
    }

    /// Why the return path has ended before its time.
    pub(crate) fn outcome(&self) -> MigrateError {
        let mut state = self.lock();
        match (state.failed.take(), state.shut) {
            (Some(error), _) => error,
            (None, Some(0)) => MigrateError::Protocol("the destination ended before it had every page".into()),
            (None, Some(status)) => MigrateError::Refused { status },
            (None, None) => MigrateError::Protocol("it closed the return path without reporting a result".into()),
        }
    }
}

/// The bit of a PING's token. Those that are sent are small; an answer to another one is ignored.
fn bit(token: u32) -> Option<u64> {
    1u64.checked_shl(token)
}

/// Sorts one message; `true` if it is the last one.
fn deliver(
    state: &mut State,
    blocks: &[RamBlock],
    current: &mut Option<usize>,
    message: ReturnMessage,
    arrived: Instant,
) -> Result<bool, MigrateError> {
    match message {
        ReturnMessage::Shut(status) => {
            state.shut = Some(status);
            return Ok(true);
        }
        ReturnMessage::Pong(token) => state.pongs |= bit(token).unwrap_or_default(),
        ReturnMessage::RequestPages { block, start, length } => {
            if let Some(name) = block {
                let index = blocks.iter().position(|known| known.name == name);
                *current = Some(index.ok_or_else(|| {
                    MigrateError::Protocol(format!("the destination asks for pages of an unknown RAM block {name:?}"))
                })?);
            }
            let Some(index) = *current else {
                // Of the block that it named on the channel before this one. When it resumes it asks again, by name,
                // for all that it waits for; and every page is sent some time.
                return Ok(false);
            };
            let pages = checked_range(blocks, index, start, length)?;
            if state.requests.len() >= MAX_WAITING {
                return Err(MigrateError::Protocol(format!("more than {MAX_WAITING} unanswered page requests")));
            }
            state.requests.push_back(Request { block: index, pages, arrived });
        }
        ReturnMessage::ReceivedBitmap { block, bitmap } => state.bitmap = Some((block, bitmap)),
        ReturnMessage::ResumeAck(_) => state.resume_ack = true,
        ReturnMessage::SwitchoverAck => {}
    }
    Ok(false)
}

fn checked_range(blocks: &[RamBlock], index: usize, start: u64, length: u32) -> Result<PageRange, MigrateError> {
    let out_of_bounds = || {
        let name = blocks.get(index).map_or("?", |block| block.name.as_str());
        MigrateError::Protocol(format!("the destination asks for {length} bytes at {start:#x} of RAM block {name}"))
    };
    let block = blocks.get(index).ok_or_else(out_of_bounds)?;
    let end = start.checked_add(u64::from(length)).ok_or_else(out_of_bounds)?;
    if length == 0 || !start.is_multiple_of(PAGE_SIZE) || !end.is_multiple_of(PAGE_SIZE) || end > block.used_length {
        return Err(out_of_bounds());
    }
    Ok(PageRange::new(PageNumber(start / PAGE_SIZE), PageNumber(end / PAGE_SIZE)))
}
