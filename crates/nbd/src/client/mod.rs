//! A client: an export as a storage.

mod connection;
mod error;
mod handshake;
mod reply;
mod transfer;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use limosa_channel::{Channel, Options, Tls};
use limosa_page::to_usize;
use limosa_storage::{
    Alignment, Buffer, Extent, ExtentKind, IoVector, Operation, Request, Storage, StorageError, ZeroOptions,
};
use parking_lot::Mutex;

pub use connection::retire_threads;
pub use error::NbdError;

use crate::address::NbdAddress;
use crate::protocol::allocation;
use crate::protocol::error::ErrorCode;
use crate::protocol::handshake::transmission;
use crate::protocol::request::{Command, flag};
use connection::{Connection, NewRequest, Waiting};
use handshake::Handshake;
use reply::{Answer, Expected};

/// Bytes that a request without a payload is about, at most: a compact header has 32 bits for them, and a server that
/// writes zeros by hand should not take minutes for one.
const PLAIN_MAX: u64 = 1 << 30;

/// How an export is opened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// Whether writes are refused.
    pub read_only: bool,
    /// Limit for connecting, and for the handshake.
    pub connect_timeout: Duration,
    /// How long a server may be silent while requests are in flight.
    pub timeout: Duration,
    /// The metadata context that tells about holes.
    pub context: String,
    /// Encrypts the connection: credentials of a client.
    pub tls: Option<Tls>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            connect_timeout: Duration::from_secs(30),
            timeout: Duration::from_secs(120),
            context: allocation::NAME.to_owned(),
            tls: None,
        }
    }
}

impl ConnectOptions {
    /// Sets `read_only`.
    #[must_use]
    pub fn read_only(self, read_only: bool) -> Self {
        Self { read_only, ..self }
    }

    /// Sets `connect_timeout` and `timeout`.
    #[must_use]
    pub fn timeouts(self, connect_timeout: Duration, timeout: Duration) -> Self {
        Self { connect_timeout, timeout, ..self }
    }

    /// Sets `context`.
    #[must_use]
    pub fn context(self, context: impl Into<String>) -> Self {
        Self { context: context.into(), ..self }
    }
}

/// An export of a server. Requests in flight are completed before it is dropped.
///
/// Its length is fixed. Writes have to be multiples of [`Storage::alignment`], which is 1 with most servers.
#[derive(Debug)]
pub struct NbdStorage {
    name: Arc<str>,
    connection: Arc<Connection>,
    read_only: bool,
    /// The last extents that the server has told, of an export that is only read.
    known: Mutex<Vec<Extent>>,
}

impl NbdStorage {
    /// Connects to a server, and opens an export.
    ///
    /// # Errors
    /// [`NbdError`], as the source: nobody listens, there is no such export, the server breaks the protocol. If writes
    /// are wanted: the export is read-only.
    pub fn connect(address: &NbdAddress, options: &ConnectOptions) -> Result<Arc<Self>, StorageError> {
        let name: Arc<str> = address.to_string().into();
        let failed = |error: NbdError| StorageError::for_storage(Operation::Open, &name, io::Error::other(error));
        let connection = connect(address, options).map_err(failed)?;
        if !options.read_only && connection.agreed.flags & transmission::READ_ONLY != 0 {
            let why = io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the export is read-only");
            return Err(StorageError::for_storage(Operation::Open, &name, why));
        }
        let (read_only, known) = (options.read_only, Mutex::default());
        Ok(Arc::new(Self { name, connection, read_only, known }))
    }

    fn has(&self, flags: u16) -> bool {
        self.connection.agreed.flags & flags == flags
    }

    fn size(&self) -> u64 {
        self.connection.agreed.size
    }

