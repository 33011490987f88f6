//! A client: an export as a storage.

mod connection;
mod error;
mod handshake;
mod reply;
mod requests;
mod transfer;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use limosa_channel::{Channel, Options, Tls, Uri};
use limosa_page::to_usize;
use limosa_storage::{
    Alignment, Buffer, Extent, ExtentKind, IoVector, Operation, Request, Storage, StorageError, UnitLocks, ZeroOptions,
};
use parking_lot::Mutex;

pub use connection::retire_threads;
pub use error::NbdError;

use crate::address::NbdAddress;
use crate::protocol::allocation;
use crate::protocol::handshake::transmission;
use crate::protocol::request::{Command, flag};
use connection::{Connection, NewRequest, OpenConnection};
use handshake::Handshake;
use reply::{Answer, Expected};
use requests::{PLAIN_MAX, Requests, failed};

/// How an export is opened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether each change is durable when it completes; otherwise a flush makes it so.
    pub is_synchronous: bool,
    /// Limit for connecting, and for the handshake.
    pub connect_timeout: Duration,
    /// How long a server may be silent while requests are in flight. There is no limit while it flushes, discards or
    /// writes zeros, which can take long: then the kernel finds out whether a server at another host is still there.
    pub timeout: Duration,
    /// The metadata context that is asked for. With another one than `base:allocation` nothing is known about holes.
    pub context: String,
    /// Credentials of a client: the connection is encrypted, or refused. The server's certificate must have the name
    /// that they expect, or the host of a `tcp:` address.
    pub tls: Option<Tls>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            is_synchronous: false,
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

    /// Sets `is_synchronous`.
    #[must_use]
    pub fn synchronous(self, is_synchronous: bool) -> Self {
        Self { is_synchronous, ..self }
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

    /// Sets `tls`.
    #[must_use]
    pub fn tls(self, tls: Option<Tls>) -> Self {
        Self { tls, ..self }
    }
}

/// A run of bytes, and what a metadata context says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ContextExtent {
    /// Offsets in bytes.
    pub range: Range<u64>,
    /// The flags of the context: of a dirty bitmap, 1 is dirty (QEMU docs: interop/nbd).
    pub flags: u64,
}

