//! A connected byte stream.
//!
//! The laws of this module: `write_all` and `read_exact` move everything or report the byte at which they failed;
//! partial transfers, signals and non-blocking descriptors are handled here alone. One thread may write while another
//! reads; each direction belongs to one thread at a time (two concurrent writers interleave their bytes). A third
//! thread may shut the channel down at any moment, which wakes both, wherever they wait.

mod settings;

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::fs::{self, FileType, OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SocketFlags, SocketType, sockopt};

use crate::counters::Counters;
use crate::descriptor::{self, Kind};
#[cfg(feature = "testing")]
use crate::direction::TransferHook;
use crate::direction::{Direction, Stop, Transfer};
use crate::error::{ChannelError, Operation};
use crate::options::Options;
use crate::passed_descriptors::PASSED_MAX;
use crate::rate::RateLimit;
use crate::tls::{Session, Tls, TlsFailure};
use crate::transport::{Half, Transport};
use crate::vector::{Cursor, In, Out};
use crate::zero_copy::{Parts, Refusal, ZeroCopy, ZeroCopySender};

use settings::grow_buffers;

type Result<T> = std::result::Result<T, ChannelError>;

/// Size of the buffers that [`Channel::pair`] requests, in bytes; the kernel may grant less. Holds a batch of pages on
/// top of the one being read. Measured: a larger one gains nothing, and 4 MiB is slower.
const PAIR_BUFFER: usize = 512 << 10;

/// The directions to shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shutdown {
    /// No more reads.
    Read,
    /// No more writes; the peer sees the end of the data.
    Write,
    /// No more reads or writes.
    Both,
}

/// A connected socket or pipe.
///
/// Every method takes `&self`. Dropping the channel closes its descriptor; the peer sees the end once every
/// [`try_clone`](Self::try_clone) is dropped too. An encrypted channel's peer then receives a close notification,
/// unless a write or a read has failed.
#[derive(Debug)]
pub struct Channel {
    transport: Transport,
    state: Arc<ChannelState>,
}

/// State shared by all clones of a channel.
#[derive(Debug)]
struct ChannelState {
    peer: Arc<str>,
    rate: RateLimit,
    read_rate: RateLimit,
    input: Direction,
    output: Direction,
    sender: ZeroCopySender,
}

