//! The network of a VM, on the far side of its gate: it may end and come back.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::frame::{FrameReader, PREFIX, with_length};
use super::hold::Frames;
use super::queue::{FrameQueue, FrameSink};
use super::tap;

/// Time between two attempts to reach it.
const RETRY: Duration = Duration::from_millis(250);

/// The place that a VM's frames come from and go to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NetworkAddress {
    /// A unix socket that listens and speaks the framing of QEMU's stream back end: passt's, or another QEMU's.
    Unix(PathBuf),
    /// A tap device that exists.
    Tap(String),
}

/// A text that is no address of a network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not the address of a network: expected unix:PATH or tap:NAME")]
pub struct NetworkAddressError {
    text: String,
}

impl FromStr for NetworkAddress {
    type Err = NetworkAddressError;

    fn from_str(text: &str) -> Result<Self, NetworkAddressError> {
        let address = match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Some(Self::Unix(path.into())),
            Some(("tap", name)) if (1..16).contains(&name.len()) && !name.contains(['/', '\0']) => {
                Some(Self::Tap(name.to_owned()))
            }
            _ => None,
        };
        address.ok_or_else(|| NetworkAddressError { text: text.to_owned() })
    }
}

impl fmt::Display for NetworkAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tap(name) => write!(f, "tap:{name}"),
        }
    }
}

/// A connection to it.
#[derive(Debug)]
enum Link {
    Stream(UnixStream),
    Tap(File),
}

impl Link {
    fn open(address: &NetworkAddress) -> io::Result<Self> {
        match address {
            NetworkAddress::Unix(path) => connect_to(path).map(Self::Stream),
            NetworkAddress::Tap(name) => tap::open(name).map(Self::Tap),
        }
    }

    fn read(&self, room: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Stream(stream) => (&*stream).read(room),
            Self::Tap(tap) => (&*tap).read(room),
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Stream(stream) => stream.as_fd(),
            Self::Tap(tap) => tap.as_fd(),
        }
    }
}

impl FrameSink for Link {
    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stream(stream) => stream.send(bytes),
            Self::Tap(tap) => (&*tap).write(bytes),
        }
    }

    fn takes_packets(&self) -> bool {
        matches!(self, Self::Tap(_))
    }
}

/// Connects to a unix socket without waiting for one whose queue is full.
fn connect_to(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// A change of the connection.
#[derive(Debug)]
pub(super) enum LinkChange {
    /// It is there again.
    Connected,
    /// It is gone, for this reason.
    Lost(io::Error),
}

/// The network, and the frames for it.
#[derive(Debug)]
pub(super) struct Network {
    address: NetworkAddress,
    link: Option<Link>,
    retry_at: Option<Instant>,
    reader: FrameReader,
    queue: FrameQueue,
    /// Frames that it did not get.
    undelivered: u64,
}

impl Network {
    /// Connects.
    ///
    /// # Errors
    /// The network cannot be reached. It is tried again later, unless it is a tap device.
    pub(super) fn new(address: NetworkAddress, limit: u64) -> (Self, Option<io::Error>) {
        let (reader, queue) = (FrameReader::new(), FrameQueue::new(limit));
        let mut network = Self { address, link: None, retry_at: None, reader, queue, undelivered: 0 };
        let error = network.connect(Instant::now()).err();
        (network, error)
    }

    pub(super) const fn address(&self) -> &NetworkAddress {
        &self.address
    }

    fn connect(&mut self, now: Instant) -> io::Result<()> {
        match Link::open(&self.address) {
            Ok(link) => {
                (self.link, self.retry_at) = (Some(link), None);
                self.reader.restart();
                Ok(())
            }
            Err(error) => {
                self.retry_at = Some(now + RETRY);
                Err(error)
            }
        }
    }

    /// Tries to connect if it is time for that.
    pub(super) fn retry(&mut self, now: Instant) -> Option<LinkChange> {
        let due = self.link.is_none() && self.retry_at.is_some_and(|at| now >= at);
        (due && self.connect(now).is_ok()).then_some(LinkChange::Connected)
    }

    /// The moment of the next attempt.
    pub(super) const fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    pub(super) fn link_fd(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
    }

    /// Whether frames wait for it.
    pub(super) const fn has_frames(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Takes a frame that leaves the VM.
    pub(super) fn push(&mut self, frame: &[u8]) {
        if self.link.is_none() || !self.queue.push(frame) {
            self.undelivered += 1;
        }
    }

    /// Takes the frames of an epoch.
    pub(super) fn push_all(&mut self, frames: Frames) {
        self.undelivered += match self.link {
            Some(_) => self.queue.push_all(frames),
            None => frames.count,
        };
    }

    /// Returns the number of frames that it did not get since this was asked last.
    pub(super) fn take_undelivered(&mut self) -> u64 {
        std::mem::take(&mut self.undelivered)
    }

    /// Writes as many frames as it takes.
    pub(super) fn write(&mut self) -> Option<LinkChange> {
        let link = self.link.as_ref()?;
        match self.queue.write_to(link) {
            Ok(refused) => {
                self.undelivered += refused;
                None
            }
            Err(error) => Some(self.lose(error)),
        }
    }

    /// Reads frames for the VM, from at most one system call; each goes to `take` with its length.
    pub(super) fn read(&mut self, mut take: impl FnMut(&[u8])) -> Option<LinkChange> {
        let link = self.link.as_ref()?;
        let error = match (link, link.takes_packets()) {
            (link, true) => {
                let room = self.reader.room();
                match room.get_mut(PREFIX..).map_or(Ok(0), |room| link.read(room)) {
                    Ok(count) => {
                        if let Some(frame) = with_length(room, count) {
                            take(frame);
                        }
                        return None;
                    }
                    Err(error) => error,
                }
            }
            (link, false) => match link.read(self.reader.room()) {
                Ok(0) => io::ErrorKind::UnexpectedEof.into(),
                Ok(count) => match self.reader.take_arrived(count, take) {
                    Ok(()) => return None,
                    Err(error) => error,
                },
                Err(error) => error,
            },
        };
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => None,
            _ => Some(self.lose(error)),
        }
    }

    fn lose(&mut self, error: io::Error) -> LinkChange {
        self.undelivered += self.queue.clear();
        (self.link, self.retry_at) = (None, Some(Instant::now() + RETRY));
        LinkChange::Lost(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written_and_others_are_refused() {
        for text in ["unix:/run/passt.sock", "tap:tap0"] {
            assert_eq!(text.parse::<NetworkAddress>().unwrap().to_string(), text);
        }
        for text in ["unix:", "tap:", "tap:a/b", "tap:0123456789abcdef", "tcp:host:1", "/run/passt.sock", ""] {
            assert!(text.parse::<NetworkAddress>().is_err(), "{text:?}");
        }
    }
}
