//! A connected byte stream.
//!
//! The laws of this module: `put` and `get` move everything or say at which byte they failed; partial transfers, signals
//! and non-blocking descriptors are nobody else's business. One thread may put while another gets; each direction
//! belongs to one thread at a time (two that put at once interleave their bytes). A third may shut the channel down at
//! any moment, which wakes both, wherever they wait.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{OFlags, Timespec, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

use crate::counters::{Cells, Counters, Side};
use crate::descriptor::{self, Kind};
use crate::error::{ChannelError, Operation};
use crate::options::Options;
use crate::rate::RateLimit;
use crate::transport::Transport;
use crate::vector::{Cursor, In, Out};

type Result<T> = std::result::Result<T, ChannelError>;

/// The buffers that [`Channel::pair`] asks for, in bytes; the kernel may grant less.
const PAIR_BUFFER: usize = 4 << 20;

/// Which directions to shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum How {
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
/// [`try_clone`](Self::try_clone) is dropped too.
#[derive(Debug)]
pub struct Channel {
    transport: Transport,
    shared: Arc<Shared>,
}

/// What all clones of a channel have in common.
#[derive(Debug)]
struct Shared {
    peer: Arc<str>,
    rate: RateLimit,
    cells: Cells,
    get: Direction,
    put: Direction,
}

#[derive(Debug)]
struct Direction {
    /// Nanoseconds without progress after which a call gives up; 0 is never.
    timeout: AtomicU64,
    shut: AtomicBool,
    /// Becomes readable at shutdown, for descriptors that the kernel cannot shut down.
    wake: Option<OwnedFd>,
}

impl Direction {
    fn timeout(&self) -> Option<Duration> {
        Some(self.timeout.load(Ordering::Relaxed)).filter(|&ns| ns != 0).map(Duration::from_nanos)
    }

    fn is_shut(&self) -> bool {
        self.shut.load(Ordering::Acquire)
    }

    fn shut(&self) -> io::Result<()> {
        self.shut.store(true, Ordering::Release);
        if let Some(wake) = &self.wake {
            rustix::io::write(wake, &1_u64.to_ne_bytes())?;
        }
        Ok(())
    }
}

/// How long nothing has moved.
struct Quiet {
    limit: Option<Duration>,
    since: Option<Instant>,
}

impl Quiet {
    fn new(limit: Option<Duration>) -> Self {
        Self { limit, since: limit.map(|_| Instant::now()) }
    }

    fn progress(&mut self) {
        self.since = self.limit.map(|_| Instant::now());
    }

    /// The rest of the limit (`None`: no limit), or `Stop::TimedOut`.
    fn remaining(&self) -> std::result::Result<Option<Duration>, Stop> {
        let (Some(limit), Some(since)) = (self.limit, self.since) else { return Ok(None) };
        match limit.checked_sub(since.elapsed()) {
            Some(rest) if !rest.is_zero() => Ok(Some(rest)),
            _ => Err(Stop::TimedOut(limit)),
        }
    }
}

/// Why a transfer stopped, before it is known to whom and where.
enum Stop {
    TimedOut(Duration),
    ShutDown,
    Ended { got: u64, wanted: u64 },
    Failed(io::Error),
}

impl Channel {
    /// Makes a channel of a descriptor: a connected stream socket, a pipe's end, or anything else that is read or
    /// written in order. `TCP_NODELAY` is set on TCP; what is no socket is put into non-blocking mode.
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

    /// A channel to a new descriptor of this process: a socket pair with big buffers. The other end is meant to be
    /// handed to another process.
    ///
    /// # Errors
    /// If the kernel has no descriptors left.
    pub fn pair() -> Result<(Self, OwnedFd)> {
        let failed = |errno: Errno| ChannelError::setup(Operation::Connect, "a socket pair", errno);
        let (near, far) =
            net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map_err(failed)?;
        grow_buffers(&far, Some(PAIR_BUFFER), Some(PAIR_BUFFER)).map_err(failed)?;
        let options =
            Options { send_buffer: Some(PAIR_BUFFER), receive_buffer: Some(PAIR_BUFFER), ..Options::default() };
        Ok((Self::over(near, "the other end of a socket pair", &options)?, far))
    }

