//! What the kernel seals.
//!
//! The law: no key seals more records than it may. How many it has sealed only the kernel knows, which cuts what it is given into
//! records as it likes; none is empty, so a call of so many bytes is taken for so many records until it is asked.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;
use rustls::ContentType;

use super::key::Key;
use super::option::{self, Direction};
use super::{of_record, record_type};
use crate::tls::failure::TlsFailure;
use crate::tls::record::{CLOSE, NewKeys, UPDATE};
use crate::transport;
use crate::vector::{Batch, Out};

/// The part of a key's records that the bytes of one call are at most. As many may be left when it is renewed.
const CALL_SHARE: u64 = 16;
/// Most bytes of one call.
const CALL_MAX: u64 = 1 << 20;

const USED_UP: &str = "its key has sealed all that it may, and this kernel takes no second one (Linux 6.14 does); auto does \
                       without it";

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
    /// A put was broken off: there was more to say.
    amid: bool,
    /// The peer waits for records of a key that the kernel does not have.
    lost: bool,
}

impl Output {
    /// Gives the kernel the key, if nothing that was sealed with it waits to be sent.
    pub(crate) fn over(socket: &OwnedFd, key: &Key, limit: u64) -> Result<Self, Errno> {
        let set = || option::set(socket.as_fd(), Direction::Sending, key);
        set()?;
        let renews = set().is_ok();
        let room = limit.saturating_sub(key.number());
        Ok(Self { length: key.bytes().len(), limit, room, renews, amid: false, lost: false })
    }

    /// Has the kernel seal and send some of the batch; returns how many bytes. `renew` is whether the peer wants another key.
    pub(crate) fn put(
        &mut self,
        socket: &OwnedFd,
        batch: &Batch<'_, Out>,
        renew: &AtomicBool,
        keys: &mut dyn NewKeys,
    ) -> io::Result<usize> {
        self.amid = true;
        let most = (self.limit / CALL_SHARE).clamp(1, CALL_MAX);
        let part = batch.head(usize::try_from(most).unwrap_or(usize::MAX));
        let records = part.bytes() as u64;
        if self.room < records {
            let next = option::next_number(socket.as_fd(), self.length)?;
            self.room = self.limit.saturating_sub(next);
        }
        if self.lost || self.room < records || renew.load(Ordering::Acquire) {
            self.renew(socket, keys)?;
            renew.store(false, Ordering::Release);
        }
        let sent = transport::send(socket, &part, 0);
        let moved = sent.map_err(|error| match Errno::from_io_error(&error) {
            // Also what the other direction has found.
            Some(Errno::BADMSG) => of_record(Errno::BADMSG).map_or(error, io::Error::from),
            _ => error,
        })?;
        self.room = self.room.saturating_sub(moved as u64);
        self.amid = moved < batch.bytes();
        Ok(moved)
    }

    /// Goes on with the next key. The peer is told so by the last record of this one.
    fn renew(&mut self, socket: &OwnedFd, keys: &mut dyn NewKeys) -> io::Result<()> {
        if !self.renews || self.lost {
            return Err(TlsFailure::Kernel(USED_UP.into()).into());
        }
        record_type::send(socket.as_fd(), ContentType::Handshake, &UPDATE, 0)?;
        self.lost = true;
        let refused = |why: &dyn std::fmt::Display| TlsFailure::Kernel(format!("it does not take a new key: {why}"));
        let key = Key::new(&keys.next_sending()?, 0).ok_or_else(|| refused(&"another cipher"))?;
        option::set(socket.as_fd(), Direction::Sending, &key).map_err(|errno| refused(&errno))?;
        self.lost = false;
        self.room = self.limit;
        Ok(())
    }

    /// The word that this was all, if it was. Waits so long for room.
    pub(crate) fn close(&mut self, socket: &OwnedFd, within: Duration) {
        if self.amid || self.lost {
            return;
        }
        // Nobody puts any more.
        let bounded = sockopt::set_socket_timeout(socket, sockopt::Timeout::Send, Some(within));
        let flags = if bounded.is_ok() { 0 } else { libc::MSG_DONTWAIT };
        // If the peer is gone, or has no room, it will see that it was cut.
        while record_type::send(socket.as_fd(), ContentType::Alert, &CLOSE, flags) == Err(Errno::INTR) {}
    }
}