impl Channel {
    /// Makes a channel of a descriptor: a connected stream socket, a pipe's end, or anything else that is read or
    /// written in order. `TCP_NODELAY` is set on TCP; any other descriptor is switched to non-blocking mode, and a pipe
    /// whose reader is gone is an error only where SIGPIPE is ignored, as in every Rust program (sockets never raise
    /// it).
    ///
    /// # Errors
    /// [`ChannelError::Unsupported`] for a listening or message-based socket, a directory and the like.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        Self::from_fd_with(fd, &Options::default())
    }

    /// As [`from_fd`](Self::from_fd), with options.
    ///
    /// # Errors
    /// As `from_fd`; and if an option cannot be set.
    pub fn from_fd_with(fd: OwnedFd, options: &Options) -> Result<Self> {
        let peer = describe(&fd);
        Self::over(fd, peer, options)
    }

    /// Creates a socket pair with buffers for a hundred pages, and returns a channel over one end. The other end is
    /// meant for another process.
    ///
    /// # Errors
    /// If the kernel has no descriptors left.
    pub fn pair() -> Result<(Self, OwnedFd)> {
        let peer = "the other end of a socket pair";
        let (near, far) = socket_pair().map_err(|source| ChannelError::setup(Operation::Connect, peer, source))?;
        Ok((Self::over(near, peer, &Options::default())?, far))
    }

    pub(crate) fn over(fd: OwnedFd, peer: impl Into<Arc<str>>, options: &Options) -> Result<Self> {
        let peer = peer.into();
        let failed = |source: io::Error| ChannelError::setup(Operation::Configure, peer.clone(), source);
        let unsupported = |why| ChannelError::Unsupported { operation: Operation::Configure, peer: peer.clone(), why };
        options.check(Operation::Configure, &peer)?;
        let (transport, wakes) = match descriptor::kind(&fd).map_err(failed)? {
            Kind::Stream(family) => {
                if matches!(family, AddressFamily::INET | AddressFamily::INET6) {
                    sockopt::set_tcp_nodelay(&fd, true).map_err(|e| failed(e.into()))?;
                }
                let transport = match &options.tls {
                    None => Transport::Socket(fd, Arc::default()),
                    Some(tls) if !tls.has_peer_name() => {
                        let failure = Box::new(TlsFailure::NoHostName);
                        return Err(ChannelError::Tls { operation: Operation::Configure, peer, offset: None, failure });
                    }
                    Some(tls) => Transport::Tls(Arc::new(
                        Session::over(fd, tls, options.connect_timeout)
                            .map_err(|error| of_tls(Operation::Connect, &peer, None, error))?,
                    )),
                };
                (transport, None)
            }
            Kind::Ordered if options.tls.is_some() => return Err(unsupported("TLS needs a stream socket")),
            Kind::Ordered => {
                unblock(&fd).map_err(|e| failed(e.into()))?;
                (Transport::Pipe(fd), Some(wakes().map_err(|e| failed(e.into()))?))
            }
            Kind::Listening => return Err(unsupported("it waits for connections itself; use it with a listener")),
            Kind::Unsupported(why) => return Err(unsupported(why)),
        };
        Self::with_transport(transport, wakes, peer, options)
    }

    /// Creates a channel that reads from one descriptor and writes to another.
    pub(crate) fn over_two(
        input: OwnedFd,
        output: OwnedFd,
        peer: impl Into<Arc<str>>,
        options: &Options,
    ) -> Result<Self> {
        let peer = peer.into();
        if options.tls.is_some() {
            let why = "TLS needs one socket for both directions";
            return Err(ChannelError::Unsupported { operation: Operation::Configure, peer, why });
        }
        let halves = || -> std::result::Result<_, Errno> {
            let half = |fd: OwnedFd| -> std::result::Result<Half, Errno> {
                if FileType::from_raw_mode(fs::fstat(&fd)?.st_mode) == FileType::Socket {
                    return Ok(Half::Socket(fd));
                }
                unblock(&fd)?;
                Ok(Half::Pipe(fd))
            };
            Ok((Transport::Pair { input: half(input)?, output: half(output)? }, wakes()?))
        };
        let (transport, wakes) =
            halves().map_err(|e| ChannelError::setup(Operation::Configure, Arc::clone(&peer), e))?;
        Self::with_transport(transport, Some(wakes), peer, options)
    }

    fn with_transport(
        transport: Transport,
        wakes: Option<(OwnedFd, OwnedFd)>,
        peer: Arc<str>,
        options: &Options,
    ) -> Result<Self> {
        let (wake_input, wake_output) = wakes.unzip();
        let sender = ZeroCopySender::new(options.zero_copy, &transport).map_err(|refusal| match refusal {
            Refusal::Unsupported(why) => {
                ChannelError::Unsupported { operation: Operation::Configure, peer: Arc::clone(&peer), why }
            }
            Refusal::MemoryLock { limit, least } => {
                ChannelError::MemoryLock { operation: Operation::Configure, peer: Arc::clone(&peer), limit, least }
            }
            Refusal::Failed(source) => ChannelError::setup(Operation::Configure, Arc::clone(&peer), source),
        })?;
        let state = ChannelState {
            sender,
            peer,
            rate: options.rate_limit.clone().unwrap_or_default(),
            read_rate: options.read_rate_limit.clone().unwrap_or_default(),
            input: Direction::new(PollFlags::IN, wake_input),
            output: Direction::new(PollFlags::OUT, wake_output),
        };
        let channel = Self { transport, state: Arc::new(state) };
        channel.set_buffers(options.send_buffer, options.receive_buffer)?;
        channel.set_timeouts(options.read_timeout, options.write_timeout)?;
        Ok(channel)
    }

    /// Asks these before every call to the kernel, for as long as the channel and its clones live. Set once.
    #[cfg(feature = "testing")]
    pub fn set_transfer_hooks(&self, read: TransferHook, write: TransferHook) {
        let _ = self.state.input.hook.set(read);
        let _ = self.state.output.hook.set(write);
    }

    /// Creates a second handle: a descriptor of its own for the same end, with the same counters, rate limit and
    /// time-outs. Shutting one down shuts down both.
    ///
    /// # Errors
    /// If the kernel has no descriptors left.
    pub fn try_clone(&self) -> Result<Self> {
        let transport = self.transport.try_clone().map_err(|e| self.failed(Operation::Configure, e))?;
        Ok(Self { transport, state: Arc::clone(&self.state) })
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// As [`write_all_vectored`](Self::write_all_vectored).
    pub fn write_all(&self, bytes: &[u8]) -> Result<()> {
        self.write_all_vectored(&[IoSlice::new(bytes)])
    }

    /// Writes all slices in order, as fast as the rate limit allows. The list may have any length and empty slices.
    ///
    /// # Errors
    /// [`ChannelError::Broken`] if the peer is gone, [`ChannelError::TimedOut`] if it takes nothing for the length of
    /// the write time-out, [`ChannelError::ShutDown`] after [`shutdown`](Self::shutdown). Only the error's offset tells
    /// how much of the list went out.
    pub fn write_all_vectored(&self, list: &[IoSlice<'_>]) -> Result<()> {
        self.write_cursor(Cursor::gather(list), &[])
    }

    /// As [`write_all_vectored`](Self::write_all_vectored), for guest memory: it must not become a slice, because the
    /// guest writes it meanwhile.
    ///
    /// # Errors
    /// As `write_all_vectored`.
    ///
    /// # Safety
    /// Every entry must name memory that stays mapped and readable until the call returns.
    #[allow(unsafe_code, reason = "passes its own contract on")]
    pub unsafe fn write_all_raw(&self, list: &[libc::iovec]) -> Result<()> {
        // SAFETY: the caller promises what the cursor asks for, for as long as this call lasts.
        self.write_cursor(unsafe { Cursor::gather_raw(list) }, &[])
    }

    /// Writes all of `bytes`, and passes duplicates of `descriptors` with the first of them. A peer that does not
    /// [accept](Self::allow_descriptors) them receives the bytes alone.
    ///
    /// # Errors
    /// As [`write_all_vectored`](Self::write_all_vectored); [`ChannelError::Unsupported`], before a byte has moved, if
    /// the channel is no unix socket, `bytes` is empty, or there are more than 253 descriptors.
    pub fn write_all_with_descriptors(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let unsupported = |why| {
            Err(ChannelError::Unsupported { operation: Operation::Write, peer: Arc::clone(&self.state.peer), why })
        };
        if !self.passes_descriptors() {
            return unsupported("descriptors can be passed only over a unix socket");
        }
        if bytes.is_empty() || descriptors.len() > PASSED_MAX {
            return unsupported("at most 253 descriptors can be passed, with at least one byte");
        }
        self.write_cursor(Cursor::gather(&[IoSlice::new(bytes)]), descriptors)
    }

    /// Completes the TLS handshake, so that a wrong peer is reported now and not when the channel is used. Waits as
    /// long as a handshake may take. Does nothing on a channel that is not encrypted.
    ///
    /// # Errors
    /// [`ChannelError::Tls`]; [`ChannelError::ShutDown`] after a [`shutdown`](Self::shutdown).
    pub fn complete_handshake(&self) -> Result<()> {
        let Transport::Tls(session) = &self.transport else { return Ok(()) };
        session.establish().map_err(|error| {
            let stop = if self.is_shut() { Stop::ShutDown } else { Stop::Failed(error) };
            self.explain(Operation::Read, stop)
        })
    }

    /// Continues the TLS handshake without waiting for the peer, and returns whether it is complete. Always true for a
    /// channel that is not encrypted.
    ///
    /// # Errors
    /// As [`complete_handshake`](Self::complete_handshake).
    pub fn try_complete_handshake(&self) -> Result<bool> {
        let Transport::Tls(session) = &self.transport else { return Ok(true) };
        match session.try_establish() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(self.explain(Operation::Read, Stop::Failed(error))),
            Ok(()) => Ok(true),
        }
    }

    /// Whether the channel is encrypted (TLS). Then neither files ([`send_file`](Self::send_file)) nor memory can be
    /// sent without a copy, and no descriptors can be passed.
    pub fn is_encrypted(&self) -> bool {
        matches!(self.transport, Transport::Tls(_))
    }

    /// Whether descriptors can be passed: true for a unix socket that is not encrypted.
    pub fn passes_descriptors(&self) -> bool {
        match &self.transport {
            Transport::Socket(socket, _) => {
                sockopt::socket_domain(socket).is_ok_and(|domain| domain == AddressFamily::UNIX)
            }
            _ => false,
        }
    }

    /// Accepts up to `most` descriptors from the peer (at most 253); 0 accepts no more. Bytes are read and written as
    /// before. A read that meets one more descriptor than `most` fails ([`ChannelError::Io`],
    /// [`io::ErrorKind::InvalidData`]). Without this call the kernel closes passed descriptors.
    pub fn allow_descriptors(&self, most: usize) {
        if let Transport::Socket(_, passed) = &self.transport {
            passed.want(most);
        }
    }

    /// Returns the descriptors received with the bytes read so far, in the order of passing. They are close-on-exec.
    pub fn take_descriptors(&self) -> Vec<OwnedFd> {
        match &self.transport {
            Transport::Socket(_, passed) => passed.take(),
            _ => Vec::new(),
        }
    }

    /// Writes `length` bytes of `file` from `offset` on, straight from the page cache (sendfile), as fast as the rate
    /// limit allows. They are not copied on this side, which halves the cost of a read and a write.
    ///
    /// The peer receives what the file holds when *it* reads, so a caller that relies on the contents checks afterwards
    /// that the file has not changed.
    ///
    /// # Errors
    /// As [`write_all_vectored`](Self::write_all_vectored); [`ChannelError::Io`] with [`io::ErrorKind::UnexpectedEof`]
    /// if the file ends before; [`ChannelError::Unsupported`], before a byte has moved, if the kernel cannot send this
    /// file over this channel: the caller reads it instead.
    pub fn send_file(&self, file: impl AsFd, offset: u64, length: u64) -> Result<()> {
        let before = self.state.output.counters.bytes();
        let written = self.output().send_file(file.as_fd(), offset, length);
        written.map_err(|stop| match stop {
            Stop::Failed(error) if before == self.state.output.counters.bytes() && cannot_send(&error) => {
                let why = "the kernel cannot send this file over it without reading it";
                ChannelError::Unsupported { operation: Operation::Write, peer: Arc::clone(&self.state.peer), why }
            }
            stop => self.explain(Operation::Write, stop),
        })
    }

    /// Reads exactly `bytes.len()` bytes.
    ///
    /// # Errors
    /// As [`read_exact_vectored`](Self::read_exact_vectored).
    pub fn read_exact(&self, bytes: &mut [u8]) -> Result<()> {
        self.read_exact_vectored(&mut [IoSliceMut::new(bytes)])
    }

    /// Fills all slices in order; the list may have any length and empty slices.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] with the number of bytes read, if the data ends before; [`ChannelError::TimedOut`] if
    /// nothing arrives for the length of the read time-out; [`ChannelError::ShutDown`] after
    /// [`shutdown`](Self::shutdown). The contents of the slices are then unspecified.
    pub fn read_exact_vectored(&self, list: &mut [IoSliceMut<'_>]) -> Result<()> {
        self.read_cursor(Cursor::scatter(list))
    }

    /// As [`read_exact_vectored`](Self::read_exact_vectored), straight into memory that must not become a slice: guest
    /// memory.
    ///
    /// # Errors
    /// As `read_exact_vectored`.
    ///
    /// # Safety
    /// Every entry must name memory that stays mapped and writable until the call returns, and to which no reference
    /// exists.
    #[allow(unsafe_code, reason = "passes its own contract on")]
    pub unsafe fn read_exact_raw(&self, list: &[libc::iovec]) -> Result<()> {
        // SAFETY: the caller promises what the cursor asks for, for as long as this call lasts.
        self.read_cursor(unsafe { Cursor::scatter_raw(list) })
    }

    /// Reads the bytes that are there, at least one, and returns how many; 0 is the end of the data (or an empty
    /// buffer).
    ///
    /// # Errors
    /// As [`read_exact_vectored`](Self::read_exact_vectored), except that the end is no error.
    pub fn read(&self, bytes: &mut [u8]) -> Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(bytes)])
    }

    /// As [`read`](Self::read), into several slices by one call of at most 1,024 entries.
    ///
    /// # Errors
    /// As `read`.
    pub fn read_vectored(&self, list: &mut [IoSliceMut<'_>]) -> Result<usize> {
        self.input().read(&mut Cursor::scatter(list)).map_err(|stop| self.explain(Operation::Read, stop))
    }

    /// Switches a socket to non-blocking mode, so that [`try_read_raw`](Self::try_read_raw) and
    /// [`try_write_raw`](Self::try_write_raw) do not wait. Calls that wait work as before. The mode belongs to the open
    /// socket: other processes that have it see it, too.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_nonblocking(&self) -> Result<()> {
        let Some(socket) = self.transport.socket() else { return Ok(()) };
        let set = fcntl_getfl(socket).and_then(|flags| fcntl_setfl(socket, flags | OFlags::NONBLOCK));
        set.map_err(|errno| self.failed(Operation::Configure, errno.into()))
    }

    /// Reads bytes that have arrived, without waiting: returns how many, 0 at the end of the data, `None` if there are
    /// none yet. The rate limit does not apply. A socket must be in [non-blocking mode](Self::set_nonblocking).
    ///
    /// # Errors
    /// As [`read`](Self::read), except the time-out.
    ///
    /// # Safety
    /// Every entry must name memory that stays mapped and writable until the call returns.
    #[allow(unsafe_code, reason = "passes its own contract on")]
    pub unsafe fn try_read_raw(&self, list: &[libc::iovec]) -> Result<Option<usize>> {
        // SAFETY: the caller promises what the cursor asks for, for as long as this call lasts.
        let read = self.input().try_read(&mut unsafe { Cursor::scatter_raw(list) });
        read.map_err(|stop| self.explain(Operation::Read, stop))
    }

    /// Writes bytes from the beginning of a list, without waiting: returns how many, `None` if none can be written now.
    /// The rate limit does not apply. A socket must be in [non-blocking mode](Self::set_nonblocking). An encrypted
    /// channel may keep bytes that count as written: [`try_flush`](Self::try_flush).
    ///
    /// # Errors
    /// As [`write_all_vectored`](Self::write_all_vectored), except the time-out.
    ///
    /// # Safety
    /// Every entry must name memory that stays mapped and readable until the call returns.
    #[allow(unsafe_code, reason = "passes its own contract on")]
    pub unsafe fn try_write_raw(&self, list: &[libc::iovec]) -> Result<Option<usize>> {
        // SAFETY: the caller promises what the cursor asks for, for as long as this call lasts.
        let written = self.output().try_write(&mut unsafe { Cursor::gather_raw(list) });
        written.map_err(|stop| self.explain(Operation::Write, stop))
    }

    /// Hands bytes that an encrypted channel keeps to the kernel, without waiting. Returns whether none is left.
    ///
    /// # Errors
    /// As [`try_write_raw`](Self::try_write_raw).
    pub fn try_flush(&self) -> Result<bool> {
        self.output().try_drain().map_err(|stop| self.explain(Operation::Write, stop))
    }

    /// Begins TLS on a connected socket: for protocols that agree on it with their first messages. What the peer sends
    /// from now on must be TLS; bytes that were read before are the caller's, who must not use any that came after that
    /// agreement. The handshake may take `within` (default: 30 s). Rate limits, time-outs and counters begin again.
    ///
    /// # Errors
    /// [`ChannelError::Unsupported`] for anything but a socket that is not encrypted yet; [`ChannelError::Tls`].
    pub fn encrypt(self, tls: &Tls, within: Option<Duration>) -> Result<Self> {
        let peer = Arc::clone(&self.state.peer);
        let Self { transport: Transport::Socket(socket, _), .. } = self else {
            let why = "TLS needs a stream socket that is not encrypted";
            return Err(ChannelError::Unsupported { operation: Operation::Configure, peer, why });
        };
        let options = Options { tls: Some(tls.clone()), connect_timeout: within, ..Options::default() };
        options.check(Operation::Configure, &peer)?;
        Self::over(socket, peer, &options)
    }

    /// Copies the first bytes that have arrived, without consuming them and without waiting. Returns how many, 0 at the
    /// end of the data, `None` if nothing has arrived yet. Not counted. An accepted encrypted channel continues its
    /// handshake here. Only a read detects an end that an encrypted peer did not announce.
    ///
    /// # Errors
    /// [`ChannelError::Unsupported`] for anything but a socket; [`ChannelError::Broken`] if the peer is gone;
    /// [`ChannelError::Tls`].
    pub fn peek(&self, bytes: &mut [u8]) -> Result<Option<usize>> {
        if let Transport::Tls(session) = &self.transport {
            return session.peek(bytes).map_err(|error| self.explain(Operation::Read, Stop::Failed(error)));
        }
        let Transport::Socket(socket, _) = &self.transport else {
            let why = "only a socket can be peeked";
            return Err(ChannelError::Unsupported { operation: Operation::Read, peer: self.state.peer.clone(), why });
        };
        loop {
            match net::recv(socket, &mut *bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Ok((got, _)) => return Ok(Some(got)),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.explain(Operation::Read, Stop::Failed(errno.into()))),
            }
        }
    }

    /// Waits until a [`read`](Self::read) returns at once, with bytes, the end of the data or an error: true; or until
    /// `woken` is readable and nothing has arrived: false. Unlike a shutdown, this ends a wait without the peer
    /// noticing.
    ///
    /// # Errors
    /// [`ChannelError::TimedOut`] after the read time-out; those of the kernel.
    pub fn wait_to_read(&self, woken: BorrowedFd<'_>) -> Result<bool> {
        self.input().wait_to_read(woken).map_err(|stop| self.explain(Operation::Read, stop))
    }

    fn output(&self) -> Transfer<'_> {
        Transfer { direction: &self.state.output, transport: &self.transport, rate: &self.state.rate }
    }

    fn input(&self) -> Transfer<'_> {
        Transfer { direction: &self.state.input, transport: &self.transport, rate: &self.state.read_rate }
    }

    fn write_cursor(&self, mut gather: Cursor<'_, Out>, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let written = self.output().write_all(&mut gather, descriptors);
        written.map_err(|stop| self.explain(Operation::Write, stop))
    }

    pub(crate) fn write_all_zero_copy(&self, parts: Parts<'_>) -> Result<()> {
        let written = self.state.sender.write_all(self.output(), parts);
        written.map_err(|stop| self.explain(Operation::Write, stop))
    }

    pub(crate) fn flush_zero_copy(&self) -> Result<()> {
        let given_up = || self.state.output.is_shut() && self.state.input.is_shut();
        let flushed = self.state.sender.flush(self.output(), given_up);
        flushed.map_err(|stop| self.explain(Operation::Write, stop))
    }

    /// Flushes the zero-copy sends; if that fails, cuts the connection and discards what is queued.
    pub(crate) fn end_zero_copy(&self) {
        if self.flush_zero_copy().is_err() {
            self.abort_zero_copy();
        }
    }

    pub(crate) fn abort_zero_copy(&self) {
        self.state.sender.abort(&self.transport);
    }

    /// Returns the zero-copy setting of the channel ([`Options::zero_copy`]).
    pub fn zero_copy_setting(&self) -> ZeroCopy {
        self.state.sender.setting()
    }

    /// Returns the zero-copy method in use now: [`Off`](ZeroCopy::Off) if pages are copied, never
    /// [`Auto`](ZeroCopy::Auto).
    pub fn zero_copy(&self) -> ZeroCopy {
        self.state.sender.method()
    }

    fn read_cursor(&self, mut scatter: Cursor<'_, In>) -> Result<()> {
        let read = self.input().read_exact(&mut scatter);
        read.map_err(|stop| self.explain(Operation::Read, stop))
    }

    /// Shuts down one or both directions and wakes the threads that wait in them or in the rate limit; their calls fail
    /// with [`ChannelError::ShutDown`]. Bytes that arrived before a read shutdown of a socket can still be read. A
    /// pipe's peer sees the end only when the channel is dropped. An encrypted channel sends its close notification
    /// only for [`Shutdown::Write`], and only if no write is in progress: otherwise the peer sees a cut connection.
    ///
    /// # Errors
    /// If the kernel refuses. A peer that is gone already is no error.
    pub fn shutdown(&self, how: Shutdown) -> Result<()> {
        let (read, write) = (how != Shutdown::Write, how != Shutdown::Read);
        let mark = || -> io::Result<()> {
            if read {
                self.state.input.shut()?;
                self.state.read_rate.wake();
            }
            if write {
                self.state.output.shut()?;
                self.state.rate.wake();
            }
            if let Transport::Tls(session) = &self.transport {
                match how {
                    Shutdown::Read => session.stop_receiving(),
                    // A write is in progress: its rest will never come, so this must not look like an orderly end.
                    Shutdown::Write if self.state.output.is_amid() => session.give_up(),
                    Shutdown::Write => session.close(),
                    Shutdown::Both => session.give_up(),
                }
            }
            if let Some(socket) = self.transport.socket() {
                match net::shutdown(
                    socket,
                    match how {
                        Shutdown::Read => net::Shutdown::Read,
                        Shutdown::Write => net::Shutdown::Write,
                        Shutdown::Both => net::Shutdown::Both,
                    },
                ) {
                    Err(Errno::NOTCONN) => {}
                    answer => answer?,
                }
            }
            Ok(())
        };
        mark().map_err(|e| self.failed(Operation::Shutdown, e))
    }

    /// Whether bytes can be read (`Shutdown::Read`), written (`Shutdown::Write`), or both: a pipe's end and a file
    /// carry one direction.
    pub fn has_direction(&self, how: Shutdown) -> bool {
        let opened = |fd: BorrowedFd<'_>| fcntl_getfl(fd).map_or(OFlags::empty(), |flags| flags & OFlags::RWMODE);
        let (get, put) = match &self.transport {
            Transport::Socket(..) | Transport::Tls(_) => (true, true),
            Transport::Pipe(_) | Transport::Pair { .. } => {
                (opened(self.transport.input()) != OFlags::WRONLY, opened(self.transport.output()) != OFlags::RDONLY)
            }
        };
        let is_file =
            |fd| fs::fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        match how {
            Shutdown::Read => get,
            Shutdown::Write => put,
            Shutdown::Both => get && put && !is_file(self.transport.input()),
        }
    }

    /// Returns a handle to the rate limit of writes, to change it while the channel is in use.
    pub fn rate_limit(&self) -> RateLimit {
        self.state.rate.clone()
    }

    /// Returns the counters of this channel and its clones.
    pub fn counters(&self) -> Counters {
        Counters::of(&self.state.output.counters, &self.state.input.counters)
    }

    /// Returns the descriptor that is written, as [`as_fd`](AsFd::as_fd) returns the one that is read.
    pub fn output_fd(&self) -> BorrowedFd<'_> {
        self.transport.output()
    }

    /// Returns the name of the other end, for messages.
    pub fn peer(&self) -> &str {
        &self.state.peer
    }

    fn explain(&self, operation: Operation, stop: Stop) -> ChannelError {
        let peer = Arc::clone(&self.state.peer);
        let direction = if operation == Operation::Write { &self.state.output } else { &self.state.input };
        let offset = direction.counters.bytes();
        match stop {
            Stop::TimedOut(after) => ChannelError::TimedOut { operation, peer, offset: Some(offset), after },
            Stop::ShutDown => ChannelError::ShutDown { operation, peer, offset },
            Stop::Internal(broken) => ChannelError::Internal { operation, peer, offset: Some(offset), broken },
            Stop::Ended { got, wanted } => ChannelError::Closed { operation, peer, offset, got, wanted },
            // A handshake needs both directions.
            Stop::Failed(source) if self.is_shut() && is_ended(&source) => {
                ChannelError::ShutDown { operation, peer, offset }
            }
            Stop::Failed(source) => match source.kind() {
                _ if source.get_ref().is_some_and(|error| error.is::<TlsFailure>()) => {
                    of_tls(operation, &peer, Some(offset), source)
                }
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted => {
                    ChannelError::Broken { operation, peer, offset, source }
                }
                _ => ChannelError::Io { operation, peer, offset: Some(offset), source },
            },
        }
    }

    /// Whether a direction was shut down on this side.
    fn is_shut(&self) -> bool {
        self.state.input.is_shut() || self.state.output.is_shut()
    }

    fn failed(&self, operation: Operation, source: io::Error) -> ChannelError {
        ChannelError::setup(operation, Arc::clone(&self.state.peer), source)
    }
}

