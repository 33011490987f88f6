//! Both directions of one encrypted connection.
//!
//! The laws: each direction has a lock of its own, which is held while its thread waits in the socket; no thread takes
//! both. The lock of the secrets for new keys is held for a computation only. Encrypted records go out in order before
//! anything else: a write that fails leaves the rest of its records to the next one, because the peer counts them. The
//! close notification is sent only after complete data: an end that gives up or failed leaves a cut connection to the
//! peer.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use limosa_page::{BrokenInvariant, broken_invariant};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustls::ConnectionTrafficSecrets;

use super::credentials::Tls;
use super::failure::TlsFailure;
use super::handshake::{Established, Handshake, Keys, Wait};
use super::plaintext::Walk;
use super::record::{self, BODY_MAX, Decrypted, Decrypter, Encrypter, HEADER, NewKeys, PAYLOAD_MAX};
use crate::vector::{Batch, In, Out};

/// Maximum number of records that one write encrypts before it sends them: 256 KiB.
const RECORDS_MAX: usize = 16;
/// Size of the receive buffer: the bytes of one read, and room for an incomplete record.
const BUFFER: usize = (128 << 10) + HEADER + BODY_MAX;
/// How long the close notification waits for room in the socket.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);

/// An encrypted connection, or one that is in its handshake.
pub(crate) struct Session {
    socket: OwnedFd,
    /// `None` once it has ended.
    handshake: Mutex<Option<Box<Handshake>>>,
    /// Result of the handshake.
    outcome: OnceLock<Result<Directions, TlsFailure>>,
    /// The sending direction was shut down on this side.
    shut: AtomicBool,
    /// The receiving direction was shut down on this side: a read that fails is no failure of the session.
    receive_stopped: AtomicBool,
    /// A write or a read has failed: data is incomplete, so no close notification may be sent.
    failed: AtomicBool,
}

/// The two directions of an established connection.
struct Directions {
    sending: Mutex<Sending>,
    receiving: Mutex<Receiving>,
    keys: Mutex<Keys>,
    /// The peer requested a key update of this end.
    key_update_requested: AtomicBool,
}

struct Sending {
    encrypter: Encrypter,
    /// Records to send, the first from `at` on.
    records: VecDeque<Vec<u8>>,
    at: usize,
    /// Plaintext of one record.
    plain: Box<[u8]>,
    closed: bool,
}

struct Receiving {
    decrypter: Decrypter,
    buffer: Vec<u8>,
    /// Decrypted bytes that no read has returned yet.
    plain: Range<usize>,
    /// Bytes behind them that are not decrypted yet.
    encrypted: Range<usize>,
    /// Whether data has ever arrived.
    begun: bool,
    end: Option<End>,
}

/// The reason why no more data comes.
#[derive(Clone)]
enum End {
    /// The peer sent a close notification.
    Closed,
    Failed(TlsFailure),
}

/// Locked while new keys are derived, and not while records are decrypted: the other direction may need keys meanwhile.
struct LockedKeys<'a>(&'a Mutex<Keys>);

impl NewKeys for LockedKeys<'_> {
    fn next_sending(&mut self) -> Result<ConnectionTrafficSecrets, TlsFailure> {
        self.0.lock().next_sending()
    }

    fn next_receiving(&mut self) -> Result<ConnectionTrafficSecrets, TlsFailure> {
        self.0.lock().next_receiving()
    }
}

/// Locks without waiting for another thread.
fn try_lock<T>(mutex: &Mutex<T>) -> io::Result<MutexGuard<'_, T>> {
    mutex.try_lock().ok_or_else(|| io::ErrorKind::WouldBlock.into())
}

