//! A connected byte stream.
//!
//! The laws of this module: `put` and `get` move everything or say at which byte they failed; partial transfers,
//! signals and non-blocking descriptors are handled here alone. One thread may put while another gets; each direction
//! belongs to one thread at a time (two that put at once interleave their bytes). A third may shut the channel down at
//! any moment, which wakes both, wherever they wait.

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
use crate::direction::Gate;
use crate::direction::{Direction, Stop, Transfer};
use crate::error::{ChannelError, Operation};
use crate::options::Options;
use crate::passed_descriptors::PASSED_MAX;
use crate::rate::RateLimit;
use crate::tls::{ByKernel, Session, TlsFailure};
use crate::transport::{Half, Transport};
use crate::vector::{Cursor, In, Out};
use crate::zero_copy::{Refusal, ZeroCopy, ZeroCopySender};

type Result<T> = std::result::Result<T, ChannelError>;

/// The buffers that [`Channel::pair`] asks for, in bytes; the kernel may grant less. Room for a batch of pages on top
/// of the one being read; more was measured to gain nothing, and 4 MiB to be slower.
const PAIR_BUFFER: usize = 512 << 10;

/// The directions to shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shutdown {
    /// No more gets.
    Read,
    /// No more puts; the peer sees the end of the data.
    Write,
    /// Neither.
    Both,
}

/// A connected socket or pipe.
///
/// Every method takes `&self`. Dropping the channel closes its descriptor; the peer sees the end once every
/// [`try_clone`](Self::try_clone) is dropped too. An encrypted channel's peer then receives a close notification,
/// unless a put or a get has failed.
#[derive(Debug)]
pub struct Channel {
    transport: Transport,
    state: Arc<ChannelState>,
}

/// What all clones of a channel have in common.
#[derive(Debug)]
struct ChannelState {
    peer: Arc<str>,
    rate: RateLimit,
    get_rate: RateLimit,
    get: Direction,
    put: Direction,
    sender: ZeroCopySender,
}

impl Channel {
    /// Makes a channel of a descriptor: a connected stream socket, a pipe's end, or anything else that is read or
    /// written in order. `TCP_NODELAY` is set on TCP; what is no socket is put into non-blocking mode, and a pipe whose
    /// reader is gone is an error only where SIGPIPE is ignored, as in every Rust program (sockets never raise it).
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