/// An export of a server. Its connection ends when it and all requests are dropped; those in flight are completed.
///
/// Its length is fixed. Requests may have any offset and length: a write of a part of the server's unit
/// ([`Storage::alignment`], 1 with most servers) reads the unit first.
#[derive(Debug)]
pub struct NbdStorage {
    requests: Requests,
    read_only: bool,
    context: String,
    /// The extents that the server reported last, of an export that is only read.
    known: Mutex<Vec<ContextExtent>>,
    /// Changes in flight, if the unit is more than a byte.
    locks: Option<Arc<UnitLocks>>,
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
        let locks = (connection.agreed.minimum > 1).then(Arc::default);
        let requests = Requests { name, connection, is_synchronous: options.is_synchronous };
        let (read_only, context, known) = (options.read_only, options.context.clone(), Mutex::default());
        Ok(Arc::new(Self { requests, read_only, context, known, locks }))
    }

    /// Returns the metadata context that was asked for.
    #[must_use]
    pub fn context(&self) -> &str {
        &self.context
    }

    /// Returns what the metadata context says of a range inside of the export, without gaps.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`]: the server has no such context; the server's.
    pub fn context_extents(&self, range: Range<u64>) -> Result<Vec<ContextExtent>, StorageError> {
        let mut found: Vec<ContextExtent> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let Some(extents) = self.extents_at(at, range.end)? else {
                let why = format!("the server does not report {}", self.context);
                let why = io::Error::new(io::ErrorKind::Unsupported, why);
                return Err(self.requests.failure(Operation::Extents, &range, why));
            };
            for ContextExtent { range: extent, flags } in extents {
                let part = extent.start.max(at)..extent.end.min(range.end);
                at = at.max(part.end);
                match found.last_mut() {
                    _ if part.is_empty() => {}
                    Some(last) if last.flags == flags => last.range.end = part.end,
                    _ => found.push(ContextExtent { range: part, flags }),
                }
            }
        }
        Ok(found)
    }

    /// Why a range cannot be changed.
    fn refusal(&self, operation: Operation, range: &Range<u64>) -> Option<StorageError> {
        let why = if self.read_only {
            io::Error::new(io::ErrorKind::PermissionDenied, "it is open read-only")
        } else if range.end > self.requests.size() {
            io::ErrorKind::StorageFull.into()
        } else {
            return None;
        };
        Some(self.requests.failure(operation, range, why))
    }

    /// Whether a range has parts of the server's units.
    fn is_partial(&self, range: &Range<u64>) -> bool {
        self.requests.around(range) != *range
    }

    /// Returns extents from `at` on, at least one; `None`: the server does not report the context. Extents that are
    /// known already end with the one that reaches `end`.
    fn extents_at(&self, at: u64, end: u64) -> Result<Option<Vec<ContextExtent>>, StorageError> {
        let Self { requests, read_only, .. } = self;
        let Some(context) = requests.connection.agreed.context else { return Ok(None) };
        let mut known = self.known.lock();
        // They are in order, and without gaps.
        let first = known.partition_point(|extent| extent.range.end <= at);
        if known.get(first).is_some_and(|extent| extent.range.start <= at) {
            let wanted = known.iter().skip(first).take_while(|extent| extent.range.start < end);
            return Ok(Some(wanted.cloned().collect()));
        }
        let mut range = requests.around(&(at..end));
        if *read_only {
            // What is not written meanwhile is asked for once.
            range.end = requests.size();
        }
        range.end = range.end.min(range.start.saturating_add(PLAIN_MAX));
        let expected = Expected::Extents { context, found: Vec::new() };
        let request = NewRequest { expected, ..NewRequest::plain(Command::BlockStatus, 0, &range) };
        let failure = |why| requests.failure(Operation::Extents, &range, why);
        let reported = match requests.connection.send(request).wait() {
            Ok(Answer::Extents(reported)) => reported,
            Ok(Answer::Failed(number)) => return Err(failure(failed(number))),
            Ok(Answer::Done) => return Ok(None),
            Err(error) => return Err(failure(io::Error::other(error))),
        };
        let unit = requests.unit();
        let (mut from, mut to) = (range.start, range.start);
        let mut extents = Vec::with_capacity(reported.len());
        for (length, flags) in reported {
            to = to.saturating_add(length).min(requests.size());
            let whole = to - to % unit;
            if whole < to && self.context != allocation::NAME {
                let why = "the server breaks the protocol: an extent is no whole unit";
                return Err(failure(io::Error::new(io::ErrorKind::InvalidData, why)));
            }
            if whole > from {
                extents.push(ContextExtent { range: from..whole, flags });
                from = whole;
            }
            // Servers that put units over what has none report parts of them. Such a unit counts as contents.
            if to > from {
                extents.push(ContextExtent { range: from..from + unit, flags: 0 });
                from += unit;
            }
        }
        extents.retain(|extent| extent.range.end > at);
        if *read_only {
            known.clone_from(&extents);
        }
        Ok(Some(extents).filter(|extents| !extents.is_empty()))
    }

    /// Carries out a change in the order that parts of units need.
    fn in_units(&self, range: Range<u64>, is_partial: bool, change: Request) -> Request {
        let Some(locks) = &self.locks else { return change };
        let around = self.requests.around(&range);
        let units = around.start / self.requests.unit()..around.end / self.requests.unit();
        Box::pin(Arc::clone(locks).write(units, is_partial, change))
    }

    fn write_range(&self, operation: Operation, offset: u64, from: IoVector) -> Request {
        let range = offset..offset.saturating_add(from.len() as u64);
        if let Some(error) = self.refusal(operation, &range) {
            return Box::pin(std::future::ready(Err(error)));
        }
        if !self.is_partial(&range) {
            return self.in_units(range, false, self.requests.write(operation, offset, from));
        }
        let (requests, outer) = (self.requests.clone(), self.requests.around(&range));
        let (start, inner) = (outer.start, range.clone());
        let change = Box::pin(async move {
            let [head, tail] = [outer.start..inner.start, inner.end..outer.end];
            let mut all = IoVector::new();
            let rest = [head, tail].map(|part| (Buffer::zeroed(to_usize(part.end - part.start)), part));
            for (buffer, part) in &rest {
                if !part.is_empty() {
                    requests.read(part.clone(), buffer.clone().into()).await?;
                }
            }
            let [(head, _), (tail, _)] = rest;
            all.push(head);
            all.append(from);
            all.push(tail);
            requests.write(operation, start, all).await
        });
        self.in_units(range, true, change)
    }
}

fn connect(address: &NbdAddress, options: &ConnectOptions) -> Result<Arc<OpenConnection>, NbdError> {
    let within = Some(options.connect_timeout);
    let settings =
        Options { connect_timeout: within, read_timeout: within, write_timeout: within, ..Options::default() };
    let channel = Channel::connect(&address.server, &settings)?;
    let tls = match (&options.tls, &address.server) {
        (Some(tls), Uri::Tcp { host, .. }) => Some(tls.to_host(host)),
        (tls, _) => tls.clone(),
    };
    let handshake = Handshake::new(channel, options.connect_timeout);
    let (channel, agreed) = handshake.run(&address.export, &options.context, tls.as_ref())?;
    // A request whose bytes the server does not take is in flight, too, and its thread that receives has the limit.
    channel.set_timeouts(Some(options.timeout), None)?;
    channel.set_keep_alive(options.timeout)?;
    Ok(Arc::new(OpenConnection(Connection::new(channel, agreed))))
}

