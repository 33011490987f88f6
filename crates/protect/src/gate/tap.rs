//! A tap device: an Ethernet interface of the host whose other end is this process.
//!
//! Source: Documentation/networking/tuntap.rst of Linux.

#![allow(unsafe_code, reason = "the ioctl TUNSETIFF")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;

use rustix::fs::OFlags;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};

/// Bytes of an interface's name and its end.
const NAME_SIZE: usize = 16;

const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;

const TUNSETIFF: Opcode = opcode::write::<i32>(b'T', 202);

/// The kernel's `struct ifreq`, with the member that this call uses.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; NAME_SIZE],
    flags: u16,
    unused: [u8; 22],
}

/// Attaches to the tap device of this name, which must exist. Reads and writes are one frame each, without any header,
/// and do not block.
pub(super) fn open(name: &str) -> io::Result<File> {
    // A device that does not exist would be created, without an address or a bridge, and be gone with this process.
    let any = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    netdevice::name_to_index(&any, name)?;
    let mut request = InterfaceRequest { name: [0; NAME_SIZE], flags: IFF_TAP | IFF_NO_PI, unused: [0; 22] };
    let place = request.name.get_mut(..name.len()).filter(|_| name.len() < NAME_SIZE);
    place.ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(name.as_bytes());
    let flags = i32::try_from((OFlags::NONBLOCK | OFlags::CLOEXEC).bits()).map_err(io::Error::other)?;
    let tap = OpenOptions::new().read(true).write(true).custom_flags(flags).open("/dev/net/tun")?;
    // SAFETY: TUNSETIFF reads and writes a struct ifreq, whose size and layout the request has.
    unsafe { ioctl(&tap, Updater::<TUNSETIFF, InterfaceRequest>::new(&mut request)) }?;
    Ok(tap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_the_kernels_and_a_device_that_does_not_exist_is_not_created() {
        assert_eq!(size_of::<InterfaceRequest>(), 40);
        assert_eq!(TUNSETIFF, 0x4004_54ca);
        for name in ["limosa-no-tap", "", "a-name-of-more-than-15-bytes"] {
            assert!(open(name).is_err(), "{name:?}");
        }
    }
}
