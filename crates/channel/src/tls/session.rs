//! Both directions of one encrypted connection.
//!
//! The laws: each direction has a lock of its own, which is held while its thread waits in the socket; no thread takes
//! both. The secret that new keys come from is held for a computation only. What was sealed goes out, in order, before
//! anything else is: a put that fails leaves the rest of its records to the next one, because the peer counts them. The
//! close notification is sent only behind complete data: an end that gives up, or failed, leaves the peer a connection
//! that was cut. Each direction is this process's or the [kernel](super::kernel)'s.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use limosa_page::{broken, invariant};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustls::ConnectionTrafficSecrets;

use super::credentials::Tls;
use super::failure::TlsFailure;
use super::handshake::{Agreed, Handshake, Keys, Wait};
use super::kernel::{ByKernel, Input, Kernel, Key, Output, Received, yield_to_kernel};
use super::plaintext::Walk;
use super::record::{self, BODY_MAX, Decrypter, Encrypter, HEADER, NewKeys, Opened, PAYLOAD_MAX};
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
    /// Set if the kernel is to have the keys.
    kernel: Option<Kernel>,
    /// None once it is over.
    handshake: Mutex<Option<Box<Handshake>>>,
    /// How that ended.
    outcome: OnceLock<Result<Directions, TlsFailure>>,
    /// The direction was ended on this side.
    shut: AtomicBool,
    /// This end gets no more: that it cannot is no failure.
    receive_stopped: AtomicBool,
    /// A put or a get has failed: this end has not said all that it had to say, or does not know what was said to it.
    failed: AtomicBool,
}

/// The directions.
struct Directions {
    sending: Mutex<Sending>,
    receiving: Mutex<Receiving>,
    keys: Mutex<Keys>,
    /// The peer wants what this end sends under a new key.
    renew: AtomicBool,
    by_kernel: ByKernel,
}

/// Who seals.
enum Seals {
    Here(Encrypter),
    Kernel(Output),
}

/// Who opens.
enum Opens {
    Here(Decrypter),
    Kernel(Input),
}

struct Sending {
    seals: Seals,
    /// Records to go out, the first from `at` on.
    sealed: VecDeque<Vec<u8>>,
    at: usize,
    /// One record's bytes before they are sealed.
    plain: Box<[u8]>,
    closed: bool,
}

struct Receiving {
    opens: Opens,
    /// The first key, for the kernel, once everything that was read is opened.
    awaited: Option<(Kernel, Key)>,
    buffer: Vec<u8>,
    /// Bytes that no get has returned yet.
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
struct LockedKeys<'a>(&'a Mutex<Keys>);

impl NewKeys for LockedKeys<'_> {
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

/// As `lock`, unless another thread has it.
fn try_lock<T>(mutex: &Mutex<T>) -> io::Result<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
    }
}