impl Session {
    /// Creates a session over a connected stream socket. A client completes the handshake before this returns, unless
    /// it is deferred; a server when its channel is used.
    ///
    /// # Errors
    /// A [`TlsFailure`], or an error of the kernel.
    pub(crate) fn over(socket: OwnedFd, tls: &Tls, within: Option<Duration>) -> io::Result<Self> {
        let handshake = Mutex::new(Some(Box::new(Handshake::new(tls, within)?)));
        let off = AtomicBool::default;
        let this =
            Self { socket, handshake, outcome: OnceLock::new(), shut: off(), receive_stopped: off(), failed: off() };
        if tls.is_client() {
            match this.directions(if tls.is_eager() { Wait::Yes } else { Wait::No }) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                begun => begun.map(|_| ())?,
            }
        }
        Ok(this)
    }

    /// Completes the handshake and returns the directions.
    fn directions(&self, wait: Wait) -> io::Result<&Directions> {
        let known = |outcome: &'_ Result<Directions, TlsFailure>| outcome.as_ref().err().cloned();
        if self.outcome.get().is_none() {
            let mut handshake = match wait {
                Wait::Yes => self.handshake.lock(),
                Wait::No => try_lock(&self.handshake)?,
            };
            // Another thread may have completed it meanwhile.
            if let Some(in_progress) = handshake.as_mut() {
                let outcome = match in_progress.advance(self.socket.as_fd(), wait) {
                    Ok(agreed) => Ok(Directions::from(agreed)),
                    Err(error) => match error.get_ref().and_then(|error| error.downcast_ref::<TlsFailure>()) {
                        Some(failure) => Err(failure.clone()),
                        None => return Err(error),
                    },
                };
                *handshake = None;
                let _ = self.outcome.set(outcome);
            }
        }
        match self.outcome.get() {
            Some(Ok(directions)) => Ok(directions),
            outcome => Err(outcome.and_then(known).unwrap_or(TlsFailure::HandshakeClosed).into()),
        }
    }

    /// Completes the handshake.
    ///
    /// # Errors
    /// A [`TlsFailure`], or an error of the kernel.
    pub(crate) fn establish(&self) -> io::Result<()> {
        self.directions(Wait::Yes).map(|_| ())
    }

    /// As [`complete_handshake`](Self::complete_handshake), without waiting.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the handshake waits for the peer.
    pub(crate) fn try_establish(&self) -> io::Result<()> {
        self.directions(Wait::No).map(|_| ())
    }

    /// Returns the socket, for everything but transfers.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Encrypts some of the batch and begins to send it; returns how many bytes. The rest of the records may need a
    /// [flush](Self::flush).
    pub(crate) fn write(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        self.noting_failure(self.write_some(batch))
    }

    fn write_some(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        let directions = self.directions(Wait::Yes)?;
        let mut sending = directions.sending.lock();
        if sending.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let moved = directions.encrypt(&mut sending, batch)?;
        match sending.send(&self.socket, SendFlags::empty()) {
            Ok(()) => Ok(moved),
            // The records are queued now.
            Err(Errno::AGAIN | Errno::INTR) => Ok(moved),
            Err(errno) => Err(self.alert_or(directions, errno)),
        }
    }

    /// Whether records wait to be sent.
    pub(crate) fn is_buffering(&self) -> bool {
        matches!(self.outcome.get(), Some(Ok(directions)) if !directions.sending.lock().records.is_empty())
    }

    /// Sends some of the queued records.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let directions = self.directions(Wait::Yes)?;
        let sent = directions.sending.lock().send(&self.socket, SendFlags::empty());
        self.noting_failure(sent.map_err(|errno| self.alert_or(directions, errno)))
    }

    /// Notes that a call has failed, unless it may be repeated.
    fn noting_failure<T>(&self, called: io::Result<T>) -> io::Result<T> {
        called.inspect_err(|error| {
            if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
                self.failed.store(true, Ordering::Relaxed);
            }
        })
    }

    /// Returns the alert that the peer sent before it closed, which says more than the error of the socket.
    fn alert_or(&self, directions: &Directions, errno: Errno) -> io::Error {
        if matches!(errno, Errno::CONNRESET | Errno::PIPE)
            && let Ok(mut receiving) = try_lock(&directions.receiving)
        {
            while receiving.plain.is_empty() && receiving.end.is_none() {
                if !directions.decrypt(&mut receiving)
                    && !receiving.read(&self.socket, RecvFlags::DONTWAIT).is_ok_and(|got| got)
                {
                    break;
                }
            }
            if let Some(End::Failed(failure @ TlsFailure::Refused(_))) = &receiving.end {
                return failure.clone().into();
            }
        }
        errno.into()
    }

    /// Reads some of the batch; returns how many bytes, 0 at the close notification.
    pub(crate) fn read(&self, batch: &Batch<'_, In>) -> io::Result<usize> {
        let got = self.read_some(batch);
        if self.receive_stopped.load(Ordering::Relaxed) { got } else { self.noting_failure(got) }
    }

    fn read_some(&self, batch: &Batch<'_, In>) -> io::Result<usize> {
        let directions = self.directions(Wait::Yes)?;
        let mut receiving = directions.receiving.lock();
        let mut places = Walk::over(batch);
        let mut moved = 0;
        loop {
            moved += receiving.copy_out(&mut places);
            if moved == batch.bytes() {
                return Ok(moved);
            }
            if directions.decrypt(&mut receiving) {
                continue;
            }
            if moved != 0 {
                return Ok(moved);
            }
            match &receiving.end {
                Some(End::Closed) => return Ok(0),
                Some(End::Failed(failure)) => return Err(failure.clone().into()),
                None => receiving.read(&self.socket, RecvFlags::empty()).map(|_| ())?,
            }
        }
    }

    /// Copies the first decrypted bytes without waiting: 0 at an end of any kind, `None` if there are none yet.
    pub(crate) fn peek(&self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        let mut look = || -> io::Result<Option<usize>> {
            let directions = self.directions(Wait::No)?;
            let mut receiving = try_lock(&directions.receiving)?;
            // Read once only: a peer that keeps sending must not delay other peers.
            let mut asked = false;
            while receiving.plain.len() < bytes.len() {
                if directions.decrypt(&mut receiving) {
                    continue;
                }
                if asked || receiving.end.is_some() {
                    break;
                }
                asked = true;
                match receiving.read(&self.socket, RecvFlags::DONTWAIT) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    read => read?,
                };
            }
            let there = &receiving.buffer[receiving.plain.clone()];
            let length = there.len().min(bytes.len());
            bytes[..length].copy_from_slice(&there[..length]);
            Ok((length != 0 || receiving.end.is_some()).then_some(length))
        };
        match look() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            looked => looked,
        }
    }

    /// Notes that this side reads no more.
    pub(crate) fn stop_receiving(&self) {
        self.receive_stopped.store(true, Ordering::Relaxed);
    }

    /// Ends the sending direction without a close notification.
    pub(crate) fn give_up(&self) {
        self.shut.store(true, Ordering::Relaxed);
        if let Some(Ok(directions)) = self.outcome.get()
            && let Ok(mut sending) = try_lock(&directions.sending)
        {
            sending.closed = true;
        }
    }

    /// Sends the close notification, unless a write is in progress: its data is incomplete. Waits for room at most
    /// [`CLOSE_WITHIN`].
    pub(crate) fn close(&self) {
        self.shut.store(true, Ordering::Relaxed);
        let Some(Ok(directions)) = self.outcome.get() else { return };
        let Ok(mut sending) = try_lock(&directions.sending) else { return };
        // Queued records are the rest of a failed write: the data is incomplete.
        if std::mem::replace(&mut sending.closed, true) || !sending.records.is_empty() {
            return;
        }
        let Ok(record) = sending.encrypter.close() else { return };
        sending.records.push_back(record);
        let end = Instant::now() + CLOSE_WITHIN;
        while !sending.records.is_empty() {
            match sending.send(&self.socket, SendFlags::DONTWAIT) {
                Ok(()) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let rest = end.saturating_duration_since(Instant::now());
                    let (rest, mut polled) =
                        (Timespec::try_from(rest).ok(), [PollFd::new(&self.socket, PollFlags::OUT)]);
                    if Instant::now() >= end
                        || poll(&mut polled, rest.as_ref()).is_err_and(|errno| errno != Errno::INTR)
                    {
                        return;
                    }
                }
                // The peer is gone, or has no room: it will see a cut connection.
                Err(_) => return,
            }
        }
    }
}

