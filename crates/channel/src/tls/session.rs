//! Both directions of one encrypted connection.
//!
//! The laws: each direction has a lock of its own, which is held while its thread waits in the socket; nobody needs both. The
//! secret that new keys come from is held for a computation only. What was sealed goes out, in order, before anything else
//! is: a put that fails leaves the rest of its records to the next one, because the peer counts them. The word that this was
//! all is for who has said all: whoever gives up, or failed, leaves the peer a connection that was cut.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustls::ConnectionTrafficSecrets;

use super::credentials::Tls;
use super::failure::TlsFailure;
use super::handshake::{Agreed, Handshake, Keys, Wait};
use super::plaintext::Walk;
use super::record::{self, BODY_MAX, HEADER, NewKeys, Opened, Opener, PAYLOAD_MAX, Sealer};
use crate::vector::{Batch, In, Out};

/// Records that one put seals before it sends them: 256 KiB.
const SEALED_MAX: usize = 16;
/// Bytes read at once, and room for the record that they cut.
const BUFFER: usize = (128 << 10) + HEADER + BODY_MAX;
/// How long the last word waits for room in the socket.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);

/// An encrypted connection, or one that is to become it.
pub(crate) struct Session {
    socket: OwnedFd,
    /// None once it is over.
    handshake: Mutex<Option<Box<Handshake>>>,
    /// How that ended.
    outcome: OnceLock<Result<Both, TlsFailure>>,
    /// The direction was ended on this side.
    shut: AtomicBool,
    /// Nobody here wants to get any more: that none can is no failure.
    deaf: AtomicBool,
    /// A put or a get has failed: this end has not said all that it had to say, or does not know what was said to it.
    failed: AtomicBool,
}

/// The directions.
struct Both {
    sending: Mutex<Sending>,
    receiving: Mutex<Receiving>,
    keys: Mutex<Keys>,
    /// The peer wants what this end sends under a new key.
    renew: AtomicBool,
}

struct Sending {
    sealer: Sealer,
    /// Records to go out, the first from `at` on.
    sealed: VecDeque<Vec<u8>>,
    at: usize,
    /// One record's bytes before they are sealed.
    plain: Box<[u8]>,
    closed: bool,
}

struct Receiving {
    opener: Opener,
    buffer: Vec<u8>,
    /// Bytes that nobody has got yet.
    plain: Range<usize>,
    /// Bytes behind them that are not opened yet.
    sealed: Range<usize>,
    /// Whether bytes have ever come.
    begun: bool,
    end: Option<End>,
}

/// Why nothing more comes.
#[derive(Clone)]
enum End {
    /// The peer has said so.
    Closed,
    Failed(TlsFailure),
}

/// Held while new keys are computed, and not while records are opened: the other direction may need some meanwhile.
struct Locked<'a>(&'a Mutex<Keys>);

impl NewKeys for Locked<'_> {
    fn next_sending(&mut self) -> Result<ConnectionTrafficSecrets, TlsFailure> {
        lock(self.0).next_sending()
    }

    fn next_receiving(&mut self) -> Result<ConnectionTrafficSecrets, TlsFailure> {
        lock(self.0).next_receiving()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As `lock`, unless somebody else has it.
fn try_lock<T>(mutex: &Mutex<T>) -> io::Result<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
    }
}

