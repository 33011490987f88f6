//! Control records: their type is in a message's ancillary data (kernel docs: networking/tls).
#![allow(unsafe_code, reason = "ancillary data of messages")]

use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{c_int, iovec, msghdr};
use rustix::io::Errno;
use rustls::ContentType;

use super::option::last;

// include/uapi/linux/tls.h
const TLS_SET_RECORD_TYPE: c_int = 1;
const TLS_GET_RECORD_TYPE: c_int = 2;

/// Room for one header with one byte, aligned.
type Control = [u64; 4];

/// Sends a record of this type; the kernel takes all of these few bytes, or none.
pub(super) fn send(socket: BorrowedFd<'_>, typ: ContentType, bytes: &[u8], flags: c_int) -> Result<(), Errno> {
    let list = [iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
    let mut control: Control = [0; 4];
    let mut message = message(&list, &mut control);
    // SAFETY: computes a number.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(1) } as _;
    // SAFETY: the room is aligned, and larger than one header with one byte.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_TLS;
        (*header).cmsg_type = TLS_SET_RECORD_TYPE;
        (*header).cmsg_len = libc::CMSG_LEN(1) as _;
        libc::CMSG_DATA(header).write(u8::from(typ));
    }
    // SAFETY: the message, its list and its ancillary data live through the call; the list's entry is valid for reads.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags | libc::MSG_NOSIGNAL) };
    if usize::try_from(sent).map_err(|_| last())? < bytes.len() {
        return Err(Errno::MSGSIZE);
    }
    Ok(())
}

/// Receives bytes of records of one type; returns how many, and the type, which is `None` at the end of the connection.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    room: &mut [u8],
    flags: c_int,
) -> Result<(usize, Option<ContentType>), Errno> {
    let list = [iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() }];
    let mut control: Control = [0; 4];
    let mut message = message(&list, &mut control);
    // SAFETY: the message, its list and its ancillary data live through the call; the list's entry is valid for writes.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let got = usize::try_from(got).map_err(|_| last())?;
    Ok((got, type_of(&message)))
}

fn type_of(message: &msghdr) -> Option<ContentType> {
    // SAFETY: the macros walk the headers that the kernel wrote, within `msg_controllen`; a header of this type has a
    // byte behind it.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_TLS && (*header).cmsg_type == TLS_GET_RECORD_TYPE {
                return Some(ContentType::from(libc::CMSG_DATA(header).read()));
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    None
}

fn message(list: &[iovec; 1], control: &mut Control) -> msghdr {
    // SAFETY: all zero is the header of an empty message; its fields differ between C libraries, hence no literal.
    let mut message: msghdr = unsafe { mem::zeroed() };
    message.msg_iov = list.as_ptr().cast_mut();
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(control) as _;
    message
}