/// Dropping a channel means that its data is complete, unless a call has failed.
impl Drop for Session {
    fn drop(&mut self) {
        let over = self.shut.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed);
        if !over && !std::thread::panicking() {
            self.close();
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.outcome.get() {
            None => "shaking hands",
            Some(Ok(_)) => "up",
            Some(Err(_)) => "failed",
        };
        f.debug_struct("Session")
            .field("socket", &self.socket.as_raw_fd())
            .field("state", &state)
            .finish_non_exhaustive()
    }
}

impl From<Established> for Directions {
    fn from(agreed: Established) -> Self {
        let Established { encrypter, decrypter, keys, rest } = agreed;
        let plain = vec![0; PAYLOAD_MAX].into_boxed_slice();
        let encrypted = 0..rest.len();
        let sending = Sending { encrypter, records: VecDeque::new(), at: 0, plain, closed: false };
        let receiving = Receiving { decrypter, buffer: rest, plain: 0..0, encrypted, begun: false, end: None };
        Self {
            sending: Mutex::new(sending),
            receiving: Mutex::new(receiving),
            keys: Mutex::new(keys),
            key_update_requested: AtomicBool::new(false),
        }
    }
}

impl Directions {
    /// Encrypts the beginning of a batch; returns how many bytes.
    fn encrypt(&self, sending: &mut Sending, batch: &Batch<'_, Out>) -> Result<usize, TlsFailure> {
        let mut from = Walk::over(batch);
        let mut moved = 0;
        for _ in 0..RECORDS_MAX {
            if self.key_update_requested.swap(false, Ordering::AcqRel) || sending.encrypter.is_used_up() {
                let record = sending.encrypter.update_key(&mut LockedKeys(&self.keys))?;
                sending.records.push_back(record);
            }
            let length = from.gather(&mut sending.plain);
            if length == 0 {
                break;
            }
            let record = sending.encrypter.encrypt(&sending.plain[..length])?;
            sending.records.push_back(record);
            moved += length;
        }
        Ok(moved)
    }

