//! The VM's side of a gate: the socket that QEMU's stream back end connects to.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use limosa_socket::PeerProcess;

use super::fences::{ConnectedVm, Fences};
use super::frame::FrameReader;
use super::queue::{FrameQueue, FrameSink};

/// System calls in a row that read from one VM, so that it cannot keep a gate from everything else.
const READS: usize = 64;

impl FrameSink for UnixStream {
    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn takes_packets(&self) -> bool {
        false
    }
}

/// The reason why a VM is not connected any more.
#[derive(Debug)]
pub(super) struct VmLost(pub(super) io::Error);

/// The end of a read.
#[derive(Debug)]
pub(super) enum VmRead {
    /// Nothing more is there.
    Empty,
    /// More may be there.
    More,
    /// The VM is gone.
    Lost(VmLost),
}

/// The end of an attempt to accept a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Accepted {
    /// It is connected.
    Vm,
    /// It was failed over, and has been turned away; the number of its process, if it has one here.
    Refused(Option<u32>),
    /// It has been turned away: it is not identified, and may be a VM that was failed over.
    Unidentified,
    /// None waits.
    None,
}

/// The listening socket, and the VM that is connected. Another one waits until that one is gone.
#[derive(Debug)]
pub(super) struct VmPort {
    listener: UnixListener,
    vm: Option<UnixStream>,
    /// The process of that VM, if it is identified.
    process: Option<Arc<PeerProcess>>,
    /// The number of the last connection.
    connection: u64,
    reader: FrameReader,
    queue: FrameQueue,
    /// Frames that no VM was there for, or that did not read them.
    undelivered: u64,
}

impl VmPort {
    pub(super) fn new(listener: UnixListener, limit: u64) -> Self {
        let (reader, queue) = (FrameReader::new(), FrameQueue::new(limit));
        Self { listener, vm: None, process: None, connection: 0, reader, queue, undelivered: 0 }
    }

    pub(super) const fn is_connected(&self) -> bool {
        self.vm.is_some()
    }

    pub(super) const fn undelivered(&self) -> u64 {
        self.undelivered
    }

    /// The listening socket if no VM is connected.
    pub(super) fn listener_fd(&self) -> Option<BorrowedFd<'_>> {
        self.vm.is_none().then(|| self.listener.as_fd())
    }

    pub(super) fn vm_fd(&self) -> Option<BorrowedFd<'_>> {
        self.vm.as_ref().map(AsFd::as_fd)
    }

    /// Whether frames wait for it.
    pub(super) const fn has_frames(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether it takes no more frames for now.
    pub(super) const fn is_full(&self) -> bool {
        self.queue.is_full()
    }

    /// Accepts a VM that waits, unless it was fenced, or is not identified and may be one that was.
    pub(super) fn accept(&mut self, fences: &Fences) -> io::Result<Accepted> {
        match self.listener.accept() {
            Ok((vm, _)) => {
                let process = PeerProcess::of(vm.as_fd()).ok();
                if fences.refuses(process.as_ref()) {
                    return Ok(process.map_or(Accepted::Unidentified, |process| Accepted::Refused(process.pid())));
                }
                vm.set_nonblocking(true)?;
                self.reader.restart();
                self.connection += 1;
                (self.vm, self.process) = (Some(vm), process.map(Arc::new));
                Ok(Accepted::Vm)
            }
            Err(error) if is_passing(&error) || error.kind() == io::ErrorKind::ConnectionAborted => Ok(Accepted::None),
            Err(error) => Err(error),
        }
    }

    /// Returns the number of the process of the VM that is connected, if it has one here.
    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref()?.pid()
    }

    /// Returns the VM that is connected.
    pub(super) fn connected(&self) -> Option<ConnectedVm> {
        self.vm.as_ref()?;
        Some(ConnectedVm { connection: self.connection, process: self.process.clone() })
    }

    /// Cuts a VM off, if it is connected.
    pub(super) fn cut(&mut self, vm: &ConnectedVm) {
        let is_its = |process: &Arc<PeerProcess>| vm.process.as_ref().is_some_and(|fenced| fenced.is(process));
        if self.vm.is_some() && (self.connection == vm.connection || self.process.as_ref().is_some_and(is_its)) {
            self.lose(io::ErrorKind::ConnectionAborted.into());
        }
    }

    /// Takes a frame for the VM.
    pub(super) fn push(&mut self, frame: &[u8]) {
        if self.vm.is_none() || !self.queue.push(frame) {
            self.undelivered += 1;
        }
    }

    /// Writes as many frames as the VM takes.
    pub(super) fn write(&mut self) -> Option<VmLost> {
        let vm = self.vm.as_ref()?;
        self.queue.write_to(vm).err().map(|error| self.lose(error))
    }

    /// Reads frames that the VM has sent; each goes to `take` with its length. One that has come in part is left for
    /// later.
    pub(super) fn read(&mut self, mut take: impl FnMut(&[u8])) -> VmRead {
        let Some(vm) = self.vm.as_ref() else { return VmRead::Empty };
        for _ in 0..READS {
            let error = match (&*vm).read(self.reader.room()) {
                Ok(0) => io::ErrorKind::UnexpectedEof.into(),
                Ok(count) => match self.reader.take_arrived(count, &mut take) {
                    Ok(()) => continue,
                    Err(error) => error,
                },
                Err(error) => error,
            };
            match error.kind() {
                io::ErrorKind::WouldBlock => return VmRead::Empty,
                io::ErrorKind::Interrupted => {}
                _ => return VmRead::Lost(self.lose(error)),
            }
        }
        VmRead::More
    }

    fn lose(&mut self, error: io::Error) -> VmLost {
        self.undelivered += self.queue.clear();
        (self.vm, self.process) = (None, None);
        VmLost(error)
    }
}

/// Returns the pid namespace of this process, in which it sees the numbers of processes; 0: it is not known.
pub(super) fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino())
}

/// Whether nothing is there for now.
pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
