//! Descriptors passed over a unix socket (`SCM_RIGHTS`, unix(7)).
//!
//! **Law: a descriptor that was not requested is closed before it can be used.** A channel accepts descriptors only
//! after a request, and only the requested number; otherwise the call that reads gives the kernel no room for them, and
//! the kernel closes them. One more than requested is an error of the peer. Descriptors that were received and not
//! taken are closed with the channel.
#![allow(unsafe_code, reason = "ancillary data is laid out by macros over raw memory")]

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{c_int, iovec, msghdr};
use parking_lot::Mutex;

/// Maximum number of descriptors in one message (`SCM_MAX_FD` of the kernel).
pub(crate) const PASSED_MAX: usize = 253;

/// Descriptors that a channel and its clones have received.
#[derive(Debug, Default)]
pub(crate) struct PassedDescriptors {
    /// Number of descriptors that may still come.
    wanted: AtomicUsize,
    got: Mutex<Vec<OwnedFd>>,
}

impl PassedDescriptors {
    pub(crate) fn want(&self, most: usize) {
        self.wanted.store(most.min(PASSED_MAX), Ordering::SeqCst);
    }

    pub(crate) fn wanted(&self) -> usize {
        self.wanted.load(Ordering::SeqCst)
    }

    pub(crate) fn take(&self) -> Vec<OwnedFd> {
        mem::take(&mut *self.got.lock())
    }

    /// Receives as recvmsg(2), with room for the requested descriptors.
    ///
    /// # Safety
    /// The entries are valid for writes.
    pub(crate) unsafe fn receive(&self, socket: c_int, entries: &[iovec], flags: c_int) -> io::Result<usize> {
        let wanted = self.wanted();
        // Words, because the headers in it must be aligned.
        let mut control = vec![0_u64; space(wanted).div_ceil(8)];
        let mut message = message(entries, &mut control, space(wanted));
        // SAFETY: the message, its list and its room for ancillary data live through the call; the caller vouches for
        // the entries.
        let got = unsafe { libc::recvmsg(socket, &raw mut message, flags | libc::MSG_CMSG_CLOEXEC) };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        // SAFETY: the kernel filled the message.
        let descriptors = unsafe { descriptors_of(&message) };
        let more = descriptors.len() > wanted || message.msg_flags & libc::MSG_CTRUNC != 0;
        if more {
            let why = if descriptors.len() < wanted {
                "descriptors passed by the peer were lost: too many open files in this process (RLIMIT_NOFILE)".into()
            } else {
                format!("the peer passes more than {wanted} descriptors")
            };
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        // Another thread may have requested fewer meanwhile.
        let left = |now: usize| Some(now.saturating_sub(descriptors.len()));
        let _ = self.wanted.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left);
        self.got.lock().extend(descriptors);
        Ok(got)
    }
}

/// Sends as sendmsg(2), with at least one and at most [`PASSED_MAX`] descriptors.
///
/// # Safety
/// The entries are valid for reads.
pub(crate) unsafe fn send(
    socket: c_int,
    entries: &[iovec],
    flags: c_int,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let bytes = size_of_val(descriptors);
    let length = u32::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut control = vec![0_u64; space(descriptors.len()).div_ceil(8)];
    let mut message = message(entries, &mut control, space(descriptors.len()));
    // SAFETY: the room is aligned, and as large as one header with these descriptors.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(length) as _;
        for (index, descriptor) in descriptors.iter().enumerate() {
            ptr::write_unaligned(libc::CMSG_DATA(header).cast::<c_int>().add(index), descriptor.as_raw_fd());
        }
    }
    // SAFETY: the message, its list and its ancillary data live through the call; the caller vouches for the entries.
    let sent = unsafe { libc::sendmsg(socket, &raw mut message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Returns the size of one header with this number of descriptors, in bytes.
fn space(descriptors: usize) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "at most 253 descriptors of 4 bytes")]
    let bytes = (descriptors.min(PASSED_MAX) * size_of::<c_int>()) as u32;
    // SAFETY: computes a number.
    unsafe { libc::CMSG_SPACE(bytes) as usize }
}

fn message(entries: &[iovec], control: &mut [u64], length: usize) -> msghdr {
    // SAFETY: all zero is the header of an empty message; its fields differ between C libraries, hence no literal.
    let mut message: msghdr = unsafe { mem::zeroed() };
    message.msg_iov = entries.as_ptr().cast_mut();
    message.msg_iovlen = entries.len() as _;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = length as _;
    message
}

/// # Safety
/// The kernel filled the message: the descriptors in it have no other owner.
unsafe fn descriptors_of(message: &msghdr) -> Vec<OwnedFd> {
    let mut found = Vec::new();
    // SAFETY: the macros walk what the kernel has laid out, as long as `msg_controllen` says; each descriptor is new.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(header).cast::<c_int>();
                for index in 0..bytes / size_of::<c_int>() {
                    found.push(OwnedFd::from_raw_fd(ptr::read_unaligned(data.add(index))));
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    found
}