/// For polling several channels, or for handing the descriptor on; of two descriptors, the one that is read. Reading or
/// writing it bypasses the counters and the encryption. An encrypted channel may hold decrypted bytes although its
/// descriptor is not readable.
impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.transport.input()
    }
}

/// Converts an I/O error of a TLS session: either a [`TlsFailure`] or an error of the kernel.
fn of_tls(operation: Operation, peer: &Arc<str>, offset: Option<u64>, error: io::Error) -> ChannelError {
    match error.get_ref().and_then(|error| error.downcast_ref::<TlsFailure>()) {
        Some(failure) => {
            ChannelError::Tls { operation, peer: Arc::clone(peer), offset, failure: Box::new(failure.clone()) }
        }
        None => ChannelError::setup(operation, Arc::clone(peer), error),
    }
}

/// Whether the peer closed the connection during the handshake.
fn is_ended(error: &io::Error) -> bool {
    error.get_ref().and_then(|error| error.downcast_ref()) == Some(&TlsFailure::HandshakeClosed)
}

/// Whether the error says that sendfile(2) cannot send from this file to this descriptor.
fn cannot_send(error: &io::Error) -> bool {
    [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP].into_iter().any(|errno| Errno::from_io_error(error) == Some(errno))
}

/// Sets non-blocking mode, for a descriptor that the kernel cannot shut down: its calls return instead of waiting.
fn unblock(fd: &OwnedFd) -> std::result::Result<(), Errno> {
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

/// Creates the event descriptors that wake threads waiting for such a descriptor, to read and to write.
fn wakes() -> std::result::Result<(OwnedFd, OwnedFd), Errno> {
    let wake = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    Ok((wake()?, wake()?))
}

/// Creates a socket pair with buffers for a hundred pages.
pub(crate) fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (near, far) = net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for end in [&near, &far] {
        grow_buffers(end, Some(PAIR_BUFFER), Some(PAIR_BUFFER))?;
    }
    Ok((near, far))
}

/// Describes the other end of a descriptor for messages.
fn describe(fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    let number = fd.as_raw_fd();
    let address = net::getpeername(fd).ok().flatten();
    let inet = address.and_then(|address| std::net::SocketAddr::try_from(address).ok());
    inet.map_or_else(|| format!("descriptor {number}"), |address| format!("tcp:{address}"))
}