    pub(crate) fn over(fd: OwnedFd, peer: impl Into<Arc<str>>, options: &Options) -> Result<Self> {
        let peer = peer.into();
        let failed = |source: io::Error| ChannelError::setup(Operation::Configure, peer.clone(), source);
        let unsupported = |why| ChannelError::Unsupported { operation: Operation::Configure, peer: peer.clone(), why };
        let (transport, wakes) = match descriptor::kind(&fd).map_err(failed)? {
            Kind::Stream(family) => {
                if matches!(family, AddressFamily::INET | AddressFamily::INET6) {
                    sockopt::set_tcp_nodelay(&fd, true).map_err(|e| failed(e.into()))?;
                }
                (Transport::Socket(fd), None)
            }
            Kind::Ordered => {
                let flags = fcntl_getfl(&fd).map_err(|e| failed(e.into()))?;
                fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(|e| failed(e.into()))?;
                let wake = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
                let wakes = (wake().map_err(|e| failed(e.into()))?, wake().map_err(|e| failed(e.into()))?);
                (Transport::Pipe(fd), Some(wakes))
            }
            Kind::Listening => return Err(unsupported("it waits for connections itself; use it with a listener")),
            Kind::Useless(why) => return Err(unsupported(why)),
        };
        let direction = |wake| Direction { timeout: AtomicU64::new(0), shut: AtomicBool::new(false), wake };
        let (wake_get, wake_put) = wakes.unzip();
        let shared = Shared {
            peer,
            rate: options.rate.clone().unwrap_or_default(),
            cells: Cells::default(),
            get: direction(wake_get),
            put: direction(wake_put),
        };
        let channel = Self { transport, shared: Arc::new(shared) };
        channel.set_buffers(options.send_buffer, options.receive_buffer)?;
        channel.set_timeouts(options.read_timeout, options.write_timeout)?;
        Ok(channel)
    }

    /// A second handle: its own descriptor for the same end, with the same counters, rate limit and time-outs. Shutting
    /// one down shuts down both.
    ///
    /// # Errors
    /// If the kernel has no descriptors left.
    pub fn try_clone(&self) -> Result<Self> {
        let transport = self.transport.try_clone().map_err(|e| self.failed(Operation::Configure, e))?;
        Ok(Self { transport, shared: Arc::clone(&self.shared) })
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
        self.put_all(Cursor::gather(list))
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
        self.put_all(unsafe { Cursor::gather_raw(list) })
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
        let mut cursor = Cursor::scatter(list);
        let mut quiet = Quiet::new(self.shared.get.timeout());
        self.get_part(&mut cursor, false, &mut quiet).map_err(|stop| self.explain(Operation::Get, stop))
    }

    fn put_all(&self, mut gather: Cursor<'_, Out>) -> Result<()> {
        self.put_parts(&mut gather).map_err(|stop| self.explain(Operation::Put, stop))
    }

    fn put_parts(&self, gather: &mut Cursor<'_, Out>) -> std::result::Result<(), Stop> {
        let (side, direction, rate) = (&self.shared.cells.out, &self.shared.put, &self.shared.rate);
        let mut quiet = Quiet::new(direction.timeout());
        let mut paid = 0;
        while let Some(batch) = gather.batch(rate.chunk()) {
            let owed = batch.bytes().saturating_sub(paid);
            if owed != 0 {
                let waited = rate.take_unless(owed as u64, &direction.shut).ok_or(Stop::ShutDown)?;
                if !waited.is_zero() {
                    side.throttled(waited);
                    // Being held back is not the peer's silence.
                    quiet.progress();
                }
                paid += owed;
            }
            let moved = self
                .attempt(PollFlags::OUT, side, direction, &mut quiet, batch.bytes(), || self.transport.put(&batch))?;
            if moved == 0 {
                return Err(Stop::Failed(io::ErrorKind::WriteZero.into()));
            }
            paid = paid.saturating_sub(moved);
            gather.advance(moved);
        }
        Ok(())
    }

