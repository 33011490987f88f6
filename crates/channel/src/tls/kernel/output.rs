//! The direction that the kernel encrypts.
//!
//! The law: no key encrypts more records than its limit. Only the kernel knows how many it encrypted, because it splits
//! data into records as it likes. No record is empty, so a call of n bytes is counted as n records until the kernel is
//! asked.
//!
//! And: no call waits in the kernel, which would treat a signal there as a failure of the connection, and a time-out as
//! success. A call that does not wait may stop in the middle of a record. The kernel sends the rest when there is room,
//! unless the socket is closed before. It does not report when it has; but TCP reports how many bytes were queued, and
//! the expected number follows from the records.

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
use super::{record_failure, record_type};
use crate::system_call;
use crate::tls::failure::{KernelTlsFailure, TlsFailure};
use crate::tls::record::{CLOSE, NewKeys, UPDATE};
use crate::vector::{Batch, Out};

/// A call has at most this fraction of a key's record limit in bytes. As many records may be unused when the key is
/// updated.
const CALL_SHARE: u64 = 16;
/// Maximum number of bytes of one call.
const CALL_MAX: u64 = 1 << 20;
/// Overhead of a record in bytes: its header, the encrypted type, and the tag (RFC 8446, 5.2).
const RECORD_OVERHEAD: u64 = 5 + 1 + 16;
/// Pause for the kernel's own thread when the socket has room for the rest of a record.
const YIELD: Duration = Duration::from_micros(50);

/// The direction of a socket that the kernel encrypts.
#[derive(Debug)]
pub(crate) struct Output {
    /// Size of the key's structure in bytes.
    length: usize,
    /// Records that one key may encrypt.
    limit: u64,
    /// Records that this key may certainly still encrypt.
    room: u64,
    renews: bool,
    /// A write is in progress or failed halfway, or the kernel may hold a part of a record.
    pending: bool,
    /// Expected number of bytes queued in TCP, without the overhead of this key's records.
    given: u64,
    /// The number of this key's first record.
    first: u64,
    /// The peer expects the next key, which the kernel does not have.
    lost: bool,
}

impl Output {
    /// Gives the kernel the key. No record of this process may be unsent.
    pub(crate) fn over(socket: &OwnedFd, key: &Key, limit: u64) -> Result<Self, Errno> {
        let set = || option::set(socket.as_fd(), KeyDirection::Sending, key);
        let (given, _) = option::queued(socket.as_fd())?;
        set()?;
        let renews = set().is_ok();
        let (first, length) = (key.number(), key.bytes().len());
        let room = limit.saturating_sub(first);
        Ok(Self { length, limit, room, renews, pending: false, given, first, lost: false })
    }

    /// Has the kernel encrypt some of the batch and begin to send it; returns how many bytes. `requested`: the peer
    /// requests a key update.
    pub(crate) fn write(
        &mut self,
        socket: &OwnedFd,
        batch: &Batch<'_, Out>,
        requested: &AtomicBool,
        keys: &mut dyn NewKeys,
    ) -> io::Result<usize> {
        self.pending = true;
        let most = (self.limit / CALL_SHARE).clamp(1, CALL_MAX);
        let part = batch.head(to_usize(most));
        let records = part.bytes() as u64;
        if self.room < records {
            let next = option::next_number(socket.as_fd(), self.length)?;
            self.room = self.limit.saturating_sub(next);
        }
        if self.lost || self.room < records || requested.load(Ordering::Acquire) {
            self.update_key(socket, keys)?;
            requested.store(false, Ordering::Release);
        }
        let sent = system_call::send(socket, &part, libc::MSG_DONTWAIT);
        let moved = sent.map_err(|error| match Errno::from_io_error(&error) {
            // The kernel also reports errors of the other direction here.
            Some(Errno::BADMSG) => record_failure(Errno::BADMSG).map_or(error, io::Error::from),
            _ => error,
        })?;
        self.room = self.room.saturating_sub(moved as u64);
        self.given = self.given.wrapping_add(moved as u64);
        Ok(moved)
    }

    /// Whether a write must be [ended](Self::end).
    pub(crate) fn is_pending(&self) -> bool {
        self.pending
    }

    /// Ends a write, unless the kernel holds a part of a record that is not queued in TCP yet.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] if it does; [`Errno::PIPE`] if the peer will never receive it.
    pub(crate) fn end(&mut self, socket: &OwnedFd) -> Result<(), Errno> {
        let all = self.given.wrapping_add(self.record_overhead(socket)?);
        let (given, over) = option::queued(socket.as_fd())?;
        if given != all {
            return Err(if over { Errno::PIPE } else { Errno::AGAIN });
        }
        self.pending = false;
        Ok(())
    }

    /// Returns the overhead of this key's records in bytes.
    fn record_overhead(&self, socket: &OwnedFd) -> Result<u64, Errno> {
        let records = option::next_number(socket.as_fd(), self.length)?.wrapping_sub(self.first);
        Ok(records.wrapping_mul(RECORD_OVERHEAD))
    }

    /// Sends a control record.
    fn send_control(&mut self, socket: &OwnedFd, typ: ContentType, bytes: &[u8]) -> Result<(), Errno> {
        record_type::send(socket.as_fd(), typ, bytes, libc::MSG_DONTWAIT)?;
        self.given = self.given.wrapping_add(bytes.len() as u64);
        Ok(())
    }

    /// Changes to the next key. The last record of this one, a `KeyUpdate`, announces it to the peer.
    fn update_key(&mut self, socket: &OwnedFd, keys: &mut dyn NewKeys) -> io::Result<()> {
        if !self.renews || self.lost {
            return Err(TlsFailure::Kernel(KernelTlsFailure::KeyUsedUp).into());
        }
        self.send_control(socket, ContentType::Handshake, &UPDATE)?;
        self.lost = true;
        self.given = self.given.wrapping_add(self.record_overhead(socket)?);
        self.first = 0;
        let refused = TlsFailure::Kernel;
        let key = Key::new(&keys.next_sending()?, 0).ok_or(refused(KernelTlsFailure::UnsupportedCipher))?;
        option::set(socket.as_fd(), KeyDirection::Sending, &key)
            .map_err(|errno| refused(KernelTlsFailure::RekeyRejected(errno)))?;
        self.lost = false;
        self.room = self.limit;
        Ok(())
    }

    /// Sends the close notification, unless data is incomplete. Waits at most `within` for room.
    pub(crate) fn close(&mut self, socket: &OwnedFd, within: Duration) {
        if self.pending || self.lost {
            return;
        }
        let end = Instant::now() + within;
        let mut announced = false;
        loop {
            let answer =
                if announced { self.end(socket) } else { self.send_control(socket, ContentType::Alert, &CLOSE) };
            match answer {
                Ok(()) if announced => return,
                Ok(()) => announced = true,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if Instant::now() < end => {
                    let rest = Timespec::try_from(end.saturating_duration_since(Instant::now())).ok();
                    // An error shows in the next iteration.
                    let _ = poll(&mut [PollFd::new(socket, PollFlags::OUT)], rest.as_ref());
                    yield_to_kernel();
                }
                // If the peer is gone, or has no room, it will see a cut connection.
                Err(_) => return,
            }
        }
    }
}

/// Yields to the kernel's own thread, which sends the rest of a record.
pub(crate) fn yield_to_kernel() {
    thread::sleep(YIELD);
}
