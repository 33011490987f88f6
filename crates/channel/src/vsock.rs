//! Addresses of sockets between a host and its virtual machines (vsock(7)).
#![allow(unsafe_code, reason = "addresses are passed to the kernel, and taken from it, by their C layout")]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::time::Duration;

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, listen, socket_with};

const LENGTH: usize = size_of::<libc::sockaddr_vm>();

/// The context of a machine, and a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VsockAddress {
    pub(crate) cid: u32,
    pub(crate) port: u32,
}

// SAFETY: the closure gets a whole address in the kernel's layout, and its length.
unsafe impl SocketAddrArg for VsockAddress {
    unsafe fn with_sockaddr<R>(&self, with: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R) -> R {
        let address = libc::sockaddr_vm {
            svm_family: AddressFamily::VSOCK.as_raw(),
            svm_reserved1: 0,
            svm_port: self.port,
            svm_cid: self.cid,
            svm_zero: [0; 4],
        };
        with((&raw const address).cast(), SocketAddrLen::try_from(LENGTH).unwrap_or_default())
    }
}

impl VsockAddress {
    /// Returns the address of a socket; `None`: it is of another family.
    pub(crate) fn of(socket: impl AsFd) -> io::Result<Option<Self>> {
        let found = getsockname(socket)?;
        if found.address_family() != AddressFamily::VSOCK || (found.addr_len() as usize) < LENGTH {
            return Ok(None);
        }
        // SAFETY: an address of this family is a `sockaddr_vm`, and it is whole. Its alignment is not relied on.
        let address = unsafe { found.as_ptr().cast::<libc::sockaddr_vm>().read_unaligned() };
        Ok(Some(Self { cid: address.svm_cid, port: address.svm_port }))
    }

    /// Creates a socket, in non-blocking mode, that connects within this time: the kernel has a limit of its own, of
    /// 2 s if nothing is said.
    pub(crate) fn connecting_socket(within: Option<Duration>) -> io::Result<OwnedFd> {
        /// `SO_VM_SOCKETS_CONNECT_TIMEOUT` (`linux/vm_sockets.h`), for a `timeval` of this machine's words.
        const CONNECT_TIMEOUT: libc::c_int = 6;
        /// The limit if none is given.
        const LONG: Duration = Duration::from_secs(24 * 60 * 60);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::VSOCK, SocketType::STREAM, flags, None)?;
        let within = within.unwrap_or(LONG).min(LONG);
        let time = libc::timeval {
            tv_sec: within.as_secs().try_into().unwrap_or(i32::MAX.into()),
            tv_usec: within.subsec_micros().into(),
        };
        let length = libc::socklen_t::try_from(size_of::<libc::timeval>()).unwrap_or_default();
        // SAFETY: the kernel reads the structure, which outlives the call.
        let set = unsafe {
            libc::setsockopt(socket.as_raw_fd(), libc::AF_VSOCK, CONNECT_TIMEOUT, (&raw const time).cast(), length)
        };
        if set == 0 { Ok(socket) } else { Err(io::Error::last_os_error()) }
    }

    pub(crate) fn listen(self, backlog: i32) -> io::Result<OwnedFd> {
        let socket = socket_with(AddressFamily::VSOCK, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &self)?;
        listen(&socket, backlog)?;
        Ok(socket)
    }
}