    /// The part of a change that is sent, and why it cannot be.
    fn changeable(&self, operation: Operation, range: &Range<u64>) -> Result<(), StorageError> {
        let minimum = u64::from(self.connection.agreed.minimum);
        let why = if self.read_only {
            io::Error::new(io::ErrorKind::PermissionDenied, "it is open read-only")
        } else if range.end > self.size() {
            io::ErrorKind::StorageFull.into()
        } else if !range.start.is_multiple_of(minimum) || !range.end.is_multiple_of(minimum) {
            let why = format!("the server takes only multiples of {minimum} bytes");
            io::Error::new(io::ErrorKind::InvalidInput, why)
        } else {
            return Ok(());
        };
        Err(self.failure(operation, range, why))
    }

    fn failure(&self, operation: Operation, range: &Range<u64>, why: io::Error) -> StorageError {
        let length = range.end.saturating_sub(range.start);
        StorageError::for_request(operation, &self.name, range.start, length, why)
    }

    /// Returns what the server tells about the bytes from `at` on, at least one, and no extent that begins at `end` or
    /// behind it, if it was told before; `None`: nothing.
    fn told(&self, at: u64, end: u64) -> Result<Option<Vec<Extent>>, StorageError> {
        let Some(context) = self.connection.agreed.context else { return Ok(None) };
        let mut known = self.known.lock();
        // They are in order, and without gaps.
        let first = known.partition_point(|extent| extent.range.end <= at);
        if known.get(first).is_some_and(|extent| extent.range.start <= at) {
            let wanted = known.iter().skip(first).take_while(|extent| extent.range.start < end);
            return Ok(Some(wanted.cloned().collect()));
        }
        let minimum = u64::from(self.connection.agreed.minimum);
        let begin = at - at % minimum;
        // What is not written meanwhile is asked for once.
        let wanted = if self.read_only { self.size() } else { end.next_multiple_of(minimum).min(self.size()) };
        let request = NewRequest {
            command: Command::BlockStatus,
            flags: 0,
            offset: begin,
            length: (wanted - begin).min(PLAIN_MAX),
            payload: IoVector::new(),
            expected: Expected::Extents { context, found: Vec::new() },
        };
        let failure = |why| self.failure(Operation::Extents, &(begin..end), why);
        let told = match self.connection.send(request).wait() {
            Ok(Answer::Extents(told)) => told,
            Ok(Answer::Failed(number)) => return Err(failure(failed(number))),
            Ok(Answer::Done) => return Ok(None),
            Err(error) => return Err(failure(io::Error::other(error))),
        };
        let mut from = begin;
        let mut extents = Vec::with_capacity(told.len());
        for (length, flags) in told {
            let to = from.saturating_add(length).min(self.size());
            extents.push(Extent::new(from..to, kind(flags)));
            from = to;
        }
        extents.retain(|extent| extent.range.end > at);
        if self.read_only {
            known.clone_from(&extents);
        }
        Ok(Some(extents).filter(|extents| !extents.is_empty()))
    }

    /// Sends requests for all pieces of a range, and waits for all of them.
    fn send(
        &self,
        operation: Operation,
        range: Range<u64>,
        pieces: impl IntoIterator<Item = NewRequest, IntoIter: Send> + Send + 'static,
    ) -> Request {
        let (connection, name) = (Arc::clone(&self.connection), Arc::clone(&self.name));
        Box::pin(async move {
            // All are in flight before the first is waited for.
            let sent: Vec<_> = pieces.into_iter().map(|piece| Waiting(connection.send(piece))).collect();
            let mut outcome = Ok(());
            for waiting in sent {
                outcome = outcome.and(done(waiting.await));
            }
            let length = range.end.saturating_sub(range.start);
            outcome.map_err(|why| StorageError::for_request(operation, &name, range.start, length, why))
        })
    }

    /// A request without a payload, in pieces.
    fn plain(&self, operation: Operation, command: Command, flags: u16, range: Range<u64>) -> Request {
        let request = move |piece: Range<u64>| NewRequest {
            command,
            flags,
            offset: piece.start,
            length: piece.end - piece.start,
            payload: IoVector::new(),
            expected: Expected::Outcome,
        };
        self.send(operation, range.clone(), pieces(range, PLAIN_MAX).map(request))
    }

