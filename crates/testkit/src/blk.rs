//! A front end of vhost-user and a driver of virtio-blk for tests: they send what they are told, also what no honest
//! driver sends.
//!
//! Their facts are those of QEMU's docs/interop/vhost-user.rst and of virtio 1.2, and none of limosa's code. The
//! guest's memory is a memfd that is mapped here, and accessed as what others change.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _};

/// For what should take moments on any machine: a limit for a server that hangs, not a measure.
const SOON: Duration = Duration::from_secs(120);

/// Descriptors of a ring.
const SIZE: u16 = 64;
/// Descriptors of a request: header, data in two parts, status.
const CHAIN: u16 = 4;
/// Most requests of a queue in flight.
pub const BLK_SLOTS: u16 = SIZE / CHAIN;
/// Most bytes of data of a request.
pub const BLK_DATA: usize = 128 << 10;

/// Guest address of the memory's first byte, and the front end's.
const GUEST: u64 = 1 << 20;
const USER: u64 = 0x7f00_0000_0000;
/// Bytes of a queue's area: its ring, and a page and the data of each request.
const AREA: u64 = 4 << 20;
/// Places in the area.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const SLOTS: u64 = 0x10000;
/// Bytes of a slot, and places in it: the header, the status, an indirect table, ranges, data.
const SLOT: u64 = 0x1000 + BLK_DATA as u64;
const STATUS: u64 = 0x100;
const TABLE: u64 = 0x200;
const DATA: u64 = 0x1000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A status that no device writes.
const NO_STATUS: u8 = 0xee;

/// `VHOST_USER_F_PROTOCOL_FEATURES`
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Requests of vhost-user by their numbers.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
enum Ask {
    GetFeatures = 1,
    SetFeatures = 2,
    SetOwner = 3,
    SetMemTable = 5,
    SetVringNum = 8,
    SetVringAddr = 9,
    SetVringBase = 10,
    GetVringBase = 11,
    SetVringKick = 12,
    SetVringCall = 13,
    SetProtocolFeatures = 16,
    SetVringEnable = 18,
    GetConfig = 24,
    SetConfig = 25,
    GetInflightFd = 31,
    SetInflightFd = 32,
}

/// A request of a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlkCommand {
    /// Read this number of bytes at a sector.
    Read(u64, usize),
    /// Write bytes at a sector.
    Write(u64, Vec<u8>),
    /// Flush.
    Flush,
    /// The disk's name.
    GetId,
    /// Discard ranges: first sector, sectors, flags.
    Discard(Vec<(u64, u32, u32)>),
    /// Write zeroes to ranges.
    WriteZeroes(Vec<(u64, u32, u32)>),
}

impl BlkCommand {
    /// The number of its type, its sector, what the device reads, and how many bytes it writes.
    fn parts(&self) -> (u32, u64, Vec<u8>, usize) {
        let ranges = |ranges: &[(u64, u32, u32)]| {
            let bytes = |(sector, count, flags): &(u64, u32, u32)| {
                [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
            };
            ranges.iter().flat_map(bytes).collect::<Vec<u8>>()
        };
        match self {
            Self::Read(sector, length) => (0, *sector, Vec::new(), *length),
            Self::Write(sector, data) => (1, *sector, data.clone(), 0),
            Self::Flush => (4, 0, Vec::new(), 0),
            Self::GetId => (8, 0, Vec::new(), 20),
            Self::Discard(list) => (11, 0, ranges(list), 0),
            Self::WriteZeroes(list) => (13, 0, ranges(list), 0),
        }
    }
}

/// The end of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlkReply {
    /// Its slot.
    pub slot: u16,
    /// 0, or the error: 1 failed, 2 unsupported.
    pub status: u8,
    /// Bytes that the device says to have written.
    pub written: u32,
    /// The bytes that it was to write.
    pub data: Vec<u8>,
}

/// A descriptor: an offset in the area of a queue, or any guest address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlkDescriptor {
    /// Guest address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Flags: 1 another one follows, 2 the device writes, 4 a table.
    pub flags: u16,
    /// The next one.
    pub next: u16,
}

impl BlkDescriptor {
    fn bytes(self) -> Vec<u8> {
        [
            &self.address.to_le_bytes()[..],
            &self.length.to_le_bytes(),
            &self.flags.to_le_bytes(),
            &self.next.to_le_bytes(),
        ]
        .concat()
    }
}

