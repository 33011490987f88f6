//! A vhost-user front end for the model of the driver: the part of a VMM between its guest and the device's process.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use limosa_balloon::Features;
use limosa_memory::GuestMemory;
use limosa_page::PAGE_SIZE;
use limosa_vhost::message::{ConfigPiece, HEADER_LENGTH, Request, VringState};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use virtio_queue::{Queue, QueueT as _};

use crate::machine::{DriverNotifier, RemoteDevice};

/// The user address that is announced for guest address 0: it is not accessed.
const USER: u64 = 0x7f00_0000_0000;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;
/// `REPLY_ACK`, `BACKEND_REQ` and `CONFIG`.
const PROTOCOL: u64 = 1 << 3 | 1 << 5 | 1 << 9;
/// Flags of a message of version 1, without and with a request for an acknowledgement.
const MESSAGE: u32 = 1;
const ACKNOWLEDGE: u32 = 1 << 3;
/// Time limit of a reply.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which the listening thread checks whether it should end.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Why the vhost-user server cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the vhost-user server of the balloon: {what}")]
pub struct FrontEndError {
    what: &'static str,
    source: io::Error,
}

/// A connection to a vhost-user server.
#[derive(Debug)]
pub struct FrontEnd {
    stream: Mutex<UnixStream>,
    features: u64,
    memory: Arc<GuestMemory>,
    inner: Arc<Inner>,
    listener: Mutex<Option<thread::JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Kick and call of each queue.
    queues: Mutex<BTreeMap<usize, (OwnedFd, OwnedFd)>>,
    over: AtomicBool,
    /// The server is gone, or has refused a request.
    lost: AtomicBool,
}

impl Inner {
    fn queues(&self) -> MutexGuard<'_, BTreeMap<usize, (OwnedFd, OwnedFd)>> {
        self.queues.lock()
    }
}

impl FrontEnd {
    /// Connects, for a guest with this memory, whose blocks have files and are shared. The rings are in it.
    ///
    /// # Errors
    /// There is no listener, or it does not speak vhost-user.
    pub fn connect(path: &Path, memory: Arc<GuestMemory>) -> Result<Self, FrontEndError> {
        let stream = UnixStream::connect(path).map_err(|source| FrontEndError { what: "connecting", source })?;
        stream.set_read_timeout(Some(TIMEOUT)).map_err(|source| FrontEndError { what: "connecting", source })?;
        let mut front_end =
            Self { stream: Mutex::new(stream), features: 0, memory, inner: Arc::default(), listener: Mutex::default() };
        let set_up = || {
            let features = front_end.ask_number(Request::GetFeatures)?;
            front_end.send_unacknowledged(Request::SetProtocolFeatures, &PROTOCOL.to_le_bytes(), &[])?;
            front_end.send_unacknowledged(Request::SetOwner, &[], &[])?;
            Ok(features)
        };
        front_end.features = set_up().map_err(|source| FrontEndError { what: "negotiation", source })?;
        Ok(front_end)
    }

    /// The other end is gone, or a message was refused: the guest then sees a device that does nothing.
    fn lost(&self, what: &str, error: &io::Error) {
        self.inner.lost.store(true, Ordering::Release);
        tracing::warn!("the vhost-user server of the balloon: {what}: {error}");
    }