    fn write_pieces(&self, operation: Operation, offset: u64, from: IoVector) -> Request {
        let range = offset..offset.saturating_add(from.len() as u64);
        let request = move |piece: Range<u64>| {
            let begin = to_usize(piece.start - offset);
            let length = to_usize(piece.end - piece.start);
            NewRequest {
                command: Command::Write,
                flags: 0,
                offset: piece.start,
                length: length as u64,
                payload: from.slice(begin..begin + length),
                expected: Expected::Outcome,
            }
        };
        self.send(operation, range.clone(), pieces(range, self.connection.agreed.payload.into()).map(request))
    }
}

impl Drop for NbdStorage {
    fn drop(&mut self) {
        self.connection.close();
    }
}

fn connect(address: &NbdAddress, options: &ConnectOptions) -> Result<Arc<Connection>, NbdError> {
    let within = Some(options.connect_timeout);
    let settings =
        Options { connect_timeout: within, read_timeout: within, write_timeout: within, ..Options::default() };
    let channel = Channel::connect(&address.server, &settings)?;
    let agreed = Handshake::new(&channel, options.connect_timeout).run(&address.export, &options.context)?;
    channel.set_timeouts(Some(options.timeout), Some(options.timeout))?;
    Ok(Connection::new(channel, agreed))
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
fn failed(number: u32) -> io::Error {
    let known = ErrorCode::from_repr(number).unwrap_or(ErrorCode::Io);
    io::Error::from_raw_os_error(i32::try_from(known.number()).unwrap_or(libc::EIO))
}

impl Storage for NbdStorage {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn length(&self) -> Result<u64, StorageError> {
        Ok(self.size())
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn alignment(&self) -> Alignment {
        Alignment::new(self.connection.agreed.minimum, 1)
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        let inside = to_usize(self.size().saturating_sub(offset).min(into.len() as u64));
        into.slice(inside..into.len()).buffers().iter().for_each(Buffer::clear);
        let range = offset..offset + inside as u64;
        if range.is_empty() {
            return Box::pin(std::future::ready(Ok(())));
        }
        // Whole units: what is read in addition goes to buffers of its own.
        let minimum = u64::from(self.connection.agreed.minimum);
        let outer = range.start - range.start % minimum..range.end.next_multiple_of(minimum);
        let mut all = IoVector::from(Buffer::zeroed(to_usize(range.start - outer.start)));
        all.append(into.slice(0..inside));
        all.push(Buffer::zeroed(to_usize(outer.end - range.end)));
        let begin = outer.start;
        let request = move |piece: Range<u64>| NewRequest {
            command: Command::Read,
            flags: 0,
            offset: piece.start,
            length: piece.end - piece.start,
            payload: IoVector::new(),
            expected: Expected::bytes(
                piece.start,
                all.slice(to_usize(piece.start - begin)..to_usize(piece.end - begin)),
            ),
        };
        self.send(Operation::Read, range, pieces(outer, self.connection.agreed.payload.into()).map(request))
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        let range = offset..offset.saturating_add(from.len() as u64);
        if let Err(error) = self.changeable(Operation::Write, &range) {
            return Box::pin(std::future::ready(Err(error)));
        }
        self.write_pieces(Operation::Write, offset, from)
    }

    fn write_zeroes(&self, range: Range<u64>, how: ZeroOptions) -> Request {
        let operation = Operation::WriteZeroes;
        if let Err(error) = self.changeable(operation, &range) {
            return Box::pin(std::future::ready(Err(error)));
        }
        let fast = if how.only_fast { transmission::SEND_FAST_ZERO } else { 0 };
        if self.has(transmission::SEND_WRITE_ZEROES | fast) {
            let hole = if how.unmap { 0 } else { flag::NO_HOLE };
            let fast = if how.only_fast { flag::FAST_ZERO } else { 0 };
            return self.plain(operation, Command::WriteZeroes, hole | fast, range);
        }
        if how.only_fast {
            let error = self.failure(operation, &range, io::ErrorKind::Unsupported.into());
            return Box::pin(std::future::ready(Err(error)));
        }
        // One after the other: each piece sends the same buffer.
        let zeros = Buffer::zeroed(to_usize((range.end - range.start).min(self.connection.agreed.payload.into())));
        let writes: Vec<_> = pieces(range, zeros.len().max(1) as u64)
            .map(|piece| {
                let part = zeros.slice(0..to_usize(piece.end - piece.start));
                self.write_pieces(operation, piece.start, part.into())
            })
            .collect();
        Box::pin(async move {
            for write in writes {
                write.await?;
            }
            Ok(())
        })
    }

    fn discard(&self, range: Range<u64>) -> Request {
        let range = range.start..range.end.min(self.size());
        let minimum = u64::from(self.connection.agreed.minimum);
        let range = range.start.next_multiple_of(minimum)..range.end - range.end % minimum;
        if range.is_empty() || !self.has(transmission::SEND_TRIM) {
            return Box::pin(std::future::ready(Ok(())));
        }
        if let Err(error) = self.changeable(Operation::Discard, &range) {
            return Box::pin(std::future::ready(Err(error)));
        }
        self.plain(Operation::Discard, Command::Trim, 0, range)
    }

    fn flush(&self) -> Request {
        if self.read_only || !self.has(transmission::SEND_FLUSH) {
            return Box::pin(std::future::ready(Ok(())));
        }
        let (connection, name) = (Arc::clone(&self.connection), Arc::clone(&self.name));
        Box::pin(async move {
            let flush = NewRequest {
                command: Command::Flush,
                flags: 0,
                offset: 0,
                length: 0,
                payload: IoVector::new(),
                expected: Expected::Outcome,
            };
            let outcome = Waiting(connection.send(flush)).await;
            done(outcome).map_err(|why| StorageError::for_storage(Operation::Flush, &name, why))
        })
    }

    fn set_len(&self, len: u64) -> Request {
        let why = io::Error::new(io::ErrorKind::Unsupported, "the length of an export is fixed");
        let failed = StorageError::for_storage(Operation::SetLength, &self.name, why);
        Box::pin(std::future::ready(if len == self.size() { Ok(()) } else { Err(failed) }))
    }

    fn allocate(&self, range: Range<u64>) -> Request {
        let inside = range.is_empty() || range.end <= self.size();
        let failed = || self.failure(Operation::Allocate, &range, io::ErrorKind::StorageFull.into());
        Box::pin(std::future::ready(if inside { Ok(()) } else { Err(failed()) }))
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        let end = self.size().min(range.end);
        let mut found: Vec<Extent> = Vec::new();
        let mut push = |range: Range<u64>, kind| match found.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.kind == kind => last.range.end = range.end,
            _ => found.push(Extent::new(range, kind)),
        };
        let mut at = range.start;
        while at < end {
            let Some(told) = self.told(at, end)? else { break };
            for extent in told {
                let part = extent.range.start.max(at)..extent.range.end.min(end);
                at = at.max(part.end);
                push(part, extent.kind);
            }
        }
        push(at..end.max(at), ExtentKind::Data);
        push(end.max(range.start)..range.end, ExtentKind::Hole);
        Ok(found)
    }

    fn clone_range(&self, _offset: u64, _from: &Arc<dyn Storage>, _from_offset: u64, _length: u64) -> Request<bool> {
        Box::pin(std::future::ready(Ok(false)))
    }
}

/// The kind of an extent with these flags. A hole that is not known to be zeros is read.
fn kind(flags: u64) -> ExtentKind {
    let has = |flag: u32| flags & u64::from(flag) != 0;
    match (has(allocation::ZERO), has(allocation::HOLE)) {
        (true, true) => ExtentKind::Hole,
        (true, false) => ExtentKind::Unwritten,
        (false, _) => ExtentKind::Data,
    }
}
