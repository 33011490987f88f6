//! Bytes between a channel and buffers, without a copy.
#![allow(unsafe_code, reason = "buffers are passed to the kernel by address")]

use limosa_channel::{Channel, ChannelError};
use limosa_storage::IoVector;

fn iovecs(vector: &IoVector) -> impl Iterator<Item = libc::iovec> {
    vector.buffers().iter().map(|buffer| libc::iovec { iov_base: buffer.address().cast(), iov_len: buffer.len() })
}

/// Sends a header and the bytes of a request.
pub(super) fn send(channel: &Channel, header: &[u8], payload: &IoVector) -> Result<(), ChannelError> {
    let header = libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() };
    let list: Vec<_> = std::iter::once(header).chain(iovecs(payload)).collect();
    // SAFETY: the header outlives the call, and the buffers keep their memory; both are only read.
    unsafe { channel.write_all_raw(&list) }
}

/// Receives into buffers.
pub(super) fn receive(channel: &Channel, into: &IoVector) -> Result<(), ChannelError> {
    let list: Vec<_> = iovecs(into).collect();
    // SAFETY: the buffers keep their memory, to which there is no reference.
    unsafe { channel.read_exact_raw(&list) }
}