impl Session {
    /// A session that is to be, over a connected stream socket. A client shakes hands before this returns, unless it is
    /// to defer that; a server when its channel is used.
    ///
    /// # Errors
    /// A [`TlsFailure`], or what the kernel says.
    pub(crate) fn over(socket: OwnedFd, tls: &Tls, within: Option<Duration>) -> io::Result<Self> {
        let kernel = Kernel::prepare(socket.as_fd(), tls.kernel)?;
        let handshake = Mutex::new(Some(Box::new(Handshake::new(tls, within, kernel.is_some())?)));
        let off = AtomicBool::default;
        let this = Self {
            socket,
            kernel,
            handshake,
            outcome: OnceLock::new(),
            shut: off(),
            receive_stopped: off(),
            failed: off(),
        };
        if tls.is_client() {
            match this.up(if tls.is_eager() { Wait::Yes } else { Wait::No }) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                begun => begun.map(|_| ())?,
            }
        }
        Ok(this)
    }

    /// The directions, once both ends know each other.
    fn up(&self, wait: Wait) -> io::Result<&Directions> {
        let known = |outcome: &'_ Result<Directions, TlsFailure>| outcome.as_ref().err().cloned();
        if self.outcome.get().is_none() {
            let mut handshake = match wait {
                Wait::Yes => lock(&self.handshake),
                Wait::No => try_lock(&self.handshake)?,
            };
            // Another thread may have done it meanwhile.
            if let Some(under_way) = handshake.as_mut() {
                let outcome = match under_way.go_on(self.socket.as_fd(), wait) {
                    Ok(agreed) => Directions::over(&self.socket, agreed, self.kernel),
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
        let directions = self.up(Wait::Yes)?;
        let mut sending = lock(&directions.sending);
        if sending.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if let Seals::Kernel(output) = &mut sending.seals {
            let put = output.put(&self.socket, batch, &directions.renew, &mut LockedKeys(&directions.keys));
            let moved = put.map_err(|error| match Errno::from_io_error(&error) {
                Some(errno) => self.why(directions, errno),
                None => error,
            })?;
            directions.by_kernel.sealed(moved);
            return Ok(moved);
        }
        let moved = directions.seal(&mut sending, batch)?;
        match sending.send(&self.socket, SendFlags::empty()) {
            Ok(()) => Ok(moved),
            // They are in the row now.
            Err(Errno::AGAIN | Errno::INTR) => Ok(moved),
            Err(errno) => Err(self.why(directions, errno)),
        }
    }

    /// Whether records wait to be sent; `all`: whether the kernel may have some, too, which it sends by itself.
    pub(crate) fn holds_back(&self, all: bool) -> bool {
        let Some(Ok(directions)) = self.outcome.get() else { return false };
        let sending = lock(&directions.sending);
        match &sending.seals {
            Seals::Here(_) => !sending.sealed.is_empty(),
            Seals::Kernel(output) => all && output.is_amid(),
        }
    }

    /// Sends some of the records that wait.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let directions = self.up(Wait::Yes)?;
        let mut sending = lock(&directions.sending);
        let sent = match &mut sending.seals {
            // It will not send them any more.
            Seals::Kernel(_) if self.shut.load(Ordering::Relaxed) => Err(Errno::PIPE),
            Seals::Kernel(output) => output.end(&self.socket),
            Seals::Here(_) => sending.send(&self.socket, SendFlags::empty()),
        };
        let by_kernel = matches!(sending.seals, Seals::Kernel(_));
        drop(sending);
        if by_kernel && sent == Err(Errno::AGAIN) {
            yield_to_kernel();
        }
        self.noting(sent.map_err(|errno| self.why(directions, errno)))
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
    fn why(&self, directions: &Directions, errno: Errno) -> io::Error {
        if matches!(errno, Errno::CONNRESET | Errno::PIPE)
            && let Ok(mut receiving) = try_lock(&directions.receiving)
        {
            while receiving.plain.is_empty() && receiving.end.is_none() {
                let read = |receiving: &mut _| directions.read(receiving, &self.socket, RecvFlags::DONTWAIT);
                if !directions.open(&mut receiving) && !read(&mut receiving).is_ok_and(|got| got) {
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
    /// All of it (`whole`) where the kernel opens it.
    pub(crate) fn get(&self, batch: &Batch<'_, In>, whole: bool) -> io::Result<usize> {
        let got = self.get_some(batch, whole);
        if self.receive_stopped.load(Ordering::Relaxed) { got } else { self.noting(got) }
    }

    fn get_some(&self, batch: &Batch<'_, In>, whole: bool) -> io::Result<usize> {
        let directions = self.up(Wait::Yes)?;
        let mut receiving = lock(&directions.receiving);
        let mut places = Walk::over(batch);
        let mut moved = 0;
        loop {
            moved += receiving.hand_out(&mut places);
            if moved == batch.bytes() {
                return Ok(moved);
            }
            if directions.open(&mut receiving) {
                continue;
            }
            if moved != 0 {
                return Ok(moved);
            }
            match &receiving.end {
                Some(End::Closed) => return Ok(0),
                Some(End::Failed(failure)) => return Err(failure.clone().into()),
                None => {
                    if let Some(got) = directions.get_by_kernel(&mut receiving, &self.socket, batch, whole)? {
                        return Ok(got);
                    }
                    if receiving.end.is_none() {
                        directions.read(&mut receiving, &self.socket, RecvFlags::empty())?;
                    }
                }
            }
        }
    }

    /// What the kernel does, once both ends know each other.
    pub(crate) fn by_kernel(&self) -> Option<&ByKernel> {
        self.outcome.get()?.as_ref().ok().map(|directions| &directions.by_kernel)
    }

    /// Copies the first bytes that have come, without waiting: 0 at the end, of any kind, `None` if there are none yet.
    pub(crate) fn peek(&self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        let mut look = || -> io::Result<Option<usize>> {
            let directions = self.up(Wait::No)?;
            let mut receiving = try_lock(&directions.receiving)?;
            // Once: a peer that keeps sending delays no other one.
            let mut asked = false;
            while receiving.plain.len() < bytes.len() {
                if directions.open(&mut receiving) {
                    continue;
                }
                if asked || receiving.end.is_some() {
                    break;
                }
                asked = true;
                match directions.read(&mut receiving, &self.socket, RecvFlags::DONTWAIT) {
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

    /// Nothing more is got.
    pub(crate) fn stop_receiving(&self) {
        self.receive_stopped.store(true, Ordering::Relaxed);
    }

    /// Nothing more is put, and no close notification is sent.
    pub(crate) fn give_up(&self) {
        self.shut.store(true, Ordering::Relaxed);
        if let Some(Ok(directions)) = self.outcome.get()
            && let Ok(mut sending) = try_lock(&directions.sending)
        {
            sending.closed = true;
        }
    }

    /// Tells the peer that nothing more comes, unless a put is in progress: then more comes. Waits for room, but not
    /// for long.
    pub(crate) fn close(&self) {
        self.shut.store(true, Ordering::Relaxed);
        let Some(Ok(directions)) = self.outcome.get() else { return };
        let Ok(mut sending) = try_lock(&directions.sending) else { return };
        // Records of a put that was broken off are not all that there was to say.
        if std::mem::replace(&mut sending.closed, true) || !sending.sealed.is_empty() {
            return;
        }
        let word = match &mut sending.seals {
            Seals::Here(encrypter) => encrypter.close(),
            Seals::Kernel(output) => return output.close(&self.socket, CLOSE_WITHIN),
        };
        let Ok(word) = word else { return };
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

impl Directions {
    /// Both directions of a socket, by the kernel if it is to have the keys.
    ///
    /// # Errors
    /// It was demanded, and does not take them.
    fn over(socket: &OwnedFd, agreed: Agreed, kernel: Option<Kernel>) -> Result<Self, TlsFailure> {
        let Agreed { encrypter, decrypter, keys, for_kernel, rest } = agreed;
        let by_kernel = ByKernel::default();
        let (sends, receives) = for_kernel.unzip();
        let output = match kernel.zip(sends) {
            Some((kernel, key)) => kernel.or_without(Output::over(socket, &key, encrypter.limit()))?,
            None => None,
        };
        let seals = match output {
            Some(output) => {
                by_kernel.seals();
                Seals::Kernel(output)
            }
            None => Seals::Here(encrypter),
        };
        let plain = vec![0; PAYLOAD_MAX].into_boxed_slice();
        let sealed = 0..rest.len();
        let sending = Sending { seals, sealed: VecDeque::new(), at: 0, plain, closed: false };
        let (opens, awaited) = (Opens::Here(decrypter), kernel.zip(receives));
        let mut receiving = Receiving { opens, awaited, buffer: rest, plain: 0..0, sealed, begun: false, end: None };
        receiving.hand_over_to_kernel(socket, &by_kernel)?;
        Ok(Self {
            sending: Mutex::new(sending),
            receiving: Mutex::new(receiving),
            keys: Mutex::new(keys),
            renew: AtomicBool::new(false),
            by_kernel,
        })
    }

    /// Seals the beginning of a batch: how many bytes of it.
    fn seal(&self, sending: &mut Sending, batch: &Batch<'_, Out>) -> Result<usize, TlsFailure> {
        let mut from = Walk::over(batch);
        let mut moved = 0;
        let Seals::Here(encrypter) = &mut sending.seals else { return Ok(0) };
        for _ in 0..SEALED_MAX {
            if self.renew.swap(false, Ordering::AcqRel) || encrypter.is_used_up() {
                let word = encrypter.renew(&mut LockedKeys(&self.keys))?;
                sending.sealed.push_back(word);
            }
            let length = from.gather(&mut sending.plain);
            if length == 0 {
                break;
            }
            let record = encrypter.seal(&sending.plain[..length])?;
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
        let Opens::Here(decrypter) = &mut receiving.opens else { return Ok(false) };
        let Some(sealed) = receiving.buffer.get_mut(receiving.sealed.clone()) else {
            return Err(broken("sealed bytes are inside the receive buffer").into());
        };
        let Some(body) = record::body(sealed)? else { return Ok(false) };
        let Some(record) = sealed.get_mut(body.clone()) else {
            return Err(broken("the body of a record is among the bytes that were received").into());
        };
        let opened = decrypter.open(record, &mut LockedKeys(&self.keys))?;
        if let Opened::Bytes(length) = opened {
            invariant(length <= body.len(), "an opened record is no longer than it was sealed")?;
        }
        let start = receiving.sealed.start + body.start;
        receiving.sealed.start += body.end;
        self.note(receiving, opened, start);
        Ok(true)
    }

    /// Does as a record says, whose bytes are in the buffer from `start` on.
    fn note(&self, receiving: &mut Receiving, opened: Opened, start: usize) {
        match opened {
            Opened::Bytes(length) => receiving.append(start..start + length),
            Opened::Control { renew } => {
                if renew {
                    self.renew.store(true, Ordering::Release);
                }
            }
            Opened::Close => receiving.end = Some(End::Closed),
        }
    }

    /// Reads more records, or a part of one. An end of the connection is noted.
    fn read(&self, receiving: &mut Receiving, socket: &OwnedFd, flags: RecvFlags) -> io::Result<bool> {
        receiving.make_room();
        let received = match receiving.hand_over_to_kernel(socket, &self.by_kernel) {
            Err(failure) => Err(failure.into()),
            Ok(()) => match &mut receiving.opens {
                Opens::Here(_) => return receiving.read(socket, flags),
                Opens::Kernel(input) => {
                    let room = &mut receiving.buffer[receiving.sealed.end..];
                    if room.len() < BODY_MAX {
                        return Ok(false);
                    }
                    input.receive_record(socket, room, flags, &mut LockedKeys(&self.keys))
                }
            },
        };
        match received {
            Ok(Received::Record(opened)) => {
                let start = receiving.sealed.end;
                if let Opened::Bytes(length) = opened {
                    receiving.sealed = start + length..start + length;
                    self.by_kernel.opened(length);
                }
                self.note(receiving, opened, start);
                Ok(true)
            }
            Ok(Received::Ended) => receiving.gone(Ok(0)),
            Err(error) => receiving.gone(Err(error)),
        }
    }

    /// Has the kernel open what is next straight into some of the batch, or all of it (`whole`); `None` if that has to
    /// be [read](Self::read).
    fn get_by_kernel(
        &self,
        receiving: &mut Receiving,
        socket: &OwnedFd,
        batch: &Batch<'_, In>,
        whole: bool,
    ) -> io::Result<Option<usize>> {
        let Opens::Kernel(input) = &mut receiving.opens else { return Ok(None) };
        match input.get(socket, batch, whole) {
            Ok(Some(got)) => {
                receiving.begun = true;
                self.by_kernel.opened(got);
                Ok(Some(got))
            }
            Ok(None) => Ok(None),
            Err(error) => {
                receiving.gone(Err(error))?;
                // The end, which is noted.
                Ok(None)
            }
        }
    }
}

impl Sending {
    /// Sends what one call takes.
    fn send(&mut self, socket: &OwnedFd, flags: SendFlags) -> Result<(), Errno> {
        let first = self.sealed.front().map_or(&[][..], |first| &first[self.at..]);
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
        let copied = places.scatter(&self.buffer[self.plain.clone()]);
        self.plain.start += copied;
        copied
    }

    /// Puts the bytes of another record behind those that no get has returned yet.
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

    /// Has the kernel open what comes from now on, if it is to, and if nothing is half read.
    fn hand_over_to_kernel(&mut self, socket: &OwnedFd, by_kernel: &ByKernel) -> Result<(), TlsFailure> {
        if !self.sealed.is_empty() {
            return Ok(());
        }
        let (Some((kernel, key)), Opens::Here(decrypter)) = (self.awaited.take(), &mut self.opens) else {
            return Ok(());
        };
        // A peer that has renewed its key already is one whose records this process goes on to open.
        let Some(next) = decrypter.next_of_first_key() else { return Ok(()) };
        if let Some(input) = kernel.or_without(Input::over(socket, &key.at(next), decrypter.reader_mut()))? {
            self.opens = Opens::Kernel(input);
            by_kernel.opens();
        }
        Ok(())
    }

    fn read(&mut self, socket: &OwnedFd, flags: RecvFlags) -> io::Result<bool> {
        let missing = self.awaited.as_ref().map(|_| {
            // No byte of the next record, which is for the kernel.
            record::missing(&self.buffer[self.sealed.clone()])
        });
        let room = &mut self.buffer[self.sealed.end..];
        let most = missing.map_or(room.len(), |missing: usize| missing.min(room.len()));
        let Some(room) = room.get_mut(..most).filter(|room| !room.is_empty()) else { return Ok(false) };
        match recv(socket, room, flags) {
            Ok((got, _)) if got != 0 => {
                self.sealed.end += got;
                Ok(true)
            }
            answer => self.gone(answer.map(|_| 0).map_err(io::Error::from)),
        }
    }

    /// Notes the end of the connection, if this is one.
    fn gone(&mut self, answer: io::Result<usize>) -> io::Result<bool> {
        let first = !self.begun;
        let failure = match answer {
            Ok(_) => TlsFailure::Truncated { first },
            Err(error) => match error.get_ref().and_then(|error| error.downcast_ref::<TlsFailure>()) {
                Some(failure) => failure.clone(),
                // A peer that goes with bytes of ours that it has not read; or an attacker between the two.
                None if error.kind() == io::ErrorKind::ConnectionReset => TlsFailure::Reset { first },
                None => return Err(error),
            },
        };
        self.end = Some(End::Failed(failure));
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
