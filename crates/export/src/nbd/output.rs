//! Replies on their way to the client.
//!
//! Laws: the replies of all requests that are done go out with one call, and the bytes that were read go out from where
//! they were read to. Sending never waits. A request's memory counts until its reply has been handed over.
#![allow(unsafe_code, reason = "memory for input and output is no slice: its address goes to the kernel")]

use std::collections::VecDeque;

use limosa_channel::{Channel, ChannelError};
use limosa_storage::Buffer;

use super::budget::Load;
use super::buffers::Buffers;
use super::execute::{Body, Finished, Part};
use limosa_nbd::protocol::reply::Head;

/// Most pieces of one call: the kernel's limit.
const PIECES_MAX: usize = 1024;

/// A piece of a reply.
#[derive(Debug)]
enum Piece {
    Head(Head),
    Bytes(Vec<u8>),
    Data(Buffer),
    /// The reply of a request that kept `held` bytes is complete.
    End {
        held: usize,
    },
}

impl Piece {
    fn iovec(&self) -> libc::iovec {
        let (start, len) = match self {
            Self::Head(head) => (head.as_bytes().as_ptr().cast_mut(), head.as_bytes().len()),
            Self::Bytes(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
            Self::Data(buffer) => (buffer.address(), buffer.len()),
            Self::End { .. } => (std::ptr::null_mut(), 0),
        };
        libc::iovec { iov_base: start.cast(), iov_len: len }
    }
}

/// The replies of a connection.
#[derive(Debug)]
pub(super) struct Output {
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that were sent.
    sent: usize,
    /// Whether an encrypted channel keeps bytes.
    buffered: bool,
    buffers: Buffers,
}

impl Output {
    /// Nothing is on its way yet.
    pub(super) fn new(buffers: Buffers) -> Self {
        Self { pieces: VecDeque::new(), sent: 0, buffered: false, buffers }
    }

    /// Returns whether everything was handed over.
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty() && !self.buffered
    }

    /// Adds the reply of a request.
    pub(super) fn push(&mut self, finished: Finished) {
        let Finished { subject, body, held } = finished;
        match body {
            Body::Done => self.pieces.push_back(Piece::Head(subject.done())),
            Body::Failed(error) => self.pieces.push_back(Piece::Head(subject.failed(error))),
            Body::Read(parts) => {
                let count = parts.len();
                for (number, part) in (1..).zip(parts) {
                    match part {
                        Part::Data { offset, buffer } => {
                            self.pieces.push_back(Piece::Head(subject.data(offset, buffer.len(), number == count)));
                            self.pieces.push_back(Piece::Data(buffer));
                        }
                        Part::Hole { offset, length } => {
                            self.pieces.push_back(Piece::Head(subject.hole(offset, length, number == count)));
                        }
                    }
                }
            }
            Body::Status(contexts) => {
                let count = contexts.len();
                for (number, (context, extents)) in (1..).zip(contexts) {
                    self.pieces.push_back(Piece::Bytes(subject.status(context, &extents, number == count)));
                }
            }
        }
        self.pieces.push_back(Piece::End { held });
    }

    /// Drops all replies: their client is gone.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.buffers.clone());
    }

    /// Sends as much as the client takes now. Returns whether bytes moved, and adds to `released`.
    pub(super) fn send(&mut self, channel: &Channel, released: &mut Load) -> Result<bool, ChannelError> {
        let mut moved = false;
        let mut list = Vec::with_capacity(self.pieces.len().min(PIECES_MAX));
        while !self.pieces.is_empty() {
            list.clear();
            list.extend(self.pieces.iter().take(PIECES_MAX).map(Piece::iovec));
            if let Some(first) = list.first_mut() {
                first.iov_base = first.iov_base.cast::<u8>().wrapping_add(self.sent).cast();
                first.iov_len = first.iov_len.saturating_sub(self.sent);
            }
            // SAFETY: the entries name memory that the pieces keep, which live until the call returns.
            let Some(sent) = (unsafe { channel.try_write_raw(&list)? }) else { break };
            moved = true;
            self.advance(sent, released);
        }
        if moved || self.buffered {
            let before = self.buffered;
            self.buffered = !channel.try_flush()?;
            moved |= before && !self.buffered;
        }
        Ok(moved)
    }

    /// Passes bytes that were sent, and the ends of replies among them.
    fn advance(&mut self, sent: usize, released: &mut Load) {
        let mut sent = self.sent + sent;
        while let Some(piece) = self.pieces.front() {
            let len = piece.iovec().iov_len;
            if let Piece::End { held } = piece {
                released.requests += 1;
                released.bytes += held;
            } else if sent < len {
                break;
            } else {
                sent -= len;
            }
            if let Some(Piece::Data(buffer)) = self.pieces.pop_front() {
                self.buffers.give_back(buffer);
            }
        }
        self.sent = sent;
    }
}