    fn get_all(&self, mut scatter: Cursor<'_, In>) -> Result<()> {
        let mut quiet = Quiet::new(self.shared.get.timeout());
        let mut got = 0_u64;
        while scatter.left() != 0 {
            match self.get_part(&mut scatter, true, &mut quiet) {
                Ok(0) => {
                    let wanted = got.saturating_add(scatter.left());
                    return Err(self.explain(Operation::Get, Stop::Ended { got, wanted }));
                }
                Ok(moved) => got += moved as u64,
                Err(stop) => return Err(self.explain(Operation::Get, stop)),
            }
        }
        Ok(())
    }

    /// One read; 0 is the end of the data, or an empty list.
    fn get_part(
        &self,
        scatter: &mut Cursor<'_, In>,
        whole: bool,
        quiet: &mut Quiet,
    ) -> std::result::Result<usize, Stop> {
        let (side, direction) = (&self.shared.cells.inward, &self.shared.get);
        let Some(batch) = scatter.batch(usize::MAX) else { return Ok(0) };
        let moved =
            self.attempt(PollFlags::IN, side, direction, quiet, batch.bytes(), || self.transport.get(&batch, whole))?;
        // Where the kernel knows of the shutdown, it shows as an end; what had come before it was still read.
        if moved == 0 && direction.is_shut() {
            return Err(Stop::ShutDown);
        }
        scatter.advance(moved);
        Ok(moved)
    }

