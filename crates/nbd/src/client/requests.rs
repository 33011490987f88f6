//! Requests for ranges of an export, in pieces that the server takes.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use limosa_page::to_usize;
use limosa_storage::{Buffer, IoVector, Operation, Request, StorageError};

use super::NbdError;
use super::connection::{NewRequest, OpenConnection, Waiting};
use super::reply::{Answer, Expected};
use crate::protocol::error::ErrorCode;
use crate::protocol::handshake::transmission;
use crate::protocol::request::{Command, flag};

/// Bytes that a request without a payload is about, at most: a compact header has 32 bits for them, and a server that
/// writes zeros by hand should not take minutes for one.
pub(super) const PLAIN_MAX: u64 = 1 << 30;

/// An export, as the receiver of requests. Ranges of changes are whole units of the server.
#[derive(Debug, Clone)]
pub(super) struct Requests {
    pub(super) name: Arc<str>,
    pub(super) connection: Arc<OpenConnection>,
    /// Whether each change is durable when it completes.
    pub(super) is_synchronous: bool,
}

impl Requests {
    pub(super) fn has(&self, flags: u16) -> bool {
        self.connection.agreed.flags & flags == flags
    }

    pub(super) fn size(&self) -> u64 {
        self.connection.agreed.size
    }

    /// Requests are multiples of it, in bytes.
    pub(super) fn unit(&self) -> u64 {
        self.connection.agreed.minimum.into()
    }

    /// The whole units around a range.
    pub(super) fn around(&self, range: &Range<u64>) -> Range<u64> {
        range.start - range.start % self.unit()..range.end.next_multiple_of(self.unit())
    }

    pub(super) fn failure(&self, operation: Operation, range: &Range<u64>, why: io::Error) -> StorageError {
        let length = range.end.saturating_sub(range.start);
        StorageError::for_request(operation, &self.name, range.start, length, why)
    }

    /// Reads a range inside of the export: with the rest of its first and its last unit, to buffers of their own.
    pub(super) fn read(&self, range: Range<u64>, into: IoVector) -> Request {
        let outer = self.around(&range);
        let mut all = IoVector::from(Buffer::zeroed(to_usize(range.start - outer.start)));
        all.append(into);
        all.push(Buffer::zeroed(to_usize(outer.end - range.end)));
        let begin = outer.start;
        let request = move |piece: Range<u64>| {
            let into = all.slice(to_usize(piece.start - begin)..to_usize(piece.end - begin));
            NewRequest { expected: Expected::bytes(piece.start, into), ..NewRequest::plain(Command::Read, 0, &piece) }
        };
        self.send(Operation::Read, range, pieces(outer, self.connection.agreed.payload.into()).map(request))
    }

    pub(super) fn write(&self, operation: Operation, offset: u64, from: IoVector) -> Request {
        let range = offset..offset.saturating_add(from.len() as u64);
        self.write_pieces(operation, range, move |piece| {
            from.slice(to_usize(piece.start - offset)..to_usize(piece.end - offset))
        })
    }

    /// Writes zeros as contents: all pieces send the same buffer.
    pub(super) fn write_zeros(&self, operation: Operation, range: Range<u64>) -> Request {
        let zeros = Buffer::zeroed(to_usize((range.end - range.start).min(self.connection.agreed.payload.into())));
        self.write_pieces(operation, range, move |piece| zeros.slice(0..to_usize(piece.end - piece.start)).into())
    }

    fn write_pieces(
        &self,
        operation: Operation,
        range: Range<u64>,
        payload: impl Fn(&Range<u64>) -> IoVector + Send + 'static,
    ) -> Request {
        let flags = self.durable_flag();
        let request = move |piece: Range<u64>| NewRequest {
            payload: payload(&piece),
            ..NewRequest::plain(Command::Write, flags, &piece)
        };
        let pieces = pieces(range.clone(), self.connection.agreed.payload.into());
        self.durable(self.send(operation, range, pieces.map(request)))
    }

    /// A change without a payload.
    pub(super) fn change(&self, operation: Operation, command: Command, flags: u16, range: Range<u64>) -> Request {
        let flags = flags | self.durable_flag();
        let request = move |piece: Range<u64>| NewRequest::plain(command, flags, &piece);
        self.durable(self.send(operation, range.clone(), pieces(range, PLAIN_MAX).map(request)))
    }

    /// Makes what is completed durable, if the server can.
    pub(super) fn flush(&self) -> Request {
        if !self.has(transmission::SEND_FLUSH) {
            return Box::pin(std::future::ready(Ok(())));
        }
        let Self { name, connection, .. } = self.clone();
        Box::pin(async move {
            let outcome = Waiting(connection.send(NewRequest::plain(Command::Flush, 0, &(0..0)))).await;
            done(outcome).map_err(|why| StorageError::for_storage(Operation::Flush, &name, why))
        })
    }

    /// The flag that has a change durable when it is answered, if each has to be.
    fn durable_flag(&self) -> u16 {
        if self.is_synchronous && self.has(transmission::SEND_FUA) { flag::FUA } else { 0 }
    }

    /// A change that is durable when it completes, if each has to be.
    fn durable(&self, change: Request) -> Request {
        if !self.is_synchronous || self.has(transmission::SEND_FUA) {
            return change;
        }
        let flush = self.flush();
        Box::pin(async move {
            change.await?;
            flush.await
        })
    }

    /// Sends requests for all pieces of a range, and waits for all of them.
    fn send(
        &self,
        operation: Operation,
        range: Range<u64>,
        pieces: impl IntoIterator<Item = NewRequest, IntoIter: Send> + Send + 'static,
    ) -> Request {
        let this = self.clone();
        Box::pin(async move {
            // All are in flight before the first is waited for.
            let sent: Vec<_> = pieces.into_iter().map(|piece| Waiting(this.connection.send(piece))).collect();
            let mut outcome = Ok(());
            for waiting in sent {
                outcome = outcome.and(done(waiting.await));
            }
            outcome.map_err(|why| this.failure(operation, &range, why))
        })
    }
}

/// Cuts a range into pieces, at multiples of `most` from its start.
fn pieces(range: Range<u64>, most: u64) -> impl Iterator<Item = Range<u64>> + Send {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let piece = at..range.end.min(at.saturating_add(most));
        at = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

fn done(outcome: Result<Answer, Arc<NbdError>>) -> io::Result<()> {
    match outcome {
        Ok(Answer::Done | Answer::Extents(_)) => Ok(()),
        Ok(Answer::Failed(number)) => Err(failed(number)),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// The error of a request. The protocol's numbers are Linux's.
pub(super) fn failed(number: u32) -> io::Error {
    let known = ErrorCode::from_repr(number).unwrap_or(ErrorCode::Io);
    io::Error::from_raw_os_error(i32::try_from(known.number()).unwrap_or(libc::EIO))
}