/// Receives into the rest of a payload, and behind it into `room`, without waiting. Returns how many bytes, `None` if
/// nothing has arrived.
pub(super) fn receive(
    channel: &Channel,
    payload: Option<&Buffer>,
    room: &mut [u8],
) -> Result<Option<usize>, ChannelError> {
    let room = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    match payload {
        None => {
            // SAFETY: the entry names the room, which is borrowed until the call returns.
            unsafe { channel.try_read_raw(&[room]) }
        }
        Some(payload) => {
            let payload = libc::iovec { iov_base: payload.address().cast(), iov_len: payload.len() };
            // SAFETY: as above; the buffer keeps its memory, to which there are no references.
            unsafe { channel.try_read_raw(&[payload, room]) }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::nbd::Limits;
    use crate::nbd::budget::Budget;
    use limosa_nbd::protocol::Headers;
    use limosa_nbd::protocol::reply::Subject;

    fn finished(cookie: u64, length: usize) -> Finished {
        let subject = Subject { headers: Headers::Structured, cookie, offset: 0 };
        let buffer = Buffer::from_slice(&vec![u8::try_from(cookie).unwrap(); length]);
        let body = if length == 0 { Body::Done } else { Body::Read(vec![Part::Data { offset: 0, buffer }]) };
        Finished { subject, body, held: length }
    }

    #[test]
    fn replies_that_do_not_fit_continue_where_they_stopped_and_are_released_one_by_one() {
        let (near, far) = Channel::pair().unwrap();
        let far = Channel::from_fd(far).unwrap();
        near.set_nonblocking().unwrap();
        let buffers = Buffers::new(Arc::new(Budget::new(&Limits::default())));
        let (mut output, mut released) = (Output::new(buffers), Load::default());
        let lengths = [0, 1 << 20, 0, 3 << 20, 7, 2 << 20];
        let expected: Vec<u8> = (1..)
            .zip(lengths)
            .flat_map(|(cookie, length)| {
                let subject = Subject { headers: Headers::Structured, cookie, offset: 0 };
                let head = if length == 0 { subject.done() } else { subject.data(0, length, true) };
                [head.as_bytes(), &vec![u8::try_from(cookie).unwrap(); length]].concat()
            })
            .collect();
        (1..).zip(lengths).for_each(|(cookie, length)| output.push(finished(cookie, length)));
        let (mut found, mut steps) = (Vec::new(), Vec::new());
        let mut buffer = vec![0; 100_000];
        while !output.is_empty() {
            output.send(&near, &mut released).unwrap();
            steps.push(released);
            let wanted = (expected.len() - found.len()).min(buffer.len());
            let got = far.read(&mut buffer[..wanted]).unwrap();
            found.extend_from_slice(&buffer[..got]);
        }
        while found.len() < expected.len() {
            let got = far.read(&mut buffer).unwrap();
            found.extend_from_slice(&buffer[..got]);
        }
        assert!(found == expected);
        assert_eq!(released, Load { requests: 6, bytes: lengths.iter().sum() });
        assert!(steps[0].requests < 6 && steps.is_sorted_by_key(|step| step.requests));
    }
}