    fn stream(&self) -> MutexGuard<'_, UnixStream> {
        self.stream.lock()
    }

    fn send(
        stream: &UnixStream,
        request: Request,
        flags: u32,
        body: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let length = u32::try_from(body.len()).map_err(io::Error::other)?;
        let mut bytes = [request.number(), flags, length].map(u32::to_le_bytes).concat();
        bytes.extend_from_slice(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::Error::other("too many descriptors"));
        }
        let sent = sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    fn answer(mut stream: &UnixStream, request: Request) -> io::Result<Vec<u8>> {
        let mut header = [0; HEADER_LENGTH];
        stream.read_exact(&mut header)?;
        let field =
            |at: usize| header.get(at..at + 4).and_then(|field| Some(u32::from_le_bytes(field.try_into().ok()?)));
        if field(0) != Some(request.number()) {
            return Err(io::Error::other("reply to another request"));
        }
        // No request has a longer reply than that for the configuration.
        let length = field(8).and_then(|length| usize::try_from(length).ok()).filter(|length| *length <= 4096);
        let mut body = vec![0; length.ok_or_else(|| io::Error::other("reply is too long"))?];
        stream.read_exact(&mut body)?;
        Ok(body)
    }

    fn ask(&self, request: Request, body: &[u8]) -> io::Result<Vec<u8>> {
        let stream = self.stream();
        Self::send(&stream, request, MESSAGE, body, &[])?;
        Self::answer(&stream, request)
    }

    fn ask_number(&self, request: Request) -> io::Result<u64> {
        let body = self.ask(request, &[])?;
        Ok(u64::from_le_bytes(body.try_into().map_err(|_| io::Error::other("reply of unexpected length"))?))
    }

    fn send_unacknowledged(&self, request: Request, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        Self::send(&self.stream(), request, MESSAGE, body, descriptors)
    }

    /// Sends a request and waits for the acknowledgement.
    fn send_acknowledged(&self, request: Request, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let stream = self.stream();
        Self::send(&stream, request, MESSAGE | ACKNOWLEDGE, body, descriptors)?;
        match Self::answer(&stream, request)?[..] {
            [0, 0, 0, 0, 0, 0, 0, 0] => Ok(()),
            _ => Err(io::Error::other(format!("{request:?} was refused"))),
        }
    }

    fn share_memory(&self) -> io::Result<()> {
        let regions = self.memory.regions();
        let count = u32::try_from(regions.len()).map_err(io::Error::other)?;
        let mut body = [count.to_le_bytes(), [0; 4]].concat();
        let mut files = Vec::new();
        for region in regions {
            let block = self.memory.block(region.block).map_err(io::Error::other)?;
            let (file, offset) = block.file().ok_or_else(|| io::Error::other("memory without a file"))?;
            let bytes = region.pages.bytes();
            let fields = [
                region.guest_address,
                region.pages.len() * PAGE_SIZE,
                USER + region.guest_address,
                offset + bytes.start,
            ];
            body.extend(fields.iter().flat_map(|field| field.to_le_bytes()));
            files.push(file);
        }
        self.send_acknowledged(Request::SetMemTable, &body, &files)
    }

    fn begin_all(&self, features: Features, notifier: DriverNotifier) -> io::Result<()> {
        self.send_acknowledged(
            Request::SetFeatures,
            &(features.bits() | VERSION_1 | PROTOCOL_FEATURES).to_le_bytes(),
            &[],
        )?;
        self.share_memory()?;
        let mut listener = self.listener.lock();
        if listener.is_none() {
            let (ours, theirs) = UnixStream::pair()?;
            self.send_acknowledged(Request::SetBackendReqFd, &[], &[theirs.as_fd()])?;
            let inner = Arc::clone(&self.inner);
            let thread = thread::Builder::new().name("balloon front end".into());
            *listener = Some(thread.spawn(move || listen(&ours, &inner, &notifier))?);
        }
        Ok(())
    }

    fn start_queue(&self, number: usize, queue: &Queue) -> io::Result<()> {
        let index = u32::try_from(number).map_err(io::Error::other)?;
        let state = |value| VringState { index, value }.encode();
        self.send_acknowledged(Request::SetVringNum, &state(queue.size().into()), &[])?;
        self.send_acknowledged(Request::SetVringBase, &state(0), &[])?;
        let places = [queue.desc_table(), queue.used_ring(), queue.avail_ring()].map(|place| USER + place);
        let mut body = [index.to_le_bytes(), [0; 4]].concat();
        body.extend(places.into_iter().chain([0]).flat_map(u64::to_le_bytes));
        self.send_acknowledged(Request::SetVringAddr, &body, &[])?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (kick, call) = (event()?, event()?);
        let which = u64::from(index).to_le_bytes();
        self.send_acknowledged(Request::SetVringCall, &which, &[call.as_fd()])?;
        self.send_acknowledged(Request::SetVringKick, &which, &[kick.as_fd()])?;
        self.inner.queues().insert(number, (kick, call));
        self.send_acknowledged(Request::SetVringEnable, &state(1), &[])
    }

    fn stop_queues(&self) -> io::Result<()> {
        let queues = std::mem::take(&mut *self.inner.queues());
        for number in queues.into_keys() {
            let index = u32::try_from(number).map_err(io::Error::other)?;
            self.send_acknowledged(Request::SetVringEnable, &VringState { index, value: 0 }.encode(), &[])?;
            self.ask(Request::GetVringBase, &VringState { index, value: 0 }.encode())?;
        }
        Ok(())
    }
}

