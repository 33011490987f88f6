//! A front end, its guest's memory and a driver of one ring, written for these tests; and a device for the other end.
#![allow(clippy::cast_possible_truncation, reason = "small numbers of the tests")]
#![allow(dead_code, reason = "each file of tests uses a part of it")]

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Context;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use limosa_vhost::message::Request;
use limosa_vhost::{Device, FrontEnd, MoreWork, QueueError, Ram, Requests, Server, ServerError, Stopper, Vring};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

/// Time limit of everything that is waited for.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Waits until the condition is true.
pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !so() {
        assert!(Instant::now() < end, "timeout: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

// ---- the device

/// Adds one to every byte of a buffer; holds buffers from when a test requests it until the next reset.
#[derive(Default)]
pub(crate) struct Incrementer {
    pub(crate) holds: AtomicBool,
    pub(crate) held: Mutex<Vec<u16>>,
    pub(crate) accepted: AtomicU64,
    pub(crate) memories: Mutex<Vec<Arc<Ram>>>,
    pub(crate) resets: AtomicU64,
    pub(crate) inherited: AtomicU64,
    /// Queues, in the order in which they stopped.
    pub(crate) stops: Mutex<Vec<usize>>,
    pub(crate) front_end: Mutex<Option<FrontEnd>>,
    pub(crate) written: Mutex<Vec<(u32, Vec<u8>)>>,
    /// Heads in the order in which they were taken.
    pub(crate) seen: Mutex<Vec<u16>>,
    /// If set, `process_queue` of the second queue waits until it is cleared.
    pub(crate) stuck: AtomicBool,
    /// `process_queue` of the second queue is running.
    pub(crate) working: AtomicBool,
    /// Buffers that it holds are in flight: it gives them back when it no longer holds.
    pub(crate) is_asynchronous: AtomicBool,
    /// More than one thread, if set.
    pub(crate) threads: AtomicUsize,
}

impl Incrementer {
    pub(crate) fn front_end(&self) -> FrontEnd {
        self.front_end.lock().clone().expect("a front end is attached")
    }
}

impl Device for Incrementer {
    fn features(&self) -> u64 {
        0b10
    }

    fn num_queues(&self) -> usize {
        2
    }

    fn ack_features(&self, features: u64) {
        self.accepted.store(features, Ordering::SeqCst);
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        for (byte, at) in into.iter_mut().zip(offset..) {
            *byte = if at < 16 { at as u8 } else { 0 };
        }
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) {
        self.written.lock().push((offset, bytes.to_vec()));
    }

    fn set_memory(&self, memory: Arc<Ram>) {
        self.memories.lock().push(memory);
    }

    fn front_end_connected(&self, front_end: FrontEnd) {
        *self.front_end.lock() = Some(front_end);
    }

    fn waits_for_memory(&self) -> bool {
        true
    }

    fn marks_written_memory(&self) -> bool {
        true
    }

    fn num_threads(&self) -> usize {
        self.threads.load(Ordering::SeqCst).max(1)
    }

    fn poll_requests(&self, _queue: usize, vring: &Vring, _context: &mut Context<'_>) -> Requests {
        if !self.is_asynchronous.load(Ordering::SeqCst) {
            return Requests::NONE;
        }
        let mut held = self.held.lock();
        let mut ring = Ok(MoreWork::No);
        if !self.holds.load(Ordering::SeqCst) {
            let buffers: Vec<_> = held.drain(..).map(|head| (head, 0)).collect();
            ring = vring.add_used_all(&buffers).and_then(|()| vring.notify()).map(|_| MoreWork::No);
        }
        Requests { in_flight: !held.is_empty(), waits: false, ring }
    }

    fn process_queue(&self, queue: usize, vring: &Vring) -> Result<MoreWork, QueueError> {
        if queue == 1 {
            self.working.store(true, Ordering::SeqCst);
            while self.stuck.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.working.store(false, Ordering::SeqCst);
        }
        if !self.holds.load(Ordering::SeqCst) {
            for head in std::mem::take(&mut *self.held.lock()) {
                vring.add_used(head, 0)?;
                vring.notify()?;
            }
        }
        let Some(chain) = vring.pop()? else { return Ok(MoreWork::No) };
        let head = chain.head_index();
        self.seen.lock().push(head);
        if self.holds.load(Ordering::SeqCst) {
            self.held.lock().push(head);
            return Ok(MoreWork::Yes);
        }
        let memory = chain.memory().clone();
        let mut written = 0;
        for descriptor in chain.writable() {
            let mut bytes = vec![0; descriptor.len() as usize];
            memory.read_slice(&mut bytes, descriptor.addr()).unwrap();
            bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
            memory.write_slice(&bytes, descriptor.addr()).unwrap();
            vring.mark_written([(descriptor.addr().0, u64::from(descriptor.len()))]);
            written += descriptor.len();
        }
        vring.add_used(head, written)?;
        vring.notify()?;
        Ok(MoreWork::Yes)
    }

    fn driver_resumed(&self) {
        self.inherited.fetch_add(1, Ordering::SeqCst);
    }

    fn queue_stopped(&self, queue: usize) {
        self.held.lock().clear();
        self.stops.lock().push(queue);
    }

    fn reset(&self) {
        self.holds.store(false, Ordering::SeqCst);
        self.held.lock().clear();
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

// ---- the server

/// A server on a thread.
pub(crate) struct Served {
    pub(crate) device: Arc<Incrementer>,
    pub(crate) server: Arc<Server>,
    pub(crate) path: PathBuf,
    stopper: Stopper,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    _folder: tempfile::TempDir,
}

impl Served {
    pub(crate) fn new() -> Self {
        let folder = limosa_testkit::scratch().unwrap();
        let path = folder.path().join("device.sock");
        let device = Arc::new(Incrementer::default());
        let server = Arc::new(Server::bind(&path, device.clone()).unwrap());
        let stopper = server.stopper();
        let serving = server.clone();
        let thread = Some(std::thread::spawn(move || serving.serve()));
        Self { device, server, path, stopper, thread, _folder: folder }
    }

    /// Stops it; returns its result.
    pub(crate) fn stop(&mut self) -> Result<(), ServerError> {
        self.stopper.stop();
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let ended = self.stop();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

// ---- the front end

pub(crate) struct Peer(pub(crate) UnixStream);

impl Peer {
    pub(crate) fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Self(stream)
    }

    /// A raw message: number, flags and body.
    pub(crate) fn send_raw(&self, request: u32, flags: u32, body: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut bytes = [request, flags, body.len() as u32].map(u32::to_le_bytes).concat();
        bytes.extend_from_slice(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let sent = sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(bytes.len()));
    }

    pub(crate) fn tell(&self, request: Request, body: &[u8], descriptors: &[BorrowedFd<'_>]) {
        self.send_raw(request.number(), 1, body, descriptors);
    }

    /// An answer's body and its descriptors; none if the connection has ended.
    pub(crate) fn answer(&self, request: Request) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut header = [0; 12];
        let mut descriptors = Vec::new();
        self.get(&mut header, &mut descriptors)?;
        let field = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((field(0), field(4)), (request.number(), 5), "a reply to the request, of version 1");
        let mut body = vec![0; field(8) as usize];
        self.get(&mut body, &mut descriptors)?;
        Some((body, descriptors))
    }

    fn get(&self, mut buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Option<()> {
        while !buffer.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(&self.0, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC);
            let bytes = got.map_or(0, |got| got.bytes);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    descriptors.extend(rights);
                }
            }
            if bytes == 0 {
                return None;
            }
            buffer = &mut buffer[bytes..];
        }
        Some(())
    }

    /// The body of an answer to a request that has only a number.
    pub(crate) fn answer_to(&self, request: u32) -> Vec<u8> {
        let mut bytes = [0; 20];
        self.get(&mut bytes, &mut Vec::new()).expect("the server answers");
        assert_eq!(bytes[..4], request.to_le_bytes());
        bytes[12..].to_vec()
    }

    pub(crate) fn ask(&self, request: Request, body: &[u8]) -> Vec<u8> {
        self.tell(request, body, &[]);
        self.answer(request).expect("the server answers").0
    }

    pub(crate) fn ask_number(&self, request: Request) -> u64 {
        u64::from_le_bytes(self.ask(request, &[]).try_into().unwrap())
    }

    /// Whether it succeeded; only after `REPLY_ACK` was negotiated.
    pub(crate) fn done(&self, request: Request, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
        self.send_raw(request.number(), 1 | 8, body, descriptors);
        let (body, _) = self.answer(request).expect("the server answers");
        u64::from_le_bytes(body.try_into().unwrap()) == 0
    }

    /// Everything before the rings: all protocol features, and all features that are not in `without`.
    pub(crate) fn negotiate(&self, without: u64) {
        let features = self.ask_number(Request::GetFeatures);
        let protocol = self.ask_number(Request::GetProtocolFeatures);
        // This message is already acknowledged, as it negotiates.
        assert!(self.done(Request::SetProtocolFeatures, &protocol.to_le_bytes(), &[]));
        self.tell(Request::SetOwner, &[], &[]);
        assert!(self.done(Request::SetFeatures, &(features & !without).to_le_bytes(), &[]));
    }

    /// The guest's memory, in a table as user-mode Linux sends it.
    pub(crate) fn share(&self, guest: &Guest) -> bool {
        let mut body = table(&[guest.region()]);
        body.resize(72, 0);
        self.done(Request::SetMemTable, &body, &[guest.file.as_fd()])
    }

    /// Sets up and starts a ring.
    pub(crate) fn start(&self, guest: &Guest, base: u16, enable: bool) {
        let index = guest.queue;
        assert!(self.done(Request::SetVringNum, &words(&[index, u32::from(SIZE)]), &[]));
        assert!(self.done(Request::SetVringBase, &words(&[index, u32::from(base)]), &[]));
        assert!(self.done(Request::SetVringAddr, &guest.address(), &[]));
        let number = longs(&[u64::from(index)]);
        assert!(self.done(Request::SetVringCall, &number, &[guest.call.as_fd()]));
        assert!(self.done(Request::SetVringKick, &number, &[guest.kick.as_fd()]));
        if enable {
            assert!(self.enable(guest, true));
        }
    }

    pub(crate) fn enable(&self, guest: &Guest, enable: bool) -> bool {
        self.done(Request::SetVringEnable, &words(&[guest.queue, u32::from(enable)]), &[])
    }

    /// Stops a ring; returns the index at which it continues.
    pub(crate) fn base(&self, guest: &Guest) -> u16 {
        let body = self.ask(Request::GetVringBase, &words(&[guest.queue, 0]));
        u16::from_le_bytes([body[4], body[5]])
    }
}

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

pub(crate) fn table(regions: &[[u64; 4]]) -> Vec<u8> {
    let mut body = words(&[regions.len() as u32, 0]);
    regions.iter().for_each(|region| body.extend(longs(region)));
    body
}

// ---- the guest

pub(crate) const SIZE: u16 = 8;
const LENGTH: u64 = 1 << 20;
/// The front end's address of the memory's first byte.
pub(crate) const USER: u64 = 0x7f00_0000_0000;
const AT: u64 = 0x10_0000;

/// A guest's memory at 1 MiB, and a driver of one ring in it.
pub(crate) struct Guest {
    pub(crate) file: File,
    pub(crate) memory: GuestMemoryMmap,
    pub(crate) queue: u32,
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
    offered: u16,
    /// Where the ring and its buffers are in the memory.
    offset: u64,
}

impl Guest {
    pub(crate) fn new(queue: u32) -> Self {
        let memfd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memfd, LENGTH).unwrap();
        let file = File::from(memfd);
        let place = FileOffset::new(file.try_clone().unwrap(), 0);
        let memory =
            GuestMemoryMmap::from_ranges_with_files([(GuestAddress(AT), LENGTH as usize, Some(place))]).unwrap();
        let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        Self { file, memory, queue, kick: event(), call: event(), offered: 0, offset: 0 }
    }

    pub(crate) fn region(&self) -> [u64; 4] {
        [AT, LENGTH, USER, 0]
    }

    /// The same, in the memory of another guest and next to its ring.
    pub(crate) fn beside(self, other: &Self) -> Self {
        let file = other.file.try_clone().unwrap();
        Self { file, memory: other.memory.clone(), offset: other.offset + 0x10000, ..self }
    }

    fn place(&self, offset: u64) -> GuestAddress {
        Self::at(self.offset + offset)
    }

    pub(crate) fn at(offset: u64) -> GuestAddress {
        GuestAddress(AT + offset)
    }

    /// Body of `SET_VRING_ADDR`, with the used ring logged.
    pub(crate) fn logged_address(&self) -> Vec<u8> {
        let mut body = self.address();
        body[4] = 1;
        body[32..40].copy_from_slice(&self.place(0x3000).0.to_le_bytes());
        body
    }

    /// Body of `SET_VRING_ADDR`.
    pub(crate) fn address(&self) -> Vec<u8> {
        [words(&[self.queue, 0]), longs(&[0x1000, 0x3000, 0x2000].map(|at| USER + self.offset + at)), longs(&[0])]
            .concat()
    }

    /// A driver that starts again: empty rings.
    pub(crate) fn clear(&mut self) {
        self.memory.write_slice(&[0; 0x3000], self.place(0x1000)).unwrap();
        self.offered = 0;
    }

    /// Offers a buffer of four bytes to be incremented, by descriptor `head`; does not kick.
    pub(crate) fn offer(&mut self, head: u16, bytes: [u8; 4]) {
        self.memory.write_slice(&bytes, self.place(0x8000 + u64::from(head) * 16)).unwrap();
        self.offer_as_it_is(head);
    }

    /// The same, with the contents that the buffer has.
    pub(crate) fn offer_as_it_is(&mut self, head: u16) {
        let buffer = 0x8000 + u64::from(head) * 16;
        let mut descriptor = longs(&[self.place(buffer).0]);
        descriptor.extend(4_u32.to_le_bytes());
        descriptor.extend([2, 0, 0, 0]); // The device writes; no next one.
        self.memory.write_slice(&descriptor, self.place(0x1000 + u64::from(head) * 16)).unwrap();
        let entry = 0x2004 + u64::from(self.offered % SIZE) * 2;
        self.memory.write_obj(head, self.place(entry)).unwrap();
        self.offered = self.offered.wrapping_add(1);
        self.memory.store(self.offered, self.place(0x2002), Ordering::SeqCst).unwrap();
    }

    pub(crate) fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    pub(crate) fn used(&self) -> u16 {
        self.memory.load(self.place(0x3002), Ordering::SeqCst).unwrap()
    }

    pub(crate) fn buffer(&self, head: u16) -> [u8; 4] {
        self.memory.read_obj(self.place(0x8000 + u64::from(head) * 16)).unwrap()
    }

    /// Offers, kicks and waits until the buffer is given back.
    pub(crate) fn round_trip(&mut self, head: u16) {
        let before = self.used();
        self.offer(head, [1, 2, 3, 4]);
        self.kick();
        until("the buffer is given back", || self.used() == before.wrapping_add(1));
        assert_eq!(self.buffer(head), [2, 3, 4, 5]);
    }

    /// How often the driver was called since the last query.
    pub(crate) fn calls(&self) -> u64 {
        let mut poll = [rustix::event::PollFd::new(&self.call, rustix::event::PollFlags::IN)];
        let zero = rustix::fs::Timespec { tv_sec: 0, tv_nsec: 0 };
        if rustix::event::poll(&mut poll, Some(&zero)) == Ok(0) {
            return 0;
        }
        let mut count = [0; 8];
        rustix::io::read(&self.call, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }
}