impl Storage for NbdStorage {
    fn name(&self) -> &Arc<str> {
        &self.requests.name
    }

    fn length(&self) -> Result<u64, StorageError> {
        Ok(self.requests.size())
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn alignment(&self) -> Alignment {
        Alignment::new(self.requests.connection.agreed.minimum, 1)
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        let inside = to_usize(self.requests.size().saturating_sub(offset).min(into.len() as u64));
        into.slice(inside..into.len()).buffers().iter().for_each(Buffer::clear);
        if inside == 0 {
            return Box::pin(std::future::ready(Ok(())));
        }
        self.requests.read(offset..offset + inside as u64, into.slice(0..inside))
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        self.write_range(Operation::Write, offset, from)
    }

    fn write_zeroes(&self, range: Range<u64>, how: ZeroOptions) -> Request {
        let operation = Operation::WriteZeroes;
        if let Some(error) = self.refusal(operation, &range) {
            return Box::pin(std::future::ready(Err(error)));
        }
        let requests = &self.requests;
        let fast = if how.only_fast { transmission::SEND_FAST_ZERO } else { 0 };
        let is_command = requests.has(transmission::SEND_WRITE_ZEROES | fast);
        if how.only_fast && (!is_command || self.is_partial(&range)) {
            let error = requests.failure(operation, &range, io::ErrorKind::Unsupported.into());
            return Box::pin(std::future::ready(Err(error)));
        }
        // The parts of units at both ends are written.
        let unit = requests.unit();
        let middle = range.start.next_multiple_of(unit).min(range.end)..range.end - range.end % unit;
        if middle.is_empty() {
            let zeros = Buffer::zeroed(to_usize(range.end.saturating_sub(range.start)));
            return self.write_range(operation, range.start, zeros.into());
        }
        let ends = [range.start..middle.start, middle.end..range.end].map(|part| {
            (!part.is_empty()).then(|| {
                self.write_range(operation, part.start, Buffer::zeroed(to_usize(part.end - part.start)).into())
            })
        });
        let change = if is_command {
            let hole = if how.unmap { 0 } else { flag::NO_HOLE };
            let fast = if how.only_fast { flag::FAST_ZERO } else { 0 };
            requests.change(operation, Command::WriteZeroes, hole | fast, middle.clone())
        } else {
            requests.write_zeros(operation, middle.clone())
        };
        let change = self.in_units(middle, false, change);
        if ends.iter().all(Option::is_none) {
            return change;
        }
        Box::pin(async move {
            for end in ends.into_iter().flatten() {
                end.await?;
            }
            change.await
        })
    }

    fn discard(&self, range: Range<u64>) -> Request {
        let (unit, size) = (self.requests.unit(), self.requests.size());
        let (start, end) = (range.start.min(size), range.end.min(size));
        let range = start.next_multiple_of(unit)..end - end % unit;
        if range.is_empty() || !self.requests.has(transmission::SEND_TRIM) {
            return Box::pin(std::future::ready(Ok(())));
        }
        if let Some(error) = self.refusal(Operation::Discard, &range) {
            return Box::pin(std::future::ready(Err(error)));
        }
        self.in_units(range.clone(), false, self.requests.change(Operation::Discard, Command::Trim, 0, range))
    }

    fn flush(&self) -> Request {
        if self.read_only {
            return Box::pin(std::future::ready(Ok(())));
        }
        let flush = self.requests.flush();
        let Some(locks) = self.locks.clone() else { return flush };
        Box::pin(async move {
            locks.finish().await;
            flush.await
        })
    }

    fn set_len(&self, len: u64) -> Request {
        let why = io::Error::new(io::ErrorKind::Unsupported, "the length of an export is fixed");
        let failed = StorageError::for_storage(Operation::SetLength, self.name(), why);
        Box::pin(std::future::ready(if len == self.requests.size() { Ok(()) } else { Err(failed) }))
    }

    /// The protocol has no command for it.
    fn allocate(&self, range: Range<u64>) -> Request {
        let why = io::Error::new(io::ErrorKind::Unsupported, "space of an export cannot be reserved");
        let failed = self.requests.failure(Operation::Allocate, &range, why);
        Box::pin(std::future::ready(if range.is_empty() { Ok(()) } else { Err(failed) }))
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        let end = self.requests.size().min(range.end);
        let mut found: Vec<Extent> = Vec::new();
        let mut push = |range: Range<u64>, kind| match found.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.kind == kind => last.range.end = range.end,
            _ => found.push(Extent::new(range, kind)),
        };
        let inside = range.start.min(end)..end;
        if self.context == allocation::NAME && self.requests.connection.agreed.context.is_some() {
            for ContextExtent { range, flags } in self.context_extents(inside)? {
                push(range, kind(flags));
            }
        } else {
            push(inside, ExtentKind::Data);
        }
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