/// Passes on interrupts and the server's messages: there is one kind.
fn listen(messages: &UnixStream, inner: &Inner, notifier: &DriverNotifier) {
    let mut buffer = [0; 256];
    let mut gone = false;
    while !inner.over.load(Ordering::Acquire) {
        let queues = inner.queues();
        let mut calls = Vec::new();
        for (_, call) in queues.values() {
            // A queue that is stopped meanwhile is polled once more.
            calls.extend(call.try_clone());
        }
        drop(queues);
        let mut fds: Vec<_> = calls.iter().map(|call| PollFd::new(call, PollFlags::IN)).collect();
        if !gone {
            fds.push(PollFd::new(messages, PollFlags::IN));
        }
        if !matches!(poll(&mut fds, Some(&LOOK)), Ok(1..)) {
            continue;
        }
        for call in &calls {
            // Non-blocking: a descriptor without a notification gives no bytes.
            let _ = rustix::io::read(call, &mut buffer[..8]);
        }
        if !gone && fds.last().is_some_and(|last| !last.revents().is_empty()) {
            gone = recv(messages, &mut buffer);
            inner.lost.fetch_or(gone, Ordering::AcqRel);
        }
        notifier.notify();
    }
}

/// Reads pending messages; returns whether the other end is closed.
fn recv(messages: &UnixStream, buffer: &mut [u8]) -> bool {
    let mut control = rustix::net::RecvAncillaryBuffer::default();
    let got =
        rustix::net::recvmsg(messages, &mut [IoSliceMut::new(buffer)], &mut control, rustix::net::RecvFlags::DONTWAIT);
    got.is_ok_and(|got| got.bytes == 0)
}

impl RemoteDevice for FrontEnd {
    fn is_connected(&self) -> bool {
        !self.inner.lost.load(Ordering::Acquire)
    }

    fn features(&self) -> Features {
        Features::from_bits(self.features)
    }

    fn begin(&self, features: Features, notifier: DriverNotifier) {
        if let Err(error) = self.begin_all(features, notifier) {
            self.lost("beginning", &error);
        }
    }

    fn read_config(&self, offset: u32) -> u32 {
        let body = ConfigPiece { offset, flags: 0, bytes: &[0; 4] }.encode();
        let value = self.ask(Request::GetConfig, &body).and_then(|body| {
            let value = body.last_chunk::<4>().filter(|_| body.len() == 16);
            value.map(|value| u32::from_le_bytes(*value)).ok_or_else(|| io::Error::other("reply of unexpected length"))
        });
        value.inspect_err(|error| self.lost("reading the configuration", error)).unwrap_or(0)
    }

    fn write_config(&self, offset: u32, value: u32) {
        let body = ConfigPiece { offset, flags: 0, bytes: &value.to_le_bytes() }.encode();
        if let Err(error) = self.send_acknowledged(Request::SetConfig, &body, &[]) {
            self.lost("writing the configuration", &error);
        }
    }

    fn start(&self, number: usize, queue: &Queue) {
        if let Err(error) = self.start_queue(number, queue) {
            self.lost("starting a queue", &error);
        }
    }

    fn kick(&self, number: usize) {
        if let Some((kick, _)) = self.inner.queues().get(&number) {
            // A full eventfd kicks, too.
            let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
        }
    }

    fn stop(&self) {
        if let Err(error) = self.stop_queues() {
            self.lost("stopping the queues", &error);
        }
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        self.inner.over.store(true, Ordering::Release);
        let listener = self.listener.lock().take();
        if let Some(listener) = listener {
            let _ = listener.join();
        }
    }
}