    /// Decrypts one more received record; false if none is complete, or the data has ended.
    fn decrypt(&self, receiving: &mut Receiving) -> bool {
        if receiving.end.is_some() {
            return false;
        }
        match self.decrypt_next(receiving) {
            Ok(decrypted) => decrypted,
            Err(failure) => {
                receiving.end = Some(End::Failed(failure));
                false
            }
        }
    }

    fn decrypt_next(&self, receiving: &mut Receiving) -> Result<bool, TlsFailure> {
        let (range, whole) = (receiving.encrypted.clone(), "encrypted bytes are inside the receive buffer");
        let encrypted = inside(&mut receiving.buffer, range, whole)?;
        let Some(body) = record::body(encrypted)? else { return Ok(false) };
        let record = inside(encrypted, body.clone(), "the body of a record is among the received bytes")?;
        let decrypted = receiving.decrypter.decrypt(record, &mut LockedKeys(&self.keys))?;
        let start = receiving.encrypted.start + body.start;
        receiving.encrypted.start += body.end;
        match decrypted {
            Decrypted::Bytes(length) => receiving.append(start..start + length),
            Decrypted::Control { update_key } => {
                if update_key {
                    self.key_update_requested.store(true, Ordering::Release);
                }
            }
            Decrypted::Close => receiving.end = Some(End::Closed),
        }
        Ok(true)
    }
}