impl Session {
    /// A session that is to be, over a connected stream socket. A client shakes hands before this returns, unless it is to
    /// defer that; a server when its channel is used.
    ///
    /// # Errors
    /// A [`TlsFailure`], or what the kernel says.
    pub(crate) fn over(socket: OwnedFd, tls: &Tls, within: Option<Duration>) -> io::Result<Self> {
        let handshake = Mutex::new(Some(Box::new(Handshake::new(tls, within)?)));
        let off = AtomicBool::default;
        let this = Self { socket, handshake, outcome: OnceLock::new(), shut: off(), deaf: off(), failed: off() };
        if tls.is_client() {
            match this.up(if tls.is_eager() { Wait::Yes } else { Wait::No }) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                begun => begun.map(|_| ())?,
            }
        }
        Ok(this)
    }

    /// The directions, once both ends know each other.
    fn up(&self, wait: Wait) -> io::Result<&Both> {
        let known = |outcome: &'_ Result<Both, TlsFailure>| outcome.as_ref().err().cloned();
        if self.outcome.get().is_none() {
            let mut handshake = match wait {
                Wait::Yes => lock(&self.handshake),
                Wait::No => try_lock(&self.handshake)?,
            };
            // Somebody else may have done it meanwhile.
            if let Some(under_way) = handshake.as_mut() {
                let outcome = match under_way.go_on(self.socket.as_fd(), wait) {
                    Ok(agreed) => Ok(Both::from(agreed)),
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
            Some(Ok(both)) => Ok(both),
            outcome => Err(outcome.and_then(known).unwrap_or(TlsFailure::Ended).into()),
        }
    }

    /// Makes sure that both ends know each other.
    ///
    /// # Errors
    /// A [`TlsFailure`], or what the kernel says.
    pub(crate) fn establish(&self) -> io::Result<()> {
        self.up(Wait::Yes).map(|_| ())
    }

    /// As [`establish`](Self::establish), without waiting.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the peer has more to say first.
    pub(crate) fn try_establish(&self) -> io::Result<()> {
        self.up(Wait::No).map(|_| ())
    }

    /// The socket, for what has nothing to do with its bytes.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Seals some of the batch and begins to send it; returns how many bytes. The rest of the records may have to be
    /// [flushed](Self::flush).
    pub(crate) fn put(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        self.noting(self.put_some(batch))
    }

    fn put_some(&self, batch: &Batch<'_, Out>) -> io::Result<usize> {
        let both = self.up(Wait::Yes)?;
        let mut sending = lock(&both.sending);
        if sending.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let moved = both.seal(&mut sending, batch)?;
        match sending.send(&self.socket, SendFlags::empty()) {
            Ok(()) => Ok(moved),
            // They are in the row now.
            Err(Errno::AGAIN | Errno::INTR) => Ok(moved),
            Err(errno) => Err(self.why(both, errno)),
        }
    }

    /// Whether records wait to be sent.
    pub(crate) fn holds_back(&self) -> bool {
        matches!(self.outcome.get(), Some(Ok(both)) if !lock(&both.sending).sealed.is_empty())
    }

    /// Sends some of the records that wait.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let both = self.up(Wait::Yes)?;
        let sent = lock(&both.sending).send(&self.socket, SendFlags::empty());
        self.noting(sent.map_err(|errno| self.why(both, errno)))
    }

    /// Remembers that a call has failed, unless it may go on.
    fn noting<T>(&self, called: io::Result<T>) -> io::Result<T> {
        called.inspect_err(|error| {
            if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
                self.failed.store(true, Ordering::Relaxed);
            }
        })
    }

    /// What the peer has said before it went says more than that it is gone.
    fn why(&self, both: &Both, errno: Errno) -> io::Error {
        if matches!(errno, Errno::CONNRESET | Errno::PIPE)
            && let Ok(mut receiving) = try_lock(&both.receiving)
        {
            while receiving.plain.is_empty() && receiving.end.is_none() {
                if !both.open(&mut receiving) && !receiving.read(&self.socket, RecvFlags::DONTWAIT).is_ok_and(|got| got)
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

    /// Reads some of the batch; returns how many bytes, 0 at an end that the peer has announced.
    pub(crate) fn get(&self, batch: &Batch<'_, In>) -> io::Result<usize> {
        let got = self.get_some(batch);
        if self.deaf.load(Ordering::Relaxed) { got } else { self.noting(got) }
    }

    fn get_some(&self, batch: &Batch<'_, In>) -> io::Result<usize> {
        let both = self.up(Wait::Yes)?;
        let mut receiving = lock(&both.receiving);
        let mut places = Walk::over(batch);
        let mut moved = 0;
        loop {
            moved += receiving.hand_out(&mut places);
            if moved == batch.bytes() {
                return Ok(moved);
            }
            if both.open(&mut receiving) {
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

    /// Copies the first bytes that have come, without waiting: 0 at the end, of whatever kind, `None` if there are none yet.
    pub(crate) fn peek(&self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        let mut look = || -> io::Result<Option<usize>> {
            let both = self.up(Wait::No)?;
            let mut receiving = try_lock(&both.receiving)?;
            // Once: a peer that sends and sends holds nobody up.
            let mut asked = false;
            while receiving.plain.len() < bytes.len() {
                if both.open(&mut receiving) {
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
            let there = receiving.buffer.get(receiving.plain.clone()).unwrap_or_default();
            let length = there.len().min(bytes.len());
            if let (Some(into), Some(from)) = (bytes.get_mut(..length), there.get(..length)) {
                into.copy_from_slice(from);
            }
            Ok((length != 0 || receiving.end.is_some()).then_some(length))
        };
        match look() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            looked => looked,
        }
    }

    /// Nothing more is got.
    pub(crate) fn listen_no_more(&self) {
        self.deaf.store(true, Ordering::Relaxed);
    }

    /// Nothing more is put, and the peer is not told that this was all.
    pub(crate) fn give_up(&self) {
        self.shut.store(true, Ordering::Relaxed);
        if let Some(Ok(both)) = self.outcome.get()
            && let Ok(mut sending) = try_lock(&both.sending)
        {
            sending.closed = true;
        }
    }

    /// Tells the peer that nothing more comes, unless somebody is putting: then it is not true. Waits for room, but not for
    /// long.
    pub(crate) fn close(&self) {
        self.shut.store(true, Ordering::Relaxed);
        let Some(Ok(both)) = self.outcome.get() else { return };
        let Ok(mut sending) = try_lock(&both.sending) else { return };
        // Records of a put that was broken off are not all that there was to say.
        if std::mem::replace(&mut sending.closed, true) || !sending.sealed.is_empty() {
            return;
        }
        let Ok(word) = sending.sealer.close() else { return };
        sending.sealed.push_back(word);
        let end = Instant::now() + CLOSE_WITHIN;
        while !sending.sealed.is_empty() {
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
                // The peer is gone, or has no room: it will see that it was cut.
                Err(_) => return,
            }
        }
    }
}

/// Who drops a channel has put all that there was to put, unless something has failed.
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

impl From<Agreed> for Both {
    fn from(agreed: Agreed) -> Self {
        let Agreed { sealer, opener, keys, rest } = agreed;
        let plain = vec![0; PAYLOAD_MAX].into_boxed_slice();
        let sealed = 0..rest.len();
        let sending = Sending { sealer, sealed: VecDeque::new(), at: 0, plain, closed: false };
        let receiving = Receiving { opener, buffer: rest, plain: 0..0, sealed, begun: false, end: None };
        Self {
            sending: Mutex::new(sending),
            receiving: Mutex::new(receiving),
            keys: Mutex::new(keys),
            renew: AtomicBool::new(false),
        }
    }
}

impl Both {
    /// Seals the beginning of a batch: how many bytes of it.
    fn seal(&self, sending: &mut Sending, batch: &Batch<'_, Out>) -> Result<usize, TlsFailure> {
        let mut from = Walk::over(batch);
        let mut moved = 0;
        for _ in 0..SEALED_MAX {
            if self.renew.swap(false, Ordering::AcqRel) || sending.sealer.is_used_up() {
                let word = sending.sealer.renew(&mut Locked(&self.keys))?;
                sending.sealed.push_back(word);
            }
            let length = from.gather(&mut sending.plain);
            if length == 0 {
                break;
            }
            let record = sending.sealer.seal(sending.plain.get(..length).unwrap_or_default())?;
            sending.sealed.push_back(record);
            moved += length;
        }
        Ok(moved)
    }

    /// Opens one more record of those that have come; false if there is none, or nothing more comes.
    fn open(&self, receiving: &mut Receiving) -> bool {
        if receiving.end.is_some() {
            return false;
        }
        match self.open_next(receiving) {
            Ok(opened) => opened,
            Err(failure) => {
                receiving.end = Some(End::Failed(failure));
                false
            }
        }
    }

    fn open_next(&self, receiving: &mut Receiving) -> Result<bool, TlsFailure> {
        let sealed = receiving.buffer.get_mut(receiving.sealed.clone()).unwrap_or_default();
        let Some(body) = record::body(sealed)? else { return Ok(false) };
        let opened =
            receiving.opener.open(sealed.get_mut(body.clone()).unwrap_or_default(), &mut Locked(&self.keys))?;
        let start = receiving.sealed.start + body.start;
        receiving.sealed.start += body.end;
        match opened {
            Opened::Bytes(length) => receiving.append(start..start + length),
            Opened::Word { renew } => {
                if renew {
                    self.renew.store(true, Ordering::Release);
                }
            }
            Opened::Close => receiving.end = Some(End::Closed),
        }
        Ok(true)
    }
}

impl Sending {
    /// Sends what one call takes.
    fn send(&mut self, socket: &OwnedFd, flags: SendFlags) -> Result<(), Errno> {
        let first = self.sealed.front().and_then(|first| first.get(self.at..)).unwrap_or_default();
        let rest = self.sealed.iter().skip(1).map(Vec::as_slice);
        let list: Vec<_> = std::iter::once(first).chain(rest).map(io::IoSlice::new).collect();
        let mut sent = gather(socket, &list, flags)?;
        while let Some(first) = self.sealed.front() {
            let left = first.len() - self.at;
            if sent < left {
                self.at += sent;
                break;
            }
            sent -= left;
            self.at = 0;
            self.sealed.pop_front();
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
    /// Copies what is open to the next places: how many bytes.
    fn hand_out(&mut self, places: &mut Walk<'_, In>) -> usize {
        let copied = places.scatter(self.buffer.get(self.plain.clone()).unwrap_or_default());
        self.plain.start += copied;
        copied
    }

    /// Puts the bytes of another record behind those that nobody has got yet.
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

    /// Reads more records, or a part of one. An end of the connection is noted.
    fn read(&mut self, socket: &OwnedFd, flags: RecvFlags) -> io::Result<bool> {
        self.make_room();
        let room = self.buffer.get_mut(self.sealed.end..).unwrap_or_default();
        if room.is_empty() {
            return Ok(false);
        }
        let first = !self.begun;
        let gone = match recv(socket, room, flags) {
            Ok((0, _)) => TlsFailure::Truncated { first },
            Ok((got, _)) => {
                self.sealed.end += got;
                return Ok(true);
            }
            // A peer that goes with bytes of ours that it has not read; or somebody between the two.
            Err(Errno::CONNRESET) => TlsFailure::Reset { first },
            Err(errno) => return Err(errno.into()),
        };
        self.end = Some(End::Failed(gone));
        Ok(false)
    }

    /// Moves what is left to the front of the buffer: less than a record, and what was looked at and not taken.
    fn make_room(&mut self) {
        if self.plain.is_empty() {
            self.plain = self.sealed.start..self.sealed.start;
        }
        let gap = self.sealed.start - self.plain.end;
        self.buffer.copy_within(self.sealed.clone(), self.plain.end);
        self.sealed = self.plain.end..self.sealed.end - gap;
        let from = self.plain.start;
        self.buffer.copy_within(from..self.sealed.end, 0);
        self.plain = 0..self.plain.end - from;
        self.sealed = self.sealed.start - from..self.sealed.end - from;
        if self.buffer.len() < BUFFER {
            self.buffer.resize(BUFFER, 0);
        }
    }
}