    /// A channel to a new descriptor of this process: a socket pair with buffers for a hundred pages. The other end is
    /// meant to be handed to another process.
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
                    Some(tls) if !tls.knows_its_peer() => {
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
            Kind::Useless(why) => return Err(unsupported(why)),
        };
        Self::with_transport(transport, wakes, peer, options)
    }

    /// A channel that reads from one descriptor and writes to another.
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
        let (wake_get, wake_put) = wakes.unzip();
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
            rate: options.rate.clone().unwrap_or_default(),
            get_rate: options.get_rate.clone().unwrap_or_default(),
            get: Direction::new(PollFlags::IN, wake_get),
            put: Direction::new(PollFlags::OUT, wake_put),
        };
        let channel = Self { transport, state: Arc::new(state) };
        channel.set_buffers(options.send_buffer, options.receive_buffer)?;
        channel.set_timeouts(options.read_timeout, options.write_timeout)?;
        Ok(channel)
    }

    /// Asks these before every call to the kernel, for as long as the channel and its clones live. Set once.
    #[cfg(feature = "testing")]
    pub fn set_gates(&self, read: Gate, write: Gate) {
        let _ = self.state.get.gate.set(read);
        let _ = self.state.put.gate.set(write);
    }

    /// A second handle: its own descriptor for the same end, with the same counters, rate limit and time-outs. Shutting
    /// one down shuts down both.
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
    /// As [`put_vector`](Self::put_vector).
    pub fn put(&self, bytes: &[u8]) -> Result<()> {
        self.put_vector(&[IoSlice::new(bytes)])
    }

    /// Writes all slices in order; the list may have any length and empty slices. Held back by the rate limit, if there
    /// is one.
    ///
    /// # Errors
    /// [`ChannelError::Broken`] if the peer is gone, [`ChannelError::TimedOut`] if it takes nothing for the length of
    /// the write time-out, [`ChannelError::ShutDown`] after [`shutdown`](Self::shutdown). How much of the list went out
    /// before is only known by the error's offset.
    pub fn put_vector(&self, list: &[IoSlice<'_>]) -> Result<()> {
        self.put_all(Cursor::gather(list), &[])
    }

    /// As [`put_vector`](Self::put_vector), for memory that must not become a slice because others write it meanwhile:
    /// guest memory.
    ///
    /// # Errors
    /// As `put_vector`.
    ///
    /// # Safety
    /// Every entry must name memory that stays mapped and readable until the call returns.
    #[allow(unsafe_code, reason = "passes its own contract on")]
    pub unsafe fn put_vector_raw(&self, list: &[libc::iovec]) -> Result<()> {
        // SAFETY: the caller promises what the cursor asks for, for as long as this call lasts.
        self.put_all(unsafe { Cursor::gather_raw(list) }, &[])
    }

    /// Writes all of `bytes`, and passes duplicates of `descriptors` with the first of them. A peer that does not
    /// [accept](Self::accept_descriptors) them gets the bytes alone.
    ///
    /// # Errors
    /// As [`put_vector`](Self::put_vector); [`ChannelError::Unsupported`], before a byte has moved, if the channel is
    /// no unix socket, there is no byte to pass them with, or they are more than 253.
    pub fn put_with(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let unsupported =
            |why| Err(ChannelError::Unsupported { operation: Operation::Put, peer: Arc::clone(&self.state.peer), why });
        if !self.passes_descriptors() {
            return unsupported("descriptors can be passed only over a unix socket");
        }
        if bytes.is_empty() || descriptors.len() > PASSED_MAX {
            return unsupported("at most 253 descriptors can be passed, with at least one byte");
        }
        self.put_all(Cursor::gather(&[IoSlice::new(bytes)]), descriptors)
    }

    /// Shakes hands, if that is yet to be done, so that what is wrong with the peer shows now and not when the channel
    /// is used. Waits for as long as a handshake may take. There is nothing to do for a channel that is not encrypted.
    ///
    /// # Errors
    /// [`ChannelError::Tls`]; [`ChannelError::ShutDown`] after a [`shutdown`](Self::shutdown).
    pub fn establish(&self) -> Result<()> {
        let Transport::Tls(session) = &self.transport else { return Ok(()) };
        session.establish().map_err(|error| {
            let stop = if self.is_shut() { Stop::ShutDown } else { Stop::Failed(error) };
            self.explain(Operation::Get, stop)
        })
    }

    /// Goes on shaking hands as far as that can be done without waiting for the peer: whether both ends know each
    /// other. A channel that is not encrypted has nothing to wait for.
    ///
    /// # Errors
    /// As [`establish`](Self::establish).
    pub fn try_establish(&self) -> Result<bool> {
        let Transport::Tls(session) = &self.transport else { return Ok(true) };
        match session.try_establish() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(self.explain(Operation::Get, Stop::Failed(error))),
            Ok(()) => Ok(true),
        }
    }

    /// Whether what is put and got is encrypted (TLS): then nothing goes out from where it lies, neither a file
    /// ([`put_file`](Self::put_file)) nor memory (zero-copy), and no descriptors can be passed.
    pub fn is_encrypted(&self) -> bool {
        matches!(self.transport, Transport::Tls(_))
    }

    /// Whether the kernel seals what is put ([`Shutdown::Write`]), opens what is got ([`Shutdown::Read`]), or both
    /// ([`crate::KernelTls`]). Only known once both ends have shaken hands; where bytes came with the end of that, it
    /// opens what comes behind them.
    pub fn is_sealed_by_kernel(&self, how: Shutdown) -> bool {
        let Transport::Tls(session) = &self.transport else { return false };
        let (seals, opens) = session.by_kernel().map_or((false, false), ByKernel::directions);
        match how {
            Shutdown::Read => opens,
            Shutdown::Write => seals,
            Shutdown::Both => seals && opens,
        }
    }

    /// Whether descriptors can be passed through it: whether it is a unix socket, not encrypted.
    pub fn passes_descriptors(&self) -> bool {
        match &self.transport {
            Transport::Socket(socket, _) => {
                sockopt::socket_domain(socket).is_ok_and(|domain| domain == AddressFamily::UNIX)
            }
            _ => false,
        }
    }

    /// Picks up descriptors that the peer passes, `most` of them (253 is the limit); 0 picks up no more. Gets and puts
    /// of bytes are as before, and one more descriptor than `most` fails a get ([`ChannelError::Io`],
    /// [`io::ErrorKind::InvalidData`]). Without this call the kernel closes what is passed.
    pub fn accept_descriptors(&self, most: usize) {
        if let Transport::Socket(_, passed) = &self.transport {
            passed.want(most);
        }
    }

    /// The descriptors that have come with the bytes that were got, in the order in which they were passed. They are
    /// closed when a program is executed.
    pub fn take_descriptors(&self) -> Vec<OwnedFd> {
        match &self.transport {
            Transport::Socket(_, passed) => passed.take(),
            _ => Vec::new(),
        }
    }

    /// Writes `length` bytes of `file` from `offset` on, straight from the page cache (sendfile): they are not copied
    /// on this side, which halves what a read and a put cost. Held back by the rate limit, if there is one.
    ///
    /// The peer gets what the file holds when *it* reads, so a caller that relies on the contents checks afterwards
    /// whether the file is still the same.
    ///
    /// # Errors
    /// As [`put_vector`](Self::put_vector); [`ChannelError::Io`] with [`io::ErrorKind::UnexpectedEof`] if the file ends
    /// before; [`ChannelError::Unsupported`], before a byte has moved, if the kernel cannot send this file over this
    /// channel: then it has to be read.
    pub fn put_file(&self, file: impl AsFd, offset: u64, length: u64) -> Result<()> {
        let before = self.state.put.counters.bytes();
        let put = self.output().put_file(file.as_fd(), offset, length);
        put.map_err(|stop| match stop {
            Stop::Failed(error) if before == self.state.put.counters.bytes() && cannot_send(&error) => {
                let why = "the kernel cannot send this file over it without reading it";
                ChannelError::Unsupported { operation: Operation::Put, peer: Arc::clone(&self.state.peer), why }
            }
            stop => self.explain(Operation::Put, stop),
        })
    }

    /// Reads exactly as many bytes as `bytes` has.
    ///
    /// # Errors
    /// As [`get_vector`](Self::get_vector).
    pub fn get(&self, bytes: &mut [u8]) -> Result<()> {
        self.get_vector(&mut [IoSliceMut::new(bytes)])
    }

    /// Fills all slices in order; the list may have any length and empty slices.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] with the number of bytes that came, if the data ends before; [`ChannelError::TimedOut`]
    /// if nothing comes for the length of the read time-out; [`ChannelError::ShutDown`] after
    /// [`shutdown`](Self::shutdown). The contents of the slices are then unspecified.
    pub fn get_vector(&self, list: &mut [IoSliceMut<'_>]) -> Result<()> {
        self.get_all(Cursor::scatter(list))
    }

    /// As [`get_vector`](Self::get_vector), straight into memory that must not become a slice: guest memory.
    ///
    /// # Errors
    /// As `get_vector`.
    ///
    /// # Safety
    /// Every entry must name memory that stays mapped and writable until the call returns, and to which no reference
    /// exists.
    #[allow(unsafe_code, reason = "passes its own contract on")]
    pub unsafe fn get_vector_raw(&self, list: &[libc::iovec]) -> Result<()> {
        // SAFETY: the caller promises what the cursor asks for, for as long as this call lasts.
        self.get_all(unsafe { Cursor::scatter_raw(list) })
    }

    /// Reads what is there, at least one byte, and returns how many; 0 is the end of the data (or an empty buffer).
    ///
    /// # Errors
    /// As [`get_vector`](Self::get_vector), except that the end is no error.
    pub fn get_some(&self, bytes: &mut [u8]) -> Result<usize> {
        self.get_some_vector(&mut [IoSliceMut::new(bytes)])
    }

    /// As [`get_some`](Self::get_some), into several slices by one call of at most 1,024 entries.
    ///
    /// # Errors
    /// As `get_some`.
    pub fn get_some_vector(&self, list: &mut [IoSliceMut<'_>]) -> Result<usize> {
        self.input().get_some(&mut Cursor::scatter(list)).map_err(|stop| self.explain(Operation::Get, stop))
    }

    /// Copies the first bytes that have arrived, without taking them and without waiting: how many, 0 at the end of the
    /// data, `None` if nothing has come yet. Not counted. An encrypted channel that was accepted shakes hands
    /// meanwhile; an end that its peer did not announce is recognized by a get only.
    ///
    /// # Errors
    /// [`ChannelError::Unsupported`] for anything but a socket; [`ChannelError::Broken`] if the peer is gone;
    /// [`ChannelError::Tls`].
    pub fn peek(&self, bytes: &mut [u8]) -> Result<Option<usize>> {
        if let Transport::Tls(session) = &self.transport {
            return session.peek(bytes).map_err(|error| self.explain(Operation::Get, Stop::Failed(error)));
        }
        let Transport::Socket(socket, _) = &self.transport else {
            let why = "what is no socket cannot be looked into before it is read";
            return Err(ChannelError::Unsupported { operation: Operation::Get, peer: self.state.peer.clone(), why });
        };
        loop {
            match net::recv(socket, &mut *bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Ok((got, _)) => return Ok(Some(got)),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.explain(Operation::Get, Stop::Failed(errno.into()))),
            }
        }
    }

    fn output(&self) -> Transfer<'_> {
        Transfer { direction: &self.state.put, transport: &self.transport, rate: &self.state.rate }
    }

    fn input(&self) -> Transfer<'_> {
        Transfer { direction: &self.state.get, transport: &self.transport, rate: &self.state.get_rate }
    }

    fn put_all(&self, mut gather: Cursor<'_, Out>, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let put = self.output().put(&mut gather, descriptors);
        put.map_err(|stop| self.explain(Operation::Put, stop))
    }

    pub(crate) fn put_lent(&self, cursors: [&mut Cursor<'_, Out>; 3], reused: bool) -> Result<()> {
        let put = self.state.sender.put(self.output(), cursors, reused);
        put.map_err(|stop| self.explain(Operation::Put, stop))
    }

    pub(crate) fn flush_lent(&self) -> Result<()> {
        let given_up = || self.state.put.is_shut() && self.state.get.is_shut();
        let flushed = self.state.sender.flush(self.output(), given_up);
        flushed.map_err(|stop| self.explain(Operation::Put, stop))
    }

    /// Waits until what was lent is back; where that fails the connection is cut and what is queued thrown away.
    pub(crate) fn end_lending(&self) {
        if self.flush_lent().is_err() {
            self.abort_lent();
        }
    }

    pub(crate) fn abort_lent(&self) {
        self.state.sender.abort(&self.transport);
    }

    /// How pages were wanted to leave when the channel was made ([`Options::zero_copy`]).
    pub fn zero_copy_wanted(&self) -> ZeroCopy {
        self.state.sender.setting()
    }

    /// How pages that are lent leave now: [`Off`](ZeroCopy::Off) where they are copied, never [`Auto`](ZeroCopy::Auto).
    pub fn zero_copy(&self) -> ZeroCopy {
        self.state.sender.method()
    }

    fn get_all(&self, mut scatter: Cursor<'_, In>) -> Result<()> {
        let got = self.input().get(&mut scatter);
        got.map_err(|stop| self.explain(Operation::Get, stop))
    }

    /// Ends one or both directions and wakes the threads that wait in them, also in the rate limit; these get
    /// [`ChannelError::ShutDown`]. What came before a read shutdown of a socket can still be read. A pipe's peer sees
    /// the end only when the channel is dropped. An encrypted channel's peer receives the close notification by
    /// [`Shutdown::Write`] alone, and not while a put is in progress: to the peer the connection is cut then.
    ///
    /// # Errors
    /// If the kernel refuses; that the peer is gone already is no error.
    pub fn shutdown(&self, how: Shutdown) -> Result<()> {
        let (read, write) = (how != Shutdown::Write, how != Shutdown::Read);
        let mark = || -> io::Result<()> {
            if read {
                self.state.get.shut()?;
                self.state.get_rate.wake();
            }
            if write {
                self.state.put.shut()?;
                self.state.rate.wake();
            }
            if let Transport::Tls(session) = &self.transport {
                match how {
                    Shutdown::Read => session.stop_receiving(),
                    // A put is in progress.
                    Shutdown::Write if self.state.put.is_amid() => session.give_up(),
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

    /// Sets how long a get or put may last without a byte moving; `None` is for ever. A call already under way keeps
    /// its time-out. The bound is kept within a factor of two: the kernel's clock starts anew with each call it is
    /// given.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_timeouts(&self, read: Option<Duration>, write: Option<Duration>) -> Result<()> {
        for (direction, id, time) in
            [(&self.state.get, sockopt::Timeout::Recv, read), (&self.state.put, sockopt::Timeout::Send, write)]
        {
            // Zero would mean for ever to the kernel.
            let time = time.map(|time| time.max(Duration::from_millis(1)));
            if let Some(socket) = self.transport.socket() {
                sockopt::set_socket_timeout(socket, id, time)
                    .map_err(|e| self.failed(Operation::Configure, e.into()))?;
            }
            direction.set_timeout(time);
        }
        Ok(())
    }

    /// Asks for kernel buffers of so many bytes; `None` leaves one as it is. The kernel grants what its limits allow
    /// (`net.core.wmem_max`, `rmem_max`, `fs.pipe-max-size`), which is no error. A pipe has one buffer, the larger.
    ///
    /// # Errors
    /// If the kernel refuses altogether.
    pub fn set_buffers(&self, send: Option<usize>, receive: Option<usize>) -> Result<()> {
        match self.transport.socket() {
            Some(socket) => {
                grow_buffers(socket, send, receive).map_err(|e| self.failed(Operation::Configure, e.into()))
            }
            None => {
                if let Some(size) = send.max(receive) {
                    // Above the limit (EPERM), too small for what is in it (EBUSY), or no pipe at all (EBADF): it stays
                    // as it is, and works.
                    let _granted = rustix::pipe::fcntl_setpipe_size(self.transport.output(), size);
                    let _granted = rustix::pipe::fcntl_setpipe_size(self.transport.input(), size);
                }
                Ok(())
            }
        }
    }

    /// Whether bytes can be got (`Shutdown::Read`), put (`Shutdown::Write`), or both: a pipe's end and a file carry one
    /// direction.
    pub fn carries(&self, how: Shutdown) -> bool {
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

    /// The rate limit of puts; a handle to change it while the channel is in use.
    pub fn rate(&self) -> RateLimit {
        self.state.rate.clone()
    }

    /// The counters of this channel and its clones.
    pub fn counters(&self) -> Counters {
        let mut counters = Counters::of(&self.state.put.counters, &self.state.get.counters);
        if let Transport::Tls(session) = &self.transport
            && let Some(by_kernel) = session.by_kernel()
        {
            (counters.sealed_by_kernel, counters.opened_by_kernel) = by_kernel.bytes();
        }
        counters
    }

    /// The other end, for messages.
    pub fn peer(&self) -> &str {
        &self.state.peer
    }

    fn explain(&self, operation: Operation, stop: Stop) -> ChannelError {
        let peer = Arc::clone(&self.state.peer);
        let direction = if operation == Operation::Put { &self.state.put } else { &self.state.get };
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
        self.state.get.is_shut() || self.state.put.is_shut()
    }

    fn failed(&self, operation: Operation, source: io::Error) -> ChannelError {
        ChannelError::setup(operation, Arc::clone(&self.state.peer), source)
    }
}

/// For waiting on several channels, or for handing the descriptor on; where there are two, the one that is read. Who
/// reads or writes it goes around the counters and the encryption; and bytes that came with others may have been read
/// already from an encrypted channel that is not ready.
impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.transport.input()
    }
}

/// What TLS failed with, or the kernel under it.
fn of_tls(operation: Operation, peer: &Arc<str>, offset: Option<u64>, error: io::Error) -> ChannelError {
    match error.get_ref().and_then(|error| error.downcast_ref::<TlsFailure>()) {
        Some(failure) => {
            ChannelError::Tls { operation, peer: Arc::clone(peer), offset, failure: Box::new(failure.clone()) }
        }
        None => ChannelError::setup(operation, Arc::clone(peer), error),
    }
}

/// Whether a handshake has found the connection ended.
fn is_ended(error: &io::Error) -> bool {
    error.get_ref().and_then(|error| error.downcast_ref()) == Some(&TlsFailure::Ended)
}

/// Whether this is the kernel's word that sendfile has no way from this file to this descriptor (sendfile(2)).
fn cannot_send(error: &io::Error) -> bool {
    [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP].into_iter().any(|errno| Errno::from_io_error(error) == Some(errno))
}

/// Has calls on a descriptor that the kernel cannot shut down return instead of waiting.
fn unblock(fd: &OwnedFd) -> std::result::Result<(), Errno> {
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

/// What wakes who waits for such a descriptor, to get and to put.
fn wakes() -> std::result::Result<(OwnedFd, OwnedFd), Errno> {
    let wake = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    Ok((wake()?, wake()?))
}

/// Both ends of a socket pair, with buffers for a hundred pages.
pub(crate) fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (near, far) = net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for end in [&near, &far] {
        grow_buffers(end, Some(PAIR_BUFFER), Some(PAIR_BUFFER))?;
    }
    Ok((near, far))
}

/// With the privilege to do so beyond the system's limits, else up to them.
fn grow_buffers(socket: impl AsFd, send: Option<usize>, receive: Option<usize>) -> std::result::Result<(), Errno> {
    // The kernel doubles the value, in an int.
    const MAX: usize = 1 << 30;
    if let Some(size) = send.map(|size| size.min(MAX)) {
        sockopt::set_socket_send_buffer_size_force(&socket, size)
            .or_else(|_| sockopt::set_socket_send_buffer_size(&socket, size))?;
    }
    if let Some(size) = receive.map(|size| size.min(MAX)) {
        sockopt::set_socket_recv_buffer_size_force(&socket, size)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, size))?;
    }
    Ok(())
}

/// What a person would call the other end of an unnamed descriptor.
fn describe(fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    let number = fd.as_raw_fd();
    let address = net::getpeername(fd).ok().flatten();
    let inet = address.and_then(|address| std::net::SocketAddr::try_from(address).ok());
    inet.map_or_else(|| format!("descriptor {number}"), |address| format!("tcp:{address}"))
}