/// Returns a range that must be inside `bytes`; `what` states that.
fn inside<'b>(bytes: &'b mut [u8], range: Range<usize>, what: &'static str) -> Result<&'b mut [u8], BrokenInvariant> {
    bytes.get_mut(range).ok_or_else(|| broken_invariant(what))
}

impl Sending {
    /// Sends queued records by one system call.
    fn send(&mut self, socket: &OwnedFd, flags: SendFlags) -> Result<(), Errno> {
        let first = self.records.front().map_or(&[][..], |first| &first[self.at..]);
        let rest = self.records.iter().skip(1).map(Vec::as_slice);
        let list: Vec<_> = std::iter::once(first).chain(rest).map(io::IoSlice::new).collect();
        let mut sent = gather(socket, &list, flags)?;
        while let Some(first) = self.records.front() {
            let left = first.len() - self.at;
            if sent < left {
                self.at += sent;
                break;
            }
            sent -= left;
            self.at = 0;
            self.records.pop_front();
        }
        Ok(())
    }
}

fn gather(socket: &OwnedFd, list: &[io::IoSlice<'_>], flags: SendFlags) -> Result<usize, Errno> {
    let flags = flags | SendFlags::NOSIGNAL;
    match list {
        [one] => send(socket, one, flags),
        _ => rustix::net::sendmsg(socket, list, &mut rustix::net::SendAncillaryBuffer::default(), flags),
    }
}

impl Receiving {
    /// Copies decrypted bytes to the next places; returns how many.
    fn copy_out(&mut self, places: &mut Walk<'_, In>) -> usize {
        let copied = places.scatter(&self.buffer[self.plain.clone()]);
        self.plain.start += copied;
        copied
    }

    /// Appends the bytes of another record to those that no read has returned yet.
    fn append(&mut self, bytes: Range<usize>) {
        self.begun = true;
        if self.plain.is_empty() {
            self.plain = bytes;
        } else {
            let length = bytes.len();
            self.buffer.copy_within(bytes, self.plain.end);
            self.plain.end += length;
        }
    }

    /// Reads more records, or a part of one; false if the connection has ended, which is noted, or if there is no room.
    fn read(&mut self, socket: &OwnedFd, flags: RecvFlags) -> io::Result<bool> {
        self.make_room();
        let room = &mut self.buffer[self.encrypted.end..];
        if room.is_empty() {
            return Ok(false);
        }
        let before_first_byte = !self.begun;
        let failure = match recv(socket, room, flags) {
            Ok((0, _)) => TlsFailure::Truncated { before_first_byte },
            Ok((got, _)) => {
                self.encrypted.end += got;
                return Ok(true);
            }
            // A peer that closes with unread bytes of this end; or an attacker on the path.
            Err(Errno::CONNRESET) => TlsFailure::Reset { before_first_byte },
            Err(errno) => return Err(errno.into()),
        };
        self.end = Some(End::Failed(failure));
        Ok(false)
    }

    /// Moves the remaining bytes to the front of the buffer: less than a record, and peeked data.
    fn make_room(&mut self) {
        if self.plain.is_empty() {
            self.plain = self.encrypted.start..self.encrypted.start;
        }
        let gap = self.encrypted.start - self.plain.end;
        self.buffer.copy_within(self.encrypted.clone(), self.plain.end);
        self.encrypted = self.plain.end..self.encrypted.end - gap;
        let from = self.plain.start;
        self.buffer.copy_within(from..self.encrypted.end, 0);
        self.plain = 0..self.plain.end - from;
        self.encrypted = self.encrypted.start - from..self.encrypted.end - from;
        if self.buffer.len() < BUFFER {
            self.buffer.resize(BUFFER, 0);
        }
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "encrypted bytes are inside the receive buffer")]
    fn bytes_outside_the_receive_buffer_are_a_broken_invariant() {
        let what = "encrypted bytes are inside the receive buffer";
        assert_eq!(inside(&mut [7; 4], 1..4, what), Ok(&mut [7; 3][..]));
        let _ = inside(&mut [7; 4], 1..5, what);
    }
}