    /// Calls until bytes move, the data ends, or there is a reason to stop.
    fn attempt(
        &self,
        readiness: PollFlags,
        side: &Side,
        direction: &Direction,
        quiet: &mut Quiet,
        offered: usize,
        call: impl Fn() -> io::Result<usize>,
    ) -> std::result::Result<usize, Stop> {
        loop {
            if direction.wake.is_some() && direction.is_shut() {
                return Err(Stop::ShutDown);
            }
            side.called();
            match call() {
                Ok(moved) => {
                    side.moved(moved, offered);
                    quiet.progress();
                    return Ok(moved);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    side.interrupted();
                    quiet.remaining()?;
                }
                // Either the socket's own time-out is over, or the descriptor does not block.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let began = Instant::now();
                    let remaining = quiet.remaining()?;
                    let ready = self.wait(readiness, direction, remaining);
                    side.waited(began.elapsed());
                    match ready {
                        Err(Errno::INTR) => side.interrupted(),
                        Err(errno) => return Err(Stop::Failed(errno.into())),
                        Ok(()) => {}
                    }
                }
                Err(_) if direction.is_shut() => return Err(Stop::ShutDown),
                Err(error) => return Err(Stop::Failed(error)),
            }
        }
    }

    /// Waits until the descriptor is ready, the direction is shut down, or the time is over.
    fn wait(
        &self,
        readiness: PollFlags,
        direction: &Direction,
        time: Option<Duration>,
    ) -> std::result::Result<(), Errno> {
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        let own = PollFd::new(&self.transport, readiness);
        match &direction.wake {
            Some(wake) => poll(&mut [own, PollFd::new(wake, PollFlags::IN)], time.as_ref())?,
            None => poll(&mut [own], time.as_ref())?,
        };
        Ok(())
    }

    /// Ends one or both directions and wakes whoever waits in them, also in the rate limit; they get
    /// [`ChannelError::ShutDown`]. What came before a read shutdown of a socket can still be read. A pipe's peer sees
    /// the end only when the channel is dropped.
    ///
    /// # Errors
    /// If the kernel refuses; that the peer is gone already is no error.
    pub fn shutdown(&self, how: How) -> Result<()> {
        let (read, write) = (how != How::Write, how != How::Read);
        let mark = || -> io::Result<()> {
            if read {
                self.shared.get.shut()?;
            }
            if write {
                self.shared.put.shut()?;
                self.shared.rate.wake();
            }
            if let Transport::Socket(socket) = &self.transport {
                match net::shutdown(
                    socket,
                    match how {
                        How::Read => net::Shutdown::Read,
                        How::Write => net::Shutdown::Write,
                        How::Both => net::Shutdown::Both,
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

    /// Sets how long a get or put may last without a byte moving; `None` is for ever. A call already under way keeps its
    /// time-out. The bound is kept within a factor of two: the kernel's clock starts anew with each call it is given.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_timeouts(&self, read: Option<Duration>, write: Option<Duration>) -> Result<()> {
        for (direction, id, time) in
            [(&self.shared.get, sockopt::Timeout::Recv, read), (&self.shared.put, sockopt::Timeout::Send, write)]
        {
            // Zero would mean for ever to the kernel.
            let time = time.map(|time| time.max(Duration::from_millis(1)));
            if let Transport::Socket(socket) = &self.transport {
                sockopt::set_socket_timeout(socket, id, time)
                    .map_err(|e| self.failed(Operation::Configure, e.into()))?;
            }
            let nanoseconds = time.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
            direction.timeout.store(nanoseconds, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Asks for kernel buffers of so many bytes; `None` leaves one as it is. The kernel grants what its limits allow
    /// (`net.core.wmem_max`, `rmem_max`, `fs.pipe-max-size`), which is no error. A pipe has one buffer, the larger.
    ///
    /// # Errors
    /// If the kernel refuses altogether.
    pub fn set_buffers(&self, send: Option<usize>, receive: Option<usize>) -> Result<()> {
        match &self.transport {
            Transport::Socket(socket) => {
                grow_buffers(socket, send, receive).map_err(|e| self.failed(Operation::Configure, e.into()))
            }
            Transport::Pipe(pipe) => {
                if let Some(size) = send.max(receive) {
                    // Above the limit (EPERM), too small for what is in it (EBUSY), or no pipe at all (EBADF): it stays
                    // as it is, and works.
                    let _granted = rustix::pipe::fcntl_setpipe_size(pipe, size);
                }
                Ok(())
            }
        }
    }

    /// The rate limit of puts; a handle to change it while the channel is in use.
    pub fn rate(&self) -> RateLimit {
        self.shared.rate.clone()
    }

    /// What this channel and its clones did so far.
    pub fn counters(&self) -> Counters {
        self.shared.cells.snapshot()
    }

    /// The other end, for messages.
    pub fn peer(&self) -> &str {
        &self.shared.peer
    }

    fn explain(&self, operation: Operation, stop: Stop) -> ChannelError {
        let peer = Arc::clone(&self.shared.peer);
        let cells = &self.shared.cells;
        let offset = if operation == Operation::Put { cells.out.bytes() } else { cells.inward.bytes() };
        match stop {
            Stop::TimedOut(after) => ChannelError::TimedOut { operation, peer, offset: Some(offset), after },
            Stop::ShutDown => ChannelError::ShutDown { operation, peer, offset },
            Stop::Ended { got, wanted } => ChannelError::Closed { operation, peer, offset, got, wanted },
            Stop::Failed(source) => match source.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted => {
                    ChannelError::Broken { operation, peer, offset, source }
                }
                _ => ChannelError::Io { operation, peer, offset: Some(offset), source },
            },
        }
    }

    fn failed(&self, operation: Operation, source: io::Error) -> ChannelError {
        ChannelError::setup(operation, Arc::clone(&self.shared.peer), source)
    }
}

/// For waiting on several channels, or for handing the descriptor on. Who reads or writes it goes around the counters.
impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.transport.as_fd()
    }
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
