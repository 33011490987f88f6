//! Both directions of one encrypted connection.
//!
//! The laws: each direction has a lock of its own, which is held while its thread waits in the socket; no thread takes
//! both. The lock of the secrets for new keys is held for a computation only. Encrypted records go out in order before
//! anything else: a write that fails leaves the rest of its records to the next one, because the peer counts them. The
//! close notification is sent only after complete data: an end that gives up or failed leaves a cut connection to the
//! peer. Each direction is handled either by this process or by the [kernel](super::kernel).

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
use super::kernel::{ByKernel, Input, Kernel, Key, Output, Received, yield_to_kernel};
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
    /// Set if the kernel takes over the keys.
    kernel: Option<Kernel>,
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
    by_kernel: ByKernel,
}

/// Where records are encrypted.
enum Encryption {
    Userspace(Encrypter),
    Kernel(Output),
}

/// Where records are decrypted.
enum Decryption {
    Userspace(Decrypter),
    Kernel(Input),
}

struct Sending {
    encryption: Encryption,
    /// Records to send, the first from `at` on.
    records: VecDeque<Vec<u8>>,
    at: usize,
    /// Plaintext of one record.
    plain: Box<[u8]>,
    closed: bool,
}

struct Receiving {
    decryption: Decryption,
    /// The first key, for the kernel, once all bytes that were read are decrypted.
    awaited: Option<(Kernel, Key)>,
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
        if let Encryption::Kernel(output) = &mut sending.encryption {
            let written =
                output.write(&self.socket, batch, &directions.key_update_requested, &mut LockedKeys(&directions.keys));
            let moved = written.map_err(|error| match Errno::from_io_error(&error) {
                Some(errno) => self.alert_or(directions, errno),
                None => error,
            })?;
            directions.by_kernel.encrypted(moved);
            return Ok(moved);
        }
        let moved = directions.encrypt(&mut sending, batch)?;
        match sending.send(&self.socket, SendFlags::empty()) {
            Ok(()) => Ok(moved),
            // The records are queued now.
            Err(Errno::AGAIN | Errno::INTR) => Ok(moved),
            Err(errno) => Err(self.alert_or(directions, errno)),
        }
    }

    /// Whether records wait to be sent. With `all` this includes a part of a record that the kernel sends by itself.
    pub(crate) fn is_buffering(&self, all: bool) -> bool {
        let Some(Ok(directions)) = self.outcome.get() else { return false };
        let sending = directions.sending.lock();
        match &sending.encryption {
            Encryption::Userspace(_) => !sending.records.is_empty(),
            Encryption::Kernel(output) => all && output.is_pending(),
        }
    }

    /// Sends some of the queued records.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let directions = self.directions(Wait::Yes)?;
        let mut sending = directions.sending.lock();
        let sent = match &mut sending.encryption {
            // The kernel will not send it any more.
            Encryption::Kernel(_) if self.shut.load(Ordering::Relaxed) => Err(Errno::PIPE),
            Encryption::Kernel(output) => output.end(&self.socket),
            Encryption::Userspace(_) => sending.send(&self.socket, SendFlags::empty()),
        };
        let by_kernel = matches!(sending.encryption, Encryption::Kernel(_));
        drop(sending);
        if by_kernel && sent == Err(Errno::AGAIN) {
            yield_to_kernel();
        }
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
                let read = |receiving: &mut _| directions.read(receiving, &self.socket, RecvFlags::DONTWAIT);
                if !directions.decrypt(&mut receiving) && !read(&mut receiving).is_ok_and(|got| got) {
                    break;
                }
            }
            if let Some(End::Failed(failure @ TlsFailure::Refused(_))) = &receiving.end {
                return failure.clone().into();
            }
        }
        errno.into()
    }

    /// Reads some of the batch; returns how many bytes, 0 at the close notification. With `whole`, reads all of it
    /// where the kernel decrypts.
    pub(crate) fn read(&self, batch: &Batch<'_, In>, whole: bool) -> io::Result<usize> {
        let got = self.read_some(batch, whole);
        if self.receive_stopped.load(Ordering::Relaxed) { got } else { self.noting_failure(got) }
    }

    fn read_some(&self, batch: &Batch<'_, In>, whole: bool) -> io::Result<usize> {
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
                None => {
                    if let Some(got) = directions.read_by_kernel(&mut receiving, &self.socket, batch, whole)? {
                        return Ok(got);
                    }
                    if receiving.end.is_none() {
                        directions.read(&mut receiving, &self.socket, RecvFlags::empty())?;
                    }
                }
            }
        }
    }

    /// Returns what the kernel handles; `None` before the handshake is complete.
    pub(crate) fn by_kernel(&self) -> Option<&ByKernel> {
        self.outcome.get()?.as_ref().ok().map(|directions| &directions.by_kernel)
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
        let record = match &mut sending.encryption {
            Encryption::Userspace(encrypter) => encrypter.close(),
            Encryption::Kernel(output) => return output.close(&self.socket, CLOSE_WITHIN),
        };
        let Ok(record) = record else { return };
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

impl Directions {
    /// Creates both directions of a socket, and hands the keys to the kernel if it takes over.
    ///
    /// # Errors
    /// The kernel is required, and rejects a key.
    fn over(socket: &OwnedFd, agreed: Established, kernel: Option<Kernel>) -> Result<Self, TlsFailure> {
        let Established { encrypter, decrypter, keys, for_kernel, rest } = agreed;
        let by_kernel = ByKernel::default();
        let (sends, receives) = for_kernel.unzip();
        let output = match kernel.zip(sends) {
            Some((kernel, key)) => kernel.or_userspace(Output::over(socket, &key, encrypter.limit()))?,
            None => None,
        };
        let encryption = match output {
            Some(output) => {
                by_kernel.set_encrypts();
                Encryption::Kernel(output)
            }
            None => Encryption::Userspace(encrypter),
        };
        let plain = vec![0; PAYLOAD_MAX].into_boxed_slice();
        let encrypted = 0..rest.len();
        let sending = Sending { encryption, records: VecDeque::new(), at: 0, plain, closed: false };
        let (decryption, awaited) = (Decryption::Userspace(decrypter), kernel.zip(receives));
        let mut receiving =
            Receiving { decryption, awaited, buffer: rest, plain: 0..0, encrypted, begun: false, end: None };
        receiving.hand_over_to_kernel(socket, &by_kernel)?;
        Ok(Self {
            sending: Mutex::new(sending),
            receiving: Mutex::new(receiving),
            keys: Mutex::new(keys),
            key_update_requested: AtomicBool::new(false),
            by_kernel,
        })
    }

    /// Encrypts the beginning of a batch; returns how many bytes.
    fn encrypt(&self, sending: &mut Sending, batch: &Batch<'_, Out>) -> Result<usize, TlsFailure> {
        let mut from = Walk::over(batch);
        let mut moved = 0;
        let Encryption::Userspace(encrypter) = &mut sending.encryption else { return Ok(0) };
        for _ in 0..RECORDS_MAX {
            if self.key_update_requested.swap(false, Ordering::AcqRel) || encrypter.is_used_up() {
                let record = encrypter.update_key(&mut LockedKeys(&self.keys))?;
                sending.records.push_back(record);
            }
            let length = from.gather(&mut sending.plain);
            if length == 0 {
                break;
            }
            let record = encrypter.encrypt(&sending.plain[..length])?;
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
        let Decryption::Userspace(decrypter) = &mut receiving.decryption else { return Ok(false) };
        let (range, whole) = (receiving.encrypted.clone(), "encrypted bytes are inside the receive buffer");
        let encrypted = inside(&mut receiving.buffer, range, whole)?;
        let Some(body) = record::body(encrypted)? else { return Ok(false) };
        let record = inside(encrypted, body.clone(), "the body of a record is among the received bytes")?;
        let decrypted = decrypter.decrypt(record, &mut LockedKeys(&self.keys))?;
        let start = receiving.encrypted.start + body.start;
        receiving.encrypted.start += body.end;
        self.apply(receiving, decrypted, start);
        Ok(true)
    }

    /// Applies a decrypted record, whose bytes are in the buffer from `start` on.
    fn apply(&self, receiving: &mut Receiving, decrypted: Decrypted, start: usize) {
        match decrypted {
            Decrypted::Bytes(length) => receiving.append(start..start + length),
            Decrypted::Control { update_key } => {
                if update_key {
                    self.key_update_requested.store(true, Ordering::Release);
                }
            }
            Decrypted::Close => receiving.end = Some(End::Closed),
        }
    }

    /// Reads more records, or a part of one. Notes the end of the connection.
    fn read(&self, receiving: &mut Receiving, socket: &OwnedFd, flags: RecvFlags) -> io::Result<bool> {
        receiving.make_room();
        let received = match receiving.hand_over_to_kernel(socket, &self.by_kernel) {
            Err(failure) => Err(failure.into()),
            Ok(()) => match &mut receiving.decryption {
                Decryption::Userspace(_) => return receiving.read(socket, flags),
                Decryption::Kernel(input) => {
                    let room = &mut receiving.buffer[receiving.encrypted.end..];
                    if room.len() < BODY_MAX {
                        return Ok(false);
                    }
                    input.receive_record(socket, room, flags, &mut LockedKeys(&self.keys))
                }
            },
        };
        match received {
            Ok(Received::Record(decrypted)) => {
                let start = receiving.encrypted.end;
                if let Decrypted::Bytes(length) = decrypted {
                    receiving.encrypted = start + length..start + length;
                    self.by_kernel.decrypted(length);
                }
                self.apply(receiving, decrypted, start);
                Ok(true)
            }
            Ok(Received::Ended) => receiving.note_end(Ok(0)),
            Err(error) => receiving.note_end(Err(error)),
        }
    }

    /// Has the kernel decrypt the next data straight into some of the batch, or all of it (`whole`); `None` if the next
    /// record must be [read](Self::read) into the buffer.
    fn read_by_kernel(
        &self,
        receiving: &mut Receiving,
        socket: &OwnedFd,
        batch: &Batch<'_, In>,
        whole: bool,
    ) -> io::Result<Option<usize>> {
        let Decryption::Kernel(input) = &mut receiving.decryption else { return Ok(None) };
        match input.read(socket, batch, whole) {
            Ok(Some(got)) => {
                receiving.begun = true;
                self.by_kernel.decrypted(got);
                Ok(Some(got))
            }
            Ok(None) => Ok(None),
            Err(error) => {
                receiving.note_end(Err(error))?;
                // The end, which `note_end` recorded.
                Ok(None)
            }
        }
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

    /// Hands the receiving key to the kernel, if it takes over, unless a record is incomplete.
    fn hand_over_to_kernel(&mut self, socket: &OwnedFd, by_kernel: &ByKernel) -> Result<(), TlsFailure> {
        if !self.encrypted.is_empty() {
            return Ok(());
        }
        let (Some((kernel, key)), Decryption::Userspace(decrypter)) = (self.awaited.take(), &mut self.decryption)
        else {
            return Ok(());
        };
        // After a key update of the peer this process keeps decrypting: the kernel would get a key whose number is
        // unknown here.
        let Some(next) = decrypter.next_number_of_first_key() else { return Ok(()) };
        if let Some(input) = kernel.or_userspace(Input::over(socket, &key.at(next), decrypter.reader_mut()))? {
            self.decryption = Decryption::Kernel(input);
            by_kernel.set_decrypts();
        }
        Ok(())
    }

    fn read(&mut self, socket: &OwnedFd, flags: RecvFlags) -> io::Result<bool> {
        let missing = self.awaited.as_ref().map(|_| {
            // Not a byte of the next record, which the kernel decrypts.
            record::missing(&self.buffer[self.encrypted.clone()])
        });
        let room = &mut self.buffer[self.encrypted.end..];
        let most = missing.map_or(room.len(), |missing: usize| missing.min(room.len()));
        let Some(room) = room.get_mut(..most).filter(|room| !room.is_empty()) else { return Ok(false) };
        match recv(socket, room, flags) {
            Ok((got, _)) if got != 0 => {
                self.encrypted.end += got;
                Ok(true)
            }
            answer => self.note_end(answer.map(|_| 0).map_err(io::Error::from)),
        }
    }

    /// Notes the end of the connection, or returns another error.
    fn note_end(&mut self, answer: io::Result<usize>) -> io::Result<bool> {
        let first = !self.begun;
        let failure = match answer {
            Ok(_) => TlsFailure::Truncated { before_first_byte: first },
            Err(error) => match error.get_ref().and_then(|error| error.downcast_ref::<TlsFailure>()) {
                Some(failure) => failure.clone(),
                // A peer that closes with unread bytes of this end; or an attacker on the path.
                None if error.kind() == io::ErrorKind::ConnectionReset => {
                    TlsFailure::Reset { before_first_byte: first }
                }
                None => return Err(error),
            },
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
