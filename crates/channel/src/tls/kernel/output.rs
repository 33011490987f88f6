//! What the kernel seals.
//!
//! The law: no key seals more records than it may. How many it has sealed only the kernel knows, which cuts what it is
//! given into records as it likes; none is empty, so a call of so many bytes is taken for so many records until it is
//! asked.
//!
//! And: no call waits in the kernel, which would take a signal there for the connection's failure, and a time-out for
//! success. What does not wait is cut in the middle of a record, whose rest the kernel sends when there is room, unless
//! the socket is closed before. Whether it has, it does not say; but TCP says how much it was given, and how much that
//! has to be follows from the records.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use limosa_page::to_usize;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustls::ContentType;

use super::key::Key;
use super::option::{self, KeyDirection};
use super::{of_record, record_type};
use crate::tls::failure::{KernelTlsFailure, TlsFailure};
use crate::tls::record::{CLOSE, NewKeys, UPDATE};
use crate::transport;
use crate::vector::{Batch, Out};

/// The part of a key's records that the bytes of one call are at most. As many may be left when it is renewed.
const CALL_SHARE: u64 = 16;
/// Most bytes of one call.
const CALL_MAX: u64 = 1 << 20;
/// Bytes of a record beside what is in it: its header, the type that is sealed, and the tag (RFC 8446, 5.2).
const RECORD_OVERHEAD: u64 = 5 + 1 + 16;
/// How long the kernel is left to itself when it has room for what it holds.
const YIELD: Duration = Duration::from_micros(50);

/// The direction of a socket that the kernel seals.
#[derive(Debug)]
pub(crate) struct Output {
    /// Bytes of the key's structure.
    length: usize,
    /// Records that one key may seal.
    limit: u64,
    /// Records that this one may seal yet, for certain.
    room: u64,
    renews: bool,
    /// A put is not over, or was broken off: there was more to say, or the kernel may hold some of it.
    amid: bool,
    /// Bytes that TCP is to be given altogether, were it not for what is beside them in the records of this key.
    given: u64,
    /// The number of the first of those.
    first: u64,
    /// The peer waits for records of a key that the kernel does not have.
    lost: bool,
}

impl Output {
    /// Gives the kernel the key, if nothing that was sealed with it waits to be sent.
    pub(crate) fn over(socket: &OwnedFd, key: &Key, limit: u64) -> Result<Self, Errno> {
        let set = || option::set(socket.as_fd(), KeyDirection::Sending, key);
        let (given, _) = option::given(socket.as_fd())?;
        set()?;
        let renews = set().is_ok();
        let (first, length) = (key.number(), key.bytes().len());
        let room = limit.saturating_sub(first);
        Ok(Self { length, limit, room, renews, amid: false, given, first, lost: false })
    }

    /// Has the kernel seal some of the batch, and begin to send it; returns how many bytes. `renew` is whether the peer
    /// wants another key.
    pub(crate) fn put(
        &mut self,
        socket: &OwnedFd,
        batch: &Batch<'_, Out>,
        renew: &AtomicBool,
        keys: &mut dyn NewKeys,
    ) -> io::Result<usize> {
        self.amid = true;
        let most = (self.limit / CALL_SHARE).clamp(1, CALL_MAX);
        let part = batch.head(to_usize(most));
        let records = part.bytes() as u64;
        if self.room < records {
            let next = option::next_number(socket.as_fd(), self.length)?;
            self.room = self.limit.saturating_sub(next);
        }
        if self.lost || self.room < records || renew.load(Ordering::Acquire) {
            self.renew(socket, keys)?;
            renew.store(false, Ordering::Release);
        }
        let sent = transport::send(socket, &part, libc::MSG_DONTWAIT);
        let moved = sent.map_err(|error| match Errno::from_io_error(&error) {
            // Also what the other direction has found.
            Some(Errno::BADMSG) => of_record(Errno::BADMSG).map_or(error, io::Error::from),
            _ => error,
        })?;
        self.room = self.room.saturating_sub(moved as u64);
        self.given = self.given.wrapping_add(moved as u64);
        Ok(moved)
    }

    /// Whether a put is to be [ended](Self::end).
    pub(crate) fn is_amid(&self) -> bool {
        self.amid
    }

    /// Ends a put, unless the kernel holds some of it, which TCP was not given yet.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] if it does; [`Errno::PIPE`] if the peer will never receive that.
    pub(crate) fn end(&mut self, socket: &OwnedFd) -> Result<(), Errno> {
        let all = self.given.wrapping_add(self.record_overhead(socket)?);
        let (given, over) = option::given(socket.as_fd())?;
        if given != all {
            return Err(if over { Errno::PIPE } else { Errno::AGAIN });
        }
        self.amid = false;
        Ok(())
    }

    /// How many bytes are beside what this key's records have in them.
    fn record_overhead(&self, socket: &OwnedFd) -> Result<u64, Errno> {
        let records = option::next_number(socket.as_fd(), self.length)?.wrapping_sub(self.first);
        Ok(records.wrapping_mul(RECORD_OVERHEAD))
    }

    /// Sends a record that is no data.
    fn say(&mut self, socket: &OwnedFd, typ: ContentType, word: &[u8]) -> Result<(), Errno> {
        record_type::send(socket.as_fd(), typ, word, libc::MSG_DONTWAIT)?;
        self.given = self.given.wrapping_add(word.len() as u64);
        Ok(())
    }

    /// Goes on with the next key. The last record of this one announces that to the peer.
    fn renew(&mut self, socket: &OwnedFd, keys: &mut dyn NewKeys) -> io::Result<()> {
        if !self.renews || self.lost {
            return Err(TlsFailure::Kernel(KernelTlsFailure::KeyUsedUp).into());
        }
        self.say(socket, ContentType::Handshake, &UPDATE)?;
        self.lost = true;
        self.given = self.given.wrapping_add(self.record_overhead(socket)?);
        self.first = 0;
        let refused = TlsFailure::Kernel;
        let key = Key::new(&keys.next_sending()?, 0).ok_or(refused(KernelTlsFailure::NewCipher))?;
        option::set(socket.as_fd(), KeyDirection::Sending, &key)
            .map_err(|errno| refused(KernelTlsFailure::NewKey(errno)))?;
        self.lost = false;
        self.room = self.limit;
        Ok(())
    }

    /// The word that this was all, if it was. Waits so long for room.
    pub(crate) fn close(&mut self, socket: &OwnedFd, within: Duration) {
        if self.amid || self.lost {
            return;
        }
        let end = Instant::now() + within;
        let mut announced = false;
        loop {
            let answer = if announced { self.end(socket) } else { self.say(socket, ContentType::Alert, &CLOSE) };
            match answer {
                Ok(()) if announced => return,
                Ok(()) => announced = true,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if Instant::now() < end => {
                    let rest = Timespec::try_from(end.saturating_duration_since(Instant::now())).ok();
                    // What goes wrong with it shows above.
                    let _ = poll(&mut [PollFd::new(socket, PollFlags::OUT)], rest.as_ref());
                    yield_to_kernel();
                }
                // If the peer is gone, or has no room, it will see that it was cut.
                Err(_) => return,
            }
        }
    }
}

/// Leaves the processor to the kernel's own thread, which is to send what is left of a record.
pub(crate) fn yield_to_kernel() {
    thread::sleep(YIELD);
}