/// The driver's state of a queue.
#[derive(Debug)]
struct BlkQueue {
    kick: OwnedFd,
    call: OwnedFd,
    available: u16,
    used: u16,
    /// Bytes that the device writes, of each slot in use.
    slots: [Option<usize>; BLK_SLOTS as usize],
}

/// How a client begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlkSettings {
    /// Number of queues.
    pub queues: u16,
    /// Features that are not acknowledged.
    pub without: u64,
}

/// A front end with a guest's memory and a driver.
#[derive(Debug)]
pub struct BlkClient {
    stream: UnixStream,
    memory: File,
    mapped: MmapRegion,
    settings: BlkSettings,
    features: u64,
    queues: Vec<BlkQueue>,
    /// The in-flight area: its description and its memory.
    inflight: (Vec<u8>, OwnedFd),
}

impl BlkClient {
    /// Connects, and starts all queues, with an in-flight area.
    ///
    /// # Errors
    /// There is no server, or it refuses something.
    pub fn connect(path: &Path, settings: BlkSettings) -> Result<Self> {
        let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC)?);
        memory.set_len(AREA * u64::from(settings.queues))?;
        let length = usize::try_from(AREA)? * usize::from(settings.queues);
        let mapped = MmapRegion::from_file(FileOffset::new(memory.try_clone()?, 0), length)?;
        let queue = || -> Result<BlkQueue> {
            let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            Ok(BlkQueue { kick: event()?, call: event()?, available: 0, used: 0, slots: Default::default() })
        };
        let queues = (0..settings.queues).map(|_| queue()).collect::<Result<_>>()?;
        let stream = stream(path)?;
        let inflight = (Vec::new(), memfd_create("none", MemfdFlags::CLOEXEC)?);
        let mut client = Self { stream, memory, mapped, settings, features: 0, queues, inflight };
        client.negotiate()?;
        let mut area = vec![0; 24];
        area[16..18].copy_from_slice(&settings.queues.to_le_bytes());
        area[18..20].copy_from_slice(&SIZE.to_le_bytes());
        client.send(Ask::GetInflightFd, 1, &area, &[])?;
        let (body, mut descriptors) = client.answer(Ask::GetInflightFd)?;
        client.inflight = (body, descriptors.pop().context("an in-flight area")?);
        client.start()?;
        Ok(client)
    }

    /// Connects to the next server, with the same memory, rings and in-flight area: what was in flight is completed
    /// there.
    ///
    /// # Errors
    /// As [`BlkClient::connect`].
    pub fn reconnect(&mut self, path: &Path) -> Result<()> {
        self.stream = stream(path)?;
        self.negotiate()?;
        self.start()
    }

    /// Features that the server offers.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    fn negotiate(&mut self) -> Result<()> {
        self.features = self.ask_number(Ask::GetFeatures)?;
        // Several queues, acknowledgements, configuration, in-flight areas.
        let protocol = 1_u64 | 1 << 3 | 1 << 9 | 1 << 12;
        self.send(Ask::SetProtocolFeatures, 1, &protocol.to_le_bytes(), &[])?;
        self.done(Ask::SetOwner, &[], &[])?;
        let features = (self.features | PROTOCOL_FEATURES) & !self.settings.without;
        self.done(Ask::SetFeatures, &features.to_le_bytes(), &[])
    }

    /// Shares the memory, and starts all queues where the device has used their rings up to.
    fn start(&mut self) -> Result<()> {
        let (area, memfd) = &self.inflight;
        self.done(Ask::SetInflightFd, area, &[memfd.as_fd()])?;
        let length = AREA * u64::from(self.settings.queues);
        let table = [&1_u64.to_le_bytes()[..], &longs(&[GUEST, length, USER, 0])].concat();
        self.done(Ask::SetMemTable, &table, &[self.memory.as_fd()])?;
        for index in 0..self.settings.queues {
            self.start_queue(index, self.used_index(index)?)?;
        }
        Ok(())
    }

    /// Starts a queue at an index of its available ring.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn start_queue(&self, index: u16, base: u16) -> Result<()> {
        let queue = &self.queues[usize::from(index)];
        let at = |place: u64| USER + AREA * u64::from(index) + place;
        let state = |value: u16| [u32::from(index).to_le_bytes(), u32::from(value).to_le_bytes()].concat();
        self.done(Ask::SetVringNum, &state(SIZE), &[])?;
        self.done(Ask::SetVringBase, &state(base), &[])?;
        let places = longs(&[u64::from(index), at(DESCRIPTORS), at(USED), at(AVAILABLE), 0]);
        self.done(Ask::SetVringAddr, &places, &[])?;
        self.done(Ask::SetVringCall, &longs(&[index.into()]), &[queue.call.as_fd()])?;
        self.done(Ask::SetVringKick, &longs(&[index.into()]), &[queue.kick.as_fd()])?;
        self.done(Ask::SetVringEnable, &state(1), &[])
    }

    /// Stops a queue. Returns the index at which it continues.
    ///
    /// # Errors
    /// The server is gone.
    pub fn stop_queue(&self, index: u16) -> Result<u16> {
        self.send(Ask::GetVringBase, 1, &longs(&[index.into()]), &[])?;
        let (body, _) = self.answer(Ask::GetVringBase)?;
        Ok(u16::from_le_bytes(body.get(4..6).context("a short answer")?.try_into()?))
    }

    /// Sends the table of memory again, as when memory was plugged.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn share_again(&self) -> Result<()> {
        let length = AREA * u64::from(self.settings.queues);
        let table = [&1_u64.to_le_bytes()[..], &longs(&[GUEST, length, USER, 0])].concat();
        self.done(Ask::SetMemTable, &table, &[self.memory.as_fd()])
    }

    /// A piece of the configuration space.
    ///
    /// # Errors
    /// The server is gone.
    pub fn config(&self, offset: u32, length: u32) -> Result<Vec<u8>> {
        let mut body = [offset, length, 0].map(u32::to_le_bytes).concat();
        body.resize(12 + usize::try_from(length)?, 0);
        self.send(Ask::GetConfig, 1, &body, &[])?;
        Ok(self.answer(Ask::GetConfig)?.0.split_off(12))
    }

    /// Writes to the configuration space.
    ///
    /// # Errors
    /// The server is gone.
    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<()> {
        let mut body = [offset, u32::try_from(bytes.len())?, 0].map(u32::to_le_bytes).concat();
        body.extend_from_slice(bytes);
        self.done(Ask::SetConfig, &body, &[])
    }

    // ---- requests

    /// Whether another request can be submitted to a queue.
    #[must_use]
    pub fn has_room(&self, queue: u16) -> bool {
        self.queues[usize::from(queue)].slots.iter().any(Option::is_none)
    }

    /// Number of requests of a queue in flight.
    #[must_use]
    pub fn in_flight(&self, queue: u16) -> usize {
        self.queues[usize::from(queue)].slots.iter().flatten().count()
    }

    /// Makes a request available, without a kick: its data cut into two parts at `cut`, its descriptors in a table of
    /// their own if `indirect`. Returns its slot.
    ///
    /// # Errors
    /// There is no room.
    pub fn submit(&mut self, queue: u16, command: &BlkCommand, cut: usize, indirect: bool) -> Result<u16> {
        let (kind, sector, out, into) = command.parts();
        let slot = self.queues[usize::from(queue)].slots.iter().position(Option::is_none).context("no free slot")?;
        let slot = u16::try_from(slot)?;
        let at = self.slot_address(queue, slot);
        ensure!(out.len().max(into) <= BLK_DATA, "too long for this driver");
        self.write(at, &[&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat())?;
        self.write(at + DATA, &out)?;
        self.write(at + STATUS, &[NO_STATUS])?;
        let (length, flag) = if into > 0 { (into, WRITE) } else { (out.len(), 0) };
        let cut = cut.min(length);
        let parts = [(0, 16, 0), (DATA, cut, flag), (DATA + cut as u64, length - cut, flag), (STATUS, 1, WRITE)];
        let parts: Vec<_> = parts.into_iter().filter(|(_, length, _)| *length > 0).collect();
        let first = if indirect { 0 } else { slot * CHAIN };
        let last = parts.len() - 1;
        let mut descriptors = Vec::new();
        for (number, (place, length, flags)) in parts.into_iter().enumerate() {
            let next = if number < last { NEXT } else { 0 };
            descriptors.push(BlkDescriptor {
                address: at + place,
                length: u32::try_from(length)?,
                flags: flags | next,
                next: if next == 0 { 0 } else { first + u16::try_from(number)? + 1 },
            });
        }
        if indirect {
            let table: Vec<u8> = descriptors.into_iter().flat_map(BlkDescriptor::bytes).collect();
            self.write(at + TABLE, &table)?;
            let length = u32::try_from(table.len())?;
            descriptors = vec![BlkDescriptor { address: at + TABLE, length, flags: INDIRECT, next: 0 }];
        }
        self.queues[usize::from(queue)].slots[usize::from(slot)] = Some(into);
        self.offer(queue, slot * CHAIN, &descriptors)?;
        Ok(slot)
    }

    /// Writes descriptors from number `first` on, and makes the chain that begins there available.
    ///
    /// # Errors
    /// The memory is gone.
    pub fn offer(&mut self, queue: u16, first: u16, descriptors: &[BlkDescriptor]) -> Result<()> {
        let bytes: Vec<u8> = descriptors.iter().flat_map(|descriptor| descriptor.bytes()).collect();
        let area = GUEST + AREA * u64::from(queue);
        self.write(area + DESCRIPTORS + 16 * u64::from(first), &bytes)?;
        let state = &mut self.queues[usize::from(queue)];
        let entry = AVAILABLE + 4 + 2 * u64::from(state.available % SIZE);
        state.available = state.available.wrapping_add(1);
        let available = state.available;
        self.write(area + entry, &first.to_le_bytes())?;
        // The device sees the entry before the index.
        let index = place(area + AVAILABLE + 2)?;
        Ok(self.mapped.as_volatile_slice().store(available.to_le(), index, Ordering::SeqCst)?)
    }

    /// Guest address of a slot: its header is there, its status 0x100 behind, its data 0x1000 behind.
    #[must_use]
    pub fn slot_address(&self, queue: u16, slot: u16) -> u64 {
        GUEST + AREA * u64::from(queue) + SLOTS + SLOT * u64::from(slot)
    }

    /// Kicks a queue.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn kick(&self, queue: u16) -> Result<()> {
        rustix::io::write(&self.queues[usize::from(queue)].kick, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    /// The next request of a queue that is done, if there is one.
    ///
    /// # Errors
    /// The device has used what it was not given.
    pub fn try_reply(&mut self, queue: u16) -> Result<Option<BlkReply>> {
        let used = self.used_index(queue)?;
        let state = &mut self.queues[usize::from(queue)];
        if used == state.used {
            return Ok(None);
        }
        let entry = GUEST + AREA * u64::from(queue) + USED + 4 + 8 * u64::from(state.used % SIZE);
        state.used = state.used.wrapping_add(1);
        // With event indexes: the driver wants a call for the next one.
        let wanted = state.used;
        self.write(GUEST + AREA * u64::from(queue) + AVAILABLE + 4 + 2 * u64::from(SIZE), &wanted.to_le_bytes())?;
        let bytes = self.read(entry, 8)?;
        let head = u32::from_le_bytes(bytes[..4].try_into()?);
        let written = u32::from_le_bytes(bytes[4..].try_into()?);
        let slot = u16::try_from(head)? / CHAIN;
        let place = self.queues[usize::from(queue)].slots.get_mut(usize::from(slot));
        let length = place.and_then(Option::take).with_context(|| format!("{head} was used, and is not in flight"))?;
        let at = self.slot_address(queue, slot);
        let status = self.read(at + STATUS, 1)?[0];
        ensure!(status != NO_STATUS, "a request was used without a status");
        Ok(Some(BlkReply { slot, status, written, data: self.read(at + DATA, length)? }))
    }

    /// The next request of a queue that is done.
    ///
    /// # Errors
    /// None is in time, or the server is gone.
    pub fn reply(&mut self, queue: u16) -> Result<BlkReply> {
        let end = Instant::now() + SOON;
        loop {
            if let Some(reply) = self.try_reply(queue)? {
                return Ok(reply);
            }
            self.wait(queue..queue + 1)?;
            ensure!(Instant::now() < end, "no reply in time");
        }
    }

    /// Waits until a request of these queues is done, at most for a second.
    ///
    /// # Errors
    /// The server is gone, and no request is done.
    pub fn wait(&self, queues: Range<u16>) -> Result<()> {
        let queues = || queues.clone().map(|queue| (queue, &self.queues[usize::from(queue)]));
        let calls = queues().map(|(_, state)| PollFd::new(&state.call, PollFlags::IN));
        let mut fds: Vec<_> = calls.chain([PollFd::new(&self.stream, PollFlags::IN)]).collect();
        // A call that is missing is found by the test's own measure; a short wait looks again.
        retry_on_intr(|| poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })))?;
        let is_gone = fds.last().is_some_and(|server| !server.revents().is_empty());
        let mut is_done = false;
        for (queue, state) in queues() {
            let _ = rustix::io::read(&state.call, &mut [0; 8]);
            is_done |= self.used_index(queue)? != state.used;
        }
        ensure!(is_done || !is_gone, "the server is gone");
        Ok(())
    }

    /// Carries out one request alone.
    ///
    /// # Errors
    /// As [`BlkClient::submit`] and [`BlkClient::reply`].
    pub fn run(&mut self, queue: u16, command: &BlkCommand) -> Result<BlkReply> {
        let slot = self.submit(queue, command, usize::MAX, false)?;
        self.kick(queue)?;
        let reply = self.reply(queue)?;
        ensure!(reply.slot == slot, "the reply is of another request");
        Ok(reply)
    }

    /// Number of calls that the driver has not looked at.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn take_calls(&self, queue: u16) -> Result<u64> {
        let mut count = [0; 8];
        match rustix::io::read(&self.queues[usize::from(queue)].call, &mut count) {
            Ok(_) => Ok(u64::from_ne_bytes(count)),
            Err(rustix::io::Errno::AGAIN) => Ok(0),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Index of a queue's used ring.
    ///
    /// # Errors
    /// The memory is gone.
    pub fn used_index(&self, queue: u16) -> Result<u16> {
        let index = place(GUEST + AREA * u64::from(queue) + USED + 2)?;
        Ok(u16::from_le(self.mapped.as_volatile_slice().load(index, Ordering::SeqCst)?))
    }

    /// Bytes of guest memory.
    ///
    /// # Errors
    /// The memory does not reach that far.
    pub fn read(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.mapped.as_volatile_slice().read_slice(&mut bytes, place(address)?)?;
        Ok(bytes)
    }

    /// Writes guest memory.
    ///
    /// # Errors
    /// The memory does not reach that far.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        Ok(self.mapped.as_volatile_slice().write_slice(bytes, place(address)?)?)
    }

    // ---- messages

    fn send(&self, ask: Ask, flags: u32, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let mut bytes = [ask as u32, flags, u32::try_from(body.len())?].map(u32::to_le_bytes).concat();
        bytes.extend_from_slice(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ensure!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "too many descriptors");
        }
        let sent = retry_on_intr(|| sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL))?;
        ensure!(sent == bytes.len(), "a message was sent in part");
        Ok(())
    }

    fn answer(&self, ask: Ask) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        let (mut header, mut descriptors) = ([0; 12], Vec::new());
        self.receive(&mut header, &mut descriptors)?;
        let field = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        ensure!((field(0), field(4)) == (ask as u32, 5), "{ask:?} was answered with {header:?}");
        let mut body = vec![0; usize::try_from(field(8))?];
        self.receive(&mut body, &mut descriptors)?;
        Ok((body, descriptors))
    }

    fn receive(&self, mut buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<()> {
        while !buffer.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let got = retry_on_intr(|| {
                recvmsg(&self.stream, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)
            })?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    descriptors.extend(rights);
                }
            }
            ensure!(got.bytes > 0, "the server has closed the connection");
            buffer = &mut buffer[got.bytes..];
        }
        Ok(())
    }

    fn ask_number(&self, ask: Ask) -> Result<u64> {
        self.send(ask, 1, &[], &[])?;
        Ok(u64::from_le_bytes(self.answer(ask)?.0.as_slice().try_into()?))
    }

    /// Sends a request that has to succeed.
    fn done(&self, ask: Ask, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        self.send(ask, 1 | 1 << 3, body, descriptors)?;
        let (body, _) = self.answer(ask)?;
        ensure!(body == [0; 8], "{ask:?} was refused");
        Ok(())
    }
}

/// The place of a guest address in the memory.
fn place(address: u64) -> Result<usize> {
    Ok(usize::try_from(address.checked_sub(GUEST).context("no memory is there")?)?)
}

fn stream(path: &Path) -> Result<UnixStream> {
    let stream = UnixStream::connect(path).with_context(|| path.display().to_string())?;
    stream.set_read_timeout(Some(SOON))?;
    Ok(stream)
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}
